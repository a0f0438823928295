package podspec_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
)

// F84, F85: a pod's rules about other pods get the values of its own labels when it is made. Labels that it lacks, and
// a selector of nothing, add nothing; a key that was selected already is refused.
func TestLabelKeysAreMerged(t *testing.T) {
	k := podspec.PodKind()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a",
		Labels: map[string]string{"rev": "7", "app": "web"}}}
	p.Spec.Containers = []corev1.Container{{Name: "c", Image: "i"}}
	selector := func() *metav1.LabelSelector {
		return &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	}
	term := corev1.PodAffinityTerm{TopologyKey: "zone", LabelSelector: selector(), MatchLabelKeys: []string{"lacking"},
		MismatchLabelKeys: []string{"rev"}}
	p.Spec.Affinity = &corev1.Affinity{
		PodAffinity: &corev1.PodAffinity{
			PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{Weight: 1,
				PodAffinityTerm: term}}},
		PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: "zone"}}},
	}
	p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{MaxSkew: 1, TopologyKey: "zone",
		WhenUnsatisfiable: corev1.DoNotSchedule,
		LabelSelector:     selector(), MatchLabelKeys: []string{"rev"}}}
	k.Writes.Default(p)
	k.Writes.PrepareCreate(p)
	for what, s := range map[string]*metav1.LabelSelector{
		"app=web,rev in (7)": p.Spec.TopologySpreadConstraints[0].LabelSelector,
		"app=web,rev " +
			"notin (7)": p.Spec.Affinity.PodAffinity.
			PreferredDuringSchedulingIgnoredDuringExecution[0].PodAffinityTerm.LabelSelector,
		"<none>": p.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[0].LabelSelector,
	} {
		got := metav1.FormatLabelSelector(s)
		if got != what {
			t.Errorf("selector %q, want %q", got, what)
		}
	}
	if errs := k.Validation.Object(p); len(errs) > 0 {
		t.Error(errs)
	}
	p.Spec.TopologySpreadConstraints[0].MatchLabelKeys = []string{"app"}
	k.Writes.PrepareCreate(p)
	if errs := k.Validation.Object(p); len(errs) == 0 {
		t.Error("a key that was in the selector before was accepted")
	}
}
