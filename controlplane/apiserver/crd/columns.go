package crd

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/util/jsonpath"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
)

// maxDescents is the maximum number of wildcard steps ("..", "[*]", a slice, a filter) in the
// JSONPath of a column. Each step multiplies the evaluation time. A column with more steps stays
// empty.
const maxDescents = 3

// maxUnions is the maximum number of commas in the JSONPath of a column: n unions of two names each
// have 2^n results.
const maxUnions = 8

// column is a table column that a CustomResourceDefinition adds.
type column struct {
	metav1.TableColumnDefinition
	find func(all map[string]any) (any, bool)
}

// columnsOf returns the table columns of a version after the name column. Their JSONPaths are
// parsed at first use.
func columnsOf(v *apiextensionsv1.CustomResourceDefinitionVersion) []column {
	list := v.AdditionalPrinterColumns
	if len(list) == 0 {
		list = []apiextensionsv1.CustomResourceColumnDefinition{{
			Name: "Age", Type: "date", JSONPath: ".metadata.creationTimestamp",
			Description: metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"],
		}}
	}
	out := make([]column, len(list))
	for i, c := range list {
		about := c.Description
		if about == "" {
			about = "Custom resource definition column (in JSONPath format): " + c.JSONPath
		}
		out[i].TableColumnDefinition = metav1.TableColumnDefinition{
			Name: c.Name, Type: c.Type, Format: c.Format, Description: about, Priority: c.Priority,
		}
		out[i].find = newFinder(c.JSONPath)
	}
	return out
}

// setColumns sets the table columns of a kind, and the function that returns a row for an object.
func setColumns(k *api.Kind, v *apiextensionsv1.CustomResourceDefinitionVersion) {
	cols := columnsOf(v)
	k.Lists.Columns = []metav1.TableColumnDefinition{
		{Name: "Name", Type: "string", Format: "name", Description: metav1.ObjectMeta{}.SwaggerDoc()["name"]},
	}
	for _, c := range cols {
		k.Lists.Columns = append(k.Lists.Columns, c.TableColumnDefinition)
	}
	k.Lists.Row = func(obj api.Object, now time.Time) []any {
		cells := []any{obj.GetName()}
		all, err := obj.(*custom.Object).Map()
		for _, c := range cols {
			var cell any
			if value, ok := c.find(all); ok && err == nil {
				cell = cellValue(c.Type, value, now)
			}
			cells = append(cells, cell)
		}
		return cells
	}
}

// newFinder returns a function that finds the first value of a JSONPath in an object. The function
// finds nothing if the path is invalid or too costly.
func newFinder(path string) func(map[string]any) (any, bool) {
	if isSimplePath(path) {
		names := splitPath(path)
		return func(all map[string]any) (any, bool) {
			var at any = all
			for _, name := range names {
				m, ok := at.(map[string]any)
				if !ok {
					return nil, false
				}
				if at, ok = m[name]; !ok {
					return nil, false
				}
			}
			return at, true
		}
	}
	if isCostlyRule(path) {
		return func(map[string]any) (any, bool) { return nil, false }
	}
	var mu sync.Mutex // a parsed path has state
	parse := sync.OnceValue(func() *jsonpath.JSONPath {
		p := jsonpath.New("path").AllowMissingKeys(true)
		if p.Parse("{"+path+"}") != nil {
			return nil
		}
		return p
	})
	return func(all map[string]any) (value any, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		defer func() {
			if recover() != nil { // a filter compared values of different types
				value, ok = nil, false
			}
		}()
		p := parse()
		if p == nil {
			return nil, false
		}
		found, err := p.FindResults(all)
		if err != nil || len(found) == 0 || len(found[0]) == 0 || !found[0][0].IsValid() ||
			!found[0][0].CanInterface() {
			return nil, false
		}
		return found[0][0].Interface(), true
	}
}

// isCostlyRule reports whether the evaluation of a JSONPath could take too long for a large object.
// It is also true for paths with braces, which could start another expression or a loop.
func isCostlyRule(path string) bool {
	descents := 0
	for _, mark := range []string{"..", "*", "?", ":"} {
		descents += strings.Count(path, mark)
	}
	return descents > maxDescents || strings.Count(path, ",") > maxUnions || strings.ContainsAny(path, "{}")
}

// isSimplePath reports whether a path consists only of field names separated by dots.
func isSimplePath(path string) bool {
	return strings.HasPrefix(path, ".") && !strings.ContainsAny(path, `[]{}()*?@$'"\,|& `) &&
		!strings.Contains(path, "..") && len(path) > 1
}

// cellValue converts a value to the type of a column; nil if it has another type.
func cellValue(columnType string, value any, currentTime time.Time) any {
	switch columnType {
	case "string":
		return cellText(value)
	case "integer":
		switch n := value.(type) {
		case int64:
			return n
		case float64:
			return int64(n)
		}
	case "number":
		switch n := value.(type) {
		case int64:
			return float64(n)
		case float64:
			return n
		}
	case "boolean":
		if b, ok := value.(bool); ok {
			return b
		}
	case "date":
		if s, ok := value.(string); ok {
			return formatAge(s, currentTime)
		}
	}
	return nil
}

// cellText formats a value as kubectl prints the result of a JSONPath: scalars as text, other
// values as JSON.
func cellText(value any) any {
	if s, ok := value.(string); ok {
		return s
	}
	var buf bytes.Buffer
	if err := jsonpath.New("cell").PrintResults(&buf, []reflect.Value{reflect.ValueOf(value)}); err != nil {
		return nil
	}
	return buf.String()
}

func formatAge(timestamp string, currentTime time.Time) string {
	t, err := time.Parse(time.RFC3339, timestamp)
	switch {
	case timestamp == "" || timestamp == "null":
		return "<unknown>"
	case err != nil:
		return "<invalid>"
	}
	return duration.HumanDuration(currentTime.Sub(t))
}

// selectableField is a field of a version that field selectors may use, and its name.
type selectableField struct {
	name string
	find func(map[string]any) (any, bool)
}

func selectableFields(v *apiextensionsv1.CustomResourceDefinitionVersion) (out []selectableField) {
	for _, f := range v.SelectableFields {
		out = append(out, selectableField{strings.TrimPrefix(f.JSONPath, "."), newFinder(f.JSONPath)})
	}
	return out
}

func (s *selectableField) fieldValue(content map[string]any) string {
	if value, ok := s.find(content); ok && value != nil {
		return fmt.Sprint(value)
	}
	return ""
}
