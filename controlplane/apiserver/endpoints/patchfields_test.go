package endpoints_test

import (
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

const openDefinition = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: opens.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: opens, singular: open, kind: Open, listKind: OpenList}
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema: {type: object, properties: {spec: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`

// Duplicate fields of a patch are rejected with fieldValidation=Strict and warned about with Warn,
// also in custom resources that preserve unknown fields. The messages are those of Kubernetes. F16
func TestDuplicateFieldsOfPatches(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	r.LeadDefinitions()
	c := r.AdminHTTP()
	r.Establish(c, openDefinition)
	const opens, cms = "/apis/example.com/v1/namespaces/default/opens/", "/api/v1/namespaces/default/configmaps/"
	const apply, merge, strategic, operations = "application/apply-patch+yaml", "application/merge-patch+json",
		"application/strategic-merge-patch+json", "application/json-patch+json"
	open := "\napiVersion: example.com/v1\nkind: Open\nmetadata: {name: a}\nspec:\n  foo: foo1\n  foo: foo2\n"
	openJSON := `{"apiVersion":"example.com/v1","kind":"Open","metadata":{"name":"a"},"spec":{"foo":"1","foo":"2"}}`
	cm := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: b, a: c}\n"
	for _, p := range []string{opens + "a", cms + "c"} {
		body := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c"}}`
		if strings.HasPrefix(p, opens) {
			body = `{"apiVersion":"example.com/v1","kind":"Open","metadata":{"name":"a"},"spec":{"foo":"0"}}`
		}
		r.OK(r.Call(c, "PATCH", p+"?fieldManager=first", body, "Content-Type", apply))
	}
	for _, one := range []struct {
		path, media, body string
		code              int
		message           string
	}{
		{opens + "a", apply, open, 400, `line 7: key "foo" already set in map`},
		{opens + "a", apply, openJSON, 400, `key "foo" already set in map`},
		{cms + "c", apply, cm, 400, `line 4: key "a" already set in map`},
		{opens + "a", merge, `{"spec":{"foo":"1","foo":"2"}}`, 422, `duplicate field "spec.foo"`},
		{cms + "c", merge, `{"data":{"a":"1","a":"2"}}`, 422, `duplicate field "data.a"`},
		{cms + "c", strategic, `{"data":{"a":"1","a":"2"}}`, 422, `duplicate field "data.a"`},
		{cms + "c", operations, `[{"op":"add","path":"/data","value":{},"foo":1}]`, 422,
			`json patch unknown field "[0].foo"`},
	} {
		query := "?fieldManager=m&force=true"
		if one.media != apply {
			query = "?fieldManager=m"
		}
		r.Refused(r.Call(c, "PATCH", one.path+query+"&fieldValidation=Strict", one.body, "Content-Type", one.media),
			one.code, one.message)
		a := r.OK(r.Call(c, "PATCH", one.path+query+"&fieldValidation=Warn", one.body, "Content-Type", one.media))
		if w := a.Header.Get("Warning"); !strings.Contains(w, strings.ReplaceAll(one.message, `"`, `\"`)) {
			t.Errorf("%s %s: warning %q, want %s", one.media, one.body, w, one.message)
		}
		if a = r.OK(r.Call(c, "PATCH", one.path+query+"&fieldValidation=Ignore", one.body, "Content-Type",
			one.media)); a.Header.Get("Warning") != "" {
			t.Errorf("%s: warning %q although the fields are to be ignored", one.media, a.Header.Get("Warning"))
		}
	}
}
