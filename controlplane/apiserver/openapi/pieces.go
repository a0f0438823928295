package openapi

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// form is the OpenAPI version (v2 or v3) and the encoding (JSON or protobuf) of a document.
type form struct{ v3, proto bool }

// description contains the paths and definitions of a topic in one form, and the Go types that they
// reference.
type description struct {
	types       typeSet // types that the topic references
	paths       *piece
	definitions *piece // definitions that belong to the topic only; nil = none
}

type (
	topicKey struct {
		topic
		form form
	}
	typesKey struct {
		types      [sha256.Size]byte
		form       form
		parameters bool // set for the key of the shared parameters; types is then unused
	}
)

// pendingValue is a value that a goroutine computes or has computed. done is closed when value and
// err are set.
type pendingValue[T any] struct {
	done  chan struct{}
	value T
	err   error
}

// beginMaking returns the value of a key, which may still be computed. If mine is true, there was
// no value, and the caller must compute it with finishMaking. The caller holds the lock of the map.
func beginMaking[K comparable, T any](pending map[K]*pendingValue[T], key K) (m *pendingValue[T], mine bool) {
	if m = pending[key]; m != nil {
		return m, false
	}
	m = &pendingValue[T]{done: make(chan struct{})}
	pending[key] = m
	return m, true
}

// finishMaking sets the value m of a key, which beginMaking has returned, to the result of compute.
// If compute fails, it removes the key, so that the next caller tries again.
func finishMaking[K comparable, T any](
	s *Spec, pending map[K]*pendingValue[T], key K, m *pendingValue[T], compute func() (T, error),
) {
	m.err = fmt.Errorf("generation was interrupted")
	defer func() {
		if m.err != nil {
			s.mu.Lock()
			if pending[key] == m {
				delete(pending, key)
			}
			s.mu.Unlock()
		}
		close(m.done)
	}()
	m.value, m.err = compute()
}

// makeOnce returns the value of a key. The first caller computes it with compute; concurrent
// callers with the same key wait for it.
func makeOnce[K comparable, T any](s *Spec, pending map[K]*pendingValue[T], key K, compute func() (T, error)) (
	T, error,
) {
	s.mu.Lock()
	m, mine := beginMaking(pending, key)
	s.mu.Unlock()
	if mine {
		finishMaking(s, pending, key, m, compute)
	}
	<-m.done
	return m.value, m.err
}

// reserveWork waits until the caller may generate a piece. The number of pieces that are generated
// concurrently is limited, because each needs megabytes of memory. The caller must call done.
func (s *Spec) reserveWork() (done func()) {
	s.slots <- struct{}{}
	return func() { <-s.slots }
}

// packCounted is like packPiece, but also counts the bytes of data for freeMemory.
func (s *Spec) packCounted(data []byte) (*piece, error) {
	s.written.Add(int64(len(data)))
	return packPiece(data)
}

// packMembers returns a piece with the members of the JSON object value, without its braces. It
// returns nil for an empty object.
func (s *Spec) packMembers(value any) (*piece, error) {
	data, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	if data = bytes.TrimSpace(data); len(data) <= len("{}") {
		return nil, nil
	}
	return s.packCounted(data[1 : len(data)-1])
}

// describeTopic returns the description of a topic in a form. It is generated at the first call.
func (s *Spec) describeTopic(topic topic, docForm form) (*description, error) {
	return makeOnce(s, s.descriptions, topicKey{topic, docForm}, func() (*description, error) {
		if docForm.proto {
			plain, err := s.describeTopic(topic, form{v3: docForm.v3})
			if err != nil {
				return nil, err
			}
			defer s.reserveWork()()
			return s.inProto(plain, docForm.v3)
		}
		defer s.reserveWork()()
		d := &document{schemas: newSchemas(docForm.v3), paths: object{}}
		if topic.kind != nil {
			d.addKind(topic.kind)
		} else {
			d.addPlace(topic.place)
		}
		out := &description{types: d.types}
		var err error
		if out.paths, err = s.packMembers(d.paths); err != nil {
			return nil, fmt.Errorf("describing the paths of %s: %w", topic.uniqueName(), err)
		}
		if out.definitions, err = s.packMembers(d.defs); err != nil {
			return nil, fmt.Errorf("describing %s: %w", topic.uniqueName(), err)
		}
		return out, nil
	})
}

// sharedDefinitions returns the definitions of a set of Go types. There are few different sets,
// because custom resources reference only types that all kinds reference.
func (s *Spec) sharedDefinitions(types typeSet, docForm form) (*piece, error) {
	return s.sharedBy(types, types.hashKey(), docForm)
}

func (s *Spec) sharedBy(types typeSet, key [sha256.Size]byte, docForm form) (*piece, error) {
	return makeOnce(s, s.definitions, typesKey{types: key, form: docForm}, func() (*piece, error) {
		if docForm.proto {
			plain, err := s.sharedBy(types, key, form{v3: docForm.v3})
			if err != nil {
				return nil, err
			}
			defer s.reserveWork()()
			d, err := s.inProto(&description{definitions: plain}, docForm.v3)
			if err != nil {
				return nil, err
			}
			return d.definitions, nil
		}
		defer s.reserveWork()()
		defs, err := typeDefinitions(types, docForm.v3)
		if err != nil {
			return nil, err
		}
		return s.packMembers(defs)
	})
}

// sections contains the pieces of a document for each of its top-level sections: definitions
// (schemas), paths and parameters.
type sections struct {
	definitions, paths, parameters []*piece
}

func (x *sections) addDescription(d *description) {
	if d.paths != nil {
		x.paths = append(x.paths, d.paths)
	}
	if d.definitions != nil {
		x.definitions = append(x.definitions, d.definitions)
	}
}

// gatherSections returns the sections of a document that describes the selected topics in the form
// docForm.
func (s *Spec) gatherSections(selected []topic, docForm form) (*sections, error) {
	selected = slices.SortedFunc(slices.Values(selected), func(a, b topic) int {
		// a fixed order, because all replicas must have the same hash
		return strings.Compare(a.uniqueName(), b.uniqueName())
	})
	topics, types, err := s.describeAll(selected, docForm)
	if err != nil {
		return nil, err
	}
	out := &sections{}
	shared, err := s.sharedDefinitions(types, docForm)
	if err != nil {
		return nil, err
	}
	if shared != nil {
		out.definitions = append(out.definitions, shared)
	}
	for _, d := range topics {
		out.addDescription(d)
	}
	if !docForm.v3 {
		p, err := s.sharedParameters(docForm)
		if err != nil {
			return nil, err
		}
		out.parameters = []*piece{p}
	}
	return out, nil
}

// describeAll returns the descriptions of all topics, and the union of the types that they
// reference.
func (s *Spec) describeAll(topics []topic, docForm form) ([]*description, typeSet, error) {
	out, types := make([]*description, len(topics)), typeSet{}
	for i, x := range topics {
		d, err := s.describeTopic(x, docForm)
		if err != nil {
			return nil, nil, err
		}
		out[i] = d
		for t, gvks := range d.types {
			types.addType(t)
			maps.Copy(types[t], gvks)
		}
	}
	return out, types, nil
}

// sharedParameters returns the piece with the shared parameters of v2 documents.
func (s *Spec) sharedParameters(docForm form) (*piece, error) {
	return makeOnce(s, s.definitions, typesKey{form: docForm, parameters: true}, func() (*piece, error) {
		p, err := s.packMembers(sharedParameters())
		if err != nil || !docForm.proto {
			return p, err
		}
		x, err := s.sectionsInProto(&sections{parameters: []*piece{p}}, false)
		if err != nil {
			return nil, err
		}
		return x.parameters[0], nil
	})
}

// typesOf returns the v2 JSON definitions of the Go types that topics reference; nil if they
// reference none.
func (s *Spec) typesOf(topics []topic) (*piece, error) {
	_, types, err := s.describeAll(topics, form{})
	if err != nil {
		return nil, err
	}
	return s.sharedDefinitions(types, form{})
}

// bearerToken is the security scheme in v2 documents. Generated clients authenticate with it.
const bearerToken = `{"description":"Bearer Token authentication","in":"header","name":"authorization","type":"apiKey"}`

// asJSONDocument returns the JSON document that consists of these sections and the info section
// info.
func (x *sections) asJSONDocument(v3 bool, info []byte) sequence {
	var out sequence
	section := func(before string, pieces []*piece) {
		out = append(append(out, plainPiece(before)), joinWithCommas(pieces)...)
	}
	if v3 {
		section(`{"components":{"schemas":{`, x.definitions)
		section(`},"securitySchemes":{"BearerToken":`+bearerToken+`}},"info":`+string(info)+
			`,"openapi":"3.0.0","paths":{`, x.paths)
		return append(out, plainPiece("}}"))
	}
	section(`{"definitions":{`, x.definitions)
	if len(x.parameters) > 0 {
		section(`},"parameters":{`, x.parameters)
	}
	section(`},"info":`+string(info)+`,"paths":{`, x.paths)
	return append(out, plainPiece(`},"security":[{"BearerToken":[]}],"securityDefinitions":{"BearerToken":`+bearerToken+
		`},"swagger":"2.0"}`))
}
