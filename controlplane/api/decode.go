package api

import (
	kjson "sigs.k8s.io/json"
)

// JSONDecoder is an object with its own rules for decoding JSON.
type JSONDecoder interface {
	// DecodeJSON replaces the object with the decoded document. If strict is true, strictErrs lists
	// the document's duplicate and unknown fields; otherwise strictErrs is empty.
	DecodeJSON(data []byte, strict bool) (strictErrs []error, err error)
}

// DecodeJSON decodes a JSON document into target. The document replaces the content of a
// JSONDecoder. It is merged into any other object, as encoding/json does. If strict is true,
// strictErrs lists duplicate and unknown fields.
func DecodeJSON(data []byte, target any, strict bool) (strictErrs []error, err error) {
	if own, ok := target.(JSONDecoder); ok {
		return own.DecodeJSON(data, strict)
	}
	if strict {
		return kjson.UnmarshalStrict(data, target)
	}
	return nil, kjson.UnmarshalCaseSensitivePreserveInts(data, target)
}
