// Package fieldrules contains the validation rules that several API groups share. Every rule
// returns the errors that Kubernetes returns for the same value.
package fieldrules

import (
	"fmt"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	pathvalidation "k8s.io/apimachinery/pkg/api/validation/path"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// OmittedValue replaces long or binary values in validation errors.
const OmittedValue = "<value omitted>"

// ValidateReplicaParts validates the numbers of pods in a status, given by field name. Each must be
// between 0 and replicas, the total number of pods.
func ValidateReplicaParts(replicas int32, fldPath *field.Path, counts map[string]int32) field.ErrorList {
	var errs field.ErrorList
	for _, name := range SortedKeys(counts) {
		errs = append(errs, ValidateNonNegative(counts[name], fldPath.Child(name))...)
		if counts[name] > replicas {
			errs = append(errs, field.Invalid(fldPath.Child(name), counts[name],
				"cannot be greater than status.replicas"))
		}
	}
	return errs
}

// ValidateUnchanged returns an error if an immutable field has changed.
func ValidateUnchanged(obj, old any, fldPath *field.Path) field.ErrorList {
	return apivalidation.ValidateImmutableField(obj, old, fldPath)
}

// ValidateOneOf returns an error if a value is not one of the allowed values. For an empty value,
// the error is Required. The error for any other value lists the allowed values sorted.
func ValidateOneOf[T ~string](value T, fldPath *field.Path, allowed ...T) field.ErrorList {
	if value == "" {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	for _, a := range allowed {
		if value == a {
			return nil
		}
	}
	return field.ErrorList{field.NotSupported(fldPath, value, slices.Sorted(slices.Values(allowed)))}
}

// ValidateRequiredOneOf is like ValidateOneOf: it returns a Required error for an empty value, and
// an error for any value that is not allowed. Unlike in ValidateOneOf, that error lists the allowed
// values in the given order.
func ValidateRequiredOneOf[T ~string](value T, fldPath *field.Path, allowed ...T) field.ErrorList {
	if value == "" {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	return ValidateSupported(value, fldPath, allowed...)
}

// ValidateRequiredSegment returns an error if a value is empty or is not valid as a URL path
// segment.
func ValidateRequiredSegment(value string, fldPath *field.Path) field.ErrorList {
	if value == "" {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	return InvalidErrors(fldPath, value, pathvalidation.IsValidPathSegmentName(value))
}

// ValidateNonNegative returns an error if a value is negative.
func ValidateNonNegative[T ~int32 | ~int64](value T, fldPath *field.Path) field.ErrorList {
	return apivalidation.ValidateNonnegativeField(int64(value), fldPath)
}

// InvalidErrors returns an Invalid error for the value with each of the messages.
func InvalidErrors(fldPath *field.Path, value any, messages []string) field.ErrorList {
	var errs field.ErrorList
	for _, m := range messages {
		errs = append(errs, field.Invalid(fldPath, value, m))
	}
	return errs
}

// SemanticEqual reports whether a and b are equal as API values: nil and empty lists are equal, and
// so are quantities of the same amount.
func SemanticEqual(a, b any) bool { return apiequality.Semantic.DeepEqual(a, b) }

// CountSet returns the number of members of a union that are set: the non-nil pointer fields of the
// struct, including those of nested structs.
func CountSet(union any) int {
	n := 0
	v := reflect.ValueOf(union)
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.Pointer:
			if !f.IsNil() {
				n++
			}
		case reflect.Struct:
			n += CountSet(f.Interface())
		}
	}
	return n
}

// SortedKeys returns the keys of m, sorted, so that errors have a stable order.
func SortedKeys[K ~string, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// ForbidSetFields returns a Forbidden error for each field for which isSet is true.
func ForbidSetFields(fldPath *field.Path, msg string, isSet map[string]bool) field.ErrorList {
	var errs field.ErrorList
	for _, name := range SortedKeys(isSet) {
		if isSet[name] {
			errs = append(errs, field.Forbidden(fldPath.Child(name), msg))
		}
	}
	return errs
}

// ValidateDescending returns an error if a path is absolute or contains "..".
func ValidateDescending(filePath string, fldPath *field.Path) field.ErrorList {
	if path.IsAbs(filePath) {
		return field.ErrorList{field.Invalid(fldPath, filePath, "must be a relative path")}
	}
	return ValidateNoBacksteps(filePath, fldPath)
}

// ValidateNoBacksteps returns an error if a path contains the element "..".
func ValidateNoBacksteps(filePath string, fldPath *field.Path) field.ErrorList {
	for _, part := range strings.Split(filePath, "/") {
		if part == ".." {
			return field.ErrorList{field.Invalid(fldPath, filePath, "must not contain '..'")}
		}
	}
	return nil
}

// ValidateItems calls validate for each item of a list and returns the errors. It also returns
// Duplicate errors for items with equal keys, unless key is nil. For a list with more than limit
// items, it returns only that error. A negative limit means no limit.
func ValidateItems[T any](
	list []T, limit int, fldPath *field.Path, key func(T) string, validate func(T, *field.Path) field.ErrorList,
) field.ErrorList {
	if limit >= 0 && len(list) > limit {
		return field.ErrorList{field.TooMany(fldPath, len(list), limit)}
	}
	var errs field.ErrorList
	for i, item := range list {
		errs = append(errs, validate(item, fldPath.Index(i))...)
	}
	if key == nil {
		return errs
	}
	seen := map[string]bool{}
	for i, item := range list {
		if k := key(item); seen[k] {
			errs = append(errs, field.Duplicate(fldPath.Index(i), k))
		} else {
			seen[k] = true
		}
	}
	return errs
}

// SelfKey returns its argument. It is a key function of ValidateItems for lists of strings.
func SelfKey(s string) string { return s }

// ValidateDNSLabel returns an error if a name is not a DNS label.
func ValidateDNSLabel(name string, fldPath *field.Path) field.ErrorList {
	return InvalidErrors(fldPath, name, validation.IsDNS1123Label(name))
}

// ValidateRequiredValue is like ValidateOneOf, but the error for an empty value also lists the
// allowed values.
func ValidateRequiredValue[T ~string](value T, fldPath *field.Path, allowed ...T) field.ErrorList {
	switch {
	case value == "":
		return field.ErrorList{field.Required(fldPath, fmt.Sprintf("valid values: %q", allowed))}
	case !slices.Contains(allowed, value):
		return field.ErrorList{field.NotSupported(fldPath, value, allowed)}
	}
	return nil
}

// ValidateRequiredSubdomain returns an error if a name is empty or not a DNS subdomain.
func ValidateRequiredSubdomain(name string, fldPath *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	return InvalidErrors(fldPath, name, apivalidation.NameIsDNSSubdomain(name, false))
}

// ValidateSupported returns a NotSupported error if a value is not one of the allowed values.
// Unlike ValidateOneOf, it also does so for an empty value.
func ValidateSupported[T ~string](value T, fldPath *field.Path, allowed ...T) field.ErrorList {
	for _, a := range allowed {
		if value == a {
			return nil
		}
	}
	return field.ErrorList{field.NotSupported(fldPath, value, allowed)}
}
