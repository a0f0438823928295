package nodelifecycle

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func node(ready corev1.ConditionStatus, others ...corev1.NodeConditionType) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	if ready != "" {
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
	}
	for _, o := range others {
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: o, Status: corev1.ConditionTrue})
	}
	return n
}

func show(taints []corev1.Taint) string {
	var out []string
	for _, t := range taints {
		out = append(out, strings.TrimPrefix(t.Key, "node.kubernetes.io/")+":"+string(t.Effect))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func TestTaints(t *testing.T) {
	cordoned := node(corev1.ConditionTrue)
	cordoned.Spec.Unschedulable = true
	tainted := node(corev1.ConditionTrue)
	tainted.Spec.Taints = []corev1.Taint{{Key: "team", Effect: corev1.TaintEffectNoSchedule},
		{Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute}}
	for _, c := range []struct {
		name string
		node *corev1.Node
		want string
	}{
		{"ready", node(corev1.ConditionTrue), ""},
		{"not ready", node(corev1.ConditionFalse), "not-ready:NoExecute not-ready:NoSchedule"},
		{"lost", node(corev1.ConditionUnknown), "unreachable:NoExecute unreachable:NoSchedule"},
		{"never heard of", node(""), "not-ready:NoSchedule"},
		{"cordoned", cordoned, "unschedulable:NoSchedule"},
		{"short of memory and disk", node(corev1.ConditionTrue, corev1.NodeMemoryPressure, corev1.NodeDiskPressure),
			"disk-pressure:NoSchedule memory-pressure:NoSchedule"},
		{"back: ours go, others stay", tainted, "team:NoSchedule"},
	} {
		if got := show(Taints(c.node, epoch)); got != c.want {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
	// The clock of an eviction is not set back.
	lost := node(corev1.ConditionUnknown)
	lost.Spec.Taints = Taints(lost, epoch)
	for _, taint := range Taints(lost, epoch.Add(time.Minute)) {
		if !taint.TimeAdded.Time.Equal(epoch) {
			t.Errorf("%s was added at %v", taint.Key, taint.TimeAdded)
		}
	}
}

// P4
func TestEviction(t *testing.T) {
	const unreachable = corev1.TaintNodeUnreachable
	seconds := func(n int64) *int64 { return &n }
	exists := func(key string, s *int64) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute,
			TolerationSeconds: s}
	}
	for _, c := range []struct {
		name        string
		taint       string
		tolerations []corev1.Toleration
		annotation  string
		want        string
	}{
		{"not tolerated", unreachable, nil, "", "0s"},
		{"five minutes mean five minutes", unreachable, []corev1.Toleration{exists(unreachable, seconds(300))}, "",
			"5m0s"},
		{"asked for", unreachable, []corev1.Toleration{exists(unreachable, seconds(60))}, "", "1m0s"},
		{"for ever", unreachable, []corev1.Toleration{exists(unreachable, nil)}, "", "never"},
		{"everything for ever", unreachable, []corev1.Toleration{{Operator: corev1.TolerationOpExists}}, "", "never"},
		{"another taint is tolerated", unreachable, []corev1.Toleration{exists("other", nil)}, "", "0s"},
		{"the first counts", unreachable, []corev1.Toleration{exists(unreachable, seconds(60)),
			exists(unreachable, seconds(30))}, "", "1m0s"},
		{"the first, before everything", unreachable,
			[]corev1.Toleration{exists(unreachable, seconds(20)), {Operator: corev1.TolerationOpExists}}, "", "20s"},
		{"by annotation", unreachable, []corev1.Toleration{exists(unreachable, seconds(300))}, "300", "5m0s"},
		{"never by annotation", unreachable, nil, "never", "never"},
		{"300 s on another taint is meant", "team", []corev1.Toleration{exists("team", seconds(300))}, "", "5m0s"},
		{"by value", "team", []corev1.Toleration{{Key: "team", Value: "a"}}, "", "never"},
		{"by another value", "team", []corev1.Toleration{{Key: "team", Value: "b"}}, "", "0s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &corev1.Pod{Spec: corev1.PodSpec{Tolerations: c.tolerations}}
			if c.annotation != "" {
				p.Annotations = map[string]string{EvictionAnnotation: c.annotation}
			}
			taint := corev1.Taint{Key: c.taint, Effect: corev1.TaintEffectNoExecute,
				TimeAdded: &metav1.Time{Time: epoch}}
			if c.taint == "team" {
				taint.Value = "a"
			}
			at, evict := Eviction(p, []corev1.Taint{{Key: c.taint, Effect: corev1.TaintEffectNoSchedule}, taint},
				time.Time{})
			got := "never"
			if evict {
				got = fmt.Sprint(at.Sub(epoch))
			}
			if got != c.want {
				t.Errorf("leaves after %s, want %s", got, c.want)
			}
		})
	}
	if _, evict := Eviction(&corev1.Pod{}, []corev1.Taint{{Key: "x", Effect: corev1.TaintEffectNoSchedule}},
		time.Time{}); evict {
		t.Error("NoSchedule evicts")
	}
	// After a disruption, the time of lost nodes starts again; the time of other taints does not.
	for key, want := range map[string]time.Duration{unreachable: time.Minute + 20*time.Second,
		"team": 20 * time.Second} {
		p := &corev1.Pod{Spec: corev1.PodSpec{Tolerations: []corev1.Toleration{exists(key, seconds(20))}}}
		taint := corev1.Taint{Key: key, Effect: corev1.TaintEffectNoExecute, TimeAdded: &metav1.Time{Time: epoch}}
		if at, _ := Eviction(p, []corev1.Taint{taint}, epoch.Add(time.Minute)); at.Sub(epoch) != want {
			t.Errorf("%s: leaves after %v, want %v", key, at.Sub(epoch), want)
		}
	}
}

func TestNotReady(t *testing.T) {
	p :=
		&corev1.Pod{Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady,
			Status: corev1.ConditionTrue}}}}
	s, changed := NotReady(p, epoch)
	if !changed || s.Conditions[0].Status != corev1.ConditionFalse ||
		!s.Conditions[0].LastTransitionTime.Time.Equal(epoch) {
		t.Errorf("%v %+v", changed, s)
	}
	if p.Status.Conditions[0].Status != corev1.ConditionTrue {
		t.Error("the shared pod was changed")
	}
	p.Status = s
	if _, changed = NotReady(p, epoch); changed {
		t.Error("changed twice")
	}
}
