// Package fieldrules has the validation rules that several API groups share. Every rule returns the
// errors that Kubernetes returns for the same value.
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

// PartsOfReplicas validates the pod counts of a status, by field name: each must be between 0 and
// all, the total.
func PartsOfReplicas(all int32, at *field.Path, of map[string]int32) field.ErrorList {
	var errs field.ErrorList
	for _, name := range SortedKeys(of) {
		errs = append(errs, NonNegative(of[name], at.Child(name))...)
		if of[name] > all {
			errs = append(errs, field.Invalid(at.Child(name), of[name], "cannot be greater than status.replicas"))
		}
	}
	return errs
}

// Unchanged returns an error if an immutable field has changed.
func Unchanged(obj, old any, at *field.Path) field.ErrorList {
	return apivalidation.ValidateImmutableField(obj, old, at)
}

// OneOf returns an error if v is not one of the allowed values. An empty value is Required. The
// error lists the allowed values sorted.
func OneOf[T ~string](v T, at *field.Path, allowed ...T) field.ErrorList {
	if v == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	for _, a := range allowed {
		if v == a {
			return nil
		}
	}
	return field.ErrorList{field.NotSupported(at, v, slices.Sorted(slices.Values(allowed)))}
}

// RequiredOneOf is OneOf with the allowed values listed in the given order.
func RequiredOneOf[T ~string](v T, at *field.Path, allowed ...T) field.ErrorList {
	if v == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return Supported(v, at, allowed...)
}

// RequiredPathSegment returns an error if v is empty or is not valid as a URL path segment.
func RequiredPathSegment(v string, at *field.Path) field.ErrorList {
	if v == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return Invalid(at, v, pathvalidation.IsValidPathSegmentName(v))
}

// NonNegative returns an error if v is negative.
func NonNegative[T ~int32 | ~int64](v T, at *field.Path) field.ErrorList {
	return apivalidation.ValidateNonnegativeField(int64(v), at)
}

// Invalid returns an Invalid error for each message of a syntax check.
func Invalid(at *field.Path, v any, msgs []string) field.ErrorList {
	var errs field.ErrorList
	for _, m := range msgs {
		errs = append(errs, field.Invalid(at, v, m))
	}
	return errs
}

// SemanticEqual reports whether a and b are equal as API values: nil and empty lists are equal, and
// so are quantities of the same amount.
func SemanticEqual(a, b any) bool { return apiequality.Semantic.DeepEqual(a, b) }

// Deref returns *p, or the zero value if p is nil.
func Deref[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}

// CountSet returns the number of members of a union that are set: non-nil pointer fields of the
// struct, including nested structs.
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

// ForbidSet returns a Forbidden error for each field that is true in set.
func ForbidSet(at *field.Path, msg string, set map[string]bool) field.ErrorList {
	var errs field.ErrorList
	for _, name := range SortedKeys(set) {
		if set[name] {
			errs = append(errs, field.Forbidden(at.Child(name), msg))
		}
	}
	return errs
}

// ValidateDescending returns an error if a path is absolute or contains "..".
func ValidateDescending(p string, at *field.Path) field.ErrorList {
	if path.IsAbs(p) {
		return field.ErrorList{field.Invalid(at, p, "must be a relative path")}
	}
	return NoBacksteps(p, at)
}

// NoBacksteps returns an error if a path contains the element "..".
func NoBacksteps(p string, at *field.Path) field.ErrorList {
	for _, part := range strings.Split(p, "/") {
		if part == ".." {
			return field.ErrorList{field.Invalid(at, p, "must not contain '..'")}
		}
	}
	return nil
}

// Items validates the items of a list with judge. It returns Duplicate errors for items with equal
// keys, unless key is nil. A list with more than limit items gets only that error; a negative limit
// means no limit.
func Items[T any](list []T, limit int, at *field.Path, key func(T) string, judge func(T, *field.Path) field.ErrorList) field.ErrorList {
	if limit >= 0 && len(list) > limit {
		return field.ErrorList{field.TooMany(at, len(list), limit)}
	}
	var errs field.ErrorList
	for i, item := range list {
		errs = append(errs, judge(item, at.Index(i))...)
	}
	if key == nil {
		return errs
	}
	seen := map[string]bool{}
	for i, item := range list {
		if k := key(item); seen[k] {
			errs = append(errs, field.Duplicate(at.Index(i), k))
		} else {
			seen[k] = true
		}
	}
	return errs
}

// Itself returns its argument. It is the key function for lists of strings.
func Itself(s string) string { return s }

// DNSLabel returns an error if a name is not a DNS label.
func DNSLabel(name string, at *field.Path) field.ErrorList {
	return Invalid(at, name, validation.IsDNS1123Label(name))
}

// SupportedOrRequired is OneOf, except that the error for an empty value also lists the allowed
// values.
func SupportedOrRequired[T ~string](v T, at *field.Path, allowed ...T) field.ErrorList {
	switch {
	case v == "":
		return field.ErrorList{field.Required(at, fmt.Sprintf("valid values: %q", allowed))}
	case !slices.Contains(allowed, v):
		return field.ErrorList{field.NotSupported(at, v, allowed)}
	}
	return nil
}

// IsTrue reports whether b points to true.
func IsTrue(b *bool) bool { return b != nil && *b }

// RequiredSubdomain returns an error if a name is empty or not a DNS subdomain.
func RequiredSubdomain(name string, at *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return Invalid(at, name, apivalidation.NameIsDNSSubdomain(name, false))
}

// Supported returns an error if v is not one of the allowed values. Unlike OneOf, it returns
// NotSupported for an empty value too.
func Supported[T ~string](v T, at *field.Path, allowed ...T) field.ErrorList {
	for _, a := range allowed {
		if v == a {
			return nil
		}
	}
	return field.ErrorList{field.NotSupported(at, v, allowed)}
}
