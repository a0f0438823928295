package admission

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// serviceFamilies returns the IP families of Services in this cluster, the primary one first.
func serviceFamilies(c Config) []corev1.IPFamily {
	out := []corev1.IPFamily{familyOf(c.ServiceCIDR.Addr())}
	if c.SecondServiceCIDR.IsValid() {
		out = append(out, familyOf(c.SecondServiceCIDR.Addr()))
	}
	return out
}

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Unmap().Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

func otherFamily(f corev1.IPFamily) corev1.IPFamily {
	if f == corev1.IPv4Protocol {
		return corev1.IPv6Protocol
	}
	return corev1.IPv4Protocol
}

// keepFamilies restores families that an update omits. It removes the second family and address
// from a Service that becomes SingleStack.
func keepFamilies(svc, before *corev1.Service) {
	spec, had := &svc.Spec, &before.Spec
	if !needsIP(svc) || !needsIP(before) || had.IPFamilyPolicy == nil {
		return
	}
	if spec.IPFamilyPolicy == nil {
		policy := *had.IPFamilyPolicy
		spec.IPFamilyPolicy = &policy
	}
	if len(spec.IPFamilies) == 0 {
		spec.IPFamilies = slices.Clone(had.IPFamilies)
	}
	if *spec.IPFamilyPolicy == corev1.IPFamilyPolicySingleStack {
		if *had.IPFamilyPolicy != corev1.IPFamilyPolicySingleStack && len(had.IPFamilies) == 2 {
			if slices.Equal(spec.IPFamilies, had.IPFamilies) {
				spec.IPFamilies = spec.IPFamilies[:1]
			}
			if slices.Equal(spec.ClusterIPs, had.ClusterIPs) && len(spec.ClusterIPs) == 2 {
				spec.ClusterIPs = spec.ClusterIPs[:1]
			}
		}
		return
	}
	// An update by a client that sets only clusterIP does not remove the second address.
	if len(spec.ClusterIPs) == 1 && len(had.ClusterIPs) == 2 && spec.ClusterIPs[0] == had.ClusterIPs[0] && slices.Equal(spec.IPFamilies, had.IPFamilies) {
		spec.ClusterIPs = slices.Clone(had.ClusterIPs)
	}
}

// chooseFamilies sets the IP families and policy of a Service, or returns errors if its values are
// impossible. cluster are the families of the cluster. Families in had, which the Service already
// has, are always allowed: this replica may learn of the second family later than others.
func chooseFamilies(svc *corev1.Service, cluster, had []corev1.IPFamily) field.ErrorList {
	spec, at := &svc.Spec, field.NewPath("spec")
	if !needsIP(svc) {
		return nil
	}
	policy := func(p corev1.IPFamilyPolicy) { spec.IPFamilyPolicy = &p }
	if spec.ClusterIP == corev1.ClusterIPNone && len(spec.Selector) == 0 {
		// A client writes the endpoints of a headless Service without a selector, with addresses of
		// any family.
		if spec.IPFamilyPolicy == nil {
			policy(corev1.IPFamilyPolicyRequireDualStack)
		}
		if len(spec.IPFamilies) == 0 {
			spec.IPFamilies = []corev1.IPFamily{cluster[0]}
		}
		if len(spec.IPFamilies) == 1 && *spec.IPFamilyPolicy != corev1.IPFamilyPolicySingleStack {
			spec.IPFamilies = append(spec.IPFamilies, otherFamily(spec.IPFamilies[0]))
		}
		return twice(spec, at)
	}
	if spec.IPFamilyPolicy == nil {
		policy(corev1.IPFamilyPolicySingleStack)
		if len(spec.ClusterIPs) == 2 || len(spec.IPFamilies) == 2 {
			policy(corev1.IPFamilyPolicyRequireDualStack)
		}
	}
	single := *spec.IPFamilyPolicy == corev1.IPFamilyPolicySingleStack
	if single && (len(spec.ClusterIPs) > 1 || len(spec.IPFamilies) > 1) {
		return field.ErrorList{field.Invalid(at.Child("ipFamilyPolicy"), *spec.IPFamilyPolicy,
			"may be SingleStack with one family and one address only: give RequireDualStack or PreferDualStack, or leave the second ones out")}
	}
	if *spec.IPFamilyPolicy == corev1.IPFamilyPolicyRequireDualStack && len(cluster) == 1 && len(had) < 2 {
		return field.ErrorList{field.Invalid(at.Child("ipFamilyPolicy"), *spec.IPFamilyPolicy,
			"this cluster is not configured for dual-stack services: use SingleStack or PreferDualStack")}
	}
	errs := append(familiesOfAddresses(spec, at), twice(spec, at)...)
	for i, f := range spec.IPFamilies {
		if !slices.Contains(cluster, f) && !slices.Contains(had, f) {
			errs = append(errs, field.Invalid(at.Child("ipFamilies").Index(i), f,
				fmt.Sprintf("not configured on this cluster, whose Services have addresses of %v", cluster)))
		}
	}
	if len(errs) > 0 {
		return errs
	}
	if len(spec.IPFamilies) == 0 {
		spec.IPFamilies = []corev1.IPFamily{cluster[0]}
	}
	if !single && len(spec.IPFamilies) == 1 && len(cluster) == 2 {
		spec.IPFamilies = append(spec.IPFamilies, otherFamily(spec.IPFamilies[0]))
	}
	return nil
}

// familiesOfAddresses sets the families of the Service by its chosen addresses. It returns an error
// for each contradiction.
func familiesOfAddresses(spec *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, text := range spec.ClusterIPs {
		a, err := netip.ParseAddr(text)
		if err != nil {
			continue // "None"; other invalid values are already rejected
		}
		f := familyOf(a)
		switch {
		case i >= len(spec.IPFamilies):
			spec.IPFamilies = append(spec.IPFamilies, f)
		case spec.IPFamilies[i] != f:
			errs = append(errs, field.Invalid(at.Child("clusterIPs").Index(i), text,
				fmt.Sprintf("expected an %s value as indicated by `ipFamilies[%d]`", spec.IPFamilies[i], i)))
		}
	}
	return errs
}

// twice returns an error if a family is listed more than once.
func twice(spec *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	if len(spec.IPFamilies) > 2 {
		return field.ErrorList{field.Invalid(at.Child("ipFamilies"), spec.IPFamilies, "may have IPv4 and IPv6, each once")}
	}
	if len(spec.IPFamilies) == 2 && spec.IPFamilies[0] == spec.IPFamilies[1] {
		return field.ErrorList{field.Duplicate(at.Child("ipFamilies").Index(1), spec.IPFamilies[1])}
	}
	return nil
}
