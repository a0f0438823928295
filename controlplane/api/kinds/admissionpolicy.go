package kinds

import (
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func validatingPolicyKind(o *options) *api.Kind {
	k := newKind(names{
		gv: admissionv1.SchemeGroupVersion, kind: "ValidatingAdmissionPolicy", conditional: true, plural: "validatingadmissionpolicies",
		singular: "validatingadmissionpolicy", global: true, categories: []string{"api-extensions"},
	}, func(l *admissionv1.ValidatingAdmissionPolicyList) *[]admissionv1.ValidatingAdmissionPolicy {
		return &l.Items
	})
	k.Default = defaults(func(p *admissionv1.ValidatingAdmissionPolicy) {
		setDefaultPtr(&p.Spec.FailurePolicy, admissionv1.Fail)
		defaultMatch(p.Spec.MatchConstraints)
	})
	hasStatus(k, func(o *admissionv1.ValidatingAdmissionPolicy) *admissionv1.ValidatingAdmissionPolicyStatus {
		return &o.Status
	}, halves[*admissionv1.ValidatingAdmissionPolicy]{
		spec: func(p *admissionv1.ValidatingAdmissionPolicy) any { return p.Spec },
		keep: func(obj, old *admissionv1.ValidatingAdmissionPolicy) { obj.Spec = *old.Spec.DeepCopy() },
		status: func(obj, old *admissionv1.ValidatingAdmissionPolicy) {
			obj.Status = admissionv1.ValidatingAdmissionPolicyStatus{}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	keepsMetadata(k)
	check(k, func(p *admissionv1.ValidatingAdmissionPolicy) field.ErrorList { return validateValidatingPolicy(p, o) })
	checkStatus(k, func(obj, _ *admissionv1.ValidatingAdmissionPolicy) field.ErrorList {
		return validatePolicyStatus(&obj.Status, field.NewPath("status"))
	})
	k.Columns = columns(nameCol, numCol("Validations"), col("ParamKind"), ageCol)
	k.Row = row(func(p *admissionv1.ValidatingAdmissionPolicy, now time.Time) []any {
		return []any{p.Name, int64(len(p.Spec.Validations)), shownParamKind(p.Spec.ParamKind), age(p, now)}
	})
	return k
}

func validatingPolicyBindingKind() *api.Kind {
	k := newKind(names{
		gv: admissionv1.SchemeGroupVersion, kind: "ValidatingAdmissionPolicyBinding", conditional: true, plural: "validatingadmissionpolicybindings",
		singular: "validatingadmissionpolicybinding", global: true, categories: []string{"api-extensions"},
	}, func(l *admissionv1.ValidatingAdmissionPolicyBindingList) *[]admissionv1.ValidatingAdmissionPolicyBinding {
		return &l.Items
	})
	k.Default = defaults(func(b *admissionv1.ValidatingAdmissionPolicyBinding) { defaultMatch(b.Spec.MatchResources) })
	countsGeneration(k, func(b *admissionv1.ValidatingAdmissionPolicyBinding) any { return b.Spec })
	check(k, func(b *admissionv1.ValidatingAdmissionPolicyBinding) field.ErrorList {
		spec := field.NewPath("spec")
		errs := validatePolicyBinding(b.Spec.PolicyName, b.Spec.ParamRef, b.Spec.MatchResources, spec)
		return append(errs, validateActions(b.Spec.ValidationActions, spec.Child("validationActions"))...)
	})
	k.Columns = columns(nameCol, col("PolicyName"), col("ParamRef"), ageCol)
	k.Row = row(func(b *admissionv1.ValidatingAdmissionPolicyBinding, now time.Time) []any {
		return []any{b.Name, b.Spec.PolicyName, shownParamRef(b.Spec.ParamRef), age(b, now)}
	})
	return k
}

func mutatingPolicyKind(o *options) *api.Kind {
	k := newKind(names{
		gv: admissionv1.SchemeGroupVersion, kind: "MutatingAdmissionPolicy", conditional: true, plural: "mutatingadmissionpolicies",
		singular: "mutatingadmissionpolicy", global: true, categories: []string{"api-extensions"},
	}, func(l *admissionv1.MutatingAdmissionPolicyList) *[]admissionv1.MutatingAdmissionPolicy {
		return &l.Items
	})
	k.Default = defaults(func(p *admissionv1.MutatingAdmissionPolicy) {
		setDefaultPtr(&p.Spec.FailurePolicy, admissionv1.Fail)
		setDefault(&p.Spec.ReinvocationPolicy, admissionv1.NeverReinvocationPolicy)
		defaultMatch(p.Spec.MatchConstraints)
	})
	countsGeneration(k, func(p *admissionv1.MutatingAdmissionPolicy) any { return p.Spec })
	check(k, func(p *admissionv1.MutatingAdmissionPolicy) field.ErrorList {
		return validateMutatingPolicy(&p.Spec, o)
	})
	k.Columns = columns(nameCol, numCol("Mutations"), col("ParamKind"), ageCol)
	k.Row = row(func(p *admissionv1.MutatingAdmissionPolicy, now time.Time) []any {
		return []any{p.Name, int64(len(p.Spec.Mutations)), shownParamKind(p.Spec.ParamKind), age(p, now)}
	})
	return k
}

func mutatingPolicyBindingKind() *api.Kind {
	k := newKind(names{
		gv: admissionv1.SchemeGroupVersion, kind: "MutatingAdmissionPolicyBinding", conditional: true, plural: "mutatingadmissionpolicybindings",
		singular: "mutatingadmissionpolicybinding", global: true, categories: []string{"api-extensions"},
	}, func(l *admissionv1.MutatingAdmissionPolicyBindingList) *[]admissionv1.MutatingAdmissionPolicyBinding {
		return &l.Items
	})
	k.Default = defaults(func(b *admissionv1.MutatingAdmissionPolicyBinding) { defaultMatch(b.Spec.MatchResources) })
	countsGeneration(k, func(b *admissionv1.MutatingAdmissionPolicyBinding) any { return b.Spec })
	check(k, func(b *admissionv1.MutatingAdmissionPolicyBinding) field.ErrorList {
		return validatePolicyBinding(b.Spec.PolicyName, b.Spec.ParamRef, b.Spec.MatchResources, field.NewPath("spec"), mutableOperations...)
	})
	k.Columns = columns(nameCol, col("PolicyName"), col("ParamRef"), ageCol)
	k.Row = row(func(b *admissionv1.MutatingAdmissionPolicyBinding, now time.Time) []any {
		return []any{b.Name, b.Spec.PolicyName, shownParamRef(b.Spec.ParamRef), age(b, now)}
	})
	return k
}

// defaultMatch fills what a policy or a binding leaves out of the requests that it is about.
func defaultMatch(m *admissionv1.MatchResources) {
	if m == nil {
		return
	}
	setDefaultPtr(&m.MatchPolicy, admissionv1.Equivalent)
	setDefaultPtr(&m.NamespaceSelector, metav1.LabelSelector{})
	setDefaultPtr(&m.ObjectSelector, metav1.LabelSelector{})
	for _, rules := range [][]admissionv1.NamedRuleWithOperations{m.ResourceRules, m.ExcludeResourceRules} {
		for i := range rules {
			setDefaultPtr(&rules[i].Scope, admissionv1.AllScopes)
		}
	}
}

func shownParamKind(p *admissionv1.ParamKind) string {
	if p == nil {
		return unset
	}
	return p.APIVersion + "/" + p.Kind
}

// shownParamRef: without a namespace nobody can tell whether the parameter is in one.
func shownParamRef(p *admissionv1.ParamRef) string {
	switch {
	case p == nil:
	case p.Name != "" && p.Namespace != "":
		return p.Namespace + "/" + p.Name
	case p.Name != "":
		return "*/" + p.Name
	case p.Selector != nil:
		return p.Selector.String()
	}
	return unset
}
