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

// DefaultServiceCIDR is the name of the ServiceCIDR for the range with which the cluster was
// created.
const DefaultServiceCIDR = "kubernetes"

// ClusterAddresses returns the cluster IPs of a Service in canonical form.
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

// AddressOf returns the IPAddress that records that a Service has an address.
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

// IsAddressOf reports whether an IPAddress belongs to a Service.
func IsAddressOf(a *networkingv1.IPAddress, s *corev1.Service) bool {
	ref := a.Spec.ParentRef
	return ref != nil && ref.Group == "" && ref.Resource == "services" && ref.Namespace == s.Namespace && ref.Name == s.Name
}

// ServiceCompanions returns the IPAddresses to be removed in the same commit as a Service. made
// reports whether the Service is created and not removed; then the result is empty.
func ServiceCompanions(obj api.Object, made bool, _ time.Time) []api.Companion {
	svc, ok := obj.(*corev1.Service)
	if !ok || made {
		return nil // admission creates them, because that can fail
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

// ServiceRanges returns the ranges of a ServiceCIDR from which addresses can be allocated. It
// returns no ranges if the ServiceCIDR is not ready or is being deleted.
func ServiceRanges(c *networkingv1.ServiceCIDR) []netip.Prefix {
	if c.DeletionTimestamp != nil || !meta.IsStatusConditionTrue(c.Status.Conditions, networkingv1.ServiceCIDRConditionReady) {
		return nil
	}
	return RangesOf(c)
}

// RangesOf returns the ranges in the spec of a ServiceCIDR.
func RangesOf(c *networkingv1.ServiceCIDR) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range c.Spec.CIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

// InRanges reports whether an address is in one of the ranges.
func InRanges(a netip.Addr, ranges []netip.Prefix) bool {
	return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(a) })
}
