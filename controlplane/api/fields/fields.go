// Package fields states for every field of the served kinds how the API server treats it:
//
//	honoured  it has its documented effect
//	refused   it is not implemented: requests that set it are rejected, with a remedy
//	dropped   its feature gate is off by default in Kubernetes 1.37: as there, it is removed from
//	          requests
//	inert     it has no effect in Kubernetes either, or only with an external component
//	stored    it is validated, stored and returned but has no effect yet; clients get a warning
//
// These treatments, the answers, are listed in answers/*.txt by Go type, so that a type used in
// many kinds (PodSpec, ObjectMeta, selectors) is described once. Answers.FindIneffective and
// Answers.Drop enforce them. docs/reference/compatibility.md is generated from them. A test fails
// if a field has no answer.
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

// State is how the API server treats a field: honoured, refused, dropped, inert or stored. The
// package comment describes each state.
type State string

// The states of a field, as described in the package comment.
const (
	Honoured State = "honoured"
	Refused  State = "refused"
	Dropped  State = "dropped"
	Inert    State = "inert"
	Stored   State = "stored"
)

// Answer states how the API server treats a field, or some values of the field. The package comment
// describes the possible treatments.
type Answer struct {
	State State
	// Why is the explanation for users: the remedy for a refused or dropped field, or the
	// documented reason for an inert field. For a stored field it is the component that ignores the
	// field.
	Why string
	// Gate is the Kubernetes feature gate of a dropped field.
	Gate string
	// Warn reports whether a client that sets the inert or stored field gets a warning.
	Warn bool
	// Values are the values to which the Answer applies. nil means every value that is set. A "*"
	// at the end matches any suffix. All other values are honoured.
	Values []string

	source string // file:line, for errors about the answer files
	used   bool
}

//go:embed answers/*.txt
var files embed.FS

// OptionTypes returns one value of each option type of requests, such as ListOptions. Options are
// sent as query parameters.
func OptionTypes() []any {
	return []any{
		&metav1.GetOptions{}, &metav1.ListOptions{}, &metav1.CreateOptions{}, &metav1.UpdateOptions{},
		&metav1.PatchOptions{},
		&metav1.DeleteOptions{}, &corev1.PodLogOptions{}, &corev1.PodExecOptions{}, &corev1.PodAttachOptions{},
		&corev1.PodPortForwardOptions{},
	}
}

// Table maps Go types and the paths of their fields to an Answer, which states how the API server
// treats the field.
type Table struct {
	types    map[string]map[string][]*Answer
	mu       sync.Mutex
	compiled map[reflect.Type]*Answers
}

// LoadTable returns the Table of the built-in kinds. It parses the files answers/*.txt once.
var LoadTable = sync.OnceValue(func() *Table {
	t := &Table{types: map[string]map[string][]*Answer{}, compiled: map[reflect.Type]*Answers{}}
	names, err := fs.Glob(files, "answers/*.txt")
	for _, name := range names {
		var data []byte
		if data, err = files.ReadFile(name); err == nil {
			err = t.parseFile(name, string(data))
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

// parseFile adds the answers of one file to the table. Its format is:
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
func (t *Table) parseFile(file, text string) error {
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
				return fmt.Errorf("%s: type %s has two sections", source, name)
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
		return fmt.Errorf("%q is not an answer line", line)
	}
	list, why, _ := strings.Cut(rest, " -- ")
	word, gate, _ := strings.Cut(word, " ")
	a := Answer{State: State(word), Why: strings.TrimSpace(why), Gate: gate, source: source}
	switch {
	case (a.State == Dropped) != (gate != ""):
		return fmt.Errorf("a feature gate is required for a dropped field, and allowed for no other field")
	case a.State == Dropped && strings.ContainsAny(list, "=["):
		return fmt.Errorf("a field is dropped with all its values and keys")
	case word == "warned":
		a.State, a.Warn = Inert, true
	case a.State == Stored:
		a.Warn = true
	case a.State != Honoured && a.State != Refused && a.State != Inert && a.State != Dropped:
		return fmt.Errorf("%q is not a state", word)
	}
	if (a.Why == "") != (a.State == Honoured) {
		return fmt.Errorf("a sentence is required for a %s field, and not allowed for a honoured field", a.State)
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
var typeRoots = []string{"k8s.io/api/", "k8s.io/apimachinery/pkg/apis/", "k8s.io/kube-aggregator/pkg/apis/",
	"k8s.io/apiextensions-apiserver/pkg/apis/",
	"k8s.io/metrics/pkg/apis/"}

// typeName returns the name of a type as written in the files answers/*.txt: "core/v1.Pod",
// "meta/v1.ObjectMeta".
func typeName(t reflect.Type) string {
	p := t.PkgPath()
	for _, root := range typeRoots {
		p = strings.TrimPrefix(p, root)
	}
	return p + "." + t.Name()
}

// UnusedAnswers returns a sorted description of each answer of the Table that applies to no field
// of the types of the given values.
func (t *Table) UnusedAnswers(values []any) []string {
	for _, o := range values {
		t.AnswersFor(o)
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
