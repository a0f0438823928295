package conformance

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"keelson.dev/keelson/controlplane/api"
)

var rewrite = flag.Bool("rewrite", false,
	"write what the server says to testdata/invalid, to be read before it is committed")

// leastRefused is how many invalid objects there are at least, over all kinds, without what is wrong with the metadata of
// any kind alike.
const leastRefused = 900

// Objects that are wrong in one place are refused, with the reason and exactly the causes that testdata/invalid has.
// Of every kind there are its valid object without each of its fields and with a wrong value in each of them, changes of
// each field of a stored one, and what its row adds, through facets as well. Of what is changed there are the refusals
// alone.
func TestInvalidObjects(t *testing.T) {
	var refused atomic.Int64
	t.Run("kinds", func(t *testing.T) {
		for _, k := range shared.kinds.All() {
			if k.Serving.Acts || !slices.Contains(discovered(k), "create") {
				continue // bindings are those of pods, and the others are made by nobody
			}
			t.Run(k.GVK.Kind+"."+k.GVK.GroupVersion().String(), func(t *testing.T) {
				t.Parallel()
				version := strings.ToLower(k.GVK.Version + "-" + strings.ReplaceAll(k.GVK.Group, ".", "-"))
				u := load(t, shared, k).inNamespace(t, strings.Trim("invalid-"+k.Resource+"-"+version, "-"))
				u.made.Store(100) // apart from the objects of the other tests
				said, n := u.refusals(t)
				refused.Add(int64(n))
				compare(t, k, said)
			})
		}
	})
	if n := refused.Load(); n < leastRefused && !t.Failed() {
		t.Errorf("%d invalid objects were refused, want %d at least", n, leastRefused)
	} else {
		t.Logf("%d invalid objects were refused", n)
	}
}

// discovered are the verbs of a virtual kind, or some of a stored one.
func discovered(k *api.Kind) []string {
	if k.Serving.Virtual {
		return k.Serving.Verbs
	}
	return []string{"create"}
}

// refusals are the candidates of a kind and what is said of each, and how many of them are refused. What is taken though
// it was meant to be wrong stands at the end, by name: an optional field that is left out, a string that may be any.
func (u *kindUnderTest) refusals(t *testing.T) (string, int) {
	t.Helper()
	var out strings.Builder
	var taken []string
	refused := 0
	note := func(name string, a answer) {
		if a.code/100 == 2 {
			taken = append(taken, name)
			return
		}
		if !slices.Contains(anyKind, name) {
			refused++
		}
		fmt.Fprintf(&out, "%s\n  %d %s\n", name, a.code, a.object().text("reason"))
		lines := causes(a)
		if len(lines) == 0 {
			lines = []string{a.object().message()}
		}
		for _, line := range lines {
			fmt.Fprintf(&out, "  %s\n", strings.ReplaceAll(line, "\n", "\n  "))
		}
	}
	base := u.fresh(t)
	for _, c := range append(wrongs(t, base), u.ownWrongs(t, base)...) {
		note(c.name, u.send(t, "POST", with(u.path(), "dryRun=All"), c.object))
	}
	if len(taken) > 0 {
		fmt.Fprintf(&out, "taken\n  %s\n", strings.Join(taken, "\n  "))
	}
	if u.Serving.Virtual {
		return out.String(), refused
	}
	taken = nil
	stored := u.make(t)
	for _, c := range changes(t, stored, base) {
		note(c.name, u.send(t, "PUT", with(u.path(stored.name()), "dryRun=All"), c.object))
	}
	taken = nil
	for _, facet := range slices.Sorted(maps.Keys(u.row.Refused)) {
		for _, name := range slices.Sorted(maps.Keys(u.row.Refused[facet])) {
			note(facet+": "+name, u.throughFacet(t, facet, u.row.Refused[facet][name]))
		}
	}
	if len(taken) > 0 {
		t.Errorf("taken by a facet: %q", taken)
	}
	return strings.ReplaceAll(out.String(), stored.uid(), "UID"), refused
}

// compare says where a golden file differs, or writes it.
func compare(t *testing.T, k *api.Kind, said string) {
	t.Helper()
	at := filepath.Join("testdata/invalid", strings.TrimSuffix(fileOf(k), ".yaml")+".txt")
	if *rewrite {
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(said), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(at)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(said, "\n")); diff != "" {
		t.Errorf("%s (-want +got, -rewrite writes it):\n%s", at, diff)
	}
}

// anyKind are the candidates that every kind has.
var anyKind = []string{"a name in capitals", "a name with a slash", "a label's key with a space"}

// candidate is an object that should be refused.
type candidate struct {
	name   string
	object object
}

// wrongs are a valid object with one thing wrong in each.
func wrongs(t *testing.T, base object) []candidate {
	t.Helper()
	var out []candidate
	for _, at := range places(map[string]any(base)) {
		if at[0] == "apiVersion" || at[0] == "kind" || at[0] == "metadata" {
			continue
		}
		was := value(base, at)
		out = append(out, candidate{"without " + spell(at), put(t, base, at, nil)})
		switch was.(type) {
		case string:
			out = append(out, candidate{`"Not Valid!" at ` + spell(at), put(t, base, at, "Not Valid!")})
		case float64:
			out = append(out, candidate{"-1 at " + spell(at), put(t, base, at, -1)})
		case []any:
			out = append(out, candidate{"empty " + spell(at), put(t, base, at, []any{})})
		}
	}
	if base.name() != "" {
		out = append(out, candidate{anyKind[0], merged(base, object{"metadata": map[string]any{"name": "Bad_Name"}})})
		out = append(out, candidate{anyKind[1], merged(base, object{"metadata": map[string]any{"name": "a/b"}})})
		out = append(out, candidate{anyKind[2], merged(base, labelled("a b", "c"))})
	}
	return out
}

// ownWrongs are those of the row: merge patches, by their text.
func (u *kindUnderTest) ownWrongs(t *testing.T, base object) []candidate {
	t.Helper()
	var out []candidate
	for _, name := range slices.Sorted(maps.Keys(u.row.Invalid)) {
		out = append(out, candidate{name, normal(t, merged(base, u.row.Invalid[name]))})
	}
	return out
}

// throughFacet changes a new object through a facet, or itself.
func (u *kindUnderTest) throughFacet(t *testing.T, facet string, c facetChange) answer {
	t.Helper()
	o := u.make(t)
	for _, f := range slices.Sorted(maps.Keys(c.After)) {
		o = u.want(t, 200, "PUT", u.path(o.name(), f), normal(t, merged(o, c.After[f]))).object()
	}
	at := u.path(o.name(), facet)
	if facet == "itself" {
		at = u.path(o.name())
	}
	return u.send(t, "PUT", with(at, "dryRun=All"), normal(t, merged(o, c.Patch)))
}

// changes are a stored object with one of the fields of base changed in each.
func changes(t *testing.T, stored, base object) []candidate {
	t.Helper()
	var out []candidate
	for _, at := range places(map[string]any(base)) {
		if at[0] == "apiVersion" || at[0] == "kind" || at[0] == "metadata" {
			continue
		}
		switch was := value(stored, at).(type) {
		case string:
			out = append(out, candidate{"changed " + spell(at), put(t, stored, at, was+"x")})
		case float64:
			out = append(out, candidate{"changed " + spell(at), put(t, stored, at, was+1)})
		case bool:
			out = append(out, candidate{"changed " + spell(at), put(t, stored, at, !was)})
		}
	}
	return out
}

// places are the paths to all that is in a JSON value, in order: names of fields and indexes of lists.
func places(v any, at ...any) (out [][]any) {
	add := func(step, v any) {
		here := append(slices.Clone(at), step)
		out = append(append(out, here), places(v, here...)...)
	}
	switch v := v.(type) {
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			add(name, v[name])
		}
	case []any:
		for i := range v {
			add(i, v[i])
		}
	}
	return out
}

func spell(at []any) string {
	var b strings.Builder
	for _, step := range at {
		switch step := step.(type) {
		case int:
			fmt.Fprintf(&b, "[%d]", step)
		default:
			if b.Len() > 0 {
				b.WriteByte('.')
			}
			fmt.Fprint(&b, step)
		}
	}
	return b.String()
}

// value is what stands at a place; nil where there is nothing.
func value(o object, at []any) any {
	var v any = map[string]any(o)
	for _, step := range at {
		switch step := step.(type) {
		case int:
			list, _ := v.([]any)
			if step >= len(list) {
				return nil
			}
			v = list[step]
		case string:
			m, _ := v.(map[string]any)
			v = m[step]
		}
	}
	return v
}

// put is a copy of o with another value at a place, or with nothing there: a list then has one item less.
func put(t *testing.T, o object, at []any, v any) object {
	t.Helper()
	out := normal(t, o)
	last := at[len(at)-1]
	switch in := value(out, at[:len(at)-1]).(type) {
	case map[string]any:
		in[last.(string)] = v
		if v == nil {
			delete(in, last.(string))
		}
	case []any:
		if v != nil {
			in[last.(int)] = v
			break
		}
		return put(t, out, at[:len(at)-1], slices.Delete(in, last.(int), last.(int)+1))
	}
	return out
}
