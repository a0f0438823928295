package podgc

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestJudge(t *testing.T) {
	going := &metav1.Time{Time: time.Unix(1, 0)}
	pod := func(node string, deleted *metav1.Time) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: deleted},
			Spec: corev1.PodSpec{NodeName: node}}
	}
	node := func(ready corev1.ConditionStatus, taints ...string) *corev1.Node {
		n := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady,
			Status: ready}}}}
		for _, k := range taints {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: k})
		}
		return n
	}
	for _, c := range []struct {
		name string
		pod  *corev1.Pod
		node *corev1.Node
		want DeletionReason
	}{
		{"runs", pod("w1", nil), node(corev1.ConditionTrue), Stays},
		{"waits for a node", pod("", nil), nil, Stays},
		{"deleted before it had one", pod("", going), nil, Unscheduled},
		{"its node is gone", pod("w1", nil), nil, Orphaned},
		{"its node is lost", pod("w1", going), node(corev1.ConditionUnknown), Stays},
		{"its node is declared dead", pod("w1", going), node(corev1.ConditionUnknown, corev1.TaintNodeOutOfService),
			OutOfService},
		{"declared dead but alive", pod("w1", going), node(corev1.ConditionTrue, corev1.TaintNodeOutOfService), Stays},
		{"declared dead, not deleted", pod("w1", nil), node(corev1.ConditionUnknown, corev1.TaintNodeOutOfService),
			Stays},
	} {
		if got := Judge(c.pod, c.node); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestSurplus(t *testing.T) {
	var pods []*corev1.Pod
	add := func(name string, phase corev1.PodPhase, reason string, age int) {
		pods = append(pods,
			&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.Unix(int64(1000-age), 0)},
				Status: corev1.PodStatus{Phase: phase, Reason: reason}})
	}
	add("young", corev1.PodSucceeded, "", 1)
	add("old", corev1.PodFailed, "", 100)
	add("evicted", corev1.PodFailed, "Evicted", 5)
	add("runs", corev1.PodRunning, "", 1000)
	show := func(limit int) string {
		var out []string
		for _, p := range Surplus(pods, limit) {
			out = append(out, p.Name)
		}
		return strings.Join(out, " ")
	}
	for limit, want := range []string{"evicted old young", "evicted old", "evicted", ""} {
		if got := show(limit); got != want {
			t.Errorf("limit %d: %q, want %q", limit, got, want)
		}
	}
	if got := fmt.Sprint(len(pods)); got != "4" {
		t.Errorf("the list was changed: %s", got)
	}
}
