package podspec_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// The scheduler ignores a pod with gates, so its condition states the reason from the start.
func TestGatedPodsSayWhyTheyWait(t *testing.T) {
	for gates, want := range map[string]string{"": "", "schedulingGates: [{name: a.test/b}],": "SchedulingGated"} {
		p := kindstest.Load[*corev1.Pod](t, "{metadata: {name: a}, spec: {"+gates+
			" containers: [{name: c, image: i}]}, status: {conditions: [{type: x}]}}")
		kinds.All().ByType(p).Writes.PrepareCreate(p)
		got := ""
		if c := api.PodCondition(p, corev1.PodScheduled); c != nil && c.Status == corev1.ConditionFalse {
			got = c.Reason
		}
		if got != want {
			t.Errorf("gates %q: %q, want %q", gates, got, want)
		}
	}
}
