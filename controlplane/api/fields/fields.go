// Package fields says of every field of the served kinds what becomes of it:
//
//	honoured  it has its documented effect
//	refused   its effect is not built: a request that sets it is refused, with a sentence that says what to do
//	dropped   Kubernetes 1.37 removes it from requests, because its feature gate is off by default; so does Keelson
//	inert     Kubernetes itself gives it no effect, or none without something that is not part of a cluster
//	stored    it is kept, judged and shown, and nothing acts on it yet: who sets it is told so by a warning
//
// The answers stand in answers/*.txt, by Go type, so that a type that occurs in many kinds (a pod's specification,
// metadata, selectors) is answered once. Refusals and removals are enforced from there (Answers.Check, Answers.Drop), so
// that none can be forgotten; docs/reference/compatibility.md is written from there. A field without an answer fails a test.
package fields

import (
	"embed"
	"fmt"
	"io/fs"
	"reflect"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// State is what becomes of a field.
type State string

// The states.
const (
	Honoured State = "honoured"
	Refused  State = "refused"
	Dropped  State = "dropped"
	Inert    State = "inert"
	Stored   State = "stored"
)

// Answer is what becomes of a field, or of some of its values.
type Answer struct {
	State State
	// Why is for the user of a refused or dropped field what to do, for an inert one the documented reason, for a stored
	// one who does not act on it.
	Why string
	// Gate is the feature gate of Kubernetes that a dropped field is behind.
	Gate string
	// Warn tells the client of an inert or stored field that is set, by a warning header.
	Warn bool
	// Values are those that the answer is about; nil = every value that is set. A "*" at the end stands for any
	// rest. The other values are honoured.
	Values []string

	source string // file:line, for complaints about the table
	used   bool
}

//go:embed answers/*.txt
var files embed.FS

// Options are what requests are given beside an object, as query parameters.
func Options() []any {
	return []any{
		&metav1.GetOptions{}, &metav1.ListOptions{}, &metav1.CreateOptions{}, &metav1.UpdateOptions{}, &metav1.PatchOptions{},
		&metav1.DeleteOptions{}, &corev1.PodLogOptions{}, &corev1.PodExecOptions{}, &corev1.PodAttachOptions{}, &corev1.PodPortForwardOptions{},
	}
}

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
//	dropped EmptyDirVolumeMode: mode -- sentence  with the feature gate
//	warned: ...                           inert, and the client is told
//	stored: strategy -- sentence          the client is told
//	stored: . -- sentence                 all of a kind but what its part of the file says otherwise: the client is told
//	                                      once, when it makes such an object; in the types below what is refused or
//	                                      inert stays so, the rest is stored
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
	word, gate, _ := strings.Cut(word, " ")
	a := Answer{State: State(word), Why: strings.TrimSpace(why), Gate: gate, source: source}
	switch {
	case (a.State == Dropped) != (gate != ""):
		return fmt.Errorf("a dropped field needs its feature gate, and no other field has one")
	case a.State == Dropped && strings.ContainsAny(list, "=["):
		return fmt.Errorf("a field is dropped with all its values and keys")
	case word == "warned":
		a.State, a.Warn = Inert, true
	case a.State == Stored:
		a.Warn = true
	case a.State != Honoured && a.State != Refused && a.State != Inert && a.State != Dropped:
		return fmt.Errorf("%q is no state", word)
	}
	if (a.Why == "") != (a.State == Honoured) {
		return fmt.Errorf("a %s field needs a sentence, a honoured one none", a.State)
	}
	for p := range strings.FieldsSeq(list) {
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

// typeRoots are the folders of the modules that types come from.
var typeRoots = []string{"k8s.io/api/", "k8s.io/apimachinery/pkg/apis/", "k8s.io/kube-aggregator/pkg/apis/", "k8s.io/apiextensions-apiserver/pkg/apis/",
	"k8s.io/metrics/pkg/apis/"}

// typeName is how the files call a type: "core/v1.Pod", "meta/v1.ObjectMeta".
func typeName(t reflect.Type) string {
	p := t.PkgPath()
	for _, root := range typeRoots {
		p = strings.TrimPrefix(p, root)
	}
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
