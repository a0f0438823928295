package loadbalancer

import (
	"fmt"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// F117: which nodes may answer for addresses, and why the others do not.
func TestFit(t *testing.T) {
	for _, c := range []struct {
		want   string
		change func(n *corev1.Node, l *coordinationv1.Lease)
	}{
		{"", func(*corev1.Node, *coordinationv1.Lease) {}},
		{"it is not Ready", func(n *corev1.Node, _ *coordinationv1.Lease) {
			n.Status.Conditions[0].Status = corev1.ConditionUnknown
		}},
		{"it is not Ready", func(n *corev1.Node, _ *coordinationv1.Lease) { n.Status.Conditions = nil }},
		{"its network is not available", func(n *corev1.Node, _ *coordinationv1.Lease) {
			n.Status.Conditions = append(n.Status.Conditions,
				corev1.NodeCondition{Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionTrue})
		}},
		{"it does not report", func(_ *corev1.Node, l *coordinationv1.Lease) {
			l.Annotations = map[string]string{balancer.MissingSince: "2026-01-02T03:04:05Z"}
		}},
		{"it is cordoned", func(n *corev1.Node, _ *coordinationv1.Lease) { n.Spec.Unschedulable = true }},
		{"it has label node.kubernetes.io/exclude-from-external-load-balancers",
			func(n *corev1.Node, _ *coordinationv1.Lease) {
				n.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""}
			}},
		{"its agent does not announce addresses", func(n *corev1.Node, _ *coordinationv1.Lease) {
			n.Annotations = nil
		}},
		{"it is gone", func(n *corev1.Node, _ *coordinationv1.Lease) { n.DeletionTimestamp = &metav1.Time{} }},
	} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1",
			Annotations: map[string]string{balancer.Announces: "true"}},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady,
				Status: corev1.ConditionTrue}}}}
		l := &coordinationv1.Lease{}
		c.change(n, l)
		if got := UnfitReason(n, l); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
	if UnfitReason(nil, nil) == "" {
		t.Error("a node that is not there is fit")
	}
}

// F117: Services are spread evenly, even if several leaders choose nodes without the load of the
// other choices.
func TestPickSpreads(t *testing.T) {
	load, blind := map[string]int{}, map[string]int{}
	for i := range 300 {
		key := engine.Key{Namespace: "ns", Name: fmt.Sprint("s", i)}
		var know, not []Candidate
		for _, n := range []string{"w1", "w2", "w3"} {
			know, not = append(know, Candidate{n, load[n]}), append(not, Candidate{n, 0})
		}
		load[PickAnnouncer(key, know)]++
		blind[PickAnnouncer(key, not)]++
	}
	for _, n := range []string{"w1", "w2", "w3"} {
		if load[n] != 100 || blind[n] < 60 || blind[n] > 140 {
			t.Errorf("%s answers for %d, and for %d where nobody counts", n, load[n], blind[n])
		}
	}
	if PickAnnouncer(engine.Key{}, nil) != "" {
		t.Error("somebody answers where nobody can")
	}
}
