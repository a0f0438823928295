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

// Error messages of common validation rules.
var (
	NotSubdomain = validation.IsDNS1123Subdomain("A")[0]
	NotLabel     = validation.IsDNS1123Label("A")[0]
)

// BadObject is the YAML of an object and the errors that its validation must return: one line for
// each error, complete and in order. An empty Want means that the object is valid.
type BadObject struct{ Text, Want string }

// InvalidText returns the text of the error for an invalid value of the field at a path.
func InvalidText(path, value, reason string) string {
	return path + `: Invalid value: "` + value + `": ` + reason
}

// JoinErrors returns the texts of the errors, one error per line.
func JoinErrors(errs field.ErrorList) string {
	var out []string
	for _, e := range errs {
		out = append(out, e.Error())
	}
	return strings.Join(out, "\n")
}

// CheckRefused validates the new object of each case, and fails the test if the errors differ from
// those in the case.
func CheckRefused[P api.Object](t *testing.T, cases ...BadObject) {
	t.Helper()
	for _, c := range cases {
		o := Load[P](t, c.Text)
		if got := JoinErrors(kinds.All().ByType(o).ValidateObject(o, nil)); got != c.Want {
			t.Errorf("%s\n got  %s\n want %s", c.Text, strings.ReplaceAll(got, "\n", "\n      "),
				strings.ReplaceAll(c.Want, "\n", "\n      "))
		}
	}
}

// Change is a change of an object, with the expected errors and generation. Sub is the subresource
// of the request. It is "" for the object itself.
type Change[P api.Object] struct {
	Sub        string
	Change     func(P)
	Want       string
	Generation int64
}

// CheckChanges applies each change to a stored object, and fails the test if the errors or the
// generation differ from the expected ones. It also fails if the stored object was modified.
func CheckChanges[P api.Object](t *testing.T, text string, cases ...Change[P]) {
	t.Helper()
	for i, c := range cases {
		old := Load[P](t, text)
		k := kinds.All().ByType(old)
		if k.Writes.PrepareCreate != nil {
			status := old.DeepCopyObject().(P)
			k.Writes.PrepareCreate(old)
			if k.Type.Ops.SetStatus != nil {
				k.Type.Ops.SetStatus(old, status)
			}
		}
		old.SetResourceVersion("1")
		previous := old.DeepCopyObject().(P)
		obj := old.DeepCopyObject().(P)
		c.Change(obj)
		var errs field.ErrorList
		if s := k.Subresources[c.Sub]; s != nil {
			s.PrepareUpdate(obj, old)
			errs = s.ValidateUpdate(obj, old)
		} else {
			if k.Writes.Default != nil {
				k.Writes.Default(obj)
			}
			if k.Writes.PrepareUpdate != nil {
				k.Writes.PrepareUpdate(obj, old)
			}
			errs = append(k.ValidateObject(obj, old), k.Validation.Update(obj, old)...)
		}
		if got := JoinErrors(errs); got != c.Want || obj.GetGeneration() != c.Generation {
			t.Errorf("change %d (%s): generation %d, want %d\n got  %s\n want %s", i, c.Sub, obj.GetGeneration(),
				c.Generation, got, c.Want)
		}
		if !fieldrules.SemanticEqual(old, previous) {
			t.Errorf("change %d (%s): the stored object was changed", i, c.Sub)
		}
	}
}

// RunUpdate applies an update to a copy of the stored object as the registry does. It returns the
// updated object and the texts of the errors.
func RunUpdate[P api.Object](t *testing.T, stored P, subresource string, change func(P)) (P, []string) {
	t.Helper()
	k := kinds.All().ByType(stored)
	obj := stored.DeepCopyObject().(P)
	change(obj)
	prepare, judge := k.Writes.PrepareUpdate, k.Validation.Update
	if subresource != "" {
		prepare, judge = k.Subresources[subresource].PrepareUpdate, k.Subresources[subresource].ValidateUpdate
	}
	if prepare != nil {
		prepare(obj, stored)
	}
	if k.Writes.Default != nil {
		k.Writes.Default(obj)
	}
	var out []string
	for _, e := range judge(obj, stored) {
		out = append(out, e.Field)
	}
	return obj, out
}

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

// ValidationErrors parses the YAML of an object, sets its defaults, and returns its validation
// errors.
func ValidationErrors[P api.Object](t *testing.T, text string) field.ErrorList {
	t.Helper()
	o := Load[P](t, text)
	return kinds.All().ByType(o).Validation.Object(o)
}

// patchedOnto applies a patch to base and returns the result: maps are merged, null deletes a key,
// and other values replace those of base.
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

// CheckRejected applies each patch to base and validates the result after defaulting and
// PrepareCreate. It fails the test if the errors differ from those in the case, or if base itself
// is invalid.
func CheckRejected[P api.Object](t *testing.T, base string, cases []InvalidPatch) {
	t.Helper()
	cases = append([]InvalidPatch{{"", ""}}, cases...)
	for _, c := range cases {
		o := Load[P](t, patchedOnto(t, base, c.Patch))
		o.SetUID("u1")
		k := kinds.All().ByType(o)
		if k.Writes.PrepareCreate != nil {
			k.Writes.PrepareCreate(o)
		}
		var want []string
		if c.Want != "" {
			want = strings.Split(c.Want, "; ")
		}
		CheckErrors(t, c.Patch, k.Validation.Object(o), want...)
	}
}

// LastingTemplate is a selector and a template of pods with restart policy Always.
const LastingTemplate = "selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: " +
	"[{name: c, image: i}]}}"

// EndingTemplate is a template of pods with restart policy Never.
const EndingTemplate = "template: {spec: {restartPolicy: Never, containers: [{name: c, image: i}]}}"
