package api

import (
	kjson "sigs.k8s.io/json"
)

// JSONDecoder is an object that reads JSON by rules of its own.
type JSONDecoder interface {
	// DecodeJSON replaces the object by what the document says. told are the fields that are there twice or do not exist;
	// nothing is told unless strict.
	DecodeJSON(data []byte, strict bool) (told []error, err error)
}

// DecodeJSON reads a JSON document into an object, as JSONDecoder says. Into an object without rules of its own it
// merges, as JSON decoders do.
func DecodeJSON(data []byte, into any, strict bool) (told []error, err error) {
	if own, ok := into.(JSONDecoder); ok {
		return own.DecodeJSON(data, strict)
	}
	if strict {
		return kjson.UnmarshalStrict(data, into)
	}
	return nil, kjson.UnmarshalCaseSensitivePreserveInts(data, into)
}
