package fields

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Check returns the fields of obj that have no effect: refused fields as errors, and inert and
// stored fields with Warn as warnings. A value that old, the stored object (nil on create), has in
// the same field is skipped. So an object that was stored by a release which accepted the value can
// still be updated. Check allocates nothing if it finds nothing.
func (a *Answers) Check(obj, old any) (errs field.ErrorList, warnings []string) {
	if a == nil || a.tree == nil || obj == nil {
		return nil, nil
	}
	now := a.find(obj)
	if len(now) == 0 {
		return nil, nil
	}
	var was []finding
	if old != nil && !reflect.ValueOf(old).IsNil() {
		was = a.find(old)
	}
	for _, f := range now {
		if i := slices.IndexFunc(was, f.same); i >= 0 {
			was = slices.Delete(was, i, i+1) // one stored value excuses only one new value
			continue
		}
		if f.answer.State == Refused {
			errs = append(errs, &field.Error{Type: field.ErrorTypeForbidden, Field: f.path, BadValue: "", Detail: f.answer.Why})
			continue
		}
		if f.answer.State == Stored {
			warnings = append(warnings, f.path+": stored; "+f.answer.Why)
			continue
		}
		warnings = append(warnings, f.path+": "+f.answer.Why)
	}
	return errs, warnings
}

// finding is a value to which an answer applies.
type finding struct {
	path   string // "spec.containers[0].env[1]"
	answer *Answer
	value  any
	place  reflect.Value // the value itself, if the walker collects places
}

func (f finding) same(g finding) bool {
	return f.answer == g.answer && apiequality.Semantic.DeepEqual(f.value, g.value)
}

func (a *Answers) find(obj any) []finding {
	w := walker{at: make([]step, 0, 16)}
	w.walk(reflect.ValueOf(obj), a.tree)
	return w.found
}

// walker walks an object along the tree of fields that have rules, and collects findings.
type walker struct {
	at     []step
	found  []finding
	places bool // findings have a place, but neither path nor value
}

type step struct {
	name  string
	index int    // index in a list; -1 = none
	key   string // key in a map
}

// walk applies the rules of n to a value, if it is set, and continues below it.
func (w *walker) walk(v reflect.Value, n *node) {
	set := !v.IsZero()
	whole := v
	for v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return
		}
		v = v.Elem()
	}
	if set {
		for _, a := range n.rules {
			if a.Values == nil {
				w.note(a, whole)
				continue
			}
			w.judgeValues(a, v)
		}
	}
	w.below(v, n)
}

func (w *walker) below(v reflect.Value, n *node) {
	switch v.Kind() {
	case reflect.Struct:
		for _, e := range n.edges {
			f := v.Field(e.index)
			if e.name == "" {
				w.walk(f, e.to)
				continue
			}
			if k := f.Kind(); (k == reflect.Slice || k == reflect.Map) && f.Len() == 0 || k == reflect.Pointer && f.IsNil() {
				continue
			}
			w.at = append(w.at, step{name: e.name, index: -1})
			w.walk(f, e.to)
			w.at = w.at[:len(w.at)-1]
		}
	case reflect.Slice:
		if len(n.edges) == 0 {
			return
		}
		here := len(w.at) - 1
		for i := range v.Len() {
			w.at[here].index = i
			w.below(reflect.Indirect(v.Index(i)), n)
		}
		w.at[here].index = -1
	case reflect.Map:
		w.keys(v, n)
	}
}

// judgeValues applies a rule about certain values to a value, or to each item of a list.
func (w *walker) judgeValues(a *Answer, v reflect.Value) {
	if v.Kind() != reflect.Slice {
		if anyMatches(a.Values, text(v)) {
			w.note(a, v)
		}
		return
	}
	here := len(w.at) - 1
	for i := range v.Len() {
		if anyMatches(a.Values, text(v.Index(i))) {
			w.at[here].index = i
			w.note(a, v.Index(i))
		}
	}
	w.at[here].index = -1
}

// keys applies the rules about the keys of a map, and the rules about its members.
func (w *walker) keys(v reflect.Value, n *node) {
	here := len(w.at) - 1
	if len(n.edges) > 0 {
		for it := v.MapRange(); it.Next(); {
			w.at[here].key = it.Key().String()
			w.below(reflect.Indirect(it.Value()), n)
		}
		w.at[here].key = ""
	}
	if len(n.keys) == 0 {
		return
	}
	// rules about keys exist only for labels and annotations
	pairs, _ := v.Interface().(map[string]string)
	for key, value := range pairs {
		for pattern, a := range n.keys {
			if matches(pattern, key) && (a.Values == nil || anyMatches(a.Values, value)) {
				w.at[here].key = key
				w.note(a, v.MapIndex(reflect.ValueOf(key)))
				w.at[here].key = ""
			}
		}
	}
}

func (w *walker) note(a *Answer, v reflect.Value) {
	if w.places {
		w.found = append(w.found, finding{answer: a, place: v})
		return
	}
	var path strings.Builder
	for i, s := range w.at {
		if i > 0 {
			path.WriteByte('.')
		}
		path.WriteString(s.name)
		if s.key != "" {
			path.WriteString("[" + s.key + "]")
		}
		if s.index >= 0 {
			path.WriteString("[" + strconv.Itoa(s.index) + "]")
		}
	}
	w.found = append(w.found, finding{path: path.String(), answer: a, value: v.Interface()})
}

func anyMatches(patterns []string, v string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return matches(p, v) })
}

func matches(pattern, v string) bool {
	prefix, open := strings.CutSuffix(pattern, "*")
	return open && strings.HasPrefix(v, prefix) || pattern == v
}

// text returns a value in the form of the files answers/*.txt.
func text(v reflect.Value) string {
	v = reflect.Indirect(v)
	switch v.Kind() {
	case reflect.String:
		return v.String()
	case reflect.Bool:
		return strconv.FormatBool(v.Bool())
	case reflect.Invalid:
		return ""
	}
	return fmt.Sprint(v.Interface())
}
