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

// form is how documents are written.
type form struct{ v3, proto bool }

// described is what documents of one form say of a topic.
type described struct {
	types       typeSet // that it refers to
	paths       *piece
	definitions *piece // of its own; nil = none
}

type (
	topicKey struct {
		topic
		form form
	}
	typesKey struct {
		types      [sha256.Size]byte
		form       form
		parameters bool // the shared parameters, not types
	}
)

// making is a value of which the making has begun.
type making[T any] struct {
	done  chan struct{}
	value T
	err   error
}

// begin returns what stands under a key; mine says that there was nothing, and that the caller makes it now. The caller
// holds the lock of the table.
func begin[K comparable, T any](in map[K]*making[T], key K) (m *making[T], mine bool) {
	if m = in[key]; m != nil {
		return m, false
	}
	m = &making[T]{done: make(chan struct{})}
	in[key] = m
	return m, true
}

// end makes what has been begun. What fails is forgotten, so that the next who asks tries again.
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

// once returns what stands under a key. Who asks first makes it, the others wait for that; for another key nobody waits.
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

// working bounds what is made at once: each has megabytes at hand.
func (s *Spec) working() (done func()) {
	s.places <- struct{}{}
	return func() { <-s.places }
}

// pack compresses a piece, and counts it.
func (s *Spec) pack(data []byte) (*piece, error) {
	s.written.Add(int64(len(data)))
	return pack(data)
}

// members is a piece of the members of a JSON object, without its braces; nil of none.
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

// describe returns what documents of a form say of a topic.
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

// shared returns the definitions of Go types. There are few sets of them: the kinds that come and go refer to those that
// all kinds refer to.
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

// sections are the pieces of which a document consists.
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

// gather collects what a document of a form says of topics.
func (s *Spec) gather(of []topic, f form) (*sections, error) {
	of = slices.SortedFunc(slices.Values(of), func(a, b topic) int { // replicas must agree on the hash
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

// describeAll describes topics, and collects the types that they refer to.
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

// parameters returns the shared parameters of v2 documents.
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

// typesOf are the definitions of the Go types to which topics refer in v2, in JSON; nil when none exist.
func (s *Spec) typesOf(of []topic) (*piece, error) {
	_, types, err := s.describeAll(of, form{})
	if err != nil {
		return nil, err
	}
	return s.shared(types, form{})
}

// bearerToken is how clients authenticate that generators make.
const bearerToken = `{"description":"Bearer Token authentication","in":"header","name":"authorization","type":"apiKey"}`

// plain puts a document in JSON together.
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
