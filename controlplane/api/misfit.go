package api

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
	kjson "sigs.k8s.io/json"
)

// DescribeMismatch returns a more precise error for a JSON document that cannot be decoded into
// target, a Go value. err is the decoder's error. The result also contains the field and its value,
// as in "spec.replicas: Invalid value: "many": must be an integer, not a string". If the field
// cannot be determined, the result is err.
func DescribeMismatch(data []byte, target any, err error) error {
	if !json.Valid(data) {
		return err
	}
	if found := findMismatch(data, reflect.TypeOf(target), nil); found != nil {
		return found
	}
	return err
}

var (
	decodesJSON = reflect.TypeFor[json.Unmarshaler]()
	decodesText = reflect.TypeFor[encoding.TextUnmarshaler]()
	bytesType   = reflect.TypeFor[[]byte]()
)

// findMismatch returns an error for the first part of the JSON document that does not match the
// type t. It returns nil if the document matches the type. It decodes the document one value at a
// time, because an error of the decoder does not contain the index or key of an element in a list
// or map.
func findMismatch(data []byte, t reflect.Type, fldPath *field.Path) error {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if string(data) == "null" {
		return nil // null is valid for every field
	}
	if p := reflect.PointerTo(t); fldPath != nil && (p.Implements(decodesJSON) || p.Implements(decodesText)) ||
		t == bytesType {
		return describeLeafMismatch(data, t, fldPath)
	}
	switch t.Kind() {
	case reflect.Struct:
		var parts map[string]json.RawMessage
		if json.Unmarshal(data, &parts) != nil {
			return describeLeafMismatch(data, t, fldPath)
		}
		return findStructMismatch(data, parts, t, fldPath)
	case reflect.Map:
		var parts map[string]json.RawMessage
		if json.Unmarshal(data, &parts) != nil {
			return describeLeafMismatch(data, t, fldPath)
		}
		for _, key := range slices.Sorted(maps.Keys(parts)) {
			if err := findMismatch(parts[key], t.Elem(), childPath(fldPath, key)); err != nil {
				return err
			}
		}
		return nil
	case reflect.Slice, reflect.Array:
		var parts []json.RawMessage
		if json.Unmarshal(data, &parts) != nil {
			return describeLeafMismatch(data, t, fldPath)
		}
		for i, part := range parts {
			if err := findMismatch(part, t.Elem(), fldPath.Index(i)); err != nil {
				return err
			}
		}
		return nil
	}
	return describeLeafMismatch(data, t, fldPath)
}

func findStructMismatch(data []byte, parts map[string]json.RawMessage, t reflect.Type, fldPath *field.Path) error {
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" && f.Anonymous {
			if err := findMismatch(data, f.Type, fldPath); err != nil { // the field is an embedded struct
				return err
			}
			continue
		}
		if part, given := parts[name]; given && name != "-" {
			if err := findMismatch(part, f.Type, fldPath.Child(name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// childPath returns the path of a value in a map. A key with characters that have a meaning in
// paths is put in brackets: a dot in the key would look like two fields.
func childPath(fldPath *field.Path, key string) *field.Path {
	if key == "" || strings.ContainsAny(key, "./[]") {
		return fldPath.Key(key)
	}
	return fldPath.Child(key)
}

// maxShownValue is the maximum length of an invalid value that an error contains.
const maxShownValue = 100

// describeLeafMismatch decodes one value and returns the error for it, or nil if the value is
// valid.
func describeLeafMismatch(data []byte, t reflect.Type, fldPath *field.Path) error {
	err := kjson.UnmarshalCaseSensitivePreserveInts(data, reflect.New(t).Interface())
	if err == nil {
		return nil
	}
	why := err.Error()
	if wrong := new(json.UnmarshalTypeError); errors.As(err, &wrong) {
		given := valueDescription(data)
		why = fmt.Sprintf("must be %s, not %s", typeDescription(t), given)
		if given == "a number" && t.Kind() != reflect.String {
			why = "must be " + typeDescription(t) // the number is out of range, or has a fraction
		}
	}
	place := fldPath.String()
	if fldPath == nil {
		place = "the document"
	}
	if t == bytesType {
		return fmt.Errorf("%s: Invalid value: %s", place, why) // the value may be a secret
	}
	value := string(data)
	if len(value) > maxShownValue {
		value = strings.ToValidUTF8(value[:maxShownValue], "") + " ..."
	}
	return fmt.Errorf("%s: Invalid value: %s: %s", place, value, why)
}

// typeDescription returns the JSON name of a type, for errors.
func typeDescription(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64:
		return "an integer"
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32,
		reflect.Uint64:
		return "an integer (" + t.Kind().String() + ")"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Slice, reflect.Array:
		if t == bytesType {
			return "a string in base64"
		}
		return "a list"
	}
	return "an object"
}

func valueDescription(data []byte) string {
	switch data[0] {
	case '"':
		return "a string"
	case '{':
		return "an object"
	case '[':
		return "a list"
	case 't', 'f':
		return "a boolean"
	}
	return "a number"
}
