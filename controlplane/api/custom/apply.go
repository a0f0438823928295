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

// NewTypeConverter returns a server-side apply converter that supports custom objects in addition
// to unstructured objects. schemaTypes is the converter of the kind's schema. For a kind without a
// schema, pass managedfields.NewDeducedTypeConverter.
func NewTypeConverter(schemaTypes managedfields.TypeConverter) managedfields.TypeConverter {
	return typeConverter{schemaTypes}
}

type typeConverter struct{ of managedfields.TypeConverter }

// ObjectToTyped converts an Object or an unstructured object to a typed value.
func (t typeConverter) ObjectToTyped(obj runtime.Object, opts ...typed.ValidationOptions) (*typed.TypedValue, error) {
	if o, ok := obj.(*Object); ok {
		all, err := o.toMap()
		if err != nil {
			return nil, err
		}
		obj = &unstructured.Unstructured{Object: all}
	}
	return t.of.ObjectToTyped(obj, opts...)
}

// TypedToObject converts a typed value to an *Object.
func (t typeConverter) TypedToObject(value *typed.TypedValue) (runtime.Object, error) {
	obj, err := t.of.TypedToObject(value)
	if err != nil {
		return nil, err
	}
	u, ok := obj.(*unstructured.Unstructured)
	if !ok {
		return nil, fmt.Errorf("a custom object became a %T", obj)
	}
	return objectFromMap(u.Object)
}

// Map returns the object as one map. The map shares the object's content and must not be changed.
func (o *Object) Map() (map[string]any, error) { return o.toMap() }

// FromMap returns the object of a map in the format that Map returns.
func FromMap(document map[string]any) (*Object, error) { return objectFromMap(document) }

func (o *Object) toMap() (map[string]any, error) {
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

// objectFromMap is the inverse of toMap. The object shares the nested values of the map, which
// other objects may share too.
func objectFromMap(document map[string]any) (*Object, error) {
	o := &Object{}
	o.APIVersion, _ = document["apiVersion"].(string)
	o.Kind, _ = document["kind"].(string)
	if meta, ok := document["metadata"].(map[string]any); ok {
		into := metav1.ObjectMeta{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(meta, &into); err != nil {
			return nil, fmt.Errorf("metadata: %w", err)
		}
		o.ObjectMeta = into
	}
	for name, value := range document {
		if slices.Contains(own, name) {
			continue
		}
		if o.Content == nil {
			o.Content = make(map[string]any, len(document))
		}
		o.Content[name] = value
	}
	return o, nil
}
