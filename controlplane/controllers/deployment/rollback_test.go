package deployment

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

// A failed rollout is rolled back to the last complete revision only if the Deployment requests it.
func TestRollback(t *testing.T) {
	timedOut := func(d *appsv1.Deployment) {
		d.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentProgressing,
			Status: corev1.ConditionFalse, Reason: reasonTimedOut, Message: "late"}}
	}
	for name, c := range map[string]struct {
		change   func(d *appsv1.Deployment)
		crashing string
		want     string
	}{
		"under way":                   {func(*appsv1.Deployment) {}, "", ""},
		"out of time":                 {timedOut, "", "v1: late"},
		"a pod that does not come up": {func(*appsv1.Deployment) {}, "web-x", `v1: Pod "web-x" exits repeatedly.`},
		"not asked for": {func(d *appsv1.Deployment) {
			timedOut(d)
			delete(d.Annotations, api.RollbackAnnotation)
		}, "web-x", ""},
		"declined": {func(d *appsv1.Deployment) {
			timedOut(d)
			d.Annotations[api.RollbackAnnotation] = "false"
		}, "", ""},
		"paused":                       {func(d *appsv1.Deployment) { timedOut(d); d.Spec.Paused = true }, "", ""},
		"a status of another template": {func(d *appsv1.Deployment) { timedOut(d); d.Generation++ }, "", ""},
		"nothing was complete": {func(d *appsv1.Deployment) {
			timedOut(d)
			delete(d.Annotations, CompletedAnnotation)
		}, "", ""},
		"the last complete itself": {func(d *appsv1.Deployment) {
			timedOut(d)
			d.Annotations[CompletedAnnotation] = "2"
		}, "", ""},
		"history that is gone": {func(d *appsv1.Deployment) {
			timedOut(d)
			d.Annotations[CompletedAnnotation] = "7"
		}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			d := deploy(3, 2, "1", "1")
			d.Annotations = map[string]string{api.RollbackAnnotation: "true", CompletedAnnotation: "1"}
			d.Status.ObservedGeneration = d.Generation
			c.change(d)
			a, b := set(d, 1, 2, 2, 2), set(d, 2, 2, 2, 0)
			a.Annotations, b.Annotations = withEntry(a.Annotations, RevisionAnnotation, "1"),
				withEntry(b.Annotations, RevisionAnnotation, "2")
			got := ""
			if to, why := Rollback(d, []*appsv1.ReplicaSet{a, b}, c.crashing); to != nil {
				got = to.Name + ": " + why
			}
			if got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}
