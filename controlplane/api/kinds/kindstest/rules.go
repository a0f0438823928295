package kindstest

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// NotQualified is the message for a finalizer without a domain.
const NotQualified = "name is neither a standard finalizer name nor is it fully qualified"

// Messages of common rules.
var (
	NotSubdomain = validation.IsDNS1123Subdomain("A")[0]
	NotLabel     = validation.IsDNS1123Label("A")[0]
)

// BadObject is the YAML of an object and the errors that it has: one line for each error, complete
// and in order. An empty Want means that the object is valid.
type BadObject struct{ Text, Want string }

// InvalidText returns the text of the error for an invalid value.
func InvalidText(at, value, why string) string {
	return at + `: Invalid value: "` + value + `": ` + why
}

// JoinErrors returns the texts of the errors, one error per line.
func JoinErrors(errs field.ErrorList) string {
	var out []string
	for _, e := range errs {
		out = append(out, e.Error())
	}
	return strings.Join(out, "\n")
}

// CheckRefused fails the test if the errors of a new object differ from those of its case.
func CheckRefused[P api.Object](t *testing.T, cases ...BadObject) {
	t.Helper()
	for _, c := range cases {
		o := Load[P](t, c.Text)
		if got := JoinErrors(kinds.All().ByType(o).Judge(o, nil)); got != c.Want {
			t.Errorf("%s\n got  %s\n want %s", c.Text, strings.ReplaceAll(got, "\n", "\n      "), strings.ReplaceAll(c.Want, "\n", "\n      "))
		}
	}
}

// Change is a change of an object, with the errors and the generation that it must result in. Sub
// is the subresource of the request. It is "" for the object itself.
type Change[P api.Object] struct {
	Sub        string
	Change     func(P)
	Want       string
	Generation int64
}

// CheckChanges applies each change to a stored object and compares the errors and the generation.
// It also fails the test if the stored object was modified.
func CheckChanges[P api.Object](t *testing.T, text string, cases ...Change[P]) {
	t.Helper()
	for i, c := range cases {
		old := Load[P](t, text)
		k := kinds.All().ByType(old)
		if k.PrepareCreate != nil {
			status := old.DeepCopyObject().(P)
			k.PrepareCreate(old)
			if k.Ops.SetStatus != nil {
				k.Ops.SetStatus(old, status)
			}
		}
		old.SetResourceVersion("1")
		was := old.DeepCopyObject().(P)
		obj := old.DeepCopyObject().(P)
		c.Change(obj)
		var errs field.ErrorList
		if s := k.Subresources[c.Sub]; s != nil {
			s.PrepareUpdate(obj, old)
			errs = s.ValidateUpdate(obj, old)
		} else {
			if k.Default != nil {
				k.Default(obj)
			}
			if k.PrepareUpdate != nil {
				k.PrepareUpdate(obj, old)
			}
			errs = append(k.Judge(obj, old), k.ValidateUpdate(obj, old)...)
		}
		if got := JoinErrors(errs); got != c.Want || obj.GetGeneration() != c.Generation {
			t.Errorf("change %d (%s): generation %d, want %d\n got  %s\n want %s", i, c.Sub, obj.GetGeneration(), c.Generation, got, c.Want)
		}
		if !fieldrules.SemanticEqual(old, was) {
			t.Errorf("change %d (%s): the stored object was changed", i, c.Sub)
		}
	}
}

// RunUpdate applies an update as the registry does. It returns the updated object and the texts of
// the errors.
func RunUpdate[P api.Object](t *testing.T, old P, sub string, change func(P)) (P, []string) {
	t.Helper()
	k := kinds.All().ByType(old)
	obj := old.DeepCopyObject().(P)
	change(obj)
	prepare, judge := k.PrepareUpdate, k.ValidateUpdate
	if sub != "" {
		prepare, judge = k.Subresources[sub].PrepareUpdate, k.Subresources[sub].ValidateUpdate
	}
	if prepare != nil {
		prepare(obj, old)
	}
	if k.Default != nil {
		k.Default(obj)
	}
	var out []string
	for _, e := range judge(obj, old) {
		out = append(out, e.Field)
	}
	return obj, out
}

// Ptr returns a pointer to v.
func Ptr[T any](v T) *T { return &v }

// CheckErrors fails the test unless each error starts with the text at the same position in want.
// An empty want means that no errors are expected.
func CheckErrors(t *testing.T, name string, errs field.ErrorList, want ...string) {
	t.Helper()
	var got []string
	for _, e := range errs {
		got = append(got, e.Error())
	}
	ok := slices.EqualFunc(got, want, strings.HasPrefix)
	if !ok {
		t.Errorf("%s:\n got  %s\n want %s", name, strings.Join(got, "\n      "), strings.Join(want, "\n      "))
	}
}

// ValidationErrors returns the errors of an object with its defaults.
func ValidationErrors[P api.Object](t *testing.T, text string) field.ErrorList {
	t.Helper()
	o := Load[P](t, text)
	return kinds.All().ByType(o).Validate(o)
}

// patchedOnto returns base with a patch: maps are merged, null deletes a key, and other values
// replace those of base.
func patchedOnto(t *testing.T, base, patch string) string {
	t.Helper()
	var a, b map[string]any
	if err := yaml.Unmarshal([]byte(base), &a); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal([]byte("{"+patch+"}"), &b); err != nil {
		t.Fatalf("%v in %s", err, patch)
	}
	var merge func(a, b map[string]any)
	merge = func(a, b map[string]any) {
		for k, v := range b {
			under, both := a[k].(map[string]any)
			over, maps := v.(map[string]any)
			switch {
			case v == nil:
				delete(a, k)
			case both && maps:
				merge(under, over)
			default:
				a[k] = v
			}
		}
	}
	merge(a, b)
	out, err := yaml.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// InvalidPatch is a patch for a valid object and the errors of the result, separated by "; ".
type InvalidPatch struct{ Patch, Want string }

// CheckRejected validates base with each patch, after defaulting and PrepareCreate, and compares
// the errors. The unpatched base must be valid.
func CheckRejected[P api.Object](t *testing.T, base string, cases []InvalidPatch) {
	t.Helper()
	cases = append([]InvalidPatch{{"", ""}}, cases...)
	for _, c := range cases {
		o := Load[P](t, patchedOnto(t, base, c.Patch))
		o.SetUID("u1")
		k := kinds.All().ByType(o)
		if k.PrepareCreate != nil {
			k.PrepareCreate(o)
		}
		var want []string
		if c.Want != "" {
			want = strings.Split(c.Want, "; ")
		}
		CheckErrors(t, c.Patch, k.Validate(o), want...)
	}
}

// LastingTemplate is a selector and a template of pods with restart policy Always.
const LastingTemplate = "selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}"

// EndingTemplate is a template of pods with restart policy Never.
const EndingTemplate = "template: {spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}"
