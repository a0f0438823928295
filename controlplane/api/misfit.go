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

// Misfit returns a better error for a JSON document that cannot be decoded into the Go value into.
// err is the decoder's error. The result also names the field and its value, as in "spec.replicas:
// Invalid value: "many": must be an integer, not a string". If the field cannot be determined, the
// result is err.
func Misfit(data []byte, into any, err error) error {
	if !json.Valid(data) {
		return err
	}
	if found := misfit(data, reflect.TypeOf(into), nil); found != nil {
		return found
	}
	return err
}

var (
	decodesJSON = reflect.TypeFor[json.Unmarshaler]()
	decodesText = reflect.TypeFor[encoding.TextUnmarshaler]()
	octets      = reflect.TypeFor[[]byte]()
)

// misfit returns an error for the first part of the document that does not match the type t, or
// nil. It decodes the document piece by piece, because a decoder's error does not name the element
// of a list or map.
func misfit(data []byte, t reflect.Type, at *field.Path) error {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if string(data) == "null" {
		return nil // null is valid for every field
	}
	if p := reflect.PointerTo(t); at != nil && (p.Implements(decodesJSON) || p.Implements(decodesText)) || t == octets {
		return misfitLeaf(data, t, at)
	}
	switch t.Kind() {
	case reflect.Struct:
		var parts map[string]json.RawMessage
		if json.Unmarshal(data, &parts) != nil {
			return misfitLeaf(data, t, at)
		}
		return misfitStruct(data, parts, t, at)
	case reflect.Map:
		var parts map[string]json.RawMessage
		if json.Unmarshal(data, &parts) != nil {
			return misfitLeaf(data, t, at)
		}
		for _, key := range slices.Sorted(maps.Keys(parts)) {
			if err := misfit(parts[key], t.Elem(), below(at, key)); err != nil {
				return err
			}
		}
		return nil
	case reflect.Slice, reflect.Array:
		var parts []json.RawMessage
		if json.Unmarshal(data, &parts) != nil {
			return misfitLeaf(data, t, at)
		}
		for i, part := range parts {
			if err := misfit(part, t.Elem(), at.Index(i)); err != nil {
				return err
			}
		}
		return nil
	}
	return misfitLeaf(data, t, at)
}

func misfitStruct(data []byte, parts map[string]json.RawMessage, t reflect.Type, at *field.Path) error {
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" && f.Anonymous {
			if err := misfit(data, f.Type, at); err != nil { // embedded struct
				return err
			}
			continue
		}
		if part, given := parts[name]; given && name != "-" {
			if err := misfit(part, f.Type, at.Child(name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// below returns the path of a map's value. A key that contains path characters is put in brackets:
// a dot in it would look like two fields.
func below(at *field.Path, key string) *field.Path {
	if key == "" || strings.ContainsAny(key, "./[]") {
		return at.Key(key)
	}
	return at.Child(key)
}

// shownValue is the maximum length of an invalid value in an error.
const shownValue = 100

// misfitLeaf decodes one value and returns the error for it, or nil if the value is valid.
func misfitLeaf(data []byte, t reflect.Type, at *field.Path) error {
	err := kjson.UnmarshalCaseSensitivePreserveInts(data, reflect.New(t).Interface())
	if err == nil {
		return nil
	}
	why := err.Error()
	if wrong := new(json.UnmarshalTypeError); errors.As(err, &wrong) {
		given := kindOfJSON(data)
		why = fmt.Sprintf("must be %s, not %s", wanted(t), given)
		if given == "a number" && t.Kind() != reflect.String {
			why = "must be " + wanted(t) // out of range, or with a fraction
		}
	}
	place := at.String()
	if at == nil {
		place = "the document"
	}
	if t == octets {
		return fmt.Errorf("%s: Invalid value: %s", place, why) // the value may be a secret
	}
	value := string(data)
	if len(value) > shownValue {
		value = strings.ToValidUTF8(value[:shownValue], "") + " ..."
	}
	return fmt.Errorf("%s: Invalid value: %s: %s", place, value, why)
}

// wanted returns the JSON name of a type, for errors.
func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64:
		return "an integer"
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "an integer (" + t.Kind().String() + ")"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Slice, reflect.Array:
		if t == octets {
			return "a string in base64"
		}
		return "a list"
	}
	return "an object"
}

func kindOfJSON(data []byte) string {
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
