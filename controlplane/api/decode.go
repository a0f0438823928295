package api

import (
	kjson "sigs.k8s.io/json"
)

// JSONDecoder is an object with its own JSON decoding rules.
type JSONDecoder interface {
	// DecodeJSON replaces the object by the decoded document. If strict, told lists the document's
	// duplicate and unknown fields; otherwise told is empty.
	DecodeJSON(data []byte, strict bool) (told []error, err error)
}

// DecodeJSON decodes a JSON document into an object. A JSONDecoder is replaced by the document;
// into any other object the document is merged, as encoding/json does. If strict, told lists
// duplicate and unknown fields.
func DecodeJSON(data []byte, into any, strict bool) (told []error, err error) {
	if own, ok := into.(JSONDecoder); ok {
		return own.DecodeJSON(data, strict)
	}
	if strict {
		return kjson.UnmarshalStrict(data, into)
	}
	return nil, kjson.UnmarshalCaseSensitivePreserveInts(data, into)
}
