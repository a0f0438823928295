package apiserver_test

import (
	"fmt"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// A Job gets the tracking labels of its template only if the client set no labels on the Job
// itself, whether it is created or applied. F11
func TestJobLabelsAreThoseOfTheClient(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	const body = `{"apiVersion":"batch/v1","kind":"Job","metadata":{"name":%q,"labels":%s},"spec":{"template":{` +
		`"metadata":{"labels":{"a":"b"}},"spec":{"restartPolicy":"Never","containers":[{"name":"c","image":"x"}]}}}}`
	jobs := r.Admin().BatchV1().Jobs("default")
	check := func(how, labels string, j *batchv1.Job, err error, want int) {
		t.Helper()
		if err != nil || len(j.Labels) != want || len(j.Spec.Template.Labels) != 5 {
			t.Errorf("%s with labels %s: %v, template %v, %v", how, labels, j.Labels, j.Spec.Template.Labels, err)
		}
	}
	n := 0
	for labels, want := range map[string]int{`{"a":"b"}`: 1, `{"c":"d"}`: 1, `null`: 5, `{}`: 5} {
		n++
		name := fmt.Sprint("posted-", n)
		a := r.Call(r.AdminHTTP(), "POST", "/apis/batch/v1/namespaces/default/jobs", fmt.Sprintf(body, name, labels))
		if a.Code != 201 {
			t.Errorf("answered %d %s", a.Code, a.Body)
		}
		j, err := jobs.Get(apiservertest.Within(t), name, metav1.GetOptions{})
		check("created", labels, j, err, want)
		name = fmt.Sprint("applied-", n)
		j, err = jobs.Patch(apiservertest.Within(t), name, types.ApplyPatchType, fmt.Appendf(nil, body, name, labels),
			metav1.PatchOptions{FieldManager: "test"})
		check("applied", labels, j, err, want)
	}
}
