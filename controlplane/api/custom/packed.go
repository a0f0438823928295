package custom

import (
	"bytes"
	"errors"
	"fmt"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"keelson.dev/keelson/controlplane/api"
)

// The Go types of a schema take 750 bytes for each property, and the schemas of an unused
// definition are never read. So the compact in-memory form (api.Light) of a definition is packed:
// each schema is replaced by a placeholder with the encoded schema. All other fields are unchanged.
// Code that reads the schemas unpacks them first.

// packedMark is the $ref of a packed schema. It cannot occur otherwise: validation rejects every
// $ref, and the registry never stores packed definitions.
const packedMark = "keelson.dev/packed"

// PackedDefinitions returns the compact in-memory form (api.Light) of CustomResourceDefinitions.
func PackedDefinitions() *api.Light {
	type definition = *apiextensionsv1.CustomResourceDefinition
	return &api.Light{
		Pack: func(obj, like api.Object) (api.Object, error) {
			was, _ := like.(definition)
			return packed(obj.(definition), was)
		},
		Is: func(obj api.Object) bool {
			c, ok := obj.(definition)
			return ok && isPacked(c)
		},
		Unpack: func(obj api.Object) (api.Object, error) { return Unpacked(obj.(definition)) },
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

// Pack returns a copy of a definition with its schemas packed. The copy shares other nested values
// with c.
func Pack(c *apiextensionsv1.CustomResourceDefinition) (*apiextensionsv1.CustomResourceDefinition, error) {
	out, err := packed(c, nil)
	if err != nil {
		return nil, err
	}
	return out.(*apiextensionsv1.CustomResourceDefinition), nil
}

// packed returns a copy of c with its schemas packed. Schemas that are equal to those of was, an
// earlier packed state or nil, are shared with it.
func packed(c, was *apiextensionsv1.CustomResourceDefinition) (api.Object, error) {
	out := *c
	out.Spec.Versions = make([]apiextensionsv1.CustomResourceDefinitionVersion, len(c.Spec.Versions))
	for i, v := range c.Spec.Versions {
		if s := v.Schema; s != nil && s.OpenAPIV3Schema != nil && !isPackedSchema(s.OpenAPIV3Schema) {
			data, err := s.OpenAPIV3Schema.Marshal()
			if err != nil {
				return nil, fmt.Errorf("packing the schema of version %s: %w", v.Name, err)
			}
			if v.Schema = sharedSchema(was, i, data); v.Schema == nil {
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

func sharedSchema(was *apiextensionsv1.CustomResourceDefinition, i int, data []byte) *apiextensionsv1.CustomResourceValidation {
	if was == nil || i >= len(was.Spec.Versions) {
		return nil
	}
	s := was.Spec.Versions[i].Schema
	if s == nil || !isPackedSchema(s.OpenAPIV3Schema) || s.OpenAPIV3Schema.Default == nil ||
		!bytes.Equal(s.OpenAPIV3Schema.Default.Raw, data) {
		return nil
	}
	return s
}

// Unpacked returns a copy of a definition with its schemas unpacked, or the definition itself if it
// is not packed.
func Unpacked(c *apiextensionsv1.CustomResourceDefinition) (*apiextensionsv1.CustomResourceDefinition, error) {
	if !isPacked(c) {
		return c, nil
	}
	out := *c
	out.Spec.Versions = make([]apiextensionsv1.CustomResourceDefinitionVersion, len(c.Spec.Versions))
	for i, v := range c.Spec.Versions {
		if v.Schema != nil {
			s, err := SchemaOf(&v)
			if err != nil {
				return nil, fmt.Errorf("the schema of version %s: %w", v.Name, err)
			}
			v.Schema = &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: s}
		}
		out.Spec.Versions[i] = v
	}
	return &out, nil
}

// SchemaOf returns the schema of a version, unpacked if it is packed; nil if the version has none.
func SchemaOf(v *apiextensionsv1.CustomResourceDefinitionVersion) (*apiextensionsv1.JSONSchemaProps, error) {
	if v.Schema == nil {
		return nil, nil
	}
	s := v.Schema.OpenAPIV3Schema
	if !isPackedSchema(s) {
		return s, nil
	}
	if s.Default == nil {
		return nil, errors.New("it says that it is packed, and has no bytes")
	}
	out := &apiextensionsv1.JSONSchemaProps{}
	if err := out.Unmarshal(s.Default.Raw); err != nil {
		return nil, fmt.Errorf("unpacking: %w", err)
	}
	return out, nil
}
