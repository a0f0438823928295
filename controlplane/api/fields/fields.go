// Package fields says of every field of the served kinds what becomes of it:
//
//	honoured  it has its documented effect
//	refused   its effect is not built: a request that sets it is refused, with a sentence that says what to do
//	inert     Kubernetes itself gives it no effect, or none without something that is not part of a cluster
//
// The answers stand in answers/*.txt, by Go type, so that a type that occurs in many kinds (a pod's specification,
// metadata, selectors) is answered once. Refusals are enforced from there (Answers.Check), so that none can be
// forgotten; docs/compatibility.md is written from there. A field without an answer fails a test.
package fields

import (
	"embed"
	"fmt"
	"io/fs"
	"reflect"
	"slices"
	"strings"
	"sync"
)

// State is what becomes of a field.
type State string

// The states.
const (
	Honoured State = "honoured"
	Refused  State = "refused"
	Inert    State = "inert"
)

// Answer is what becomes of a field, or of some of its values.
type Answer struct {
	State State
	// Why is for the user of a refused field what to do, for an inert one the documented reason.
	Why string
	// Warn tells the client of an inert field that is set, by a warning header.
	Warn bool
	// Values are those that the answer is about; nil = every value that is set. A "*" at the end stands for any
	// rest. The other values are honoured.
	Values []string

	unless exemption
	source string // file:line, for complaints about the table
	used   bool
}

// exemption names objects that an answer is not about.
type exemption struct {
	labels []string // that have one of these labels
	name   string   // whose name begins so
}

func (e exemption) String() string {
	switch {
	case e.name != "":
		return "names that begin with " + e.name
	case len(e.labels) > 0:
		return "objects with the label " + strings.Join(e.labels, " or ")
	}
	return ""
}

// Unless names in words the objects that the answer is not about; "" = none.
func (a *Answer) Unless() string { return a.unless.String() }

//go:embed answers/*.txt
var files embed.FS

// Table is all answers: by type, then by the path below it.
type Table struct {
	types    map[string]map[string][]*Answer
	mu       sync.Mutex
	compiled map[reflect.Type]*Answers
}

// Load returns the table of the built-in kinds. It is read once.
var Load = sync.OnceValue(func() *Table {
	t := &Table{types: map[string]map[string][]*Answer{}, compiled: map[reflect.Type]*Answers{}}
	names, err := fs.Glob(files, "answers/*.txt")
	for _, name := range names {
		var data []byte
		if data, err = files.ReadFile(name); err == nil {
			err = t.parse(name, string(data))
		}
		if err != nil {
			break
		}
	}
	if err != nil {
		panic("fields: " + err.Error())
	}
	return t
})

// parse reads one file:
//
//	[core/v1.PodSpec]                     the type that the lines below are about
//	honoured: containers volumes          paths below it
//	refused: hostUsers=false -- sentence  one value of a path
//	refused: annotations[a/b] -- sentence one key of a map
//	refused: subsets !label(a|b) -- ...   not for objects with such a label; !name(x) for names that begin so
//	warned: ...                           inert, and the client is told
func (t *Table) parse(file, text string) error {
	var answers map[string][]*Answer
	for i, line := range strings.Split(text, "\n") {
		source := fmt.Sprintf("%s:%d", file, i+1)
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if name, ok := strings.CutPrefix(line, "["); ok && strings.HasSuffix(name, "]") {
			name = strings.TrimSuffix(name, "]")
			if t.types[name] != nil {
				return fmt.Errorf("%s: type %s has a part already", source, name)
			}
			answers = map[string][]*Answer{}
			t.types[name] = answers
			continue
		}
		if err := parseLine(answers, source, line); err != nil {
			return fmt.Errorf("%s: %w", source, err)
		}
	}
	return nil
}

func parseLine(answers map[string][]*Answer, source, line string) error {
	word, rest, ok := strings.Cut(line, ":")
	if !ok || answers == nil {
		return fmt.Errorf("%q is no answer about a type", line)
	}
	list, why, _ := strings.Cut(rest, " -- ")
	a := Answer{State: State(word), Why: strings.TrimSpace(why), source: source}
	switch {
	case word == "warned":
		a.State, a.Warn = Inert, true
	case a.State != Honoured && a.State != Refused && a.State != Inert:
		return fmt.Errorf("%q is no state", word)
	}
	if (a.Why == "") != (a.State == Honoured) {
		return fmt.Errorf("a %s field needs a sentence, a honoured one none", a.State)
	}
	var paths []string
	for _, w := range strings.Fields(list) {
		condition, ok := strings.CutPrefix(w, "!")
		if !ok {
			paths = append(paths, w)
			continue
		}
		switch kind, arg, _ := strings.Cut(strings.TrimSuffix(condition, ")"), "("); kind {
		case "label":
			a.unless.labels = strings.Split(arg, "|")
		case "name":
			a.unless.name = arg
		default:
			return fmt.Errorf("%q is no condition", w)
		}
	}
	for _, p := range paths {
		one := a
		path, values, some := strings.Cut(p, "=")
		if strings.Contains(path, "[") { // a key of a map may contain anything
			path, values, some = p, "", false
			if at := strings.LastIndex(p, "]="); at > 0 {
				path, values, some = p[:at+1], p[at+2:], true
			}
		}
		if some {
			one.Values = strings.Split(values, "|")
		}
		if slices.ContainsFunc(answers[path], func(b *Answer) bool { return b.Values == nil && one.Values == nil }) {
			return fmt.Errorf("%s has an answer already", path)
		}
		answers[path] = append(answers[path], &one)
	}
	return nil
}

// typeName is how the files call a type: "core/v1.Pod", "meta/v1.ObjectMeta".
func typeName(t reflect.Type) string {
	p := strings.TrimPrefix(strings.TrimPrefix(t.PkgPath(), "k8s.io/api/"), "k8s.io/apimachinery/pkg/apis/")
	return p + "." + t.Name()
}

// Stale lists the answers that are about nothing that any of these values has.
func (t *Table) Stale(of []any) []string {
	for _, o := range of {
		t.For(o)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []string
	for name, answers := range t.types {
		for path, list := range answers {
			for _, a := range list {
				if !a.used {
					out = append(out, fmt.Sprintf("%s: %s has no %s", a.source, name, path))
				}
			}
		}
	}
	slices.Sort(out)
	return out
}
