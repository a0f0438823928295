package jsonpatch

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
)

func repeatOperation(n int, op func(i int) string) string {
	ops := make([]string, n)
	for i := range ops {
		ops[i] = op(i)
	}
	return "[" + strings.Join(ops, ",") + "]"
}

func repeatItem(n int, item string) string {
	return "[" + strings.TrimSuffix(strings.Repeat(item+",", n), ",") + "]"
}

// hostilePatches returns patches of at most 3 MiB that cause much work, each with a document to
// apply it to.
func hostilePatches() map[string]struct{ doc, patch string } {
	text := strings.Repeat("x", 1<<20)
	nested := strings.Repeat(`{"a":`, 9000) + "1" + strings.Repeat("}", 9000)
	deeper := "/a" + strings.Repeat("/a", 900)
	return map[string]struct{ doc, patch string }{
		"copies that double a string": {`{"a":["` + text + `"]}`, repeatOperation(30, func(int) string {
			return `{"op":"copy","from":"/a","path":"/a/-"}`
		})},
		"copies that double a small value": {`{"a":[1]}`, repeatOperation(10000, func(int) string {
			return `{"op":"copy","from":"/a","path":"/a/-"}`
		})},
		"copies of the document into itself": {`{"a":{}}`, repeatOperation(10000, func(i int) string {
			return fmt.Sprintf(`{"op":"copy","from":"","path":"/a/x%d"}`, i)
		})},
		"copies that replace each other": {`{"a":` + repeatItem(15000, `{}`) + `}`,
			repeatOperation(9000, func(i int) string {
				return []string{`{"op":"copy","from":"/a","path":"/b"}`, `{"op":"add","path":"/b/0","value":1}`}[i%2]
			})},
		"inserts at the front of a long list": {`{"a":` + repeatItem(100000, "1") + `}`,
			repeatOperation(10000, func(i int) string {
				return []string{`{"op":"add","path":"/a/0","value":1}`, `{"op":"remove","path":"/a/0"}`}[i%2]
			})},
		"a list that is too long to decode": {`{"a":` + repeatItem(700000, "1") + `}`,
			`[{"op":"add","path":"/a/0","value":1}]`},
		"tests of a large object": {`{"a":{"b":"` + text + `","c":1}}`, repeatOperation(10000, func(int) string {
			return `{"op":"test","path":"/a","value":{"b":"` + `\u0078` + `","c":1}}`
		})},
		"tests that hold": {`{"a":{"b":"` + text[:1000] + `","c":1}}`, repeatOperation(2900, func(int) string {
			return `{"op":"test","path":"/a","value":{"c":1.0,"b":"` + text[:1000] + `"}}`
		})},
		"repeated access to a deep value": {`{"a":` + nested + `}`, repeatOperation(1000, func(i int) string {
			return []string{`{"op":"copy","from":"/a","path":"/b"}`,
				`{"op":"add","path":"/b` + deeper[2:] + `","value":1}`}[i%2]
		})},
		"values that nest": {`{}`, repeatOperation(300, func(int) string {
			return `{"op":"add","path":"` + "/a" + `","value":` + nested[:9000*5] + `1` +
				strings.Repeat("}", 9000)[:9000] + `}`
		})[:3<<20]},
		"moves back and forth": {`{"a":{"b":"` + text + `"}}`, repeatOperation(10000, func(i int) string {
			return []string{`{"op":"move","from":"/a","path":"/c"}`, `{"op":"move","from":"/c","path":"/a"}`}[i%2]
		})},
		"too many operations": {`{}`, repeatItem(1<<20-1, `{}`)},
		"growing by operation": {`{"a":{}}`, repeatOperation(10000, func(i int) string {
			return fmt.Sprintf(`{"op":"add","path":"/a/k%d","value":"%s"}`, i, text[:200])
		})},
	}
}

// Any patch ends within a second, allocates little more than its own text and the document's, and
// its result is within the size limit.
func TestHostilePatches(t *testing.T) {
	for name, c := range hostilePatches() {
		t.Run(name, func(t *testing.T) {
			checkBounds(t, c.doc, c.patch, func(doc, patch []byte) ([]byte, error) {
				return Apply(t.Context(), doc, patch, sizeLimit)
			})
		})
	}
	nested := func(n int) string { return strings.Repeat(`{"a":`, n) + "1" + strings.Repeat("}", n) }
	var members strings.Builder
	for i := range 250000 {
		fmt.Fprintf(&members, `"%d":1,`, i)
	}
	many := `{"a":{` + strings.TrimSuffix(members.String(), ",") + `}}`
	for name, c := range map[string]struct{ doc, patch string }{
		"deep and padded": {`{}`, strings.TrimSuffix(nested(900), "}") + `,"b":"` + strings.Repeat("x", 2<<20) + `"}`},
		"deep":            {`{}`, nested(9999)},
		"padded inside":   {`{}`, strings.Replace(nested(9000), "1", `"`+strings.Repeat("x", 2<<20)+`"`, 1)},
		"many members":    {`{}`, many},
		"many in both":    {many, many},
	} {
		t.Run("merge "+name, func(t *testing.T) {
			checkBounds(t, c.doc, c.patch, func(doc, patch []byte) ([]byte, error) {
				return Merge(t.Context(), doc, patch, sizeLimit)
			})
		})
	}
}

func checkBounds(t *testing.T, doc, patch string, apply func(doc, patch []byte) ([]byte, error)) {
	t.Helper()
	if len(patch) > 3<<20+100 {
		t.Fatalf("the patch has %d bytes", len(patch))
	}
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := time.Now()
	out, err := apply([]byte(doc), []byte(patch))
	took := time.Since(began)
	runtime.ReadMemStats(&after)
	grown := after.TotalAlloc - before.TotalAlloc
	t.Logf("%v, %.1f MiB allocated, %d bytes in the result, %.150v", took, float64(grown)/(1<<20), len(out), err)
	if grown > 32<<20 {
		t.Errorf("it allocated %d MiB", grown>>20)
	}
	if len(out) > max(sizeLimit, len(doc)) {
		t.Errorf("the result has %d bytes", len(out))
	}
	if err != nil && !errors.Is(err, ErrTooLarge) && !errors.Is(err, ErrMalformed) &&
		!strings.Contains(err.Error(), "test failed") {
		t.Errorf("refused with: %v", err)
	}
	if took > 10*time.Second { // a second on an idle machine
		t.Errorf("it took %v", took)
	}
}
