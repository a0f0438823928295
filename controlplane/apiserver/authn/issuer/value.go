package issuer

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"
	"k8s.io/apiserver/pkg/cel"
)

// celValue returns the claims as a CEL map from claim name to value.
func (c claims) celValue() (traits.Mapper, error) {
	all := make(map[string]any, len(c))
	for name, raw := range c {
		var v any
		if err := json.Unmarshal(raw, &v); err != nil {
			return nil, fmt.Errorf("parse claim %q: %w", name, err)
		}
		all[name] = v
	}
	m, ok := nativeToCEL(all).(traits.Mapper)
	if !ok {
		return nil, errors.New("converting the claims to a CEL value failed")
	}
	return m, nil
}

// nativeToCEL converts a Go value to a CEL value. A map key that is not a CEL identifier can be
// selected by its Kubernetes escape: claims.example__dot__org is the claim "example.org".
func nativeToCEL(v any) ref.Val { return withSpelledKeys(types.DefaultTypeAdapter.NativeToValue(v)) }

func withSpelledKeys(v ref.Val) ref.Val {
	switch v := v.(type) {
	case traits.Mapper:
		return spelledMap{v}
	case traits.Lister:
		return spelledList{v}
	}
	return v
}

type spelledMap struct{ traits.Mapper }

// Find returns the value of a map key. The key may be escaped as in Kubernetes (see nativeToCEL).
func (m spelledMap) Find(key ref.Val) (ref.Val, bool) {
	if s, ok := key.(types.String); ok {
		if plain, ok := cel.Unescape(string(s)); ok {
			key = types.String(plain)
		}
	}
	v, ok := m.Mapper.Find(key)
	if !ok {
		return v, false
	}
	return withSpelledKeys(v), true
}

type spelledList struct{ traits.Lister }

// Get returns the element at index. If it is a map, its keys can be selected by their Kubernetes
// escapes (see nativeToCEL).
func (l spelledList) Get(index ref.Val) ref.Val { return withSpelledKeys(l.Lister.Get(index)) }
