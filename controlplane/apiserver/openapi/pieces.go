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

// form is the version (v2 or v3) and encoding (JSON or protobuf) of a document.
type form struct{ v3, proto bool }

// described is the description of a topic in one form.
type described struct {
	types       typeSet // types that the topic references
	paths       *piece
	definitions *piece // definitions of the topic's own; nil = none
}

type (
	topicKey struct {
		topic
		form form
	}
	typesKey struct {
		types      [sha256.Size]byte
		form       form
		parameters bool // the key of the shared parameters instead of types
	}
)

// making is a value that a goroutine computes or has computed. done is closed when value and err
// are set.
type making[T any] struct {
	done  chan struct{}
	value T
	err   error
}

// begin returns the value of a key, which may still be computed. If mine is true, there was no
// value and the caller must compute it with end. The caller holds the lock of the map.
func begin[K comparable, T any](in map[K]*making[T], key K) (m *making[T], mine bool) {
	if m = in[key]; m != nil {
		return m, false
	}
	m = &making[T]{done: make(chan struct{})}
	in[key] = m
	return m, true
}

// end computes the value of a key after begin. If f fails, the key is removed, so that the next
// caller tries again.
func end[K comparable, T any](s *Spec, in map[K]*making[T], key K, m *making[T], f func() (T, error)) {
	m.err = fmt.Errorf("it was given up")
	defer func() {
		if m.err != nil {
			s.mu.Lock()
			if in[key] == m {
				delete(in, key)
			}
			s.mu.Unlock()
		}
		close(m.done)
	}()
	m.value, m.err = f()
}

// once returns the value of a key. The first caller computes it with f; concurrent callers of the
// same key wait for it.
func once[K comparable, T any](s *Spec, in map[K]*making[T], key K, f func() (T, error)) (T, error) {
	s.mu.Lock()
	m, mine := begin(in, key)
	s.mu.Unlock()
	if mine {
		end(s, in, key, m, f)
	}
	<-m.done
	return m.value, m.err
}

// working waits until another piece may be generated; their number is limited because each needs
// megabytes of memory. The caller must call done.
func (s *Spec) working() (done func()) {
	s.places <- struct{}{}
	return func() { <-s.places }
}

// pack returns data as a compressed piece and counts its bytes for giveBack.
func (s *Spec) pack(data []byte) (*piece, error) {
	s.written.Add(int64(len(data)))
	return pack(data)
}

// members returns a piece with the members of the JSON object of, without its braces. It returns
// nil for an empty object.
func (s *Spec) members(of any) (*piece, error) {
	data, err := json.Marshal(of)
	if err != nil {
		return nil, err
	}
	if data = bytes.TrimSpace(data); len(data) <= len("{}") {
		return nil, nil
	}
	return s.pack(data[1 : len(data)-1])
}

// describe returns the description of a topic in a form, and generates it on first use.
func (s *Spec) describe(of topic, f form) (*described, error) {
	return once(s, s.topicsMade, topicKey{of, f}, func() (*described, error) {
		if f.proto {
			plain, err := s.describe(of, form{v3: f.v3})
			if err != nil {
				return nil, err
			}
			defer s.working()()
			return s.inProto(plain, f.v3)
		}
		defer s.working()()
		d := &document{schemas: newSchemas(f.v3), paths: object{}}
		if of.kind != nil {
			d.add(of.kind)
		} else {
			d.addPlace(of.place)
		}
		out := &described{types: d.types}
		var err error
		if out.paths, err = s.members(d.paths); err != nil {
			return nil, fmt.Errorf("describing the paths of %s: %w", of.name(), err)
		}
		if out.definitions, err = s.members(d.defs); err != nil {
			return nil, fmt.Errorf("describing %s: %w", of.name(), err)
		}
		return out, nil
	})
}

// shared returns the definitions of a set of Go types. Few different sets occur, because custom
// resources reference types that all kinds reference.
func (s *Spec) shared(types typeSet, f form) (*piece, error) {
	return s.sharedBy(types, types.key(), f)
}

func (s *Spec) sharedBy(types typeSet, key [sha256.Size]byte, f form) (*piece, error) {
	return once(s, s.typesMade, typesKey{types: key, form: f}, func() (*piece, error) {
		if f.proto {
			plain, err := s.sharedBy(types, key, form{v3: f.v3})
			if err != nil {
				return nil, err
			}
			defer s.working()()
			d, err := s.inProto(&described{definitions: plain}, f.v3)
			if err != nil {
				return nil, err
			}
			return d.definitions, nil
		}
		defer s.working()()
		defs, err := definitions(types, f.v3)
		if err != nil {
			return nil, err
		}
		return s.members(defs)
	})
}

// sections are the pieces of a document by section.
type sections struct {
	definitions, paths, parameters []*piece
}

func (x *sections) add(d *described) {
	if d.paths != nil {
		x.paths = append(x.paths, d.paths)
	}
	if d.definitions != nil {
		x.definitions = append(x.definitions, d.definitions)
	}
}

// gather returns the sections of a document in form f about the given topics.
func (s *Spec) gather(of []topic, f form) (*sections, error) {
	of = slices.SortedFunc(slices.Values(of), func(a, b topic) int { // a fixed order, because all replicas must have the same hash
		return strings.Compare(a.name(), b.name())
	})
	topics, types, err := s.describeAll(of, f)
	if err != nil {
		return nil, err
	}
	out := &sections{}
	shared, err := s.shared(types, f)
	if err != nil {
		return nil, err
	}
	if shared != nil {
		out.definitions = append(out.definitions, shared)
	}
	for _, d := range topics {
		out.add(d)
	}
	if !f.v3 {
		p, err := s.parameters(f)
		if err != nil {
			return nil, err
		}
		out.parameters = []*piece{p}
	}
	return out, nil
}

// describeAll returns the descriptions of topics and the union of the types that they reference.
func (s *Spec) describeAll(of []topic, f form) ([]*described, typeSet, error) {
	out, types := make([]*described, len(of)), typeSet{}
	for i, x := range of {
		d, err := s.describe(x, f)
		if err != nil {
			return nil, nil, err
		}
		out[i] = d
		for t, gvks := range d.types {
			types.add(t)
			maps.Copy(types[t], gvks)
		}
	}
	return out, types, nil
}

// parameters returns the piece with the shared parameters of v2 documents.
func (s *Spec) parameters(f form) (*piece, error) {
	return once(s, s.typesMade, typesKey{form: f, parameters: true}, func() (*piece, error) {
		p, err := s.members(sharedParameters())
		if err != nil || !f.proto {
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
func (s *Spec) typesOf(of []topic) (*piece, error) {
	_, types, err := s.describeAll(of, form{})
	if err != nil {
		return nil, err
	}
	return s.shared(types, form{})
}

// bearerToken is the security scheme in documents, by which generated clients authenticate.
const bearerToken = `{"description":"Bearer Token authentication","in":"header","name":"authorization","type":"apiKey"}`

// plain returns the JSON document with these sections. info is its info section.
func (x *sections) plain(v3 bool, info []byte) sequence {
	var out sequence
	section := func(before string, pieces []*piece) {
		out = append(append(out, words(before)), listed(pieces)...)
	}
	if v3 {
		section(`{"components":{"schemas":{`, x.definitions)
		section(`},"securitySchemes":{"BearerToken":`+bearerToken+`}},"info":`+string(info)+`,"openapi":"3.0.0","paths":{`, x.paths)
		return append(out, words("}}"))
	}
	section(`{"definitions":{`, x.definitions)
	if len(x.parameters) > 0 {
		section(`},"parameters":{`, x.parameters)
	}
	section(`},"info":`+string(info)+`,"paths":{`, x.paths)
	return append(out, words(`},"security":[{"BearerToken":[]}],"securityDefinitions":{"BearerToken":`+bearerToken+`},"swagger":"2.0"}`))
}
