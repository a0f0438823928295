package core

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// LimitRangeKind returns the definition of the kind LimitRange.
func LimitRangeKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "LimitRange", CreateOnUpdate: true, Plural: "limitranges",
		Singular: "limitrange", Short: []string{"limits"},
	}, func(l *corev1.LimitRangeList) *[]corev1.LimitRange { return &l.Items })
	k.Writes.Default = builder.Default(func(r *corev1.LimitRange) {
		for i := range r.Spec.Limits {
			l := &r.Spec.Limits[i]
			defaultLimits(l)
			for _, list := range []corev1.ResourceList{l.Max, l.Min, l.Default, l.DefaultRequest,
				l.MaxLimitRequestRatio} {
				podspec.RoundResources(list)
			}
		}
	})
	builder.AddValidation(k, func(r *corev1.LimitRange) field.ErrorList {
		return validateLimitRange(&r.Spec, field.NewPath("spec", "limits"))
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.CreatedAtColumn)
	k.Lists.Row = builder.Row(func(r *corev1.LimitRange, _ time.Time) []any {
		return []any{r.Name, builder.CreatedAt(r)}
	})
	return k
}

// defaultLimits sets the defaults of a limit for containers. Missing default limits are copied from
// max, and missing default requests from the default limits or else from min.
func defaultLimits(l *corev1.LimitRangeItem) {
	if l.Type != corev1.LimitTypeContainer {
		return
	}
	if l.Default == nil {
		l.Default = corev1.ResourceList{}
	}
	if l.DefaultRequest == nil {
		l.DefaultRequest = corev1.ResourceList{}
	}
	for _, fill := range []struct{ to, from corev1.ResourceList }{{l.Default, l.Max}, {l.DefaultRequest, l.Default},
		{l.DefaultRequest, l.Min}} {
		for name, q := range fill.from {
			if _, ok := fill.to[name]; !ok {
				fill.to[name] = q.DeepCopy()
			}
		}
	}
}

func validateLimitRange(s *corev1.LimitRangeSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[corev1.LimitType]bool{}
	for i := range s.Limits {
		l, here := &s.Limits[i], fldPath.Index(i)
		errs = append(errs, validateLimitType(l.Type, here.Child("type"))...)
		if seen[l.Type] {
			errs = append(errs, field.Duplicate(here.Child("type"), l.Type))
		}
		seen[l.Type] = true
		errs = append(errs, validateLimits(l, here)...)
	}
	return errs
}

func validateLimitType(t corev1.LimitType, fldPath *field.Path) field.ErrorList {
	if errs := fieldrules.InvalidErrors(fldPath, t, utilvalidation.IsQualifiedName(string(t))); len(errs) > 0 {
		return errs
	}
	known := []corev1.LimitType{corev1.LimitTypePod, corev1.LimitTypeContainer, corev1.LimitTypePersistentVolumeClaim}
	if !strings.Contains(string(t), "/") && !slices.Contains(known, t) {
		return field.ErrorList{field.Invalid(fldPath, t, "must be a standard limit type or fully qualified")}
	}
	return nil
}

func validateLimits(l *corev1.LimitRangeItem, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	keys := map[corev1.ResourceName]bool{}
	for _, part := range []struct {
		name string
		list corev1.ResourceList
	}{{"max", l.Max}, {"min", l.Min}, {"default", l.Default}, {"defaultRequest", l.DefaultRequest},
		{"maxLimitRequestRatio", l.MaxLimitRequestRatio}} {
		if l.Type == corev1.LimitTypePod && strings.HasPrefix(part.name, "default") {
			if len(part.list) > 0 {
				errs = append(errs, field.Forbidden(fldPath.Child(part.name),
					"may not be specified when `type` is 'Pod'"))
			}
			continue
		}
		for _, name := range fieldrules.SortedKeys(part.list) {
			keys[name] = true
			here := fldPath.Child(part.name).Key(string(name))
			if l.Type == corev1.LimitTypePod || l.Type == corev1.LimitTypeContainer {
				errs = append(errs, podspec.ValidateContainerResourceName(name, here)...)
			} else {
				errs = append(errs, podspec.ValidateResourceName(name, here)...)
			}
		}
	}
	if l.Type == corev1.LimitTypePersistentVolumeClaim {
		_, least := l.Min[corev1.ResourceStorage]
		_, most := l.Max[corev1.ResourceStorage]
		if !least && !most {
			errs = append(errs, field.Required(fldPath.Child("limits"),
				"either minimum or maximum storage value is required, but neither was provided"))
		}
	}
	for _, name := range fieldrules.SortedKeys(keys) {
		errs = append(errs, validateLimit(l, name, fldPath)...)
	}
	return errs
}

// validateLimit validates the values of one resource: min <= defaultRequest <= default <= max.
func validateLimit(l *corev1.LimitRangeItem, name corev1.ResourceName, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	pick := func(list corev1.ResourceList, unless corev1.LimitType) *resource.Quantity {
		if q, ok := list[name]; ok && l.Type != unless {
			return &q
		}
		return nil
	}
	least, most := pick(l.Min, ""), pick(l.Max, "")
	limit, request := pick(l.Default, corev1.LimitTypePod), pick(l.DefaultRequest, corev1.LimitTypePod)
	order := func(low, high *resource.Quantity, lowName, highName, where string, shown *resource.Quantity) {
		if low != nil && high != nil && low.Cmp(*high) > 0 {
			errs = append(errs, field.Invalid(fldPath.Child(where).Key(string(name)), shown.String(),
				fmt.Sprintf("%s value %s is greater than %s value %s", lowName, low.String(), highName, high.String())))
		}
	}
	order(least, most, "min", "max", "min", least)
	order(least, request, "min", "default request", "defaultRequest", request)
	order(request, most, "default request", "max", "defaultRequest", request)
	order(request, limit, "default request", "default limit", "defaultRequest", request)
	order(least, limit, "min", "default", "default", least)
	order(limit, most, "default", "max", "default", most)
	errs = append(errs, validateRatio(pick(l.MaxLimitRequestRatio, ""), least, most,
		fldPath.Child("maxLimitRequestRatio").Key(string(name)))...)
	if limit != nil && request != nil && !podspec.IsOvercommitAllowed(name) && limit.Cmp(*request) != 0 {
		errs = append(errs, field.Invalid(fldPath.Child("defaultRequest").Key(string(name)), request.String(),
			fmt.Sprintf("default value %s must equal to defaultRequest value %s in %s", limit.String(),
				request.String(), name)))
	}
	return errs
}

func validateRatio(ratio, least, most *resource.Quantity, fldPath *field.Path) field.ErrorList {
	if ratio == nil {
		return nil
	}
	var errs field.ErrorList
	if ratio.Cmp(*resource.NewQuantity(1, resource.DecimalSI)) < 0 {
		errs = append(errs, field.Invalid(fldPath, ratio.String(),
			fmt.Sprintf("ratio %s is less than 1", ratio.String())))
	}
	if least == nil || most == nil || least.IsZero() {
		return errs
	}
	if limit := most.AsApproximateFloat64() / least.AsApproximateFloat64(); ratio.AsApproximateFloat64() > limit {
		errs = append(errs, field.Invalid(fldPath, ratio.String(),
			fmt.Sprintf("ratio %s is greater than max/min = %f", ratio.String(), limit)))
	}
	return errs
}
