package nodegateway

import (
	"cmp"
	"fmt"
	"sync"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/policy"
)

// The Service that pods use for DNS, and the node-local address that answers as well.
const (
	dnsService   = "kube-dns"
	dnsLinkLocal = "169.254.20.10"
)

// policySource implements policy.Source with the view's informer stores.
type policySource struct{ v *view }

func (s policySource) Pods(namespace string) []*v1.Pod {
	list, _ := s.v.stores[kindPod].ByIndex(cache.NamespaceIndex, namespace) // every informer has that index
	pods := make([]*v1.Pod, 0, len(list))
	for _, o := range list {
		if p, ok := o.(*v1.Pod); ok {
			pods = append(pods, p)
		}
	}
	return pods
}

func (s policySource) Pod(namespace, name string) (*v1.Pod, bool) { return s.v.pod(namespace, name) }

func (s policySource) Namespace(name string) (*v1.Namespace, bool) {
	o, ok, err := s.v.namespaces.GetByKey(name)
	if err != nil || !ok {
		return nil, false
	}
	ns, ok := o.(*v1.Namespace)
	return ns, ok
}

func (s policySource) Namespaces() []*v1.Namespace {
	list := s.v.namespaces.List()
	out := make([]*v1.Namespace, 0, len(list))
	for _, o := range list {
		if ns, ok := o.(*v1.Namespace); ok {
			out = append(out, ns)
		}
	}
	return out
}

// Peer implements policy.Source.
func (s policySource) Peer(p *v1.Pod) *v1.Pod { return s.v.addresses.Peer(p) }

// addressesChanged updates address groups after a change of a Node that decides which pod addresses
// are valid.
func (v *view) addressesChanged(old, now *v1.Node) {
	if old != nil && now != nil && !podaddress.NodeChanged(old, now) {
		return
	}
	var concerned []*v1.Pod
	for _, n := range []*v1.Node{old, now} {
		if n != nil {
			concerned = append(concerned, v.addresses.Concerned(n)...)
		}
	}
	pods, _ := v.stores[kindPod].ByIndex(podsByNode, cmp.Or(now, old).Name) // the index exists since newView
	for _, o := range pods {
		if p, ok := o.(*v1.Pod); ok {
			concerned = append(concerned, p)
		}
	}
	v.rejudge(concerned)
}

// rejudge updates the address groups with the presently valid addresses of the given pods.
func (v *view) rejudge(pods []*v1.Pod) {
	var changed []string
	for _, p := range pods {
		changed = append(changed, v.policies.Rejudge(p.Namespace, p.Name)...)
	}
	v.groupsChanged(changed)
}

// rangeChanged updates address groups after a change of a ServiceCIDR: pod addresses in a Service
// range are invalid.
func (v *view) rangeChanged(old, now *networkingv1.ServiceCIDR) {
	if old != nil && now != nil && !podaddress.RangeChanged(old, now) {
		return
	}
	var concerned []*v1.Pod
	for _, r := range []*networkingv1.ServiceCIDR{old, now} {
		if r != nil {
			concerned = append(concerned, v.addresses.ConcernedByRange(r)...)
		}
	}
	v.rejudge(concerned)
}

// watchRanges registers a handler that updates address groups when ServiceCIDRs change. It does
// nothing if pod addresses are not validated.
func (v *view) watchRanges(i *client.Informers) {
	if v.addresses == nil {
		return
	}
	changed := func(old, now any) {
		was, _ := object(old).(*networkingv1.ServiceCIDR)
		is, _ := object(now).(*networkingv1.ServiceCIDR)
		if was != nil || is != nil {
			v.rangeChanged(was, is)
		}
	}
	reg, err := client.Informer[*networkingv1.ServiceCIDR](i).AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { changed(nil, o) }, UpdateFunc: changed, DeleteFunc: func(o any) { changed(o, nil) },
	})
	if err != nil {
		panic(fmt.Sprintf("fleet: watch ServiceCIDRs: %v", err)) // the informer has not started: this cannot fail
	}
	v.handlers = append(v.handlers, reg)
}

// watchNamespaces registers a handler that updates address groups when namespace labels change.
func (v *view) watchNamespaces(i *client.Informers) {
	inf := client.Informer[*v1.Namespace](i)
	v.namespaces = inf.GetIndexer()
	changed := func(old, now any) {
		was, _ := object(old).(*v1.Namespace)
		is, _ := object(now).(*v1.Namespace)
		if was != nil || is != nil {
			v.groupsChanged(v.policies.Namespace(was, is))
		}
	}
	reg, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { changed(nil, o) }, UpdateFunc: changed, DeleteFunc: func(o any) { changed(o, nil) },
	})
	if err != nil {
		panic(fmt.Sprintf("fleet: watch Namespaces: %v", err)) // the informer has not started: this cannot fail
	}
	v.handlers = append(v.handlers, reg)
}

// podChanged updates address groups after a change of a pod.
func (v *view) podChanged(old, now api.Object) {
	was, _ := old.(*v1.Pod)
	is, _ := now.(*v1.Pod)
	if was != nil || is != nil {
		v.groupsChanged(v.policies.Pod(was, is))
	}
}

// policyChanged updates the policy index after a change of a NetworkPolicy. It marks the policy,
// and the pods that it selects or selected before, in the affected sessions.
func (v *view) policyChanged(id key, old, now api.Object) {
	was, _ := old.(*networkingv1.NetworkPolicy)
	is, _ := now.(*networkingv1.NetworkPolicy)
	made, gone := v.policies.Policy(id.namespace, id.name, is)
	for _, name := range gone {
		v.enc.forget(policy.UID(name))
	}
	for _, name := range made { // a session may hold a former group of the same name
		v.markInterested(key{kindAddressGroup, "", name})
	}
	v.markInterested(id)
	for _, p := range (policySource{v}).Pods(id.namespace) {
		if p.Spec.NodeName != "" && (selects(was, p) || selects(is, p)) {
			v.markPod(keyOf(kindPod, p), p)
		}
	}
}

func selects(p *networkingv1.NetworkPolicy, pod *v1.Pod) bool {
	if p == nil {
		return false
	}
	s, err := metav1.LabelSelectorAsSelector(&p.Spec.PodSelector)
	return err == nil && s.Matches(labels.Set(pod.Labels))
}

// dnsChanged updates the policy index with the addresses at which nodes answer cluster DNS.
func (v *view) dnsChanged(id key, now api.Object) {
	if id.namespace != policy.DNSNamespace || id.name != dnsService {
		return
	}
	var addresses []string
	if svc, ok := now.(*v1.Service); ok {
		addresses = append(addresses, dnsLinkLocal)
		for _, ip := range svc.Spec.ClusterIPs {
			if ip != v1.ClusterIPNone {
				addresses = append(addresses, ip)
			}
		}
	}
	v.groupsChanged(v.policies.DNS(addresses))
}

// policyReferences returns the policies that select a pod, or the address groups of a policy.
func (v *view) policyReferences(o api.Object) (keys []key) {
	switch o := o.(type) {
	case *v1.Pod:
		for _, name := range v.policies.Selecting(o) {
			keys = append(keys, key{kindNetworkPolicy, o.Namespace, name})
		}
	case *networkingv1.NetworkPolicy:
		var r refSet // several peers may share a group
		for _, name := range v.policies.Groups(o.Namespace, o.Name) {
			r.add(kindAddressGroup, "", name)
		}
		return r.list
	}
	return keys
}

// regroup collects the changed address groups until the next wave. A change sends the whole group
// to all nodes that use it, so changes are batched.
type regroup struct {
	waves waves

	mu      sync.Mutex
	pending map[string]bool
}

// mostRegrouped bounds the pause after a wave of address groups, to 200 ms.
const mostRegrouped = 100

func (v *view) groupsChanged(names []string) {
	if len(names) == 0 {
		return
	}
	r := &v.regroup
	r.mu.Lock()
	if r.pending == nil {
		r.pending = make(map[string]bool)
	}
	for _, name := range names {
		r.pending[name] = true
	}
	r.mu.Unlock()
	r.waves.ask(v.tellGroups)
}

// tellGroups marks the changed address groups in all sessions that use them. It returns the number
// of marks, at most mostRegrouped, which determines the pause until the next wave.
func (v *view) tellGroups() (reached int) {
	r := &v.regroup
	r.mu.Lock()
	names := r.pending
	r.pending = nil
	r.mu.Unlock()
	for name := range names {
		reached += v.markInterested(key{kindAddressGroup, "", name})
	}
	return min(reached, mostRegrouped)
}
