package crd

import (
	"encoding/json"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/kube-openapi/pkg/validation/spec"

	structural "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	openapiv2 "k8s.io/apiextensions-apiserver/pkg/controller/openapi/v2"

	"keelson.dev/keelson/controlplane/api/custom"
)

// schemaOf returns the schema for server-side apply, which includes the fields apiVersion and kind.
func (v *version) schemaOf() (*spec.Schema, error) {
	s, err := v.structural()
	if err != nil {
		return nil, err
	}
	out := &spec.Schema{}
	if s != nil {
		out = s.ToKubeOpenAPI()
	}
	if len(out.Type) == 0 {
		out.Type = spec.StringOrArray{"object"}
	}
	for _, name := range []string{"apiVersion", "kind"} {
		out.SetProperty(name, spec.Schema{SchemaProps: spec.SchemaProps{Type: spec.StringOrArray{"string"}}})
	}
	return out, nil
}

// publishedSchema returns the schema in the form in which Kubernetes publishes it in OpenAPI v3
// (v3=true) or v2. The result has no properties if there is no schema, and in v2 also if unknown
// fields are preserved. Clients then accept any field.
func (v *version) publishedSchema(v3 bool) (*spec.Schema, error) {
	s, err := v.structural()
	if err != nil {
		return nil, err
	}
	if s == nil || !v3 && (s.XPreserveUnknownFields || v.keep) {
		return &spec.Schema{SchemaProps: spec.SchemaProps{Type: spec.StringOrArray{"object"}}}, nil
	}
	s = s.Unfold()
	if !v3 {
		s = openapiv2.ToStructuralOpenAPIV2(s)
		withoutDefaults.Visit(s)
	}
	out := s.ToKubeOpenAPI()
	for _, name := range []string{"apiVersion", "kind"} {
		about := metav1.TypeMeta{}.SwaggerDoc()[name]
		out.SetProperty(name, *spec.StringProperty().WithDescription(about))
	}
	return out, nil
}

// withoutDefaults removes the defaults of a schema; OpenAPI v2 documents do not have them.
var withoutDefaults = &structural.Visitor{Structural: func(s *structural.Structural) bool {
	had := s.Default.Object != nil
	s.Default.Object = nil
	return had
}}

// publishedModel returns the schema that OpenAPI documents contain, without metadata. The caller
// adds the metadata if the schema has properties. It is used as api.Kind.Schema.Model.
func (v *version) publishedModel(v3 bool) (map[string]any, error) {
	s, err := v.publishedSchema(v3)
	if err != nil {
		return nil, err
	}
	delete(s.Properties, "metadata")
	if paths := v.spec.SelectableFields; len(paths) > 0 {
		fields := make([]any, len(paths))
		for i, f := range paths {
			fields[i] = map[string]any{"fieldPath": strings.TrimPrefix(f.JSONPath, ".")}
		}
		s.AddExtension("x-kubernetes-selectable-fields", fields)
	}
	data, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	var out map[string]any
	return out, json.Unmarshal(data, &out)
}

// typeConverter returns the type converter of server-side apply, which merges lists by the keys in
// the schema. Without a valid schema, it deduces the types from the objects.
func (v *version) typeConverter() managedfields.TypeConverter {
	s, err := v.schemaOf()
	if err == nil {
		s.Properties["metadata"] = custom.MetaRef()
		var types managedfields.TypeConverter
		if types, err = custom.TypeConverterForModel(v.gvk, s); err == nil {
			return custom.NewTypeConverter(types)
		}
	}
	return custom.NewTypeConverter(managedfields.NewDeducedTypeConverter())
}
