package api

import (
	"errors"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	kjson "sigs.k8s.io/json"
)

// F39: whatever cannot be read is named: the field, the value and the reason.
func TestMisfitNamesTheField(t *testing.T) {
	for _, c := range []struct {
		into any
		doc  string
		want string
	}{
		{&corev1.Pod{}, `{"spec":{"containers":[{"name":"a"},{"resources":{"limits":{"cpu":1,"memory":"lots"}}}]}}`,
			`spec.containers[1].resources.limits.memory: Invalid value: "lots": quantities must match the regular ` +
				`expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'`},
		{&corev1.Pod{}, `{"spec":{"containers":[{"resources":{"requests":{"example.com/gpu":"x"}}}]}}`,
			`spec.containers[0].resources.requests[example.com/gpu]: Invalid value: "x": quantities must match the ` +
				`regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'`},
		{&corev1.Pod{}, `{"spec":{"containers":{"name":"a"}}}`,
			`spec.containers: Invalid value: {"name":"a"}: must be a list, not an object`},
		{&corev1.Pod{}, `{"metadata":{"labels":{"a":1}}}`,
			`metadata.labels.a: Invalid value: 1: must be a string, not a number`},
		{&corev1.Pod{}, `{"metadata":{"labels":["a"]}}`,
			`metadata.labels: Invalid value: ["a"]: must be an object, not a list`},
		{&corev1.Pod{}, `{"metadata":{"creationTimestamp":"noon"}}`,
			`metadata.creationTimestamp: Invalid value: "noon": parsing time "noon" as "2006-01-02T15:04:05Z07:00": ` +
				`cannot parse "noon" as "2006"`},
		{&corev1.Pod{}, `{"spec":{"volumes":[{"name":"v","emptyDir":"yes"}]}}`,
			`spec.volumes[0].emptyDir: Invalid value: "yes": must be an object, not a string`},
		{&corev1.Pod{}, `{"spec":{"hostNetwork":"true"}}`,
			`spec.hostNetwork: Invalid value: "true": must be true or false, not a string`},
		{&appsv1.Deployment{}, `{"spec":{"replicas":"three"}}`,
			`spec.replicas: Invalid value: "three": must be an integer (int32), not a string`},
		{&appsv1.Deployment{}, `{"spec":{"replicas":3000000000}}`,
			`spec.replicas: Invalid value: 3000000000: must be an integer (int32)`},
		{&appsv1.Deployment{}, `{"spec":{"replicas":1.5}}`,
			`spec.replicas: Invalid value: 1.5: must be an integer (int32)`},
		{&corev1.Secret{}, `{"data":{"password":"not base64!"}}`,
			`data.password: Invalid value: illegal base64 data at input byte 3`},
		{&corev1.Pod{}, `[1]`, `the document: Invalid value: [1]: must be an object, not a list`},
		{&corev1.Pod{}, `{"spec":`, "unexpected end of JSON input"},
	} {
		err := kjson.UnmarshalCaseSensitivePreserveInts([]byte(c.doc), c.into)
		if err == nil {
			t.Errorf("%s was decoded", c.doc)
			continue
		}
		if got := DescribeMismatch([]byte(c.doc), c.into, err); got.Error() != c.want {
			t.Errorf("%s\n got %s\nwant %s", c.doc, got, c.want)
		}
	}
}

// A document that fits is not blamed: the decoder's own words stay.
func TestMisfitWithoutAPlace(t *testing.T) {
	own := errors.New("the decoder's words")
	doc := `{"kind":"Pod","metadata":{"name":"a","labels":null},` +
		`"spec":{"containers":[{"resources":{"limits":{"cpu":"1"}}}]}}`
	if got := DescribeMismatch([]byte(doc), &corev1.Pod{}, own); got != own {
		t.Errorf("got %v", got)
	}
}
