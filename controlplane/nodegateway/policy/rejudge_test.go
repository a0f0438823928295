package policy

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A pod without a valid address is in no group, and Rejudge applies a changed validity. A pod
// deleted in the meantime is not added again.
func TestRejudge(t *testing.T) {
	w := newWorld()
	x := New(w)
	web := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "web", Labels: map[string]string{"app": "a"}},
		Status: v1.PodStatus{PodIP: "10.0.0.1"}}
	w.namespaces["n"] = &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
	w.pods["n"] = map[string]*v1.Pod{"web": web}
	w.refused = map[string]bool{"10.0.0.1": true}
	made, _ := x.SetPolicy("n", "p",
		&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "p"},
			Spec: networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{
				{From: []networkingv1.NetworkPolicyPeer{{
					PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "a"}}}}}}}})
	want := func(step string, addresses ...string) {
		t.Helper()
		e, _ := x.Group(made[0])
		if got := shown(e); !slices.Equal(got, addresses) {
			t.Errorf("%s: %v, want %v", step, got, addresses)
		}
	}
	want("a policy for a pod whose address does not count")
	x.UpdatePod(nil, web)
	want("the pod is new")
	w.refused = nil
	if changed := x.ReevaluatePod("n", "web"); !slices.Equal(changed, made) {
		t.Errorf("the address counts, and groups %v changed", changed)
	}
	want("the address counts", "10.0.0.1 none")
	w.refused = map[string]bool{"10.0.0.1": true}
	x.ReevaluatePod("n", "web")
	want("the address no longer counts")
	w.refused, w.pods["n"] = nil, nil
	x.UpdatePod(web, nil)
	x.ReevaluatePod("n", "web")
	want("the pod is deleted")
}
