package resourceslice

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// A slice is judged by the list of drivers that the agent of its node reports. Slices of an agent
// without a list are kept.
func TestJudge(t *testing.T) {
	node := func(drivers string) *corev1.Node {
		n := &corev1.Node{}
		n.Annotations = map[string]string{Drivers: drivers}
		return n
	}
	for _, c := range []struct {
		node *corev1.Node
		want DeletionReason
	}{{nil, NoNode}, {&corev1.Node{}, Kept}, {node(""), DriverGone}, {node("a.example.com"), Kept},
		{node("b.example.com,a.example.com"), Kept},
		{node("a.example.com.org,xa.example.com"), DriverGone}} {
		if got := Judge(c.node, "a.example.com"); got != c.want {
			t.Errorf("%+v: %q, want %q", c.node, got, c.want)
		}
	}
}
