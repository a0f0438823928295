package crd

import (
	"encoding/json"

	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/kube-openapi/pkg/validation/spec"

	openapiv2 "k8s.io/apiextensions-apiserver/pkg/controller/openapi/v2"

	"keelson.dev/keelson/controlplane/api/custom"
)

// schemaOf is the schema as OpenAPI has it, with the fields that every object has.
func (v *version) schemaOf(v3 bool) (*spec.Schema, error) {
	s, err := v.structural()
	if err != nil {
		return nil, err
	}
	out := &spec.Schema{}
	if s != nil {
		if !v3 {
			s = openapiv2.ToStructuralOpenAPIV2(s)
		}
		out = s.ToKubeOpenAPI()
	}
	if len(out.Type) == 0 {
		out.Type = spec.StringOrArray{"object"}
	}
	if out.Properties == nil {
		out.Properties = map[string]spec.Schema{}
	}
	for name, about := range map[string]string{
		"apiVersion": "APIVersion defines the versioned schema of this representation of an object.",
		"kind":       "Kind is a string value representing the REST resource this object represents.",
	} {
		out.Properties[name] = spec.Schema{SchemaProps: spec.SchemaProps{Type: spec.StringOrArray{"string"}, Description: about}}
	}
	return out, nil
}

// model is api.Kind.Model. What stands for metadata is the caller's to add.
func (v *version) model(v3 bool) (map[string]any, error) {
	s, err := v.schemaOf(v3)
	if err != nil {
		return nil, err
	}
	delete(s.Properties, "metadata")
	data, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	var out map[string]any
	return out, json.Unmarshal(data, &out)
}

// types is the converter of server-side apply, which merges lists by the keys of the schema.
func (v *version) types() managedfields.TypeConverter {
	s, err := v.schemaOf(true)
	if err == nil {
		s.Properties["metadata"] = custom.MetaRef()
		var types managedfields.TypeConverter
		if types, err = custom.TypesOf(v.gvk, s); err == nil {
			return custom.Types(types)
		}
	}
	return custom.Types(managedfields.NewDeducedTypeConverter())
}
