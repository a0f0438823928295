package custom

import (
	"bytes"
	"errors"
	"fmt"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"keelson.dev/keelson/controlplane/api"
)

// The Go types of a schema take 750 bytes for each property, and the schemas of an unused
// definition are never read. So definitions are cached in the light form (api.Light): each schema
// is packed, that is, replaced with a placeholder that contains the schema as protobuf bytes. All
// other fields are unchanged. Code that reads the schemas must call Unpack or UnpackSchema first.

// packedMark is the $ref of the placeholder that replaces a schema. Other schemas cannot have it:
// validation rejects every $ref, and the registry never stores definitions with placeholders.
const packedMark = "keelson.dev/packed"

// PackedDefinitions returns the light form (api.Light) of CustomResourceDefinitions, in which each
// schema is encoded as protobuf bytes.
func PackedDefinitions() *api.Light {
	type definition = *apiextensionsv1.CustomResourceDefinition
	return &api.Light{
		Pack: func(obj, like api.Object) (api.Object, error) {
			previous, _ := like.(definition)
			return packDefinition(obj.(definition), previous)
		},
		Is: func(obj api.Object) bool {
			c, ok := obj.(definition)
			return ok && isPacked(c)
		},
		Unpack: func(obj api.Object) (api.Object, error) { return Unpack(obj.(definition)) },
	}
}

func isPackedSchema(s *apiextensionsv1.JSONSchemaProps) bool {
	return s != nil && s.Ref != nil && *s.Ref == packedMark
}

func isPacked(c *apiextensionsv1.CustomResourceDefinition) bool {
	for i := range c.Spec.Versions {
		if s := c.Spec.Versions[i].Schema; s != nil && isPackedSchema(s.OpenAPIV3Schema) {
			return true
		}
	}
	return false
}

// Pack returns a copy of a definition in which each schema is replaced with a placeholder that
// contains its protobuf bytes. Unpack is the inverse. The copy shares all other nested values with
// the definition.
func Pack(definition *apiextensionsv1.CustomResourceDefinition) (*apiextensionsv1.CustomResourceDefinition, error) {
	out, err := packDefinition(definition, nil)
	if err != nil {
		return nil, err
	}
	return out.(*apiextensionsv1.CustomResourceDefinition), nil
}

// packDefinition is like Pack. earlier is the result for an earlier state of the definition, or
// nil. The result shares equal placeholders with earlier.
func packDefinition(definition, earlier *apiextensionsv1.CustomResourceDefinition) (api.Object, error) {
	out := *definition
	out.Spec.Versions = make([]apiextensionsv1.CustomResourceDefinitionVersion, len(definition.Spec.Versions))
	for i, v := range definition.Spec.Versions {
		if s := v.Schema; s != nil && s.OpenAPIV3Schema != nil && !isPackedSchema(s.OpenAPIV3Schema) {
			data, err := s.OpenAPIV3Schema.Marshal()
			if err != nil {
				return nil, fmt.Errorf("packing the schema of version %s: %w", v.Name, err)
			}
			if v.Schema = sharedSchema(earlier, i, data); v.Schema == nil {
				mark := packedMark
				v.Schema = &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
					Ref: &mark, Default: &apiextensionsv1.JSON{Raw: data},
				}}
			}
		}
		out.Spec.Versions[i] = v
	}
	return &out, nil
}

func sharedSchema(
	old *apiextensionsv1.CustomResourceDefinition, i int, data []byte,
) *apiextensionsv1.CustomResourceValidation {
	if old == nil || i >= len(old.Spec.Versions) {
		return nil
	}
	s := old.Spec.Versions[i].Schema
	if s == nil || !isPackedSchema(s.OpenAPIV3Schema) || s.OpenAPIV3Schema.Default == nil ||
		!bytes.Equal(s.OpenAPIV3Schema.Default.Raw, data) {
		return nil
	}
	return s
}

// Unpack returns a copy of a definition in which the placeholders of Pack are decoded to schemas.
// It returns the definition itself if it has no placeholders.
func Unpack(definition *apiextensionsv1.CustomResourceDefinition) (*apiextensionsv1.CustomResourceDefinition, error) {
	if !isPacked(definition) {
		return definition, nil
	}
	out := *definition
	out.Spec.Versions = make([]apiextensionsv1.CustomResourceDefinitionVersion, len(definition.Spec.Versions))
	for i, v := range definition.Spec.Versions {
		if v.Schema != nil {
			s, err := UnpackSchema(&v)
			if err != nil {
				return nil, fmt.Errorf("the schema of version %s: %w", v.Name, err)
			}
			v.Schema = &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: s}
		}
		out.Spec.Versions[i] = v
	}
	return &out, nil
}

// UnpackSchema returns the schema of a version. It decodes the placeholder of Pack. It returns nil
// if the version has no schema.
func UnpackSchema(version *apiextensionsv1.CustomResourceDefinitionVersion) (*apiextensionsv1.JSONSchemaProps, error) {
	if version.Schema == nil {
		return nil, nil
	}
	s := version.Schema.OpenAPIV3Schema
	if !isPackedSchema(s) {
		return s, nil
	}
	if s.Default == nil {
		return nil, errors.New("it is marked as packed but has no bytes")
	}
	out := &apiextensionsv1.JSONSchemaProps{}
	if err := out.Unmarshal(s.Default.Raw); err != nil {
		return nil, fmt.Errorf("unpacking: %w", err)
	}
	return out, nil
}
