package custom

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"sigs.k8s.io/structured-merge-diff/v6/typed"
)

// Types is a type converter of server-side apply that knows custom objects besides the unstructured ones in which
// clients state what they want: with of's schema, or with managedfields.NewDeducedTypeConverter where none exists.
func Types(of managedfields.TypeConverter) managedfields.TypeConverter { return types{of} }

type types struct{ of managedfields.TypeConverter }

// ObjectToTyped implements managedfields.TypeConverter.
func (t types) ObjectToTyped(obj runtime.Object, opts ...typed.ValidationOptions) (*typed.TypedValue, error) {
	if o, ok := obj.(*Object); ok {
		all, err := o.asMap()
		if err != nil {
			return nil, err
		}
		obj = &unstructured.Unstructured{Object: all}
	}
	return t.of.ObjectToTyped(obj, opts...)
}

// TypedToObject implements managedfields.TypeConverter.
func (t types) TypedToObject(value *typed.TypedValue) (runtime.Object, error) {
	obj, err := t.of.TypedToObject(value)
	if err != nil {
		return nil, err
	}
	u, ok := obj.(*unstructured.Unstructured)
	if !ok {
		return nil, fmt.Errorf("a custom object became a %T", obj)
	}
	return fromMap(u.Object)
}

// Map is the object as one map, which shares the content: it must not be changed.
func (o *Object) Map() (map[string]any, error) { return o.asMap() }

// FromMap is the inverse of Map.
func FromMap(all map[string]any) (*Object, error) { return fromMap(all) }

func (o *Object) asMap() (map[string]any, error) {
	meta, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&o.ObjectMeta)
	if err != nil {
		return nil, fmt.Errorf("reading metadata: %w", err)
	}
	all := map[string]any{"apiVersion": o.APIVersion, "kind": o.Kind, "metadata": meta}
	for name, value := range o.Content {
		if _, ours := all[name]; !ours {
			all[name] = value
		}
	}
	return all, nil
}

// fromMap is the inverse of asMap. The object shares what is below the map, which somebody else may hold.
func fromMap(all map[string]any) (*Object, error) {
	o := &Object{}
	o.APIVersion, _ = all["apiVersion"].(string)
	o.Kind, _ = all["kind"].(string)
	if meta, ok := all["metadata"].(map[string]any); ok {
		into := metav1.ObjectMeta{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(meta, &into); err != nil {
			return nil, fmt.Errorf("metadata: %w", err)
		}
		o.ObjectMeta = into
	}
	for name, value := range all {
		if slices.Contains(own, name) {
			continue
		}
		if o.Content == nil {
			o.Content = make(map[string]any, len(all))
		}
		o.Content[name] = value
	}
	return o, nil
}
