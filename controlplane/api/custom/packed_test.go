package custom

import (
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

func manyVersions() *apiextensionsv1.CustomResourceDefinition {
	most, yes := int64(3), true
	schema := func(about string) *apiextensionsv1.CustomResourceValidation {
		return &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
			Type: "object", Description: about, XPreserveUnknownFields: &yes,
			Properties: map[string]apiextensionsv1.JSONSchemaProps{
				"a": {Type: "string", MaxLength: &most, Default: &apiextensionsv1.JSON{Raw: []byte(`"x"`)},
					Enum: []apiextensionsv1.JSON{{Raw: []byte(`"x"`)}}},
				"b": {Type: "array",
					Items: &apiextensionsv1.JSONSchemaPropsOrArray{
						Schema: &apiextensionsv1.JSONSchemaProps{Type: "integer"}}},
				"c": {Type: "object", AdditionalProperties: &apiextensionsv1.JSONSchemaPropsOrBool{Allows: true},
					XValidations: apiextensionsv1.ValidationRules{{Rule: "self == self", Message: "m"}}},
			},
		}}
	}
	c := &apiextensionsv1.CustomResourceDefinition{}
	c.Name, c.Generation = "as.example.com", 2
	c.Spec.Versions = []apiextensionsv1.CustomResourceDefinitionVersion{
		{Name: "v1", Served: true, Storage: true, Schema: schema("one")}, {Name: "v2"},
		{Name: "v3", Schema: &apiextensionsv1.CustomResourceValidation{}}, {Name: "v4", Schema: schema("four")},
	}
	return c
}

// A definition comes out of its packed form as it was, also when that was copied, and is not changed by being packed.
func TestPackedDefinitions(t *testing.T) {
	was := manyVersions()
	light := PackedDefinitions()
	packed, err := light.Pack(was, nil)
	if err != nil {
		t.Fatal(err)
	}
	if light.Is(was) || !light.Is(packed) || !equality.Semantic.DeepEqual(was, manyVersions()) {
		t.Fatalf("it is packed: %v, %v; or it was changed: %+v", light.Is(was), light.Is(packed), was)
	}
	for _, from := range []*apiextensionsv1.CustomResourceDefinition{
		packed.(*apiextensionsv1.CustomResourceDefinition),
		packed.(*apiextensionsv1.CustomResourceDefinition).DeepCopy(),
	} {
		if !light.Is(from) {
			t.Fatal("a copy of a packed definition does not say that it is one")
		}
		whole, err := Unpack(from)
		if err != nil || !equality.Semantic.DeepEqual(whole, was) {
			t.Errorf("unpacked: %+v, %v", whole, err)
		}
		again, err := Pack(from)
		if err != nil || !equality.Semantic.DeepEqual(again, from) {
			t.Errorf("packed again: %+v, %v", again, err)
		}
	}
}

// States of a definition share the schemas that they have alike, and no others.
func TestPackedStatesShare(t *testing.T) {
	light := PackedDefinitions()
	before, err := light.Pack(manyVersions(), nil)
	if err != nil {
		t.Fatal(err)
	}
	next := manyVersions()
	next.Spec.Versions[3].Schema.OpenAPIV3Schema.Description = "another"
	after, err := light.Pack(next, before)
	if err != nil {
		t.Fatal(err)
	}
	a, b := before.(*apiextensionsv1.CustomResourceDefinition), after.(*apiextensionsv1.CustomResourceDefinition)
	if a.Spec.Versions[0].Schema != b.Spec.Versions[0].Schema {
		t.Error("a schema that stayed is there twice")
	}
	if whole, err := Unpack(b); err != nil || whole.Spec.Versions[3].Schema.OpenAPIV3Schema.Description != "another" {
		t.Errorf("%+v, %v", whole, err)
	}
}

// What is no schema in its packed form is an error, not a definition without a schema.
func TestDamagedPackedDefinition(t *testing.T) {
	c, err := Pack(manyVersions())
	if err != nil {
		t.Fatal(err)
	}
	c.Spec.Versions[0].Schema.OpenAPIV3Schema.Default.Raw = []byte{0xff, 0xff}
	if whole, err := Unpack(c); err == nil {
		t.Errorf("unpacked: %+v", whole)
	}
	c.Spec.Versions[0].Schema.OpenAPIV3Schema.Default = nil
	if whole, err := Unpack(c); err == nil {
		t.Errorf("unpacked: %+v", whole)
	}
}
