// Package fieldrules has the validation rules that several API groups share. Every rule returns the errors that
// Kubernetes returns for the same value.
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

// PartsOfReplicas judges numbers of pods of a status, each of which is a part of all.
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

// Unchanged refuses a change of an immutable part.
func Unchanged(obj, old any, at *field.Path) field.ErrorList {
	return apivalidation.ValidateImmutableField(obj, old, at)
}

// OneOf refuses a value that is not listed; an empty one is Required.
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

// RequiredOneOf refuses an empty value and one that is not allowed, naming the allowed ones in their order.
func RequiredOneOf[T ~string](v T, at *field.Path, allowed ...T) field.ErrorList {
	if v == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return Supported(v, at, allowed...)
}

// RequiredPathSegment refuses what is empty or cannot stand in a path.
func RequiredPathSegment(v string, at *field.Path) field.ErrorList {
	if v == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return Invalid(at, v, pathvalidation.IsValidPathSegmentName(v))
}

// NonNegative refuses a number below zero.
func NonNegative[T ~int32 | ~int64](v T, at *field.Path) field.ErrorList {
	return apivalidation.ValidateNonnegativeField(int64(v), at)
}

// Invalid turns the messages of a syntax check into errors.
func Invalid(at *field.Path, v any, msgs []string) field.ErrorList {
	var errs field.ErrorList
	for _, m := range msgs {
		errs = append(errs, field.Invalid(at, v, m))
	}
	return errs
}

// SemanticEqual reports whether a and b are equal as API values: nil and empty lists are equal, and so are quantities of
// the same amount.
func SemanticEqual(a, b any) bool { return apiequality.Semantic.DeepEqual(a, b) }

// Deref is what p points to, or the zero value.
func Deref[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}

// CountSet is how many of a union's members are set: pointer fields of a struct,
// also of a struct that it embeds.
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

// SortedKeys are the keys of m in order: errors come in the same order every time.
func SortedKeys[K ~string, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// ForbidSet refuses the fields that are set.
func ForbidSet(at *field.Path, msg string, set map[string]bool) field.ErrorList {
	var errs field.ErrorList
	for _, name := range SortedKeys(set) {
		if set[name] {
			errs = append(errs, field.Forbidden(at.Child(name), msg))
		}
	}
	return errs
}

// ValidateDescending refuses a path that leaves the folder it is relative to.
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

// Items judges the items of a list, which are so many at most and of which none has the key of another. A list that is
// too long is not looked at.
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

// SupportedOrRequired is OneOf for values whose absence is answered with the list as well.
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

// RequiredSubdomain refuses a name that is empty or not a subdomain.
func RequiredSubdomain(name string, at *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return Invalid(at, name, apivalidation.NameIsDNSSubdomain(name, false))
}

// Supported refuses a value that is not one of those listed, an empty one too.
func Supported[T ~string](v T, at *field.Path, allowed ...T) field.ErrorList {
	for _, a := range allowed {
		if v == a {
			return nil
		}
	}
	return field.ErrorList{field.NotSupported(at, v, allowed)}
}
