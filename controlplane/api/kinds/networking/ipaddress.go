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

// IPAllocator is the value of the managed-by label on IPAddresses of Services.
const IPAllocator = "ipallocator.k8s.io"

// DefaultServiceCIDR is the name of the ServiceCIDR with the range that the cluster was created
// with.
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

// NewServiceIPAddress returns the IPAddress object that records that an address is allocated to a
// Service.
func NewServiceIPAddress(s *corev1.Service, address string) *networkingv1.IPAddress {
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

// IsServiceIPAddress reports whether an IPAddress belongs to a Service.
func IsServiceIPAddress(a *networkingv1.IPAddress, s *corev1.Service) bool {
	ref := a.Spec.ParentRef
	return ref != nil && ref.Group == "" && ref.Resource == "services" && ref.Namespace == s.Namespace &&
		ref.Name == s.Name
}

// ServiceCompanions returns the IPAddress objects to be removed in the same commit as a Service.
// For a creation it returns nil.
func ServiceCompanions(obj api.Object, isCreation bool, _ time.Time) []api.Companion {
	svc, ok := obj.(*corev1.Service)
	if !ok || isCreation {
		return nil // admission creates the IPAddresses, because that can fail
	}
	var out []api.Companion
	for _, address := range ClusterAddresses(svc) {
		out = append(out, api.Companion{Object: NewServiceIPAddress(svc, address),
			Next: func(stored api.Object) api.Object {
				if have, is := stored.(*networkingv1.IPAddress); is && IsServiceIPAddress(have, svc) {
					return nil
				}
				return stored
			}})
	}
	return out
}

// ServiceRanges returns the ranges of a ServiceCIDR from which addresses can be allocated. It
// returns nil if the ServiceCIDR is not ready or is being deleted.
func ServiceRanges(c *networkingv1.ServiceCIDR) []netip.Prefix {
	if c.DeletionTimestamp != nil || !meta.IsStatusConditionTrue(c.Status.Conditions,
		networkingv1.ServiceCIDRConditionReady) {
		return nil
	}
	return ParseRanges(c)
}

// ParseRanges returns the ranges in the spec of a ServiceCIDR.
func ParseRanges(c *networkingv1.ServiceCIDR) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range c.Spec.CIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

// IsInRanges reports whether an address is in one of the ranges.
func IsInRanges(address netip.Addr, ranges []netip.Prefix) bool {
	return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(address) })
}
