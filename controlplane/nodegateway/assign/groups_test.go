package assign

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api/podaddress"
)

// storeInformer is an informer that only has a store and is not started.
type storeInformer struct{ cache.Indexer }

func (s storeInformer) GetIndexer() cache.Indexer { return s.Indexer }

// Address groups follow ServiceCIDRs: a pod address in such a range is omitted, and added again
// when the ServiceCIDR is deleted.
func TestGroupsFollowServiceCIDRs(t *testing.T) {
	byNamespace := cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}
	nodes, pods, ranges, namespaces := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}),
		cache.NewIndexer(cache.MetaNamespaceKeyFunc, byNamespace),
		cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}),
		cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	x, err := podaddress.New(podaddress.Rules{}, storeInformer{nodes}, storeInformer{pods}, storeInformer{ranges})
	if err != nil {
		t.Fatal(err)
	}
	v := &View{}
	v.stores[kindPod] = pods
	v.groups = newPolicyGroups(v, x)
	v.groups.namespaces = namespaces
	put := func(s cache.Indexer, o any) {
		t.Helper()
		if err := s.Add(o); err != nil {
			t.Fatal(err)
		}
	}
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "web", Labels: map[string]string{"app": "web"}},
		Spec: v1.PodSpec{NodeName: "foreign"}, Status: v1.PodStatus{PodIP: "10.112.0.9",
			PodIPs: []v1.PodIP{{IP: "10.112.0.9"}}}}
	put(namespaces, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	put(pods, pod)
	v.groups.index.UpdatePod(nil, pod)
	made, _ := v.groups.index.SetPolicy("n", "p",
		&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "p"},
			Spec: networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{
				{From: []networkingv1.NetworkPolicyPeer{{
					PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}}}}}})
	members := func(step string, want ...string) {
		t.Helper()
		group, _ := v.groups.index.Group(made[0])
		var got []string
		for _, s := range group.Subsets {
			for _, a := range s.Addresses {
				got = append(got, a.IP)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", step, got, want)
		}
	}
	members("outside of the ranges", "10.112.0.9")
	more := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"},
		Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.112.0.0/16"}}}
	put(ranges, more)
	v.groups.updateForServiceCIDR(nil, more)
	members("a new ServiceCIDR")
	if err := ranges.Delete(more); err != nil {
		t.Fatal(err)
	}
	v.groups.updateForServiceCIDR(more, nil)
	members("the ServiceCIDR is gone", "10.112.0.9")
}
