package crd

import (
	"fmt"
	"regexp/syntax"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxPatternSize is the maximum size of all patterns of a definition, in instructions of the
// compiled programs: about 10 MiB. A repeated group is compiled once per repetition, so a 100 KiB
// pattern can compile to 1 GiB.
const maxPatternSize = 1 << 18

// judgePatterns returns an error if the patterns are too large in total and larger than before; was
// may be nil.
func judgePatterns(now, was *apiextensions.CustomResourceDefinition) field.ErrorList {
	size := patternsOf(now)
	if size <= maxPatternSize || was != nil && size <= patternsOf(was) {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("spec", "versions"),
		fmt.Sprintf("the patterns of the schemas are too large together: at most %d steps are compiled", maxPatternSize))}
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
	return steps(re)
}

func steps(re *syntax.Regexp) int {
	n := 1 + len(re.Rune)
	for _, sub := range re.Sub {
		n += steps(sub)
	}
	if re.Op == syntax.OpRepeat {
		n *= max(re.Min, re.Max, 1)
	}
	return min(n, 1<<30)
}
