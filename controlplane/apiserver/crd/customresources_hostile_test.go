package crd_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// defined returns a definition with the schema and the other fields of its version in JSON.
func defined(plural, schema, more string) string {
	return fmt.Sprintf(
		`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"%s.hostile.example.com"},
"spec":{"group":"hostile.example.com","scope":"Namespaced","names":{"plural":"%s","kind":"K%s"},"versions":[{"name":"v1","served":true,"storage":true%s,
"schema":{"openAPIV3Schema":{"type":"object","properties":{"spec":%s}}}}]}}`, plural, plural, plural, more, schema)
}

// list returns f(0) to f(n-1), joined by commas.
func list(n int, f func(i int) string) string {
	out := make([]string, n)
	for i := range out {
		out[i] = f(i)
	}
	return strings.Join(out, ",")
}

func hostileDefinitions() map[string]string {
	nest := func(n int, open, inner, end string) string {
		return strings.Repeat(open, n) + inner + strings.Repeat(end, n)
	}
	const object = `{"type":"object","properties":{"a":`
	tree := `{"type":"string"}`
	for range 14 {
		tree = `{"type":"object","properties":{"l":` + tree + `,"r":` + tree + `}}`
	}
	rule := func(rule string) string {
		return fmt.Sprintf(`{"type":"object","properties":{"l":{"type":"array","items":{"type":"array",`+
			`"items":{"type":"string"}}}},"x-kubernetes-validations":[{"rule":%q}]}`, rule)
	}
	return map[string]string{
		"deep":     defined("deep", nest(2000, object, `{"type":"string"}`, "}}"), ""),
		"verydeep": defined("verydeep", nest(60000, object, `{"type":"string"}`, "}}"), ""),
		"enum": defined("enum", `{"type":"string","enum":[`+list(100000, func(i int) string {
			return fmt.Sprintf(`"v%d"`, i)
		})+`]}`, ""),
		"properties": defined("properties", `{"type":"object","properties":{`+list(10000, func(i int) string {
			return fmt.Sprintf(`"p%d":{"type":"string"}`, i)
		})+`}}`, ""),
		"doubling": defined("doubling", tree, ""),
		"pattern":  defined("pattern", `{"type":"string","pattern":"((a{1,1000}){1,1000}){1,1000}"}`, ""),
		"patterns": defined("patterns", `{"type":"object","properties":{`+list(2000, func(i int) string {
			return fmt.Sprintf(`"p%d":{"type":"string","pattern":"(a|b|c){1,999}%d"}`, i, i)
		})+`}}`, ""),
		"cost":  defined("cost", rule(`self.l.all(a, self.l.all(b, self.l.all(c, a == b || b == c)))`), ""),
		"chain": defined("chain", rule(strings.Repeat("self.l.all(a, ", 300)+"true"+strings.Repeat(")", 300)), ""),
		"rules": defined("rules", `{"type":"object","properties":{"a":{"type":"integer"}},"x-kubernetes-validations":[`+
			list(2000, func(i int) string { return fmt.Sprintf(`{"rule":"self.a != %d"}`, i) })+`]}`, ""),
		"ref": defined("ref", `{"$ref":"#/definitions/spec"}`, ""),
		"anyof": defined("anyof", `{"type":"object","anyOf":[`+list(5000, func(int) string {
			return `{"required":["a"]}`
		})+`]}`, ""),
		"default": defined("default", `{"type":"object","default":`+nest(5000, `{"a":`, "1", "}")+
			`,"x-kubernetes-preserve-unknown-fields":true}`, ""),
		"columns": defined("columns", `{"type":"object","x-kubernetes-preserve-unknown-fields":true}`,
			`,"additionalPrinterColumns":[`+list(500, func(i int) string {
				return fmt.Sprintf(`{"name":"c%d","type":"string","jsonPath":".spec..*..*..x"}`, i)
			})+`]`),
		"large": defined("large", `{"type":"object","description":"`+strings.Repeat("x", 3<<20)+`"}`, ""),
		"versions": strings.Replace(defined("versions", `{"type":"object"}`, ""), `"versions":[`,
			`"versions":[`+list(2000, func(i int) string {
				return fmt.Sprintf(`{"name":"v%d","served":true,"storage":false,`+
					`"schema":{"openAPIV3Schema":{"type":"object"}}}`, i+2)
			})+`,`, 1),
	}
}

// No definition, and no object of one that is taken, is answered by a 500 or ends the server;
// patterns that would compile to more than a definition may have are refused before they are
// compiled. What the others take is logged.
func TestHostileDefinitions(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	js := []string{"Content-Type", "application/json"}
	for name, doc := range hostileDefinitions() {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		began := time.Now()
		a := r.Call(c, "POST", apiservertest.DefinitionsPath, doc, js...)
		took := time.Since(began)
		runtime.ReadMemStats(&after)
		t.Logf("%s: %d KiB: %d after %v, %d MiB allocated: %.300s", name, len(doc)>>10, a.Code, took,
			(after.TotalAlloc-before.TotalAlloc)>>20, a.Body[:min(len(a.Body), 300)])
		if a.Code >= 500 {
			t.Errorf("%s: %d %.500s", name, a.Code, a.Body)
		}
		if name == "patterns" {
			r.Refused(a, 422, "the patterns of all schemas are too large")
		}
		if a.Code != 201 {
			continue
		}
		r.Condition(c, name+".hostile.example.com", "Established", "True")
		path := "/apis/hostile.example.com/v1/namespaces/default/" + name
		for _, spec := range []string{`{}`, `"aaaa"`, `{"a":1,"l":[["x"]]}`,
			strings.Repeat(`{"a":`, 900) + "1" + strings.Repeat("}", 900),
			`{"l":[` + list(200, func(i int) string { return fmt.Sprintf(`["%d"]`, i) }) + `]}`} {
			began := time.Now()
			a := r.Call(c, "POST", path, `{"apiVersion":"hostile.example.com/v1","kind":"K`+name+
				`","metadata":{"generateName":"x"},"spec":`+spec+`}`, js...)
			if took := time.Since(began); took > 500*time.Millisecond {
				t.Logf("%s: an object takes %v: %d %.200s", name, took, a.Code, a.Body)
			}
			if a.Code >= 500 {
				t.Errorf("%s: object %.80s: %d %.500s", name, spec, a.Code, a.Body)
			}
		}
		for _, accept := range []string{"application/json;as=Table;g=meta.k8s.io;v=v1", "application/json"} {
			began := time.Now()
			a := r.Call(c, "GET", path, "", "Accept", accept)
			if took := time.Since(began); took > 500*time.Millisecond {
				t.Logf("%s: a list takes %v", name, took)
			}
			if a.Code != 200 {
				t.Errorf("%s: list: %d %.500s", name, a.Code, a.Body)
			}
		}
		r.Drop(c, name+".hostile.example.com")
	}
	r.OK(r.Call(c, "GET", "/readyz", ""))
}
