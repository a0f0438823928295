package policies

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"
	"google.golang.org/protobuf/types/known/structpb"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	celmutation "k8s.io/apiserver/pkg/cel/mutation"
	"k8s.io/apiserver/pkg/cel/mutation/dynamic"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
	"sigs.k8s.io/structured-merge-diff/v6/schema"
	"sigs.k8s.io/structured-merge-diff/v6/typed"
	"sigs.k8s.io/structured-merge-diff/v6/value"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/internal/jsonpatch"
)

// operation is one operation of a JSON patch.
type operation struct {
	Op    string          `json:"op"`
	Path  string          `json:"path"`
	From  string          `json:"from,omitempty"`
	Value json.RawMessage `json:"value,omitempty"`
}

// jsonPatch returns old after the JSON patch operations in the result v of an expression. It
// returns nil without an error if there are no operations or if a test operation fails.
func (m *mutation) jsonPatch(ctx context.Context, t matching.Target, old runtime.Object, v ref.Val) (
	runtime.Object, error,
) {
	ops, err := jsonPatchOperations(v)
	if err != nil || len(ops) == 0 {
		return nil, err
	}
	patch, err := json.Marshal(ops)
	if err != nil {
		return nil, err
	}
	doc, err := json.Marshal(old)
	if err != nil {
		return nil, err
	}
	data, err := jsonpatch.Apply(ctx, doc, patch, decodelimits.MaxBytes)
	if err != nil && strings.HasPrefix(err.Error(), "testing value ") {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("JSON Patch: %w", err)
	}
	return m.decodePatched(t, old, data)
}

// decodePatched decodes an object from the JSON that a patch of old produced. Unknown fields and a
// changed kind are errors.
func (m *mutation) decodePatched(t matching.Target, old runtime.Object, data []byte) (runtime.Object, error) {
	next := m.engine.cfg.Versions.New(m.attempt, t.Kind)
	if next == nil {
		return nil, fmt.Errorf("%v is not served", t.Kind)
	}
	if err := decodelimits.CheckJSON(data, next); err != nil {
		return nil, err
	}
	told, err := api.DecodeJSON(data, next, true)
	if err != nil {
		return nil, api.DescribeMismatch(data, next, err)
	}
	if len(told) > 0 {
		return nil, fmt.Errorf("strict decoding error: %w", errors.Join(told...))
	}
	if gvk := next.GetObjectKind().GroupVersionKind(); gvk != old.GetObjectKind().GroupVersionKind() {
		return nil, fmt.Errorf("the patch returns a %v for a %v", gvk, t.Kind)
	}
	return next, nil
}

func jsonPatchOperations(v ref.Val) ([]operation, error) {
	list, ok := v.(traits.Lister)
	if !ok {
		return nil, errors.New("type mismatch: JSONPatchType.expression should evaluate to array")
	}
	var ops []operation
	for it := list.Iterator(); it.HasNext() == types.True; {
		native, err := it.Next().ConvertToNative(reflect.TypeFor[*celmutation.JSONPatchVal]())
		one, ok := native.(*celmutation.JSONPatchVal)
		if err != nil || !ok {
			return nil, errors.New("type mismatch: JSONPatchType.expression should evaluate to array of JSONPatch")
		}
		if len(ops) == jsonpatch.MaxOps {
			return nil, fmt.Errorf("%w: a JSON patch may have at most %d operations", jsonpatch.ErrTooLarge,
				jsonpatch.MaxOps)
		}
		op := operation{Op: one.Op, Path: one.Path, From: one.From}
		if one.Val != nil {
			if op.Value, err = plainJSON(one.Val); err != nil {
				return nil, err
			}
		}
		ops = append(ops, op)
	}
	return ops, nil
}

// plainJSON returns the value of a JSON patch operation, which is a CEL value, as JSON.
func plainJSON(v ref.Val) (json.RawMessage, error) {
	if o, ok := v.(*dynamic.ObjectVal); ok {
		if err := o.CheckTypeNamesMatchFieldPathNames(); err != nil {
			return nil, fmt.Errorf("type mismatch: %w", err)
		}
	}
	native, err := v.ConvertToNative(reflect.TypeFor[*structpb.Value]())
	if err == nil {
		var data []byte
		if data, err = json.Marshal(native); err == nil {
			return data, nil
		}
	}
	return nil, fmt.Errorf("JSONPath valueExpression evaluated to a type that could not marshal to JSON: %w", err)
}

// mergeApply merges the ApplyConfiguration that an expression returned into old, by the rules of
// server-side apply.
func (m *mutation) mergeApply(t matching.Target, old runtime.Object, v ref.Val) (runtime.Object, error) {
	o, ok := v.(*dynamic.ObjectVal)
	if !ok {
		return nil, fmt.Errorf("unsupported return type from ApplyConfiguration expression: %v", v.Type())
	}
	if err := o.CheckTypeNamesMatchFieldPathNames(); err != nil {
		return nil, fmt.Errorf("type mismatch: %w", err)
	}
	content, ok := o.Value().(map[string]any)
	if !ok {
		return nil, fmt.Errorf("invalid return type: %T", o.Value())
	}
	k := m.engine.cfg.Versions.Kinds.ByGVK(t.Kind)
	if k == nil || m.engine.cfg.Types == nil || k.GVK != t.Kind {
		return nil, fmt.Errorf("the schema of %v is unknown", t.Kind)
	}
	patch := &unstructured.Unstructured{Object: content}
	patch.SetGroupVersionKind(t.Kind)
	converter := m.engine.cfg.Types(k)
	wanted, err := converter.ObjectToTyped(patch)
	if err != nil {
		return nil, fmt.Errorf("error applying patch: failed to convert patch object to typed object: %w", err)
	}
	if found := atomicPaths(nil, wanted.Schema(), wanted.TypeRef(), wanted.AsValue()); len(found) > 0 {
		return nil,
			fmt.Errorf("error applying patch: invalid ApplyConfiguration: may not mutate atomic arrays, "+
				"maps or structs: %v",
				strings.Join(found, ", "))
	}
	live, err := converter.ObjectToTyped(old, typed.AllowDuplicates)
	if err != nil {
		return nil, fmt.Errorf("error applying patch: failed to convert original object to typed object: %w", err)
	}
	merged, err := live.Merge(wanted)
	if err != nil {
		return nil, fmt.Errorf("error applying patch: failed to merge patch: %w", err)
	}
	data, err := json.Marshal(merged.AsValue().Unstructured())
	if err != nil {
		return nil, fmt.Errorf("error applying patch: %w", err)
	}
	return m.decodePatched(t, old, data)
}

// atomicPaths returns the paths of atomic lists, maps and structs in an ApplyConfiguration. These
// can only be replaced as a whole: a merge would drop the entries that the ApplyConfiguration does
// not contain.
func atomicPaths(path fieldpath.Path, s *schema.Schema, t schema.TypeRef, v value.Value) (found []string) {
	a, ok := s.Resolve(t)
	if !ok || v == nil {
		return nil
	}
	if v.IsMap() && a.Map != nil {
		if a.Map.ElementRelationship == schema.Atomic {
			found = append(found, path.String())
		}
		v.AsMap().Iterate(func(key string, below value.Value) bool {
			of := a.Map.ElementType
			if f, ok := a.Map.FindField(key); ok {
				of = f.Type
			}
			found = append(found, atomicPaths(append(path[:len(path):len(path)],
				fieldpath.PathElement{FieldName: &key}), s, of, below)...)
			return true
		})
	}
	if v.IsList() && a.List != nil {
		if a.List.ElementRelationship == schema.Atomic {
			found = append(found, path.String())
		}
		list := v.AsList()
		for i := range list.Length() {
			at := append(path[:len(path):len(path)], fieldpath.PathElement{Index: &i})
			found = append(found, atomicPaths(at, s, a.List.ElementType, list.At(i))...)
		}
	}
	return found
}
