package decodelimits

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// laughs returns YAML with n levels, each of which has ten aliases of the level below.
func laughs(n int, bottom string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "l0: &l0 %q\n", bottom)
	for i := 1; i <= n; i++ {
		fmt.Fprintf(&b, "l%d: &l%d [%s]\n", i, i,
			strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*l%d,", i-1), 10), ","))
	}
	return b.String()
}

func TestHostileTextIsRefusedBeforeItGrows(t *testing.T) {
	for name, text := range map[string]string{
		"aliases of aliases": laughs(9, "lol"),
		"aliases of a large string": "a: &a " + strings.Repeat("x", 1<<20) + "\nb: [" +
			strings.TrimSuffix(strings.Repeat("*a,", 1000), ",") + "]\n",
		"merge keys": "a: &a {k: " + strings.Repeat("x", 1<<20) + "}\n" +
			strings.Repeat("- <<: *a\n", 10),
		"an alias of itself":         "a: &a [*a]\n",
		"a long list in YAML":        "a: [" + strings.Repeat("b,", 1<<20) + "]",
		"a long list in lines":       "a:\n" + strings.Repeat("- b\n", 1<<18),
		"lists in lists in YAML":     strings.Repeat("- ", 1<<18) + "a",
		"empty objects":              `{"a":[` + strings.Repeat("{},", 1<<20) + `{}]}`,
		"nulls":                      `{"a":[` + strings.Repeat("null,", 1<<19) + `null]}`,
		"lists in lists":             `{"a":` + strings.Repeat("[", 1<<20) + strings.Repeat("]", 1<<20) + `}`,
		"many members":               `{"a":{` + strings.Repeat(`"a":1,`, 1<<18) + `"b":1}}`,
		"JSON that looks like YAML":  ` {"a":[` + strings.Repeat("{},", 1<<20) + `{}]} # so`,
		"deep objects":               strings.Repeat(`{"a":`, 100000) + "1" + strings.Repeat("}", 100000),
		"a quote that hides nothing": `{"a\\":[` + strings.Repeat("{},", 1<<20) + `{}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := FromYAML([]byte(text))
			runtime.ReadMemStats(&after)
			if name != "an alias of itself" && name != "merge keys" && !errors.Is(err, ErrTooMuch) || err == nil {
				t.Errorf("the answer is %v", err)
			}
			if grown := after.TotalAlloc - before.TotalAlloc; grown > 32<<20 {
				t.Errorf("refusing it took %d MiB", grown>>20)
			}
		})
	}
}

func TestOrdinaryText(t *testing.T) {
	for text, want := range map[string]string{
		"a: &x [1, 2]\nb: *x\n":                       `{"a":[1,2],"b":[1,2]}`,
		"base: &b {k: v}\nother:\n  <<: *b\n  l: w\n": `{"base":{"k":"v"},"other":{"k":"v","l":"w"}}`,
		`{"a":"{[,,,,"}`:                              `{"a":"{[,,,,"}`,
		"glob: '*.txt & more'":                        `{"glob":"*.txt \u0026 more"}`,
		"":                                            `null`,
	} {
		got, err := FromYAML([]byte(text))
		if err != nil || string(got) != want {
			t.Errorf("%q became %s, %v, want %s", text, got, err, want)
		}
	}
	if _, duplicates, err := FromYAMLStrict([]byte("a: 1\na: 2\n")); duplicates == nil || err != nil {
		t.Errorf("duplicates %v, %v", duplicates, err)
	}
	large := `{"data":{"k":"` + strings.Repeat(`{\"a&*#\":[1,2]},`, 1<<16) + `"}}`
	if _, err := FromYAML([]byte(large)); err != nil {
		t.Error(err)
	}
}

// A second document would be accepted and have no effect. Separators alone are none.
func TestSeveralDocuments(t *testing.T) {
	for text, refused := range map[string]bool{
		"a: 1\n---\nb: 2\n":           true,
		"---\na: 1\n---\nb: 2\n":      true,
		"{\"a\": 1}\n---\n{\"b\": 2}": true,
		"a: 1\n...\n---\nb: 2\n":      true,
		"---\na: 1\n":                 false,
		"---\n# nothing\n---\na: 1\n": false,
		"a: 1\n---\n":                 false,
		"a: 1\n...\n":                 false,
		"a: |\n  x\n  ---\n  y\n":     false,
	} {
		if _, err := FromYAML([]byte(text)); (err != nil) != refused ||
			refused && !errors.Is(err, errMultipleDocuments) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
