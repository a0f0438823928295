package fields

import (
	"reflect"
	"slices"
)

// DropsFields reports whether the type has fields that Drop clears.
func (a *Answers) DropsFields() bool { return a != nil && a.drops != nil }

// Drop clears the dropped fields of obj, a pointer to an object: the fields with a feature gate
// that is off by default in Kubernetes. stored is the stored object, nil on create. A field is kept
// if stored has a field of the same feature gate. Drop allocates nothing if obj has no such field.
func (a *Answers) Drop(obj, stored any) {
	if !a.DropsFields() || obj == nil {
		return
	}
	w := walker{steps: make([]step, 0, 16), places: true}
	w.visitValue(reflect.ValueOf(obj), a.drops)
	if len(w.found) == 0 {
		return
	}
	inUse := a.gatesInUse(stored)
	for _, f := range w.found {
		if !slices.Contains(inUse, f.answer.Gate) {
			f.place.SetZero()
		}
	}
}

// DropFrom is like Drop, for a complete or partial object as a decoded JSON document.
func (a *Answers) DropFrom(doc map[string]any, stored any) {
	if !a.DropsFields() {
		return
	}
	dropMembers(doc, a.drops, a.gatesInUse(stored))
}

// gatesInUse returns the feature gates of the dropped fields that are set in obj.
func (a *Answers) gatesInUse(obj any) []string {
	if obj == nil || reflect.ValueOf(obj).IsNil() {
		return nil
	}
	w := walker{steps: make([]step, 0, 16)}
	w.visitValue(reflect.ValueOf(obj), a.drops)
	var out []string
	for _, f := range w.found {
		out = append(out, f.answer.Gate)
	}
	return out
}

// dropMembers removes the dropped fields from a JSON object, except fields of the feature gates in
// inUse. n has the rules for the object.
func dropMembers(doc map[string]any, n *node, inUse []string) {
	for _, e := range n.edges {
		if e.name == "" {
			dropMembers(doc, e.to, inUse)
			continue
		}
		value, set := doc[e.name]
		if !set {
			continue
		}
		if slices.ContainsFunc(e.to.rules, func(r *Answer) bool { return !slices.Contains(inUse, r.Gate) }) {
			delete(doc, e.name)
			continue
		}
		dropNested(value, e.to, inUse)
	}
}

// dropNested calls dropMembers for each JSON object in a value: the value itself, the items of a
// list or the members of a map.
func dropNested(value any, n *node, inUse []string) {
	switch value := value.(type) {
	case map[string]any:
		if !n.dict {
			dropMembers(value, n, inUse)
			return
		}
		for _, member := range value {
			if member, ok := member.(map[string]any); ok {
				dropMembers(member, n, inUse)
			}
		}
	case []any:
		for _, item := range value {
			if item, ok := item.(map[string]any); ok {
				dropMembers(item, n, inUse)
			}
		}
	}
}
