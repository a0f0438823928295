package fields

import (
	"reflect"
	"slices"
)

// DropsFields reports whether the type has dropped fields.
func (a *Answers) DropsFields() bool { return a != nil && a.drops != nil }

// Drop clears the dropped fields of obj, a pointer to an object. A field stays if old, the stored
// object (nil on create), uses a field of the same feature gate. Drop allocates nothing if obj has
// no such field.
func (a *Answers) Drop(obj, old any) {
	if !a.DropsFields() || obj == nil {
		return
	}
	w := walker{at: make([]step, 0, 16), places: true}
	w.walk(reflect.ValueOf(obj), a.drops)
	if len(w.found) == 0 {
		return
	}
	inUse := a.gatesInUse(old)
	for _, f := range w.found {
		if !slices.Contains(inUse, f.answer.Gate) {
			f.place.SetZero()
		}
	}
}

// DropFrom is Drop for a complete or partial object in the form of a decoded JSON document.
func (a *Answers) DropFrom(doc map[string]any, old any) {
	if !a.DropsFields() {
		return
	}
	dropMembers(doc, a.drops, a.gatesInUse(old))
}

// gatesInUse returns the feature gates of the dropped fields that are set in obj.
func (a *Answers) gatesInUse(obj any) []string {
	if obj == nil || reflect.ValueOf(obj).IsNil() {
		return nil
	}
	w := walker{at: make([]step, 0, 16)}
	w.walk(reflect.ValueOf(obj), a.drops)
	var out []string
	for _, f := range w.found {
		out = append(out, f.answer.Gate)
	}
	return out
}

// dropMembers removes dropped fields from a JSON object, except those of gates in inUse.
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
		dropBelow(value, e.to, inUse)
	}
}

// dropBelow removes dropped fields within a JSON value: an object, the items of a list or the
// members of a map.
func dropBelow(value any, n *node, inUse []string) {
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
