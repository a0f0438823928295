// Package upstream compares the OpenAPI documents of this release with the documents that
// Kubernetes publishes in api/openapi-spec. The package is a module of its own: its go.mod requires
// k8s.io/kubernetes for these files only, and compiles no code of it.
package upstream

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

type object = map[string]any

// document is an OpenAPI document in the form that is compared: without descriptions, with
// references to parameters replaced by the parameters, and with sorted lists where order has no
// meaning.
type document struct {
	definitions, paths, other object
}

// newDocument decodes a v2 or v3 document.
func newDocument(data []byte) (*document, error) {
	var doc object
	if err := json.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("decoding an OpenAPI document: %w", err)
	}
	parameters, _ := doc["parameters"].(object)
	d := &document{paths: object{}, definitions: object{}, other: object{}}
	for key, value := range doc {
		switch key {
		case "info", "parameters":
		case "paths":
			d.paths, _ = normalize(value, parameters).(object)
		case "definitions":
			d.definitions, _ = normalize(value, nil).(object)
		case "components":
			components := value.(object)
			if schemas, ok := components["schemas"]; ok {
				d.definitions, _ = normalize(schemas, nil).(object)
			}
			d.other["securitySchemes"] = normalize(components["securitySchemes"], nil)
		default:
			d.other[key] = normalize(value, nil)
		}
	}
	return d, nil
}

// normalize returns a value of a document in the form in which documents are compared; see
// document. parameters are the parameters to which references in the value may refer.
func normalize(value any, parameters object) any {
	switch v := value.(type) {
	case object:
		out := object{}
		for key, inner := range v {
			if text, isText := inner.(string); key == "description" && isText && text != "Unauthorized" {
				continue
			}
			if listAll, isList := inner.([]any); key == "parameters" && isList {
				out[key] = normalizeParameters(listAll, parameters)
				continue
			}
			out[key] = normalize(inner, parameters)
		}
		return out
	case []any:
		out := make([]any, 0, len(v))
		for _, inner := range v {
			out = append(out, normalize(inner, parameters))
		}
		slices.SortStableFunc(out, func(a, b any) int { return strings.Compare(encodeJSON(a), encodeJSON(b)) })
		return out
	}
	return value
}

// normalizeParameters returns a list of parameters as an object, keyed by their places and names.
func normalizeParameters(list []any, parameters object) object {
	out := object{}
	for _, one := range list {
		p := one.(object)
		if ref, ok := p["$ref"].(string); ok {
			p, _ = parameters[strings.TrimPrefix(ref, "#/parameters/")].(object)
		}
		out[fmt.Sprint(p["in"], ":", p["name"])] = normalize(p, nil)
	}
	return out
}

func encodeJSON(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // the value was decoded from JSON
	}
	return string(data)
}

// keepServed removes the paths for which served returns false. It also removes the definitions to
// which no remaining path refers.
func (d *document) keepServed(served func(path string) bool) {
	maps.DeleteFunc(d.paths, func(path string, _ any) bool { return !served(path) })
	reached := map[string]bool{}
	var follow func(any)
	follow = func(value any) {
		switch v := value.(type) {
		case object:
			if ref, ok := v["$ref"].(string); ok {
				if name := ref[strings.LastIndex(ref, "/")+1:]; !reached[name] {
					reached[name] = true
					follow(d.definitions[name])
				}
			}
			for _, inner := range v {
				follow(inner)
			}
		case []any:
			for _, inner := range v {
				follow(inner)
			}
		}
	}
	follow(d.paths)
	maps.DeleteFunc(d.definitions, func(name string, _ any) bool { return !reached[name] })
}

// differences returns a line for each place in which two documents differ: "v2 definitions > NAME >
// KEY: ...". where is the name of the documents in the lines.
func differences(where string, ours, theirs *document) (out []string) {
	out = append(out, diffValues(where+" definitions", ours.definitions, theirs.definitions)...)
	out = append(out, diffValues(where+" paths", ours.paths, theirs.paths)...)
	return append(out, diffValues(where+" document", ours.other, theirs.other)...)
}

func diffValues(where string, ours, theirs any) (out []string) {
	o, isObject := ours.(object)
	t, isToo := theirs.(object)
	if !isObject || !isToo {
		if a, b := encodeJSON(ours), encodeJSON(theirs); a != b {
			out = append(out, fmt.Sprintf("%s: %s, in Kubernetes %s", where, a, b))
		}
		return out
	}
	keys := map[string]bool{}
	for key := range o {
		keys[key] = true
	}
	for key := range t {
		keys[key] = true
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		place := where + " > " + key
		a, here := o[key]
		b, there := t[key]
		switch {
		case !here:
			out = append(out, place+": is missing")
		case !there:
			out = append(out, place+": is not in Kubernetes")
		default:
			out = append(out, diffValues(place, a, b)...)
		}
	}
	return out
}
