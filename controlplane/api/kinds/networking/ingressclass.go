package networking

import (
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// maxIngressController is the maximum length of a controller's name, in bytes.
const maxIngressController = 250

// IngressClassKind returns the definition of the kind IngressClass.
func IngressClassKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: networkingv1.SchemeGroupVersion, Kind: "IngressClass", Plural: "ingressclasses",
		Singular: "ingressclass", ClusterScoped: true,
	}, func(l *networkingv1.IngressClassList) *[]networkingv1.IngressClass { return &l.Items })
	k.Writes.Default = builder.Default(func(c *networkingv1.IngressClass) {
		if p := c.Spec.Parameters; p != nil {
			builder.SetDefaultPtr(&p.Scope, networkingv1.IngressClassParametersReferenceScopeCluster)
		}
	})
	builder.CountGenerations(k, func(c *networkingv1.IngressClass) any { return c.Spec })
	builder.AddValidation(k, func(c *networkingv1.IngressClass) field.ErrorList {
		fldPath := field.NewPath("spec", "controller")
		var errs field.ErrorList
		switch n := c.Spec.Controller; {
		case n == "":
			errs = append(errs, field.Required(fldPath, ""))
		case len(n) > maxIngressController:
			errs = append(errs, field.TooLong(fldPath, n, maxIngressController))
			fallthrough
		default:
			errs = append(errs, validation.IsDomainPrefixedPath(fldPath, n)...)
		}
		if p := c.Spec.Parameters; p != nil {
			errs = append(errs, validateIngressParameters(p, field.NewPath("spec", "parameters"))...)
		}
		return errs
	})
	builder.AddUpdateValidation(k, func(obj, old *networkingv1.IngressClass) field.ErrorList {
		return fieldrules.ValidateUnchanged(obj.Spec.Controller, old.Spec.Controller,
			field.NewPath("spec", "controller"))
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Controller"),
		builder.StringColumn("Parameters"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(c *networkingv1.IngressClass, now time.Time) []any {
		parameters := builder.None
		if p := c.Spec.Parameters; p != nil {
			parameters = p.Kind
			if p.APIGroup != nil {
				parameters += "." + *p.APIGroup
			}
			parameters += "/" + p.Name
		}
		return []any{c.Name, c.Spec.Controller, parameters, builder.Age(c, now)}
	})
	return k
}

func validateIngressParameters(p *networkingv1.IngressClassParametersReference, fldPath *field.Path) field.ErrorList {
	errs := validateTypedReference(p.APIGroup, p.Kind, p.Name, fldPath)
	if p.Scope == nil {
		return append(errs, field.Required(fldPath.Child("scope"), ""))
	}
	switch here := fldPath.Child("namespace"); *p.Scope {
	case networkingv1.IngressClassParametersReferenceScopeCluster:
		if p.Namespace != nil {
			errs = append(errs, field.Forbidden(here, "`parameters.scope` is set to 'Cluster'"))
		}
	case networkingv1.IngressClassParametersReferenceScopeNamespace:
		if p.Namespace == nil {
			return append(errs, field.Required(here, "`parameters.scope` is set to 'Namespace'"))
		}
		errs = append(errs, fieldrules.InvalidErrors(here, *p.Namespace, validation.IsDNS1123Label(*p.Namespace))...)
	default:
		errs = append(errs, field.NotSupported(fldPath.Child("scope"), *p.Scope, []string{
			networkingv1.IngressClassParametersReferenceScopeCluster,
			networkingv1.IngressClassParametersReferenceScopeNamespace}))
	}
	return errs
}
