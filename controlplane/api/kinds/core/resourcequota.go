package core

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// ResourceQuotaKind returns the definition of the kind ResourceQuota.
func ResourceQuotaKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "ResourceQuota", Plural: "resourcequotas",
		Singular: "resourcequota", Short: []string{"quota"},
	}, func(l *corev1.ResourceQuotaList) *[]corev1.ResourceQuota { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	k.Writes.Default = builder.Default(func(q *corev1.ResourceQuota) {
		podspec.RoundResources(q.Spec.Hard)
		podspec.RoundResources(q.Status.Hard)
		podspec.RoundResources(q.Status.Used)
	})
	builder.SeparateSpecAndStatus(k, func(q *corev1.ResourceQuota) *corev1.ResourceQuotaSpec { return &q.Spec },
		func(q *corev1.ResourceQuota) *corev1.ResourceQuotaStatus { return &q.Status })
	builder.OmitGeneration(k)
	builder.AddValidation(k, func(q *corev1.ResourceQuota) field.ErrorList {
		return validateQuota(&q.Spec,
			field.NewPath("spec"))
	})
	builder.AddUpdateValidation(k, func(obj, old *corev1.ResourceQuota) field.ErrorList {
		if slices.Equal(quotaScopes(&obj.Spec), quotaScopes(&old.Spec)) {
			return nil
		}
		return field.ErrorList{field.Invalid(field.NewPath("spec", "scopes"), obj.Spec.Scopes,
			validation.FieldImmutableErrorMsg)}
	})
	validateMeta := k.Subresources["status"].ValidateUpdate
	k.Subresources["status"].ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		s, fldPath := &obj.(*corev1.ResourceQuota).Status, field.NewPath("status")
		errs := append(validateMeta(obj, old), validateQuotaResources(s.Hard, fldPath.Child("hard"))...)
		return append(errs, validateQuotaResources(s.Used, fldPath.Child("used"))...)
	}
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Request"),
		builder.StringColumn("Limit"),
		builder.AgeColumn)
	k.Lists.Row = builder.Row(func(q *corev1.ResourceQuota, now time.Time) []any {
		var requests, limits []string
		for _, name := range fieldrules.SortedKeys(q.Status.Hard) {
			used, hard := q.Status.Used[name], q.Status.Hard[name]
			text := fmt.Sprintf("%s: %s/%s", name, used.String(), hard.String())
			if strings.HasPrefix(string(name), "limits.") {
				limits = append(limits, text)
			} else {
				requests = append(requests, text)
			}
		}
		return []any{q.Name, strings.Join(requests, ", "), strings.Join(limits, ", "), builder.Age(q, now)}
	})
	return k
}

func quotaScopes(s *corev1.ResourceQuotaSpec) []corev1.ResourceQuotaScope {
	out := slices.Clone(s.Scopes)
	slices.Sort(out)
	return slices.Compact(out)
}

func validateQuotaResources(list corev1.ResourceList, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, name := range fieldrules.SortedKeys(list) {
		q, here := list[name], fldPath.Key(string(name))
		errs = append(errs, podspec.ValidateResourceName(name, here)...)
		if n := string(name); !strings.Contains(n, "/") && !slices.Contains(podspec.QuotaResources,
			name) && !podspec.IsHugePages(n) {
			errs = append(errs, field.Invalid(here, n, "must be a standard resource for quota"))
		}
		errs = append(errs, podspec.ValidateCountedQuantity(name, q, here)...)
	}
	return errs
}

func validateQuota(s *corev1.ResourceQuotaSpec, fldPath *field.Path) field.ErrorList {
	errs := validateQuotaResources(s.Hard, fldPath.Child("hard"))
	here := fldPath.Child("scopes")
	for _, scope := range s.Scopes {
		errs = append(errs, validateScope(scope, s.Hard, here, here, s.Scopes, s.Scopes)...)
	}
	errs = append(errs, validateScopeConflicts(s.Scopes, here, s.Scopes)...)
	if s.ScopeSelector == nil {
		return errs
	}
	here = fldPath.Child("scopeSelector", "matchExpressions")
	var scopes []corev1.ResourceQuotaScope
	for i := range s.ScopeSelector.MatchExpressions {
		r := &s.ScopeSelector.MatchExpressions[i]
		errs = append(errs, validateScope(r.ScopeName, s.Hard, here.Child("scopeName"), here, r.ScopeName,
			s.ScopeSelector)...)
		errs = append(errs, validateScopeRequirement(r, here)...)
		scopes = append(scopes, r.ScopeName)
	}
	return append(errs, validateScopeConflicts(scopes, here, s.Scopes)...)
}

// validateScope returns an error for an unknown scope, and for a limited resource to which the
// scope does not apply. scopeValue and scopesValue are the values that these errors contain.
func validateScope(
	scope corev1.ResourceQuotaScope, hard corev1.ResourceList, fldPath, all *field.Path, scopeValue, scopesValue any,
) field.ErrorList {
	var errs field.ErrorList
	applies := podspec.PodResources
	switch scope {
	case corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating,
		corev1.ResourceQuotaScopeNotBestEffort,
		corev1.ResourceQuotaScopePriorityClass, corev1.ResourceQuotaScopeCrossNamespacePodAffinity:
	case corev1.ResourceQuotaScopeBestEffort:
		applies = []corev1.ResourceName{corev1.ResourcePods}
	case corev1.ResourceQuotaScopeVolumeAttributesClass:
		applies = []corev1.ResourceName{corev1.ResourcePersistentVolumeClaims, corev1.ResourceRequestsStorage}
	default:
		return append(errs, field.Invalid(fldPath, scopeValue, "unsupported scope"))
	}
	for _, name := range fieldrules.SortedKeys(hard) {
		pages := strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) || strings.HasPrefix(string(name),
			corev1.ResourceRequestsHugePagesPrefix)
		if (pages || slices.Contains(podspec.QuotaResources, name)) && !slices.Contains(applies, name) {
			errs = append(errs, field.Invalid(all, scopesValue, "unsupported scope applied to resource"))
		}
	}
	return errs
}

func validateScopeConflicts(scopes []corev1.ResourceQuotaScope, fldPath *field.Path, shown any) field.ErrorList {
	var errs field.ErrorList
	for _, pair := range [][2]corev1.ResourceQuotaScope{
		{corev1.ResourceQuotaScopeBestEffort, corev1.ResourceQuotaScopeNotBestEffort},
		{corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating},
	} {
		if slices.Contains(scopes, pair[0]) && slices.Contains(scopes, pair[1]) {
			errs = append(errs, field.Invalid(fldPath, shown, "conflicting scopes"))
		}
	}
	return errs
}

func validateScopeRequirement(r *corev1.ScopedResourceSelectorRequirement, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch r.ScopeName {
	case corev1.ResourceQuotaScopeBestEffort, corev1.ResourceQuotaScopeNotBestEffort,
		corev1.ResourceQuotaScopeTerminating,
		corev1.ResourceQuotaScopeNotTerminating, corev1.ResourceQuotaScopeCrossNamespacePodAffinity:
		if r.Operator != corev1.ScopeSelectorOpExists {
			errs = append(errs, field.Invalid(fldPath.Child("operator"), r.Operator,
				"must be 'Exists' when scope is any of ResourceQuotaScopeTerminating, "+
					"ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, "+
					"ResourceQuotaScopeNotBestEffort or "+
					"ResourceQuotaScopeCrossNamespacePodAffinity"))
		}
	}
	switch r.Operator {
	case corev1.ScopeSelectorOpIn, corev1.ScopeSelectorOpNotIn:
		if len(r.Values) == 0 {
			errs = append(errs, field.Required(fldPath.Child("values"),
				"must be at least one value when `operator` is 'In' or 'NotIn' for scope selector"))
		}
	case corev1.ScopeSelectorOpExists, corev1.ScopeSelectorOpDoesNotExist:
		if len(r.Values) != 0 {
			errs = append(errs, field.Invalid(fldPath.Child("values"), r.Values,
				"must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector"))
		}
	default:
		errs = append(errs, field.Invalid(fldPath.Child("operator"), r.Operator, "not a valid selector operator"))
	}
	return errs
}
