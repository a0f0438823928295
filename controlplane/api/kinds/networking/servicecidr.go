package networking

import (
	"net/netip"
	"strings"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// ServiceCIDRKind returns the definition of the kind ServiceCIDR.
func ServiceCIDRKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: networkingv1.SchemeGroupVersion, Kind: "ServiceCIDR", Plural: "servicecidrs",
		Singular: "servicecidr", ClusterScoped: true,
	}, func(l *networkingv1.ServiceCIDRList) *[]networkingv1.ServiceCIDR { return &l.Items })
	builder.SeparateStatus(k, func(o *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDRStatus { return &o.Status },
		builder.Accessors[*networkingv1.ServiceCIDR]{
			Spec:     func(c *networkingv1.ServiceCIDR) any { return c.Spec },
			CopySpec: func(obj, old *networkingv1.ServiceCIDR) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *networkingv1.ServiceCIDR) {
				obj.Status = networkingv1.ServiceCIDRStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.OmitGeneration(k)
	builder.KeepMetadataOnStatus(k)
	builder.AddValidation(k, func(c *networkingv1.ServiceCIDR) field.ErrorList {
		return validateServiceCIDRs(c.Spec.CIDRs, field.NewPath("spec", "cidrs"))
	})
	builder.AddUpdateValidation(k, func(obj, old *networkingv1.ServiceCIDR) field.ErrorList {
		return validateServiceCIDRUpdate(obj.Spec.CIDRs, old.Spec.CIDRs, field.NewPath("spec", "cidrs"))
	})
	builder.AddStatusValidation(k, func(obj, _ *networkingv1.ServiceCIDR) field.ErrorList {
		return metavalidation.ValidateConditions(obj.Status.Conditions, field.NewPath("status", "conditions"))
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("CIDRs"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(c *networkingv1.ServiceCIDR, now time.Time) []any {
		return []any{c.Name, strings.Join(c.Spec.CIDRs, ","), builder.Age(c, now)}
	})
	return k
}

func validateServiceCIDRs(cidrs []string, fldPath *field.Path) field.ErrorList {
	switch {
	case len(cidrs) == 0:
		return field.ErrorList{field.Required(fldPath, "at least one CIDR required")}
	case len(cidrs) > 2:
		return field.ErrorList{field.Invalid(fldPath, struct{ CIDRs []string }{cidrs}, "may only hold up to 2 values")}
	}
	var errs field.ErrorList
	families := map[bool]int{}
	for i, c := range cidrs {
		errs = append(errs, validation.IsValidCIDR(fldPath.Index(i), c)...)
		if p, err := netip.ParsePrefix(c); err == nil {
			families[p.Addr().Is4()]++
		}
	}
	if families[true] > 1 || families[false] > 1 {
		errs = append(errs, field.Invalid(fldPath, cidrs,
			"may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64"))
	}
	return errs
}

// validateServiceCIDRUpdate returns an error for any change of the ranges, except adding a range of
// the other IP family.
func validateServiceCIDRUpdate(cidrs, old []string, fldPath *field.Path) field.ErrorList {
	if len(cidrs) != len(old) && (len(old) != 1 || len(cidrs) != 2) {
		return field.ErrorList{field.Invalid(fldPath, cidrs, apivalidation.FieldImmutableErrorMsg)}
	}
	var errs field.ErrorList
	for i, c := range old {
		if cidrs[i] != c {
			errs = append(errs, field.Invalid(fldPath.Index(i), cidrs[i], apivalidation.FieldImmutableErrorMsg))
		}
	}
	return errs
}

// IPAddressKind returns the definition of the kind IPAddress.
func IPAddressKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: networkingv1.SchemeGroupVersion, Kind: "IPAddress", Plural: "ipaddresses", Singular: "ipaddress",
		Short: []string{"ip"}, ClusterScoped: true, Rule: validateIPName,
	}, func(l *networkingv1.IPAddressList) *[]networkingv1.IPAddress { return &l.Items })
	builder.AddValidation(k, func(a *networkingv1.IPAddress) field.ErrorList {
		fldPath, ref := field.NewPath("spec", "parentRef"), a.Spec.ParentRef
		if ref == nil {
			return field.ErrorList{field.Required(fldPath, "")}
		}
		var errs field.ErrorList
		if ref.Group != "" {
			errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("group"), ref.Group,
				validation.IsDNS1123Subdomain(ref.Group))...)
		}
		errs = append(errs, fieldrules.ValidateRequiredSegment(ref.Resource, fldPath.Child("resource"))...)
		errs = append(errs, fieldrules.ValidateRequiredSegment(ref.Name, fldPath.Child("name"))...)
		if ref.Namespace != "" {
			errs = append(errs, fieldrules.ValidateRequiredSegment(ref.Namespace, fldPath.Child("namespace"))...)
		}
		return errs
	})
	builder.AddUpdateValidation(k, func(obj, old *networkingv1.IPAddress) field.ErrorList {
		return fieldrules.ValidateUnchanged(obj.Spec.ParentRef, old.Spec.ParentRef, field.NewPath("spec", "parentRef"))
	})
	k.Lists.Fields = builder.Fields(func(a *networkingv1.IPAddress) fields.Set {
		ref := ptr.Deref(a.Spec.ParentRef, networkingv1.ParentReference{})
		return fields.Set{"spec.parentRef.group": ref.Group, "spec.parentRef.resource": ref.Resource,
			"spec.parentRef.namespace": ref.Namespace, "spec.parentRef.name": ref.Name}
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn,
		builder.StringColumn("ParentRef")) // Kubernetes has no column for the age here
	k.Lists.Row = builder.Row(func(a *networkingv1.IPAddress, _ time.Time) []any {
		parent := builder.None
		if ref := a.Spec.ParentRef; ref != nil {
			parent = strings.ToLower(schema.GroupResource{Group: ref.Group, Resource: ref.Resource}.String())
			if ref.Namespace != "" {
				parent += "/" + ref.Namespace
			}
			parent += "/" + ref.Name
		}
		return []any{a.Name, parent}
	})
	return k
}

// validateIPName is the name rule of objects with an IP address as their name. The address must be
// in canonical form.
func validateIPName(name string, _ bool) []string {
	var out []string
	for _, e := range validation.IsValidIP(nil, name) {
		out = append(out, e.Detail)
	}
	return out
}
