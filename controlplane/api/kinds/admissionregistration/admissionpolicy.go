// Package admissionregistration describes the kinds of the API group admissionregistration.k8s.io.
package admissionregistration

import (
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
)

// ValidatingPolicyKind returns the definition of the kind ValidatingAdmissionPolicy.
func ValidatingPolicyKind(o *expressions.Options) *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: admissionv1.SchemeGroupVersion, Kind: "ValidatingAdmissionPolicy", Conditional: true,
		Plural:   "validatingadmissionpolicies",
		Singular: "validatingadmissionpolicy", ClusterScoped: true, Categories: []string{"api-extensions"},
	}, func(l *admissionv1.ValidatingAdmissionPolicyList) *[]admissionv1.ValidatingAdmissionPolicy {
		return &l.Items
	})
	k.Writes.Default = builder.Default(func(p *admissionv1.ValidatingAdmissionPolicy) {
		builder.SetDefaultPtr(&p.Spec.FailurePolicy, admissionv1.Fail)
		defaultMatch(p.Spec.MatchConstraints)
	})
	builder.SeparateStatus(k,
		func(o *admissionv1.ValidatingAdmissionPolicy) *admissionv1.ValidatingAdmissionPolicyStatus {
			return &o.Status
		}, builder.Accessors[*admissionv1.ValidatingAdmissionPolicy]{
			Spec:     func(p *admissionv1.ValidatingAdmissionPolicy) any { return p.Spec },
			CopySpec: func(obj, old *admissionv1.ValidatingAdmissionPolicy) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *admissionv1.ValidatingAdmissionPolicy) {
				obj.Status = admissionv1.ValidatingAdmissionPolicyStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.KeepMetadataOnStatus(k)
	builder.AddValidation(k, func(p *admissionv1.ValidatingAdmissionPolicy) field.ErrorList {
		return validateValidatingPolicy(p, o)
	})
	builder.AddStatusValidation(k, func(obj, _ *admissionv1.ValidatingAdmissionPolicy) field.ErrorList {
		return validatePolicyStatus(&obj.Status, field.NewPath("status"))
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.NumberColumn("Validations"),
		builder.StringColumn("ParamKind"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(p *admissionv1.ValidatingAdmissionPolicy, now time.Time) []any {
		return []any{p.Name, int64(len(p.Spec.Validations)), shownParamKind(p.Spec.ParamKind), builder.Age(p, now)}
	})
	return k
}

// ValidatingPolicyBindingKind returns the definition of the kind ValidatingAdmissionPolicyBinding.
func ValidatingPolicyBindingKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: admissionv1.SchemeGroupVersion, Kind: "ValidatingAdmissionPolicyBinding", Conditional: true,
		Plural:   "validatingadmissionpolicybindings",
		Singular: "validatingadmissionpolicybinding", ClusterScoped: true, Categories: []string{"api-extensions"},
	}, func(l *admissionv1.ValidatingAdmissionPolicyBindingList) *[]admissionv1.ValidatingAdmissionPolicyBinding {
		return &l.Items
	})
	k.Writes.Default = builder.Default(func(b *admissionv1.ValidatingAdmissionPolicyBinding) {
		defaultMatch(b.Spec.MatchResources)
	})
	builder.CountGenerations(k, func(b *admissionv1.ValidatingAdmissionPolicyBinding) any { return b.Spec })
	builder.AddValidation(k, func(b *admissionv1.ValidatingAdmissionPolicyBinding) field.ErrorList {
		spec := field.NewPath("spec")
		errs := validatePolicyBinding(b.Spec.PolicyName, b.Spec.ParamRef, b.Spec.MatchResources, spec)
		return append(errs, validateActions(b.Spec.ValidationActions, spec.Child("validationActions"))...)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("PolicyName"),
		builder.StringColumn("ParamRef"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(b *admissionv1.ValidatingAdmissionPolicyBinding, now time.Time) []any {
		return []any{b.Name, b.Spec.PolicyName, shownParamRef(b.Spec.ParamRef), builder.Age(b, now)}
	})
	return k
}

// MutatingPolicyKind returns the definition of the kind MutatingAdmissionPolicy.
func MutatingPolicyKind(o *expressions.Options) *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: admissionv1.SchemeGroupVersion, Kind: "MutatingAdmissionPolicy", Conditional: true,
		Plural:   "mutatingadmissionpolicies",
		Singular: "mutatingadmissionpolicy", ClusterScoped: true, Categories: []string{"api-extensions"},
	}, func(l *admissionv1.MutatingAdmissionPolicyList) *[]admissionv1.MutatingAdmissionPolicy {
		return &l.Items
	})
	k.Writes.Default = builder.Default(func(p *admissionv1.MutatingAdmissionPolicy) {
		builder.SetDefaultPtr(&p.Spec.FailurePolicy, admissionv1.Fail)
		builder.SetDefault(&p.Spec.ReinvocationPolicy, admissionv1.NeverReinvocationPolicy)
		defaultMatch(p.Spec.MatchConstraints)
	})
	builder.CountGenerations(k, func(p *admissionv1.MutatingAdmissionPolicy) any { return p.Spec })
	builder.AddValidation(k, func(p *admissionv1.MutatingAdmissionPolicy) field.ErrorList {
		return validateMutatingPolicy(&p.Spec, o)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.NumberColumn("Mutations"),
		builder.StringColumn("ParamKind"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(p *admissionv1.MutatingAdmissionPolicy, now time.Time) []any {
		return []any{p.Name, int64(len(p.Spec.Mutations)), shownParamKind(p.Spec.ParamKind), builder.Age(p, now)}
	})
	return k
}

// MutatingPolicyBindingKind returns the definition of the kind MutatingAdmissionPolicyBinding.
func MutatingPolicyBindingKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: admissionv1.SchemeGroupVersion, Kind: "MutatingAdmissionPolicyBinding", Conditional: true,
		Plural:   "mutatingadmissionpolicybindings",
		Singular: "mutatingadmissionpolicybinding", ClusterScoped: true, Categories: []string{"api-extensions"},
	}, func(l *admissionv1.MutatingAdmissionPolicyBindingList) *[]admissionv1.MutatingAdmissionPolicyBinding {
		return &l.Items
	})
	k.Writes.Default = builder.Default(func(b *admissionv1.MutatingAdmissionPolicyBinding) {
		defaultMatch(b.Spec.MatchResources)
	})
	builder.CountGenerations(k, func(b *admissionv1.MutatingAdmissionPolicyBinding) any { return b.Spec })
	builder.AddValidation(k, func(b *admissionv1.MutatingAdmissionPolicyBinding) field.ErrorList {
		return validatePolicyBinding(b.Spec.PolicyName, b.Spec.ParamRef, b.Spec.MatchResources, field.NewPath("spec"),
			mutableOperations...)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("PolicyName"),
		builder.StringColumn("ParamRef"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(b *admissionv1.MutatingAdmissionPolicyBinding, now time.Time) []any {
		return []any{b.Name, b.Spec.PolicyName, shownParamRef(b.Spec.ParamRef), builder.Age(b, now)}
	})
	return k
}

// defaultMatch sets the defaults of the match rules of a policy or a binding.
func defaultMatch(match *admissionv1.MatchResources) {
	if match == nil {
		return
	}
	builder.SetDefaultPtr(&match.MatchPolicy, admissionv1.Equivalent)
	builder.SetDefaultPtr(&match.NamespaceSelector, metav1.LabelSelector{})
	builder.SetDefaultPtr(&match.ObjectSelector, metav1.LabelSelector{})
	for _, rules := range [][]admissionv1.NamedRuleWithOperations{match.ResourceRules, match.ExcludeResourceRules} {
		for i := range rules {
			builder.SetDefaultPtr(&rules[i].Scope, admissionv1.AllScopes)
		}
	}
}

func shownParamKind(p *admissionv1.ParamKind) string {
	if p == nil {
		return builder.Unset
	}
	return p.APIVersion + "/" + p.Kind
}

// shownParamRef returns the text in the column PARAMREF of a binding. A reference without a
// namespace is shown as "*/name", because the parameter's kind may be namespaced or cluster-scoped.
func shownParamRef(ref *admissionv1.ParamRef) string {
	switch {
	case ref == nil:
	case ref.Name != "" && ref.Namespace != "":
		return ref.Namespace + "/" + ref.Name
	case ref.Name != "":
		return "*/" + ref.Name
	case ref.Selector != nil:
		return ref.Selector.String()
	}
	return builder.Unset
}
