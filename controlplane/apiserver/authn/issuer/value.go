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

// value returns the claims as a CEL map.
func (c claims) value() (traits.Mapper, error) {
	all := make(map[string]any, len(c))
	for name, raw := range c {
		var v any
		if err := json.Unmarshal(raw, &v); err != nil {
			return nil, fmt.Errorf("parse claim %q: %w", name, err)
		}
		all[name] = v
	}
	m, ok := native(all).(traits.Mapper)
	if !ok {
		return nil, errors.New("the claims cannot be shown to an expression")
	}
	return m, nil
}

// native converts a Go value to a CEL value. A map key that is not a CEL identifier can be selected
// by its Kubernetes escape: claims.example__dot__org is the claim "example.org".
func native(v any) ref.Val { return spelled(types.DefaultTypeAdapter.NativeToValue(v)) }

func spelled(v ref.Val) ref.Val {
	switch v := v.(type) {
	case traits.Mapper:
		return spelledMap{v}
	case traits.Lister:
		return spelledList{v}
	}
	return v
}

type spelledMap struct{ traits.Mapper }

// Find returns the value of the unescaped key.
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
	return spelled(v), true
}

type spelledList struct{ traits.Lister }

// Get returns the element at index, with escaped map keys as in native.
func (l spelledList) Get(index ref.Val) ref.Val { return spelled(l.Lister.Get(index)) }
