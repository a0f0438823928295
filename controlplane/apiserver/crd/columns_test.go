package crd

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// Column paths that multiply their results are not evaluated; paths in common definitions are.
func TestColumnPathsAreBounded(t *testing.T) {
	deep := map[string]any{"b": "end"}
	for range 40 {
		deep = map[string]any{"b": deep}
	}
	list := make([]any, 2000)
	for i := range list {
		list[i] = map[string]any{"type": "Ready", "status": "True", "n": int64(i)}
	}
	object := map[string]any{"deep": deep, "list": list}
	for _, path := range []string{
		".deep" + strings.Repeat("['b','b']", 25),
		".list[:]}{range .list[:]}{range $.list[:]}{range $.list[:]}{.n}{end}{end}{end}{.n",
		".." + strings.Repeat("..", 30) + "b",
	} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			newFinder(path)(object)
		}()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Fatalf("%.60s takes more than 10 s", path)
		}
	}
	for path, want := range map[string]any{
		`.list[?(@.type=="Ready")].status`: "True", ".list[0].status": "True", ".list[0:1].status": "True",
		".list[*].n": int64(0), ".list[-1:].n": int64(1999), `.list[0]['status','type']`: "True",
		".list[0,1].n": int64(0),
	} {
		if got, ok := newFinder(path)(object); !ok || got != want {
			t.Errorf("%s: %v, %v", path, got, ok)
		}
	}
}

// Schema rules reject quantities that take long to parse, like all other expressions.
func TestQuantitiesInRulesAreBounded(t *testing.T) {
	c :=
		fuzzed([]byte(`{"schema":{"openAPIV3Schema":{"type":"object","properties":{"spec":{"type":"object",` +
			`"properties":{"a":{"type":"string"}},` +
			`"x-kubernetes-validations":[{"rule":"quantity(self.a).isGreaterThan(quantity('0'))"}]}}}}}`))
	d, err := newDefinition(c, definitionsKind(kinds.All()), Hooks{})
	if err != nil {
		t.Fatal(err)
	}
	for value, want := range map[string]string{"1Gi": "",
		"1e-2000000000": "the exponent of the quantity has 10 digits"} {
		o := d.kinds[0].Type.New().(*custom.Object)
		if _, err := o.DecodeJSON([]byte(`{"metadata":{"name":"a"},"spec":{"a":"`+value+`"}}`), true); err != nil {
			t.Fatal(err)
		}
		o.Name, o.Namespace = "a", "default"
		o.SetGroupVersionKind(d.kinds[0].GVK)
		errs := d.kinds[0].Validation.Check(t.Context(), "", o, nil)
		if (len(errs) > 0) != (want != "") || !strings.Contains(fmt.Sprint(errs), want) {
			t.Errorf("%s: %v", value, errs)
		}
	}
}
