package crd

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// tooLong is the maximum duration of a step of the fuzz tests; their inputs are small.
const tooLong = 20 * time.Second

// fuzzed returns a definition with one version, which is given as JSON; nil if the API server would
// not accept the JSON.
func fuzzed(version []byte) *apiextensionsv1.CustomResourceDefinition {
	c := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "things.example.com", UID: "u", Generation: 1},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: "example.com", Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: "things", Singular: "thing",
				Kind: "Thing", ListKind: "ThingList"},
			Conversion: &apiextensionsv1.CustomResourceConversion{Strategy: apiextensionsv1.NoneConverter},
		},
	}
	var v apiextensionsv1.CustomResourceDefinitionVersion
	if json.Unmarshal(version, &v) != nil {
		return nil
	}
	v.Name, v.Served, v.Storage = "v1", true, true
	c.Spec.Versions = []apiextensionsv1.CustomResourceDefinitionVersion{v}
	c.Status = apiextensionsv1.CustomResourceDefinitionStatus{AcceptedNames: c.Spec.Names,
		StoredVersions: []string{"v1"},
		Conditions: []apiextensionsv1.CustomResourceDefinitionCondition{{Type: apiextensionsv1.Established,
			Status: apiextensionsv1.ConditionTrue}}}
	return c
}

// FuzzDefinition checks for any accepted definition that objects are decoded, validated, printed
// and selected without a panic, in bounded time.
func FuzzDefinition(f *testing.F) {
	version := func(spec, more string) string {
		return `{"schema":{"openAPIV3Schema":{"type":"object","properties":{"spec":` + spec +
			`,"status":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}}` + more + `}`
	}
	for _, seed := range [][2]string{
		{version(`{"type":"object","properties":{"a":{"type":"integer","default":3}}}`, ""),
			`{"spec":{"a":"x","b":1}}`},
		{version(`{"type":"object","x-kubernetes-preserve-unknown-fields":true}`,
			`,"additionalPrinterColumns":[{"name":"a","type":"string","jsonPath":".spec[?(@.a==1)].b"}]`),
			`{"spec":[{"a":1,"b":[]}]}`},
		{version(`{"type":"object","properties":{"replicas":{"type":"integer"}}}`,
			`,"subresources":{"status":{},"scale":{"specReplicasPath":".spec.replicas",`+
				`"statusReplicasPath":".status.n","labelSelectorPath":".status.s"}}`),
			`{"spec":{"replicas":5000000000},"status":{"n":"x","s":{}}}`},
		{version(`{"type":"object","properties":{"a":{"type":"string"}}}`,
			`,"selectableFields":[{"jsonPath":".spec.a"}]`), `{"spec":{"a":null}}`},
		{
			version(`{"type":"object","properties":{"l":{"type":"array","maxItems":9,"x-kubernetes-list-type":"map",`+
				`"x-kubernetes-list-map-keys":["k"],"items":{"type":"object","required":["k"],`+
				`"properties":{"k":{"type":"string","maxLength":9}}}}},`+
				`"x-kubernetes-validations":[{"rule":"self.l.all(x, x.k != 'a')","messageExpression":"'no ' + `+
				`string(self.l.size())"}]}`, ""), `{"spec":{"l":[{"k":"a"},{"k":"a"},7]}}`},
		{version(`{"x-kubernetes-int-or-string":true,"default":1}`, ""), `{"spec":null}`},
		{version(`{"type":"object","x-kubernetes-embedded-resource":true,"x-kubernetes-preserve-unknown-fields":true}`,
			""), `{"spec":{"metadata":{"labels":3}}}`},
		{version(`{"type":"string","pattern":"(a{1,100}){1,100}","format":"date-time","enum":["a",null]}`, ""),
			`{"spec":"aaa"}`},
		{version(`{"type":"object","additionalProperties":{"type":"array","items":{"type":"number","multipleOf":0.1,`+
			`"maximum":1e300}}}`, ""), `{"spec":{"a":[1e400,-0,0.3]}}`},
		{
			version(`{"type":"object","properties":{"a":{"type":"integer"}},`+
				`"x-kubernetes-validations":[{"rule":"1/self.a > oldSelf.orValue({'a':1}).a","optionalOldSelf":true}]}`,
				""), `{"spec":{"a":0}}`},
	} {
		f.Add([]byte(seed[0]), []byte(seed[1]))
	}
	of := definitionsKind(kinds.All())
	f.Fuzz(func(t *testing.T, schema, object []byte) {
		c := fuzzed(schema)
		if c == nil {
			return
		}
		began := time.Now()
		ctx := context.Background()
		before, _ := json.Marshal(c)
		refused := validateDefinition(ctx, &api.Attempt{Kind: of}, c)
		if after, _ := json.Marshal(c); string(after) != string(before) {
			t.Fatal("judging a definition changes it")
		}
		if refused != nil {
			return
		}
		d, err := newDefinition(c, of, Hooks{})
		if err != nil {
			t.Fatalf("a definition that was taken cannot be served: %v", err)
		}
		for _, k := range d.kinds {
			exercise(ctx, t, k, object)
		}
		if took := time.Since(began); took > tooLong {
			t.Fatalf("took %v", took)
		}
	})
}

// exercise performs the API server's operations on an object.
func exercise(ctx context.Context, t *testing.T, k *api.Kind, object []byte) {
	if _, err := k.Schema.Model(true); err != nil {
		t.Fatalf("no model: %v", err)
	}
	o := k.Type.New().(*custom.Object)
	if _, err := o.DecodeJSON(object, true); err != nil {
		return
	}
	o.Name, o.Namespace = "a", "default"
	o.SetGroupVersionKind(k.GVK)
	k.Writes.Default(o)
	errs := k.Validation.Check(ctx, "", o, nil)
	again := o.DeepCopy()
	_ = k.Validation.Check(ctx, "", again, o)
	_ = k.Validation.Check(ctx, "status", again, o)
	for _, e := range errs {
		if strings.Contains(e.Detail, "panic") {
			t.Errorf("%v", e)
		}
	}
	if n := len(k.Lists.Row(o, time.Unix(0, 0))); n != len(k.Lists.Columns) {
		t.Errorf("%d cells of %d columns", n, len(k.Lists.Columns))
	}
	if k.Lists.Fields != nil {
		k.Lists.Fields(o)
	}
	if s := k.Subresources["scale"]; s != nil && s.View(o) == nil {
		t.Error("no scale")
	}
	_, _ = k.Schema.Types().ObjectToTyped(o)
	if _, err := json.Marshal(o); err != nil {
		t.Errorf("an object that was read cannot be written: %v", err)
	}
}

// FuzzPath checks that a column path evaluates without a panic for any object.
func FuzzPath(f *testing.F) {
	for _, seed := range []string{".spec.a", ".spec.a[0]", ".spec['a']", ".spec[?(@.a>1)].b", "..a", ".spec.*",
		".spec[-1:]", ".spec[1:2:0]", "{.spec}", ".spec[", `.spec.a\.b`,
		".spec[?(@.a==\"x\")]", ".spec[?(@.a=~/x/)]", ".a|.b", "['a','b']", ".spec[9999999999999999999]"} {
		f.Add(seed, []byte(`{"spec":{"a":[1,{"b":null}],"a.b":2}}`))
	}
	f.Fuzz(func(t *testing.T, path string, object []byte) {
		o := &custom.Object{}
		if len(path) > 1<<10 || len(object) > 1<<12 || o.UnmarshalJSON(object) != nil {
			return
		}
		all, err := o.Map()
		if err != nil {
			return
		}
		began := time.Now()
		if value, ok := newFinder(path)(all); ok {
			for _, as := range []string{"string", "integer", "number", "boolean", "date"} {
				_ = cellValue(as, value, time.Unix(0, 0))
			}
		}
		if took := time.Since(began); took > tooLong {
			t.Fatalf("took %v", took)
		}
	})
}
