// Package rbac describes the kinds of the API group rbac.authorization.k8s.io.
package rbac

import (
	"slices"
	"strings"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// RoleKind returns the definition of the kind Role.
func RoleKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: rbacv1.SchemeGroupVersion, Kind: "Role", CreateOnUpdate: true, Plural: "roles", Singular: "role",
		Rule: builder.PathSegment,
	}, func(l *rbacv1.RoleList) *[]rbacv1.Role { return &l.Items })
	builder.AddValidation(k, func(r *rbacv1.Role) field.ErrorList { return validateRules(r.Rules, true) })
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.CreatedAtColumn)
	k.Lists.Row = func(o api.Object, _ time.Time) []any { return []any{o.GetName(), builder.CreatedAt(o)} }
	return k
}

// ClusterRoleKind returns the definition of the kind ClusterRole.
func ClusterRoleKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: rbacv1.SchemeGroupVersion, Kind: "ClusterRole", CreateOnUpdate: true, Plural: "clusterroles",
		Singular: "clusterrole", Rule: builder.PathSegment, ClusterScoped: true,
	}, func(l *rbacv1.ClusterRoleList) *[]rbacv1.ClusterRole { return &l.Items })
	builder.AddValidation(k, func(r *rbacv1.ClusterRole) field.ErrorList {
		errs := validateRules(r.Rules, false)
		if a := r.AggregationRule; a != nil {
			fldPath := field.NewPath("aggregationRule", "clusterRoleSelectors")
			if len(a.ClusterRoleSelectors) == 0 {
				errs = append(errs, field.Required(fldPath,
					"at least one clusterRoleSelector required if aggregationRule is non-nil"))
			}
			for i := range a.ClusterRoleSelectors {
				errs = append(errs, metavalidation.ValidateLabelSelector(&a.ClusterRoleSelectors[i],
					metavalidation.LabelSelectorValidationOptions{}, fldPath.Index(i))...)
			}
		}
		return errs
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.CreatedAtColumn)
	k.Lists.Row = func(o api.Object, _ time.Time) []any { return []any{o.GetName(), builder.CreatedAt(o)} }
	return k
}

var bindingColumns = builder.Columns(builder.NameColumn, builder.StringColumn("Role"), builder.AgeColumn,
	builder.WideColumn("Users"), builder.WideColumn("Groups"), builder.WideColumn("ServiceAccounts"))

// RoleBindingKind returns the definition of the kind RoleBinding.
func RoleBindingKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: rbacv1.SchemeGroupVersion, Kind: "RoleBinding", CreateOnUpdate: true, Plural: "rolebindings",
		Singular: "rolebinding", Rule: builder.PathSegment,
	}, func(l *rbacv1.RoleBindingList) *[]rbacv1.RoleBinding { return &l.Items })
	k.Writes.Default = builder.Default(func(b *rbacv1.RoleBinding) { defaultBinding(&b.RoleRef, b.Subjects) })
	builder.AddValidation(k, func(b *rbacv1.RoleBinding) field.ErrorList {
		return validateBinding(b.RoleRef, b.Subjects, true, "Role", "ClusterRole")
	})
	builder.AddUpdateValidation(k, func(obj, old *rbacv1.RoleBinding) field.ErrorList {
		return validateSameRole(obj.RoleRef,
			old.RoleRef)
	})
	k.Lists.Columns = bindingColumns
	k.Lists.Row = builder.Row(func(b *rbacv1.RoleBinding,
		now time.Time) []any {
		return bindingRow(b, b.RoleRef, b.Subjects, now)
	})
	return k
}

// ClusterRoleBindingKind returns the definition of the kind ClusterRoleBinding.
func ClusterRoleBindingKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: rbacv1.SchemeGroupVersion, Kind: "ClusterRoleBinding", CreateOnUpdate: true,
		Plural: "clusterrolebindings", Singular: "clusterrolebinding",
		Rule: builder.PathSegment, ClusterScoped: true,
	}, func(l *rbacv1.ClusterRoleBindingList) *[]rbacv1.ClusterRoleBinding { return &l.Items })
	k.Writes.Default = builder.Default(func(b *rbacv1.ClusterRoleBinding) { defaultBinding(&b.RoleRef, b.Subjects) })
	builder.AddValidation(k, func(b *rbacv1.ClusterRoleBinding) field.ErrorList {
		return validateBinding(b.RoleRef, b.Subjects, false, "ClusterRole")
	})
	builder.AddUpdateValidation(k, func(obj, old *rbacv1.ClusterRoleBinding) field.ErrorList {
		return validateSameRole(obj.RoleRef, old.RoleRef)
	})
	k.Lists.Columns = bindingColumns
	k.Lists.Row = builder.Row(func(b *rbacv1.ClusterRoleBinding, now time.Time) []any {
		return bindingRow(b, b.RoleRef, b.Subjects, now)
	})
	return k
}

func defaultBinding(ref *rbacv1.RoleRef, subjects []rbacv1.Subject) {
	builder.SetDefault(&ref.APIGroup, rbacv1.GroupName)
	for i := range subjects {
		if s := &subjects[i]; s.Kind == rbacv1.UserKind || s.Kind == rbacv1.GroupKind {
			builder.SetDefault(&s.APIGroup, rbacv1.GroupName)
		}
	}
}

func validateRules(rules []rbacv1.PolicyRule, namespaced bool) field.ErrorList {
	var errs field.ErrorList
	for i, r := range rules {
		fldPath := field.NewPath("rules").Index(i)
		if len(r.Verbs) == 0 {
			errs = append(errs, field.Required(fldPath.Child("verbs"), "verbs must contain at least one value"))
		}
		if len(r.NonResourceURLs) > 0 {
			if namespaced {
				errs = append(errs, field.Invalid(fldPath.Child("nonResourceURLs"), r.NonResourceURLs,
					"namespaced rules cannot apply to non-resource URLs"))
			}
			if len(r.APIGroups) > 0 || len(r.Resources) > 0 || len(r.ResourceNames) > 0 {
				errs = append(errs, field.Invalid(fldPath.Child("nonResourceURLs"), r.NonResourceURLs,
					"rules cannot apply to both regular resources and non-resource URLs"))
			}
			continue
		}
		if len(r.APIGroups) == 0 {
			errs = append(errs, field.Required(fldPath.Child("apiGroups"),
				"resource rules must supply at least one api group"))
		}
		if len(r.Resources) == 0 {
			errs = append(errs, field.Required(fldPath.Child("resources"),
				"resource rules must supply at least one resource"))
		}
	}
	return errs
}

func validateBinding(
	ref rbacv1.RoleRef, subjects []rbacv1.Subject, namespaced bool, roleKinds ...string,
) field.ErrorList {
	fldPath := field.NewPath("roleRef")
	errs := fieldrules.ValidateOneOf(ref.APIGroup, fldPath.Child("apiGroup"), rbacv1.GroupName)
	if !slices.Contains(roleKinds, ref.Kind) {
		errs = append(errs, field.NotSupported(fldPath.Child("kind"), ref.Kind, roleKinds))
	}
	if ref.Name == "" {
		errs = append(errs, field.Required(fldPath.Child("name"), ""))
	} else {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("name"), ref.Name,
			builder.PathSegment(ref.Name, false))...)
	}
	for i, s := range subjects {
		errs = append(errs, validateSubject(s, namespaced, field.NewPath("subjects").Index(i))...)
	}
	return errs
}

func validateSubject(s rbacv1.Subject, namespaced bool, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if s.Name == "" {
		errs = append(errs, field.Required(fldPath.Child("name"), ""))
	}
	switch s.Kind {
	case rbacv1.ServiceAccountKind:
		if s.Name != "" {
			errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("name"), s.Name,
				validation.IsDNS1123Subdomain(s.Name))...)
		}
		if s.APIGroup != "" {
			errs = append(errs, field.NotSupported(fldPath.Child("apiGroup"), s.APIGroup, []string{""}))
		}
		if s.Namespace == "" && !namespaced {
			errs = append(errs, field.Required(fldPath.Child("namespace"), ""))
		}
	case rbacv1.UserKind, rbacv1.GroupKind:
		if s.Name == "" {
			errs = append(errs, field.Invalid(fldPath.Child("name"), s.Name,
				strings.ToLower(s.Kind)+" name cannot be empty"))
		}
		errs = append(errs, fieldrules.ValidateOneOf(s.APIGroup, fldPath.Child("apiGroup"), rbacv1.GroupName)...)
	default:
		errs = append(errs, field.NotSupported(fldPath.Child("kind"), s.Kind,
			[]string{rbacv1.ServiceAccountKind, rbacv1.UserKind, rbacv1.GroupKind}))
	}
	return errs
}

func validateSameRole(ref, old rbacv1.RoleRef) field.ErrorList {
	if ref == old {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("roleRef"), ref, "cannot change roleRef")}
}

func bindingRow(o api.Object, ref rbacv1.RoleRef, subjects []rbacv1.Subject, now time.Time) []any {
	var users, groups, accounts []string
	for _, s := range subjects {
		switch s.Kind {
		case rbacv1.ServiceAccountKind:
			accounts = append(accounts, s.Namespace+"/"+s.Name)
		case rbacv1.UserKind:
			users = append(users, s.Name)
		case rbacv1.GroupKind:
			groups = append(groups, s.Name)
		}
	}
	list := func(l []string) string { return strings.Join(l, ", ") }
	return []any{o.GetName(), ref.Kind + "/" + ref.Name, builder.Age(o, now), list(users), list(groups), list(accounts)}
}
