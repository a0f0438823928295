package fieldrules

import (
	"errors"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// ValidateIntOrPercent returns an error if a value is neither a non-negative number nor a
// percentage such as "25%".
func ValidateIntOrPercent(value intstr.IntOrString, fldPath *field.Path) field.ErrorList {
	if value.Type == intstr.Int {
		return ValidateNonNegative(value.IntVal, fldPath)
	}
	return InvalidErrors(fldPath, value.StrVal, validation.IsValidPercent(value.StrVal))
}

// PercentOf returns the number in a percentage such as "25%", or the largest int if the number
// overflows. It returns false if the value is not a percentage.
func PercentOf(value intstr.IntOrString) (int, bool) {
	digits, ok := strings.CutSuffix(value.StrVal, "%")
	if value.Type != intstr.String || !ok {
		return 0, false
	}
	n, err := strconv.Atoi(digits)
	return n, err == nil || errors.Is(err, strconv.ErrRange)
}

// IsZero reports whether a value is the number 0 or "0%".
func IsZero(value intstr.IntOrString) bool {
	if value.Type == intstr.Int {
		return value.IntVal == 0
	}
	n, ok := PercentOf(value)
	return ok && n == 0
}
