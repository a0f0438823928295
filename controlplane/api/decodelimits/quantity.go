package decodelimits

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/resource"

	"keelson.dev/keelson/internal/quantitytext"
)

// MaxQuantity is the maximum length of a quantity, in bytes.
const MaxQuantity = quantitytext.MaxBytes

var quantityType = reflect.TypeFor[resource.Quantity]()

// CheckQuantities returns an error for a JSON text with a quantity that exceeds the limits of
// quantitytext. It checks the fields that are quantities in the Go type of target. It does not
// check the syntax of the text.
func CheckQuantities(data []byte, target any) error {
	if target == nil || !hasLongNumber(data) {
		return nil
	}
	t := reflect.TypeOf(target)
	if !holdsQuantity(t) {
		return nil
	}
	q := quantityChecker{dec: json.NewDecoder(bytes.NewReader(data))}
	q.dec.UseNumber()
	return q.checkValue(t, "", 0)
}

// hasLongNumber reports whether a string or number in the JSON text may be a quantity that exceeds
// the limits. It is a fast check without the Go type; a positive result needs an exact check.
func hasLongNumber(data []byte) bool {
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case c == '"':
			end := endOfString(data, i)
			text := data[i+1 : min(end, len(data))]
			if mayBeNumber(text) && (len(text) >= MaxQuantity || bytes.IndexByte(text, '\\') >= 0 ||
				quantitytext.HasLongExponent(string(text))) {
				return true
			}
			i = end
		case c == '-' || c >= '0' && c <= '9':
			from := i
			for i < len(data) && isNumberByte(data[i]) {
				i++
			}
			if i-from > MaxQuantity || quantitytext.HasLongExponent(string(data[from:i])) {
				return true
			}
			i--
		}
	}
	return false
}

func isNumberByte(c byte) bool {
	return c >= '0' && c <= '9' || c == '.' || c == '-' || c == '+' || c == 'e' || c == 'E'
}

// mayBeNumber reports whether a string starts like a quantity, possibly after unescaping.
func mayBeNumber(text []byte) bool {
	text = bytes.TrimLeft(text, " \t\r\n")
	return len(text) > 0 && (isNumberByte(text[0]) || text[0] == '\\' || text[0] >= 0x80)
}

// quantityChecker checks the quantities of a JSON text, guided by the Go type into which the text
// will be decoded.
type quantityChecker struct{ dec *json.Decoder }

// checkValue reads the next JSON value of the text. It returns an error if a quantity in the value
// is longer than quantitytext allows, or has too large an exponent. t is the Go type into which the
// value will be decoded. If t is nil, the value contains no quantities and is only skipped.
func (q *quantityChecker) checkValue(t reflect.Type, path string, depth int) error {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	token, err := q.dec.Token()
	if err != nil || depth > MaxDepth {
		return nil // the decoder reports the syntax error
	}
	switch v := token.(type) {
	case string:
		return checkQuantity(t, path, strings.TrimSpace(v))
	case json.Number:
		return checkQuantity(t, path, string(v))
	case json.Delim:
		return q.checkMembers(v, t, path, depth)
	}
	return nil
}

func checkQuantity(t reflect.Type, path, text string) error {
	if t != quantityType {
		return nil
	}
	if err := quantitytext.Check(text); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrTooMuch, strings.TrimPrefix(path, "."), err)
	}
	return nil
}

// checkMembers calls checkValue for each member of an object or item of a list, and reads the
// closing delimiter. The opening delimiter has already been read. t is the type of the object or
// list, or nil.
func (q *quantityChecker) checkMembers(delim json.Delim, t reflect.Type, path string, depth int) error {
	for i := 0; q.dec.More(); i++ {
		if delim == '[' {
			var of reflect.Type
			if t != nil && (t.Kind() == reflect.Slice || t.Kind() == reflect.Array) {
				of = t.Elem()
			}
			if err := q.checkValue(of, fmt.Sprintf("%s[%d]", path, i), depth+1); err != nil {
				return err
			}
			continue
		}
		key, err := q.dec.Token()
		if err != nil {
			return nil
		}
		name, _ := key.(string)
		var of reflect.Type
		switch {
		case t == nil:
		case t.Kind() == reflect.Map:
			of = t.Elem()
		case t.Kind() == reflect.Struct:
			of = fieldType(t, name)
		}
		if err := q.checkValue(of, path+"."+name, depth+1); err != nil {
			return err
		}
	}
	_, _ = q.dec.Token()
	return nil
}

// fieldType returns the type of the struct field with the JSON name, including fields of embedded
// structs. It returns nil if no field has the name.
func fieldType(t reflect.Type, name string) reflect.Type {
	for i := range t.NumField() {
		f := t.Field(i)
		tag, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case tag == name && tag != "":
			return f.Type
		case f.Anonymous && (tag == "" || strings.Contains(options, "inline")):
			inner := f.Type
			for inner.Kind() == reflect.Pointer {
				inner = inner.Elem()
			}
			if inner.Kind() == reflect.Struct {
				if found := fieldType(inner, name); found != nil {
					return found
				}
			}
		}
	}
	return nil
}

var quantityByType sync.Map // map[reflect.Type]bool

// holdsQuantity reports whether a Go type contains a resource.Quantity at any depth. Results are
// cached.
func holdsQuantity(t reflect.Type) bool {
	if known, ok := quantityByType.Load(t); ok {
		return known.(bool)
	}
	out := findQuantity(t, map[reflect.Type]bool{})
	quantityByType.Store(t, out)
	return out
}

func findQuantity(t reflect.Type, seen map[reflect.Type]bool) bool {
	switch {
	case t == quantityType:
		return true
	case seen[t]:
		return false
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return findQuantity(t.Elem(), seen)
	case reflect.Struct:
		for i := range t.NumField() {
			if findQuantity(t.Field(i).Type, seen) {
				return true
			}
		}
	}
	return false
}
