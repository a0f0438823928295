package conformance

import (
	"maps"
	"reflect"
	"strings"
)

// object is an API object, or a part of one, as JSON has it.
type object map[string]any

// at follows the names; nil where there is nothing.
func (o object) at(names ...string) any {
	var v any = map[string]any(o)
	for _, name := range names {
		m, _ := v.(map[string]any)
		v = m[name]
	}
	return v
}

// text is a string in the object, "" where there is none.
func (o object) text(names ...string) string {
	s, _ := o.at(names...).(string)
	return s
}

func (o object) name() string     { return o.text("metadata", "name") }
func (o object) version() string  { return o.text("metadata", "resourceVersion") }
func (o object) uid() string      { return o.text("metadata", "uid") }
func (o object) generation() any  { return o.at("metadata", "generation") }
func (o object) deleted() bool    { return o.at("metadata", "deletionTimestamp") != nil }
func (o object) items() []any     { list, _ := o.at("items").([]any); return list }
func (o object) message() string  { return o.text("message") }
func (o object) metadata() object { m, _ := o.at("metadata").(map[string]any); return m }

// names are those of the items of a list.
func (o object) names() []string {
	var out []string
	for _, item := range o.items() {
		out = append(out, object(item.(map[string]any)).name())
	}
	return out
}

// merged is o with a merge patch on it; o stays as it is.
func merged(o, patch map[string]any) object {
	out := maps.Clone(o)
	if out == nil {
		out = map[string]any{}
	}
	for name, v := range patch {
		m, isMap := v.(map[string]any)
		switch {
		case v == nil:
			delete(out, name)
		case isMap:
			was, _ := out[name].(map[string]any)
			out[name] = map[string]any(merged(was, m))
		default:
			out[name] = v
		}
	}
	return out
}

// lacks names the first place where o is not as want says; "" when it has all of it. What want does not mention may be
// as it likes, but lists are as long.
func lacks(got, want any, at ...string) string {
	switch want := want.(type) {
	case map[string]any:
		m, ok := got.(map[string]any)
		if !ok && len(want) > 0 {
			return strings.Join(at, ".")
		}
		for name, v := range want {
			if v == nil && m[name] == nil {
				continue
			}
			if where := lacks(m[name], v, append(at, name)...); where != "" {
				return where
			}
		}
		return ""
	case []any:
		list, _ := got.([]any)
		if len(list) != len(want) {
			return strings.Join(at, ".")
		}
		for i := range want {
			if where := lacks(list[i], want[i], append(at, "[]")...); where != "" {
				return where
			}
		}
		return ""
	}
	if !reflect.DeepEqual(got, want) {
		return strings.Join(at, ".")
	}
	return ""
}

// labelled is a merge patch that sets one label.
func labelled(key, value string) object {
	return object{"metadata": map[string]any{"labels": map[string]any{key: value}}}
}
