package fieldrules

import (
	"errors"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// ValidateIntOrPercent returns an error if v is neither a non-negative number nor a percentage such
// as "25%".
func ValidateIntOrPercent(v intstr.IntOrString, at *field.Path) field.ErrorList {
	if v.Type == intstr.Int {
		return NonNegative(v.IntVal, at)
	}
	return Invalid(at, v.StrVal, validation.IsValidPercent(v.StrVal))
}

// PercentOf returns the number of a percentage, or the largest int if the number overflows. It
// returns false if v is not a percentage.
func PercentOf(v intstr.IntOrString) (int, bool) {
	digits, ok := strings.CutSuffix(v.StrVal, "%")
	if v.Type != intstr.String || !ok {
		return 0, false
	}
	n, err := strconv.Atoi(digits)
	return n, err == nil || errors.Is(err, strconv.ErrRange)
}

// IsZero reports whether v is the number 0 or "0%".
func IsZero(v intstr.IntOrString) bool {
	if v.Type == intstr.Int {
		return v.IntVal == 0
	}
	n, ok := PercentOf(v)
	return ok && n == 0
}
