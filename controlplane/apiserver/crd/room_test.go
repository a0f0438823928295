package crd

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/internal/lrucache"
	"keelson.dev/keelson/internal/memory/memtest"
)

// ruled returns a version with the given number of CEL rules; the last requires that n equals
// number.
func ruled(t testing.TB, in *lrucache.Budget, number, rules int) *version {
	t.Helper()
	fields := map[string]apiextensionsv1.JSONSchemaProps{"n": {Type: "integer"}}
	var all apiextensionsv1.ValidationRules
	for i := range rules {
		name := fmt.Sprintf("f%d", i)
		fields[name] = apiextensionsv1.JSONSchemaProps{Type: "string",
			Description: strings.Repeat("what it is for ", 4)}
		all = append(all, apiextensionsv1.ValidationRule{Rule: fmt.Sprintf("!has(self.%s) || self.%s.startsWith('%d')",
			name, name, number)})
	}
	all = append(all, apiextensionsv1.ValidationRule{Rule: fmt.Sprintf("self.n == %d", number),
		Message: "n is another number"})
	c := &apiextensionsv1.CustomResourceDefinition{}
	c.Spec.Group, c.Status.AcceptedNames.Kind = "example.com", fmt.Sprintf("K%d", number)
	c.Spec.Versions = []apiextensionsv1.CustomResourceDefinitionVersion{{Name: "v1", Served: true, Storage: true,
		Schema: &apiextensionsv1.CustomResourceValidation{
			OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object",
				Properties: map[string]apiextensionsv1.JSONSchemaProps{"spec": {Type: "object", Properties: fields,
					XValidations: all}}}}}}
	c, err := custom.Pack(c)
	if err != nil {
		t.Fatal(err)
	}
	return newVersion(c, 0, in)
}

// judged returns the errors of the rules for an object with the given n.
func (v *version) judged(t testing.TB, n int) field.ErrorList {
	t.Helper()
	o, err := custom.FromMap(map[string]any{"apiVersion": "example.com/v1", "kind": v.gvk.Kind,
		"metadata": map[string]any{"name": "a"},
		"spec":     map[string]any{"n": int64(n)}})
	if err != nil {
		t.Fatal(err)
	}
	j := &validator{version: v, whole: func(o api.Object) field.ErrorList { return nil }}
	return j.validateFacet(t.Context(), "", o, nil)
}

// Many definitions with many rules, each used once, do not stay compiled. The cache stays within
// its budget, by estimate and by heap growth. All rules still apply afterwards, including evicted
// ones.
func TestManyRulesAreNotKept(t *testing.T) {
	const most, definitions, rules = 2 << 20, 60, 20
	in := lrucache.New(most)
	all := make([]*version, definitions)
	for i := range all {
		all[i] = ruled(t, in, i, rules)
	}
	ruled(t, lrucache.New(0), 0, rules).judged(t, 0) // caches of the libraries
	before := memtest.LiveHeap()
	for i, v := range all {
		if errs := v.judged(t, i); len(errs) > 0 {
			t.Fatal(errs)
		}
	}
	grown := memtest.LiveHeap() - before
	taken, kept := in.Used()
	t.Logf("%d definitions of %d rules: %.1f MiB of heap; %d values are kept, %.1f MiB by estimate", definitions, rules,
		float64(grown)/(1<<20), kept, float64(taken)/(1<<20))
	if taken > most || grown > 2*most || kept >= 2*definitions {
		t.Errorf("the heap has grown by %d, %d are taken of %d by %d values", grown, taken, most, kept)
	}
	for i, v := range all {
		if errs := v.judged(t, i+1); len(errs) != 1 || !strings.Contains(errs[0].Error(), "n is another number") {
			t.Errorf("definition %d: %v", i, errs)
		}
	}
}

// Rules apply correctly while they are evicted and compiled again concurrently.
func TestRulesHoldWhileTheyAreDropped(t *testing.T) {
	in := lrucache.New(1) // each new value evicts all others
	all := make([]*version, 6)
	for i := range all {
		all[i] = ruled(t, in, i, 2)
	}
	var using sync.WaitGroup
	for g := range 6 {
		using.Go(func() {
			for i := range 30 {
				n := (g + i) % len(all)
				if errs := all[n].judged(t, n); len(errs) > 0 {
					t.Errorf("definition %d refuses its number: %v", n, errs)
				}
				if errs := all[n].judged(t, n+1); len(errs) != 1 {
					t.Errorf("definition %d takes another number: %v", n, errs)
				}
			}
		})
	}
	using.Wait()
	if _, kept := in.Used(); kept > 1 {
		t.Errorf("%d values are kept in a room for one", kept)
	}
}
