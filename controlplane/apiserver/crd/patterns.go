package crd

import (
	"fmt"
	"regexp/syntax"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxPatternSize is the maximum total size of the regular expressions in a definition, in
// instructions of their compiled programs. It corresponds to about 10 MiB. A repeated group is
// compiled once per repetition, so a pattern of 100 KiB can compile to 1 GiB.
const maxPatternSize = 1 << 18

// validatePatterns returns an error if the regular expressions of a definition are too large in
// total, and larger than those of the stored definition old; old may be nil.
func validatePatterns(definition, old *apiextensions.CustomResourceDefinition) field.ErrorList {
	size := patternsOf(definition)
	if size <= maxPatternSize || old != nil && size <= patternsOf(old) {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("spec", "versions"),
		fmt.Sprintf("the patterns of all schemas are too large: they may compile to at most %d steps", maxPatternSize))}
}

func patternsOf(c *apiextensions.CustomResourceDefinition) (size int) {
	look := func(s *apiextensions.JSONSchemaProps) bool {
		if s.Pattern != "" {
			size += patternSize(s.Pattern)
		}
		return size > 1<<30
	}
	schema := func(v *apiextensions.CustomResourceValidation) {
		if v != nil && v.OpenAPIV3Schema != nil {
			validation.SchemaHas(v.OpenAPIV3Schema, look)
		}
	}
	schema(c.Spec.Validation)
	for i := range c.Spec.Versions {
		schema(c.Spec.Versions[i].Schema)
	}
	return size
}

// patternSize returns the approximate number of instructions of a compiled pattern. It is 0 for an
// invalid pattern, which other validation rejects.
func patternSize(pattern string) int {
	re, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return 0
	}
	return regexpSteps(re)
}

func regexpSteps(re *syntax.Regexp) int {
	n := 1 + len(re.Rune)
	for _, sub := range re.Sub {
		n += regexpSteps(sub)
	}
	if re.Op == syntax.OpRepeat {
		n *= max(re.Min, re.Max, 1)
	}
	return min(n, 1<<30)
}
