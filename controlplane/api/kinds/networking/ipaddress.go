package networking

import (
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core"
)

// IPAllocator is the label value that marks the IPAddresses of Services.
const IPAllocator = "ipallocator.k8s.io"

// DefaultServiceCIDR is the name of the ServiceCIDR that stands for the range which the cluster was made with.
const DefaultServiceCIDR = "kubernetes"

// ClusterAddresses are the addresses that a Service has in the cluster, in their canonical form.
func ClusterAddresses(s *corev1.Service) []string {
	var out []string
	for _, r := range core.ServiceReservations(s) {
		if r.Space != core.SpaceClusterIPs {
			continue
		}
		if a, err := netip.ParseAddr(r.Value); err == nil {
			out = append(out, a.String())
		}
	}
	return out
}

// AddressOf is the IPAddress that says that a Service has an address.
func AddressOf(s *corev1.Service, address string) *networkingv1.IPAddress {
	family := corev1.IPv4Protocol
	if a, err := netip.ParseAddr(address); err == nil && a.Is6() {
		family = corev1.IPv6Protocol
	}
	return &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Name: address, Labels: map[string]string{
			networkingv1.LabelIPAddressFamily: string(family), networkingv1.LabelManagedBy: IPAllocator,
		}},
		Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{
			Resource: "services", Namespace: s.Namespace, Name: s.Name,
		}},
	}
}

// IsAddressOf says whether an IPAddress is that of a Service.
func IsAddressOf(a *networkingv1.IPAddress, s *corev1.Service) bool {
	ref := a.Spec.ParentRef
	return ref != nil && ref.Group == "" && ref.Resource == "services" && ref.Namespace == s.Namespace && ref.Name == s.Name
}

// ServiceCompanions are the IPAddresses that go with a Service.
func ServiceCompanions(obj api.Object, made bool, _ time.Time) []api.Companion {
	svc, ok := obj.(*corev1.Service)
	if !ok || made {
		return nil // admission makes them, which may refuse
	}
	var out []api.Companion
	for _, address := range ClusterAddresses(svc) {
		out = append(out, api.Companion{Object: AddressOf(svc, address), Next: func(stored api.Object) api.Object {
			if have, is := stored.(*networkingv1.IPAddress); is && IsAddressOf(have, svc) {
				return nil
			}
			return stored
		}})
	}
	return out
}

// ServiceRanges are the ranges of a ServiceCIDR from which Services get addresses now: none until it is ready, and none
// once it is to go.
func ServiceRanges(c *networkingv1.ServiceCIDR) []netip.Prefix {
	if c.DeletionTimestamp != nil || !meta.IsStatusConditionTrue(c.Status.Conditions, networkingv1.ServiceCIDRConditionReady) {
		return nil
	}
	return RangesOf(c)
}

// RangesOf are the ranges that a ServiceCIDR names.
func RangesOf(c *networkingv1.ServiceCIDR) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range c.Spec.CIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

// InRanges says whether an address is in one of the ranges.
func InRanges(a netip.Addr, ranges []netip.Prefix) bool {
	return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(a) })
}
