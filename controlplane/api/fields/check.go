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

// FindIneffective returns the fields of obj that have no effect: refused fields as errors, and
// inert and stored fields with Warn as warnings (see the package comment for these states). stored
// is the stored object, nil on create. Values that stored has in the same field are not returned.
// So an object that was stored by a release which accepted the value can still be updated.
// FindIneffective allocates nothing if it returns nothing.
func (a *Answers) FindIneffective(obj, stored any) (errs field.ErrorList, warnings []string) {
	if a == nil || a.tree == nil || obj == nil {
		return nil, nil
	}
	updated := a.applyRules(obj)
	if len(updated) == 0 {
		return nil, nil
	}
	var was []finding
	if stored != nil && !reflect.ValueOf(stored).IsNil() {
		was = a.applyRules(stored)
	}
	for _, f := range updated {
		if i := slices.IndexFunc(was, f.equals); i >= 0 {
			was = slices.Delete(was, i, i+1) // one stored value excuses only one new value
			continue
		}
		if f.answer.State == Refused {
			errs = append(errs, &field.Error{Type: field.ErrorTypeForbidden, Field: f.path, BadValue: "",
				Detail: f.answer.Why})
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

// finding is a value in an object to which an Answer (the treatment of a field) applies.
type finding struct {
	path   string // "spec.containers[0].env[1]"
	answer *Answer
	value  any
	place  reflect.Value // the value itself, if walker.places is set
}

func (f finding) equals(g finding) bool {
	return f.answer == g.answer && apiequality.Semantic.DeepEqual(f.value, g.value)
}

func (a *Answers) applyRules(obj any) []finding {
	w := walker{steps: make([]step, 0, 16)}
	w.visitValue(reflect.ValueOf(obj), a.tree)
	return w.found
}

// walker visits the fields of an object for which a node tree has rules, and collects the values to
// which the rules apply.
type walker struct {
	steps  []step
	found  []finding
	places bool // findings have only a place, not a path and a value
}

type step struct {
	name  string
	index int    // index in a list; -1 = none
	key   string // key in a map
}

// visitValue collects the value v as a finding of each rule of n that applies to it, if v is set.
// Then it visits the values within v.
func (w *walker) visitValue(v reflect.Value, n *node) {
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
				w.addFinding(a, whole)
				continue
			}
			w.matchValues(a, v)
		}
	}
	w.visitMembers(v, n)
}

func (w *walker) visitMembers(v reflect.Value, n *node) {
	switch v.Kind() {
	case reflect.Struct:
		for _, e := range n.edges {
			f := v.Field(e.index)
			if e.name == "" {
				w.visitValue(f, e.to)
				continue
			}
			if k := f.Kind(); (k == reflect.Slice || k == reflect.Map) && f.Len() == 0 ||
				k == reflect.Pointer && f.IsNil() {
				continue
			}
			w.steps = append(w.steps, step{name: e.name, index: -1})
			w.visitValue(f, e.to)
			w.steps = w.steps[:len(w.steps)-1]
		}
	case reflect.Slice:
		if len(n.edges) == 0 {
			return
		}
		here := len(w.steps) - 1
		for i := range v.Len() {
			w.steps[here].index = i
			w.visitMembers(reflect.Indirect(v.Index(i)), n)
		}
		w.steps[here].index = -1
	case reflect.Map:
		w.visitKeys(v, n)
	}
}

// matchValues applies a rule that concerns only certain values (Answer.Values) to v or, if v is a
// list, to each of its items.
func (w *walker) matchValues(rule *Answer, v reflect.Value) {
	if v.Kind() != reflect.Slice {
		if anyMatches(rule.Values, valueText(v)) {
			w.addFinding(rule, v)
		}
		return
	}
	here := len(w.steps) - 1
	for i := range v.Len() {
		if anyMatches(rule.Values, valueText(v.Index(i))) {
			w.steps[here].index = i
			w.addFinding(rule, v.Index(i))
		}
	}
	w.steps[here].index = -1
}

// visitKeys applies the rules of n about keys of the map v, and then visits the members of the map.
func (w *walker) visitKeys(v reflect.Value, n *node) {
	here := len(w.steps) - 1
	if len(n.edges) > 0 {
		for it := v.MapRange(); it.Next(); {
			w.steps[here].key = it.Key().String()
			w.visitMembers(reflect.Indirect(it.Value()), n)
		}
		w.steps[here].key = ""
	}
	if len(n.keys) == 0 {
		return
	}
	// only labels and annotations have rules for keys
	pairs, _ := v.Interface().(map[string]string)
	for key, value := range pairs {
		for pattern, a := range n.keys {
			if matchesPattern(pattern, key) && (a.Values == nil || anyMatches(a.Values, value)) {
				w.steps[here].key = key
				w.addFinding(a, v.MapIndex(reflect.ValueOf(key)))
				w.steps[here].key = ""
			}
		}
	}
}

func (w *walker) addFinding(a *Answer, v reflect.Value) {
	if w.places {
		w.found = append(w.found, finding{answer: a, place: v})
		return
	}
	var path strings.Builder
	for i, s := range w.steps {
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
	return slices.ContainsFunc(patterns, func(p string) bool { return matchesPattern(p, v) })
}

func matchesPattern(pattern, v string) bool {
	prefix, open := strings.CutSuffix(pattern, "*")
	return open && strings.HasPrefix(v, prefix) || pattern == v
}

// valueText returns a value in the format of the files answers/*.txt.
func valueText(v reflect.Value) string {
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
