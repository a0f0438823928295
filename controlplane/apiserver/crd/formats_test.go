package crd_test

import (
	"slices"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// A definition with formats that the server does not know is accepted with a warning for each. F15
func TestUnknownFormatsOfDefinitions(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	const body = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"things.example.com"},
"spec":{"group":"example.com","scope":"Namespaced","names":{"plural":"things","kind":"Thing"},"versions":[{"name":"v1",
"served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","properties":{
"a":{"type":"string","format":"date-time"},"b":{"type":"integer","format":"int64"},"c":{"type":"string","format":"k8s-short-name"},
"d":{"type":"string","format":"postcode"},"e":{"type":"integer","format":"uint8"}}}}}]}}`
	a := r.Call(r.AdminHTTP(), "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)
	got := slices.Sorted(slices.Values(a.Header.Values("Warning")))
	want := []string{`299 - "unrecognized format \"postcode\""`, `299 - "unrecognized format \"uint8\""`}
	if a.Code != 201 || !slices.Equal(got, want) {
		t.Errorf("answered %d with the warnings %q, want %q", a.Code, got, want)
	}
}
