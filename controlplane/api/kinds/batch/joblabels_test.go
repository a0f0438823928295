package batch_test

import (
	"testing"

	batchv1 "k8s.io/api/batch/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// The labels of a job that a client set get no tracking labels, not even if they equal the template's. F11
func TestJobLabelsOfClientsStay(t *testing.T) {
	const spec = "spec: {template: {metadata: {labels: {app: x}}, spec: {restartPolicy: Never, containers: " +
		"[{name: c, image: i}]}}}"
	for labels, want := range map[string]int{"{app: x}": 1, "{other: y}": 1, "{}": 5} {
		j := kindstest.Load[*batchv1.Job](t, "{metadata: {name: a, labels: "+labels+"}, "+spec+"}")
		j.UID = "u1"
		kinds.All().ByType(j).Writes.PrepareCreate(j)
		if len(j.Labels) != want || len(j.Spec.Template.Labels) != 5 {
			t.Errorf("labels %s: %v, template %v", labels, j.Labels, j.Spec.Template.Labels)
		}
		delete(j.Labels, "app")
		if j.Spec.Template.Labels["app"] != "x" {
			t.Error("the job and its template share a map")
		}
	}
}
