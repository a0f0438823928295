// Package fields states for every field of the served kinds how it is treated:
//
//	honoured  it has its documented effect
//	refused   it is not implemented: requests that set it are rejected, with a remedy
//	dropped   its feature gate is off by default in Kubernetes 1.37: like there, requests lose it
//	inert     it has no effect in Kubernetes either, or only with an external component
//	stored    it is validated, stored and returned but has no effect yet; clients get a warning
//
// These answers are in answers/*.txt, by Go type, so that a type used in many kinds (PodSpec,
// ObjectMeta, selectors) is described once. Answers.Check and Answers.Drop enforce them, so that no
// field is forgotten. docs/reference/compatibility.md is generated from them. A field without an
// answer fails a test.
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

// State is the treatment of a field: see the package comment.
type State string

// The states.
const (
	Honoured State = "honoured"
	Refused  State = "refused"
	Dropped  State = "dropped"
	Inert    State = "inert"
	Stored   State = "stored"
)

// Answer states how a field, or some of its values, is treated.
type Answer struct {
	State State
	// Why is the explanation for users: the remedy for a refused or dropped field, the documented
	// reason for an inert field. For a stored field it names the component that ignores it.
	Why string
	// Gate is the Kubernetes feature gate of a dropped field.
	Gate string
	// Warn reports whether a client that sets an inert or stored field gets a warning.
	Warn bool
	// Values are the values to which the answer applies; nil = every value that is set. A "*" at
	// the end matches any suffix. All other values are honoured.
	Values []string

	source string // file:line, for errors about the answer files
	used   bool
}

//go:embed answers/*.txt
var files embed.FS

// Options returns the option types of requests, which are sent as query parameters.
func Options() []any {
	return []any{
		&metav1.GetOptions{}, &metav1.ListOptions{}, &metav1.CreateOptions{}, &metav1.UpdateOptions{}, &metav1.PatchOptions{},
		&metav1.DeleteOptions{}, &corev1.PodLogOptions{}, &corev1.PodExecOptions{}, &corev1.PodAttachOptions{}, &corev1.PodPortForwardOptions{},
	}
}

// Table maps Go types and the paths of their fields to answers, which state how a field is treated.
type Table struct {
	types    map[string]map[string][]*Answer
	mu       sync.Mutex
	compiled map[reflect.Type]*Answers
}

// Load returns the table of the built-in kinds. The files are parsed once.
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

// parse adds the answers of one file to the table. Its format is:
//
//	[core/v1.PodSpec]                     the type of the lines below
//	honoured: containers volumes          paths below the type
//	refused: hostUsers=false -- sentence  one value of a path
//	refused: annotations[a/b] -- sentence one key of a map
//	dropped EmptyDirVolumeMode: mode -- sentence  with the feature gate
//	warned: ...                           inert, with a warning to the client
//	stored: strategy -- sentence          with a warning to the client
//	stored: . -- sentence                 the whole kind, except for the section's other lines;
//	                                      one warning when an object is created; refused and
//	                                      inert fields of nested types stay so, all other
//	                                      fields are stored
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
		if strings.Contains(path, "[") { // the key of a map may contain any character
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

// typeRoots are the package path prefixes that type names omit.
var typeRoots = []string{"k8s.io/api/", "k8s.io/apimachinery/pkg/apis/", "k8s.io/kube-aggregator/pkg/apis/", "k8s.io/apiextensions-apiserver/pkg/apis/",
	"k8s.io/metrics/pkg/apis/"}

// typeName returns the name of a type in the files answers/*.txt: "core/v1.Pod",
// "meta/v1.ObjectMeta".
func typeName(t reflect.Type) string {
	p := t.PkgPath()
	for _, root := range typeRoots {
		p = strings.TrimPrefix(p, root)
	}
	return p + "." + t.Name()
}

// Stale lists the answers that apply to no field of the types of these values.
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
