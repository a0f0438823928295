package apiserver

import (
	"slices"
	"strings"
	"testing"
)

// A client owns the fields that it set and their defaults. It does not own the fields that the server derives from others
// (clusterIPs, dataSourceRef), which still get their values. F1
func TestDerivedFieldsHaveNoOwner(t *testing.T) {
	r := start(t, nil)
	for _, c := range []struct {
		plural, body string
		owned, value string // owned is in managedFields, value is in the stored object
		derived      string
	}{
		{"services", `{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"},"spec":{"clusterIP":"None","selector":{"a":"b"}}}`,
			`"f:clusterIP":{}`, `"clusterIPs":["None"]`, "f:clusterIPs"},
		{"persistentvolumeclaims", `{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{"name":"a"},"spec":{` +
			`"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}},` +
			`"dataSource":{"kind":"PersistentVolumeClaim","name":"b"}}}`,
			`"f:dataSource":{}`, `"dataSourceRef":{`, "f:dataSourceRef"},
	} {
		a := r.call(r.adminHTTP(), "POST", "/api/v1/namespaces/default/"+c.plural, c.body)
		if a.code != 201 || !strings.Contains(a.body, c.owned) || !strings.Contains(a.body, c.value) ||
			strings.Contains(a.body, c.derived) {
			t.Errorf("%s answered %d %s\nwant %s owned, %s without owner", c.plural, a.code, a.body, c.owned, c.value)
		}
	}
}

// A definition with formats that the server does not know is accepted with a warning for each. F15
func TestUnknownFormatsOfDefinitions(t *testing.T) {
	r := start(t, nil)
	const body = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"things.example.com"},
"spec":{"group":"example.com","scope":"Namespaced","names":{"plural":"things","kind":"Thing"},"versions":[{"name":"v1",
"served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","properties":{
"a":{"type":"string","format":"date-time"},"b":{"type":"integer","format":"int64"},"c":{"type":"string","format":"k8s-short-name"},
"d":{"type":"string","format":"postcode"},"e":{"type":"integer","format":"uint8"}}}}}]}}`
	a := r.call(r.adminHTTP(), "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)
	got := slices.Sorted(slices.Values(a.header.Values("Warning")))
	want := []string{`299 - "unrecognized format \"postcode\""`, `299 - "unrecognized format \"uint8\""`}
	if a.code != 201 || !slices.Equal(got, want) {
		t.Errorf("answered %d with the warnings %q, want %q", a.code, got, want)
	}
}
