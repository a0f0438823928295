package jsonpatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strconv"
	"strings"
	"testing"

	oracle "gopkg.in/evanphx/json-patch.v4"
)

const sizeLimit = 3 << 20

func equalJSON(t *testing.T, a, b []byte) bool {
	t.Helper()
	var x, y any
	if err := json.Unmarshal(a, &x); err != nil {
		t.Fatalf("%s: %v", a, err)
	}
	if err := json.Unmarshal(b, &y); err != nil {
		t.Fatalf("%s: %v", b, err)
	}
	return reflect.DeepEqual(x, y)
}

// The examples of RFC 6902 and cases that it leaves implicit.
func TestOperations(t *testing.T) {
	for _, c := range []struct{ doc, patch, want string }{
		{`{"foo":"bar"}`, `[{"op":"add","path":"/baz","value":"qux"}]`, `{"baz":"qux","foo":"bar"}`},
		{`{"foo":["bar","baz"]}`, `[{"op":"add","path":"/foo/1","value":"qux"}]`, `{"foo":["bar","qux","baz"]}`},
		{`{"baz":"qux","foo":"bar"}`, `[{"op":"remove","path":"/baz"}]`, `{"foo":"bar"}`},
		{`{"foo":["bar","qux","baz"]}`, `[{"op":"remove","path":"/foo/1"}]`, `{"foo":["bar","baz"]}`},
		{`{"baz":"qux","foo":"bar"}`, `[{"op":"replace","path":"/baz","value":"boo"}]`, `{"baz":"boo","foo":"bar"}`},
		{`{"foo":{"bar":"baz","waldo":"fred"},"qux":{"corge":"grault"}}`,
			`[{"op":"move","from":"/foo/waldo","path":"/qux/thud"}]`,
			`{"foo":{"bar":"baz"},"qux":{"corge":"grault","thud":"fred"}}`},
		{`{"foo":["all","grass","cows","eat"]}`, `[{"op":"move","from":"/foo/1","path":"/foo/3"}]`,
			`{"foo":["all","cows","eat","grass"]}`},
		{`{"baz":"qux","foo":["a",2,"c"]}`,
			`[{"op":"test","path":"/baz","value":"qux"},{"op":"test","path":"/foo/1","value":2.0}]`,
			`{"baz":"qux","foo":["a",2,"c"]}`},
		{`{"foo":"bar"}`, `[{"op":"add","path":"/child","value":{"grandchild":{}}}]`,
			`{"foo":"bar","child":{"grandchild":{}}}`},
		{`{"foo":"bar"}`, `[{"op":"add","path":"/baz","value":"qux","xyz":123}]`, `{"foo":"bar","baz":"qux"}`},
		{`{"/":9,"~1":10}`, `[{"op":"test","path":"/~01","value":10},{"op":"remove","path":"/~1"}]`, `{"~1":10}`},
		{`{"foo":["bar"]}`, `[{"op":"add","path":"/foo/-","value":["abc","def"]}]`, `{"foo":["bar",["abc","def"]]}`},
		{`{"foo":[1,2]}`, `[{"op":"add","path":"/foo/-1","value":3},{"op":"remove","path":"/foo/-3"}]`,
			`{"foo":[2,3]}`},
		{`{"a":{"b":[1]}}`, `[{"op":"copy","from":"/a","path":"/c"},{"op":"add","path":"/c/b/0","value":0}]`,
			`{"a":{"b":[1]},"c":{"b":[0,1]}}`},
		{`{"a":{"b":1}}`,
			`[{"op":"test","path":"/a/b","value":1},{"op":"copy","from":"/a","path":"/a/c"},{"op":"replace",` +
				`"path":"/a/c/b","value":2}]`,
			`{"a":{"b":1,"c":{"b":2}}}`},
		{`{"a":1}`, `[{"op":"replace","path":"","value":{"b":2}},{"op":"add","path":"/c","value":null}]`,
			`{"b":2,"c":null}`},
		{`{"a<b":"\u0041"}`, `[{"op":"test","path":"/a<b","value":"A"},{"op":"add","path":"/a<b","value":"C"}]`,
			`{"a<b":"C"}`},
		{`{"a\u003cb":{"x":1,"y":[{}]}}`, `[{"op":"test","path":"/a<b","value":{"y":[ { } ],"x":1e0}}]`,
			`{"a<b":{"x":1,"y":[{}]}}`},
		{`{"a":1}`, `[{"op":"test","path":"/b","value":null},{"op":"replace","path":"/b","value":2}]`, `{"a":1,"b":2}`},
		{`{"a":[1,2,3]}`, `[{"op":"move","from":"/a/0","path":"/a/0"}]`, `{"a":[1,2,3]}`},
		{`{ "a" : [ 1 , 2 ] , "b" : { } }`, `[{"op":"add","path":"/b/c","value": [ ] },{"op":"remove","path":"/a/0"}]`,
			`{"a":[2],"b":{"c":[]}}`},
	} {
		got, err := Apply(t.Context(), []byte(c.doc), []byte(c.patch), sizeLimit)
		if err != nil || !equalJSON(t, got, []byte(c.want)) {
			t.Errorf("%s with %s: %s, %v, want %s", c.doc, c.patch, got, err, c.want)
		}
	}
}

func TestRefusals(t *testing.T) {
	const doc = `{"a":{"b":[1,2]},"s":"x","n":null}`
	for patch, want := range map[string]error{
		`{"op":"add"}`: ErrMalformed, `[{"op":"add"`: ErrMalformed, `[] []`: ErrMalformed, `[{"op":1}]`: ErrMalformed,
		`nonsense`:                                                  ErrMalformed,
		`[{"op":"add","value":1}]`:                                  nil,
		`[{"op":"add","path":"a","value":1}]`:                       nil,
		`[{"op":"add","path":"/x/y","value":1}]`:                    nil,
		`[{"op":"add","path":"/s/y","value":1}]`:                    nil,
		`[{"op":"add","path":"/n/y","value":1}]`:                    nil,
		`[{"op":"add","path":"/a/b/3","value":1}]`:                  nil,
		`[{"op":"add","path":"/a/b/01","value":1}]`:                 nil,
		`[{"op":"add","path":"/a/b/+1","value":1}]`:                 nil,
		`[{"op":"add","path":"/a/b/-4","value":1}]`:                 nil,
		`[{"op":"replace","path":"/a/b/-","value":1}]`:              nil,
		`[{"op":"remove","path":"/x"}]`:                             nil,
		`[{"op":"remove","path":""}]`:                               nil,
		`[{"op":"remove","path":"/a/b/2"}]`:                         nil,
		`[{"op":"copy","from":"/x","path":"/y"}]`:                   nil,
		`[{"op":"copy","path":"/y"}]`:                               nil,
		`[{"op":"move","from":"/a","path":"/a/c"}]`:                 nil,
		`[{"op":"move","from":"/x","path":"/x"}]`:                   nil,
		`[{"op":"test","path":"/s","value":"y"}]`:                   nil,
		`[{"op":"test","path":"/a","value":{"b":[1]}}]`:             nil,
		`[{"op":"test","path":"/a","value":{"b":{"0":1}}}]`:         nil,
		`[{"op":"spam","path":"/s"}]`:                               nil,
		`[{"op":"add","path":"/` + strings.Repeat("/", 2000):        ErrMalformed,
		`[{"op":"add","path":"` + strings.Repeat("/", 2000) + `"}]`: ErrTooLarge,
	} {
		got, err := Apply(t.Context(), []byte(doc), []byte(patch), sizeLimit)
		if err == nil || want != nil && !errors.Is(err, want) ||
			want == nil && (errors.Is(err, ErrMalformed) || errors.Is(err, ErrTooLarge)) {
			t.Errorf("%.80s: %s, %v, want %v", patch, got, err, want)
		}
	}
}

// A patch is not finished after its caller's context has ended.
func TestApplyStopsWithItsCaller(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Apply(ctx, []byte(`{}`), []byte(`[{"op":"add","path":"/a","value":1}]`), sizeLimit); !errors.Is(err,
		context.Canceled) {
		t.Errorf("applied: %v", err)
	}
	if _, err := Merge(ctx, []byte(`{}`), []byte(`{"a":1}`), sizeLimit); !errors.Is(err, context.Canceled) {
		t.Errorf("merged: %v", err)
	}
}

func TestMerge(t *testing.T) {
	for _, c := range []struct{ doc, patch, want string }{
		{`{"a":"b"}`, `{"a":"c"}`, `{"a":"c"}`},
		{`{"a":"b"}`, `{"b":"c"}`, `{"a":"b","b":"c"}`},
		{`{"a":"b","b":"c"}`, `{"a":null}`, `{"b":"c"}`},
		{`{"a":["b"]}`, `{"a":"c"}`, `{"a":"c"}`},
		{`{"a":"c"}`, `{"a":["b",null]}`, `{"a":["b",null]}`},
		{`{"a":{"b":"c"}}`, `{"a":{"b":"d","c":null}}`, `{"a":{"b":"d"}}`},
		{`{"a":[{"b":"c"}]}`, `{"a":[1]}`, `{"a":[1]}`},
		{`{"e":null}`, `{"a":1}`, `{"e":null,"a":1}`},
		{`{}`, `{"a":{"bb":{"ccc":null}}}`, `{"a":{"bb":{}}}`},
		{`{"a":[1]}`, `{"a":{"b":{"c":1,"d":null}}}`, `{"a":{"b":{"c":1}}}`},
	} {
		got, err := Merge(t.Context(), []byte(c.doc), []byte(c.patch), sizeLimit)
		if err != nil || !equalJSON(t, got, []byte(c.want)) {
			t.Errorf("%s with %s: %s, %v, want %s", c.doc, c.patch, got, err, c.want)
		}
	}
	for _, bad := range []string{`[]`, `null`, `{"a"`, ``, `5`} {
		if _, err := Merge(t.Context(), []byte(`{}`), []byte(bad), sizeLimit); !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// patchGenerator draws documents and patches from few names, so that paths often exist.
type patchGenerator struct{ *rand.Rand }

func (r patchGenerator) randomValue(depth int) string {
	n := r.IntN(6)
	if depth == 0 {
		n = r.IntN(4)
	}
	switch n {
	case 0:
		return strconv.Itoa(r.IntN(3))
	case 1:
		return []string{`"x"`, `"\u0078"`, `"a/b"`, `null`, `true`}[r.IntN(5)]
	case 2, 4:
		var items []string
		for range r.IntN(4) {
			items = append(items, r.randomValue(max(depth-1, 0)))
		}
		return "[" + strings.Join(items, ", ") + "]"
	default:
		var members []string
		for _, k := range []string{"a", "b", "c"} {
			if r.IntN(2) == 0 {
				members = append(members, fmt.Sprintf("%q :%s", k, r.randomValue(max(depth-1, 0))))
			}
		}
		return "{" + strings.Join(members, ",") + "}"
	}
}

func (r patchGenerator) randomPath() string {
	var b strings.Builder
	for range 1 + r.IntN(3) {
		b.WriteString("/" + []string{"a", "b", "c", "0", "1", "-"}[r.IntN(6)])
	}
	return b.String()
}

// The results equal those of another implementation, and the counted size equals the encoded size.
func TestAgreesWithAnother(t *testing.T) {
	applied := 0
	for seed := range uint64(20000) {
		r := patchGenerator{rand.New(rand.NewPCG(seed, 7))}
		doc := `{"a":` + r.randomValue(3) + `,"b":` + r.randomValue(2) + `}`
		var ops []string
		for range 1 + r.IntN(4) {
			op := []string{"add", "replace", "remove", "copy", "move"}[r.IntN(5)]
			ops = append(ops, fmt.Sprintf(`{"op":%q,"path":%q,"from":%q,"value":%s}`, op, r.randomPath(),
				r.randomPath(), r.randomValue(2)))
		}
		patch := "[" + strings.Join(ops, ",") + "]"
		theirs, err := oracle.DecodePatch([]byte(patch))
		if err != nil {
			t.Fatal(err)
		}
		want, oracleErr := theirs.Apply([]byte(doc))
		got, err := Apply(t.Context(), []byte(doc), []byte(patch), sizeLimit)
		if err == nil {
			checkSize(t, doc, patch)
		}
		// The other implementation moves a value into itself and finds values in null. Refusing
		// those is not a difference.
		if err == nil && oracleErr == nil {
			applied++
			if !equalJSON(t, got, want) {
				t.Fatalf("%s with %s: %s, the other implementation returns %s", doc, patch, got, want)
			}
		} else if err == nil {
			t.Fatalf("%s with %s: %s, the other implementation refuses: %v", doc, patch, got, oracleErr)
		}
		change := r.randomValue(3)
		if !strings.HasPrefix(change, "{") {
			continue
		}
		if want, err = oracle.MergePatch([]byte(doc), []byte(change)); err != nil {
			t.Fatal(err)
		}
		if got, err = Merge(t.Context(), []byte(doc), []byte(change), sizeLimit); err != nil ||
			!equalJSON(t, withoutNulls(t, got), withoutNulls(t, want)) {
			t.Fatalf("%s merged with %s: %s, %v, the other implementation returns %s", doc, change, got, err, want)
		}
	}
	if applied < 500 {
		t.Errorf("only %d patches applied: too few for this test", applied)
	}
}

// withoutNulls removes members that are null. The other implementation removes them inside of lists
// too, the RFC does not.
func withoutNulls(t *testing.T, data []byte) []byte {
	t.Helper()
	var v any
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	var strip func(any)
	strip = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for k, c := range v {
				if c == nil {
					delete(v, k)
				}
				strip(c)
			}
		case []any:
			for _, c := range v {
				strip(c)
			}
		}
	}
	strip(v)
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func checkSize(t *testing.T, doc, patch string) {
	t.Helper()
	ops, err := parseOperations([]byte(patch))
	if err != nil {
		t.Fatal(err)
	}
	tr := newTree([]byte(doc), sizeLimit)
	for i := range ops {
		if err := tr.applyOperation(&ops[i]); err != nil {
			t.Fatal(err)
		}
		if n := len(tr.encode()); n != tr.bytes || n != tr.root.textSize() {
			t.Fatalf("%s with %s: after operation %d it has %d bytes, counted are %d, and %d at the root", doc, patch,
				i, n, tr.bytes, tr.root.textSize())
		}
	}
}
