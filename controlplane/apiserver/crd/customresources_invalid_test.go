package crd_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

var rewrite = flag.Bool("rewrite", false, "overwrite the expected output in testdata with the current output")

// changed returns a document with values replaced. Changes are pairs of a path like
// "spec.versions.0.name" and JSON; "" removes the value.
func changed(t testing.TB, doc string, changes ...string) string {
	t.Helper()
	var all any
	if err := yaml.Unmarshal([]byte(doc), &all); err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(changes); i += 2 {
		var value any
		if changes[i+1] != "" {
			if err := yaml.Unmarshal([]byte(changes[i+1]), &value); err != nil {
				t.Fatalf("%s: %v", changes[i+1], err)
			}
		}
		all = put(all, strings.Split(changes[i], "/"), value, changes[i+1] == "")
	}
	data, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func put(in any, path []string, value any, remove bool) any {
	if len(path) == 0 {
		return value
	}
	if list, ok := in.([]any); ok {
		i, err := strconv.Atoi(path[0])
		switch {
		case err != nil || i > len(list):
			panic("no place " + path[0])
		case i == len(list):
			return append(list, put(nil, path[1:], value, remove))
		case remove && len(path) == 1:
			return append(list[:i:i], list[i+1:]...)
		}
		list[i] = put(list[i], path[1:], value, remove)
		return list
	}
	m, ok := in.(map[string]any)
	if !ok {
		m = map[string]any{}
	}
	if remove && len(path) == 1 {
		delete(m, path[0])
	} else {
		m[path[0]] = put(m[path[0]], path[1:], value, remove)
	}
	return m
}

const (
	theVersion = "spec/versions/0/"
	theSchema  = theVersion + "schema/openAPIV3Schema/"
	theSpec    = theSchema + "properties/spec/"
	aField     = theSpec + "properties/new"
)

// invalidDefinitions are changes of the definition of CronTabs that make it invalid.
var invalidDefinitions = [][]string{
	{"metadata/name", "crontabs.example.com"},
	{"metadata/name", "Bad_Name"},
	{"spec/group", "''"},
	{"spec/group", "nodots"},
	{"spec/group", "stable.k8s.io", "metadata/name", "crontabs.stable.k8s.io"},
	{"spec/group", "stable.k8s.io", "metadata/name", "crontabs.stable.k8s.io", "metadata/annotations",
		"{api-approved.kubernetes.io: nonsense}"},
	{"spec/scope", "Somewhere"},
	{"spec/scope", ""},
	{"spec/names/plural", "CronTabs"},
	{"spec/names/kind", "cron tab"},
	{"spec/names/kind", ""},
	{"spec/names/singular", "Cron"},
	{"spec/names/shortNames", "[UPPER]"},
	{"spec/names/categories", "[Not-Valid]"},
	{"spec/names/listKind", "CronTab"},
	{"spec/versions", "[]"},
	{theVersion + "name", "V1_x"},
	{theVersion + "storage", "false"},
	{"spec/versions/1", "{name: v1, served: true, storage: false, schema: {openAPIV3Schema: {type: object}}}"},
	{"spec/versions/1", "{name: v2, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}"},
	{theVersion + "schema", ""},
	{theVersion + "deprecationWarning", "old"},
	{theVersion + "subresources/scale/specReplicasPath", "''"},
	{theVersion + "subresources/scale/specReplicasPath", ".metadata.replicas"},
	{theVersion + "subresources/scale/statusReplicasPath", ".spec.replicas"},
	{theVersion + "subresources/scale/labelSelectorPath", ".other.selector"},
	{theVersion + "additionalPrinterColumns/0/type", "text"},
	{theVersion + "additionalPrinterColumns/0/format", "colour"},
	{theVersion + "additionalPrinterColumns/0/name", "''"},
	{theVersion + "additionalPrinterColumns/0/jsonPath", "''"},
	{theVersion + "selectableFields/0/jsonPath", ".spec.nothing"},
	{theVersion + "selectableFields/0/jsonPath", ".spec.ports"},
	{theVersion + "selectableFields/1", "{jsonPath: .spec.image}"},
	{"spec/preserveUnknownFields", "true"},
	{"spec/conversion", "{strategy: Magic}"},
	{"spec/conversion", "{strategy: None, webhook: {conversionReviewVersions: [v1], clientConfig: {url: " +
		"'https://example.com/c'}}}"},
	{"spec/conversion", "{strategy: Webhook}"},
	{"spec/conversion", "{strategy: Webhook, webhook: {conversionReviewVersions: [v7], clientConfig: {url: " +
		"'https://example.com/c'}}}"},
	{"spec/conversion", "{strategy: Webhook, webhook: {conversionReviewVersions: [v1], clientConfig: {url: " +
		"'http://example.com/c'}}}"},
	{"spec/conversion", "{strategy: Webhook, webhook: {conversionReviewVersions: [v1], clientConfig: " +
		"{service: {name: a, namespace: b, port: 70000}}}}"},
	{theSchema + "type", "array"},
	{theSchema + "type", ""},
	{theSchema + "x-kubernetes-preserve-unknown-fields", "false"},
	{theSchema + "properties/metadata", "{type: object, properties: {labels: {type: object}}}"},
	{aField, "{}"},
	{aField, "{type: strin}"},
	{aField, "{type: string, format: 7}"},
	{aField, "{type: string, pattern: '('}"},
	{aField, "{type: integer, default: text}"},
	{aField, "{type: string, default: a, enum: [b]}"},
	{aField, "{type: object, default: {unknown: 1}}"},
	{aField, "{$ref: '#/definitions/x'}"},
	{aField, "{type: object, definitions: {x: {type: string}}}"},
	{aField, "{type: object, patternProperties: {x: {type: string}}}"},
	{aField, "{type: array}"},
	{aField, "{type: array, items: [{type: string}]}"},
	{aField, "{type: array, uniqueItems: true, items: {type: string}}"},
	{aField, "{type: object, properties: {a: {type: string}}, additionalProperties: {type: string}}"},
	{aField, "{type: string, anyOf: [{type: string}]}"},
	{aField, "{type: string, allOf: [{description: a}]}"},
	{aField, "{type: object, x-kubernetes-embedded-resource: true}"},
	{aField, "{type: array, x-kubernetes-list-type: bag, items: {type: string}}"},
	{aField, "{type: array, x-kubernetes-list-type: map, items: {type: object}}"},
	{aField, "{type: array, x-kubernetes-list-type: map, x-kubernetes-list-map-keys: [k], items: {type: object, " +
		"properties: {k: {type: string}}}}"},
	{aField, "{type: array, x-kubernetes-list-type: set, items: {type: string, nullable: true}}"},
	{aField, "{type: array, x-kubernetes-list-map-keys: [k], items: {type: string}}"},
	{aField, "{type: object, x-kubernetes-map-type: loose}"},
	{aField, "{type: string, x-kubernetes-list-type: set}"},
	{aField, "{type: string, x-kubernetes-validations: [{rule: ''}]}"},
	{aField, "{type: string, x-kubernetes-validations: [{rule: 'self.nothing == 1'}]}"},
	{aField, "{type: string, x-kubernetes-validations: [{rule: 'self'}]}"},
	{aField, "{type: string, x-kubernetes-validations: [{rule: 'true', messageExpression: '1'}]}"},
	{aField, "{type: string, x-kubernetes-validations: [{rule: 'true', reason: Because}]}"},
	{aField, "{type: string, x-kubernetes-validations: [{rule: 'true', fieldPath: .nothing}]}"},
	{aField, "{type: string, x-kubernetes-validations: [{rule: 'true', optionalOldSelf: true}]}"},
	{aField, "{type: array, items: {type: array, items: {type: string, x-kubernetes-validations: [{rule: " +
		"'self.contains(self)'}]}}}"},
}

// invalidCronTabs are specs of a CronTab that its schema refuses.
var invalidCronTabs = []string{
	`null`, `7`, `{}`, `{"cronSpec":1}`, `{"cronSpec":"soon"}`, `{"cronSpec":null}`,
	`{"cronSpec":"* * * * *","replicas":0}`,
	`{"cronSpec":"* * * * *","replicas":11}`, `{"cronSpec":"* * * * *","replicas":1.5}`,
	`{"cronSpec":"* * * * *","replicas":"1"}`,
	`{"cronSpec":"* * * * *","image":[]}`, `{"cronSpec":"* * * * *","port":true}`,
	`{"cronSpec":"* * * * *","mode":"Other"}`,
	`{"cronSpec":"* * * * *","mode":"Slow","replicas":4}`, `{"cronSpec":"* * * * *","tags":["a","b","a"]}`,
	`{"cronSpec":"* * * * *","ports":[{"name":"a"},{"name":"a"}]}`, `{"cronSpec":"* * * * *","ports":[{}]}`,
	`{"cronSpec":"* * * * *","ports":{"name":"a"}}`, `{"cronSpec":"* * * * *","template":{"kind":"Pod"}}`,
	`{"cronSpec":"* * * * *","template":{"apiVersion":"v1","kind":"Pod","metadata":{"name":7}}}`,
	`{"cronSpec":"* * * * *","template":{"apiVersion":1,"kind":"Pod"}}`,
}

// causes formats an error response as text.
func causes(a apiservertest.Response) string {
	var s struct {
		Message string
		Details struct {
			Causes []struct{ Reason, Message, Field string }
		}
	}
	_ = json.Unmarshal([]byte(a.Body), &s)
	if len(s.Details.Causes) == 0 {
		return fmt.Sprintf("  %d %s\n", a.Code, s.Message)
	}
	out := fmt.Sprintf("  %d\n", a.Code)
	for _, c := range s.Details.Causes {
		out += fmt.Sprintf("  %s: %s\n", c.Field, c.Message)
	}
	return out
}

// F15: what is no definition, and what is none of its objects, is refused with the causes that
// Kubernetes has for it.
func TestInvalidCustomResources(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	var got strings.Builder
	refused := func(what string, a apiservertest.Response) {
		if a.Code/100 == 2 {
			t.Errorf("%s is accepted", what)
		}
		got.WriteString(what + "\n" + causes(a))
	}
	for _, change := range invalidDefinitions {
		doc := changed(t, apiservertest.Crontabs, change...)
		refused(strings.Join(change, " "), r.Call(c, "POST", apiservertest.DefinitionsPath+"?dryRun=All", doc,
			"Content-Type", "application/json"))
	}
	r.Establish(c, apiservertest.Crontabs)
	for _, spec := range invalidCronTabs {
		refused("CronTab "+spec, r.Call(c, "POST", crontabsPath, apiservertest.Crontab("a", spec), "Content-Type",
			"application/json"))
	}
	const file = "testdata/custom/invalid.txt"
	if *rewrite {
		if err := os.WriteFile(file, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if had, has := strings.Split(string(want), "\n"), strings.Split(got.String(), "\n"); string(want) != got.String() {
		for i := range min(len(had), len(has)) {
			if had[i] != has[i] {
				t.Fatalf("line %d is\n%s\nit was\n%s", i+1, has[i], had[i])
			}
		}
		t.Fatalf("%d lines, there were %d", len(has), len(had))
	}
}
