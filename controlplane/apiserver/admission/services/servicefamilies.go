package services

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// serviceFamilies returns the IP families that Services can have in this cluster, the primary one
// first.
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

func otherFamily(family corev1.IPFamily) corev1.IPFamily {
	if family == corev1.IPv4Protocol {
		return corev1.IPv6Protocol
	}
	return corev1.IPv4Protocol
}

// keepFamilies restores the IP families that an update omits. If the update makes the Service
// SingleStack, it removes the second family and address.
func keepFamilies(svc, old *corev1.Service) {
	spec, had := &svc.Spec, &old.Spec
	if !needsIP(svc) || !needsIP(old) || had.IPFamilyPolicy == nil {
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
	if len(spec.ClusterIPs) == 1 && len(had.ClusterIPs) == 2 && spec.ClusterIPs[0] == had.ClusterIPs[0] &&
		slices.Equal(spec.IPFamilies, had.IPFamilies) {
		spec.ClusterIPs = slices.Clone(had.ClusterIPs)
	}
}

// chooseFamilies sets the IP families and the IP family policy of a Service, or returns errors if
// the requested values are impossible. cluster contains the families of the cluster, had those of
// the stored Service. The families in had are always allowed: when the cluster gets a second
// family, some replicas use it earlier than others.
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
		return duplicateFamilies(spec, at)
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
			"SingleStack allows only one family and one address: use RequireDualStack or PreferDualStack, or remove "+
				"the second family and address")}
	}
	if *spec.IPFamilyPolicy == corev1.IPFamilyPolicyRequireDualStack && len(cluster) == 1 && len(had) < 2 {
		return field.ErrorList{field.Invalid(at.Child("ipFamilyPolicy"), *spec.IPFamilyPolicy,
			"this cluster is not configured for dual-stack services: use SingleStack or PreferDualStack")}
	}
	errs := append(familiesOfAddresses(spec, at), duplicateFamilies(spec, at)...)
	for i, f := range spec.IPFamilies {
		if !slices.Contains(cluster, f) && !slices.Contains(had, f) {
			errs = append(errs, field.Invalid(at.Child("ipFamilies").Index(i), f,
				fmt.Sprintf("not configured on this cluster, which has the families %v", cluster)))
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

// familiesOfAddresses sets missing IP families of the Service to the families of its cluster IPs.
// It returns an error for each family that contradicts the cluster IP of the same index.
func familiesOfAddresses(spec *corev1.ServiceSpec, path *field.Path) field.ErrorList {
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
			errs = append(errs, field.Invalid(path.Child("clusterIPs").Index(i), text,
				fmt.Sprintf("expected an %s value as indicated by `ipFamilies[%d]`", spec.IPFamilies[i], i)))
		}
	}
	return errs
}

// duplicateFamilies returns an error if an IP family is listed more than once.
func duplicateFamilies(spec *corev1.ServiceSpec, path *field.Path) field.ErrorList {
	if len(spec.IPFamilies) > 2 {
		return field.ErrorList{field.Invalid(path.Child("ipFamilies"), spec.IPFamilies,
			"may contain IPv4 and IPv6 once each")}
	}
	if len(spec.IPFamilies) == 2 && spec.IPFamilies[0] == spec.IPFamilies[1] {
		return field.ErrorList{field.Duplicate(path.Child("ipFamilies").Index(1), spec.IPFamilies[1])}
	}
	return nil
}
