package crd_test

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/audit"
)

// F15: definitions are cached with their schemas packed, and nobody sees that: whoever reads or
// changes one by any verb, in any representation, has all of it.
func TestPackedDefinitionsAreNotSeen(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	const name, last = "c1.stable.example.com", "Field 99 of kind 1 says"
	one := apiservertest.DefinitionsPath + "/" + name
	lines, done := r.WatchLines(c, apiservertest.DefinitionsPath+"?watch=1")
	defer done()
	r.OK(r.Call(c, "POST", apiservertest.DefinitionsPath, manyOf(t, 1, 100), "Content-Type", "application/json"), last)
	r.Condition(c, name, "Established", "True")
	whole := func(what, body string) {
		t.Helper()
		if !strings.Contains(body, last) || strings.Contains(body, "keelson.dev/packed") {
			t.Errorf("%s shows %.300s", what, body)
		}
	}
	for range 2 { // the change and the status
		whole("the watch", <-lines)
	}
	again, end := r.WatchLines(c, apiservertest.DefinitionsPath+
		"?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true")
	whole("a watch's beginning", <-again)
	end()
	table := "application/json;as=Table;g=meta.k8s.io;v=v1"
	for _, accept := range []string{"application/json", "application/yaml", "application/cbor",
		"application/vnd.kubernetes.protobuf"} {
		whole("a get as "+accept, r.OK(r.Call(c, "GET", one, "", "Accept", accept)).Body)
		whole("a list as "+accept, r.OK(r.Call(c, "GET", apiservertest.DefinitionsPath, "", "Accept", accept)).Body)
		whole("a list of a selector as "+accept,
			r.OK(r.Call(c, "GET", apiservertest.DefinitionsPath+"?fieldSelector=metadata.name="+name, "",
				"Accept", accept)).Body)
	}
	whole("a table of objects",
		r.OK(r.Call(c, "GET", apiservertest.DefinitionsPath+"?includeObject=Object", "", "Accept", table)).Body)
	if rows := r.OK(r.Call(c, "GET", apiservertest.DefinitionsPath, "", "Accept", table)).Body; !strings.Contains(rows,
		name) || strings.Contains(rows, "packed") {
		t.Errorf("the table is %.300s", rows)
	}
	whole("a merge patch",
		r.OK(r.Call(c, "PATCH", one, `{"metadata":{"labels":{"a":"b"}}}`, "Content-Type",
			"application/merge-patch+json")).Body)
	whole("a patch of the status",
		r.OK(r.Call(c, "PATCH", one+"/status", `{"status":{"storedVersions":["v1"]}}`, "Content-Type",
			"application/merge-patch+json")).Body)
	whole("an apply", r.OK(r.Call(c, "PATCH", one+"?fieldManager=me&force=true",
		`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"`+name+
			`","labels":{"c":"d"}}}`,
		"Content-Type", "application/apply-patch+yaml")).Body)
	got := r.OK(r.Call(c, "GET", one, "")).Body
	whole("an update",
		r.OK(r.Call(c, "PUT", one, strings.Replace(got, last, last+" all", 1), "Content-Type", "application/json")).
			Body)
	whole("what was updated", strings.ReplaceAll(r.OK(r.Call(c, "GET", one, "")).Body, " all", ""))
	// Lists of many, which are written item by item while definitions change.
	for i := 2; i < 30; i++ {
		r.OK(r.Call(c, "POST", apiservertest.DefinitionsPath, manyOf(t, i, 100), "Content-Type", "application/json"))
	}
	for _, accept := range []string{"application/json", "application/vnd.kubernetes.protobuf"} {
		list := r.OK(r.Call(c, "GET", apiservertest.DefinitionsPath, "", "Accept", accept)).Body
		if n := strings.Count(list, "Field 99 of kind "); n != 29 || strings.Contains(list, "keelson.dev/packed") {
			t.Errorf("a list as %s shows %d schemas", accept, n)
		}
	}
	var deleted struct{ Items []json.RawMessage }
	if err := json.Unmarshal([]byte(r.OK(r.Call(c, "DELETE", apiservertest.DefinitionsPath, "")).Body),
		&deleted); err != nil || len(deleted.Items) != 29 {
		t.Fatalf("%d were deleted: %v", len(deleted.Items), err)
	}
	for _, item := range deleted.Items {
		if bytes.Contains(item, []byte("packed")) || !bytes.Contains(item, []byte("Field 99")) {
			t.Errorf("deleted: %.300s", item)
		}
	}
}

// The record of a list has the definitions as they were answered, not as they are cached. What a
// client sends in the words of the cached form is refused, and recorded as it was sent.
func TestAuditOfPackedDefinitions(t *testing.T) {
	r, j := apiservertest.Audited(t, "rules:\n- level: RequestResponse\n  users: [admin]\n  resources: [{group: "+
		"apiextensions.k8s.io, resources: [customresourcedefinitions]}]\n"+
		"  omitStages: [RequestReceived]\n- level: None\n")
	r.LeadDefinitions()
	c := r.AdminHTTP()
	for i := range 2 {
		r.OK(r.Call(c, "POST", apiservertest.DefinitionsPath, manyOf(t, i, 60), "Content-Type", "application/json"))
	}
	r.Condition(c, "c1.stable.example.com", "Established", "True")
	list := r.OK(r.Call(c, "GET", apiservertest.DefinitionsPath, "")).Body
	e := j.One(t, "list", func(e *audit.Event) bool { return e.Verb == "list" })
	var got, want struct {
		Items []struct{ Spec, Status json.RawMessage }
	}
	if err := json.Unmarshal(e.ResponseObject, &got); err != nil {
		t.Fatalf("%v: %s", err, e.ResponseObject)
	}
	if err := json.Unmarshal([]byte(list), &want); err != nil {
		t.Fatal(err)
	}
	if len(got.Items) != 2 ||
		!slices.EqualFunc(got.Items, want.Items, func(a, b struct{ Spec, Status json.RawMessage }) bool {
			return bytes.Equal(a.Spec, b.Spec) && bytes.Equal(a.Status, b.Status)
		}) {
		t.Errorf("recorded: %.500s\nanswered: %.500s", e.ResponseObject, list)
	}
	forged := changed(t, apiservertest.Crontabs, "metadata/name", "forged.stable.example.com", "spec/names",
		"{plural: forged, kind: Forged}",
		"spec/versions/0/schema/openAPIV3Schema", `{$ref: keelson.dev/packed, default: "\u00ff"}`)
	r.Refused(r.Call(c, "POST", apiservertest.DefinitionsPath, forged, "Content-Type", "application/json"), 422, "$ref")
	e = j.One(t, "forged", func(e *audit.Event) bool { return e.ResponseStatus != nil && e.ResponseStatus.Code == 422 })
	if !bytes.Contains(e.RequestObject, []byte("keelson.dev/packed")) {
		t.Errorf("recorded: %s", e.RequestObject)
	}
}
