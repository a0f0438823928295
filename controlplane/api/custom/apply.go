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

// Types returns a server-side apply converter that supports custom objects in addition to
// unstructured ones. of is the converter of the kind's schema, or
// managedfields.NewDeducedTypeConverter for a kind without one.
func Types(of managedfields.TypeConverter) managedfields.TypeConverter { return types{of} }

type types struct{ of managedfields.TypeConverter }

// ObjectToTyped converts an Object or an unstructured object to a typed value.
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

// TypedToObject converts a typed value to an *Object.
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

// Map returns the object as one map. The map shares the object's content and must not be changed.
func (o *Object) Map() (map[string]any, error) { return o.asMap() }

// FromMap returns the object of a map in the form that Map returns.
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

// fromMap is the inverse of asMap. The object shares the nested values of the map, which other
// objects may share too.
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
