package services

import (
	"context"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// serviceRange is a range of Service addresses. cidr is its ServiceCIDR object; nil for a range
// with which the cluster was created.
type serviceRange struct {
	netip.Prefix
	cidr *networkingv1.ServiceCIDR
}

// serviceRanges returns the ranges of Services: those with which the cluster was created, and the
// ServiceCIDR objects in the same IP families. If fresh is true, it reads the ServiceCIDRs from the
// store. This is required before a request is rejected, because the cache may lack a new
// ServiceCIDR.
func serviceRanges(ctx context.Context, c Config, fresh bool) ([]serviceRange, error) {
	out := []serviceRange{{Prefix: c.ServiceCIDR}}
	if c.SecondServiceCIDR.IsValid() {
		out = append(out, serviceRange{Prefix: c.SecondServiceCIDR})
	}
	families := serviceFamilies(c)
	if c.Cluster == nil {
		return out, nil
	}
	all, err := c.Cluster.List(ctx, "servicecidrs", "", fresh)
	if err != nil {
		return nil, err
	}
	for _, o := range all {
		cidr := o.(*networkingv1.ServiceCIDR)
		for _, p := range networking.ServiceRanges(cidr) {
			if slices.Contains(families, familyOf(p.Addr())) && p != c.ServiceCIDR.Masked() &&
				p != c.SecondServiceCIDR {
				out = append(out, serviceRange{p, cidr})
			}
		}
	}
	return out, nil
}

// rangeOf returns the first of the ranges in which the address can be allocated (see
// isAllocatable); false if the address cannot be allocated in any of the ranges.
func rangeOf(ranges []serviceRange, a netip.Addr) (serviceRange, bool) {
	i := slices.IndexFunc(ranges, func(r serviceRange) bool { return isAllocatable(r.Prefix, a) })
	if i < 0 {
		return serviceRange{}, false
	}
	return ranges[i], true
}

// inAny reports whether the address can be allocated in one of the ranges. It is false for an
// invalid address.
func inAny(ranges []serviceRange, address string) bool {
	a, err := netip.ParseAddr(address)
	if err != nil {
		return false
	}
	_, ok := rangeOf(ranges, a)
	return ok
}

// maxForeign is how many addresses of one range are tried, if those tried before have an IPAddress
// object that does not belong to a Service.
const maxForeign = 1024

// pickAddress chooses a free address of a family. It tries the ranges in order; those with which
// the cluster was created come first. If no address is free, it tries again with ranges from the
// store.
func (a *allocator) pickAddress(family corev1.IPFamily) (netip.Addr, error) {
	ip, err := a.pickInRange(family)
	if err == nil || a.fresh {
		return ip, err
	}
	a.fresh = true
	ranges, unread := serviceRanges(a.ctx, a.c, true)
	if unread != nil {
		return netip.Addr{}, admission.AsStatus(unread)
	}
	a.ranges = ranges
	return a.pickInRange(family)
}

func (a *allocator) pickInRange(family corev1.IPFamily) (netip.Addr, error) {
	var err error
	for _, r := range a.ranges {
		if familyOf(r.Addr()) != family {
			continue
		}
		for range maxForeign {
			var ip netip.Addr
			if ip, err = a.c.AllocateIP(a.attempt, r.Prefix); err != nil {
				break
			}
			if _, foreign := a.unreservedIPAddress(ip); !foreign {
				return ip, nil
			}
		}
	}
	return netip.Addr{}, err
}

// unreservedIPAddress returns the IPAddress object of an address that no Service has; false if
// there is no such object. The caller passes only addresses that no Service has reserved in the
// store.
func (a *allocator) unreservedIPAddress(ip netip.Addr) (api.Object, bool) {
	if a.c.Cluster == nil {
		return nil, false
	}
	return a.c.Cluster.Get(a.ctx, "ipaddresses", "", ip.String())
}

// ReserveAddresses returns a plugin that creates and deletes the IPAddress objects of a Service in
// the commit that changes its addresses. When a Service is deleted, the registry deletes them.
func ReserveAddresses(c Config) func(ctx context.Context, a *api.Attempt) error {
	var kind *api.Kind
	if c.Kinds != nil {
		kind = c.Kinds.ByType(&networkingv1.IPAddress{})
	}
	return func(ctx context.Context, a *api.Attempt) error {
		if kind == nil || !a.IsCoreResource("services") || !a.CreatesObject() && !a.UpdatesObject() {
			return nil
		}
		svc := a.Whole.(*corev1.Service)
		var had []string
		if before, ok := a.Stored.(*corev1.Service); ok {
			had = networking.ClusterAddresses(before)
		}
		have := networking.ClusterAddresses(svc)
		ranges, err := serviceRanges(ctx, c, false)
		if err == nil && slices.ContainsFunc(have, func(address string) bool {
			return !slices.Contains(had, address) && !inAny(ranges, address)
		}) {
			ranges, err = serviceRanges(ctx, c, true)
		}
		if err != nil {
			return admission.AsStatus(err)
		}
		for i, address := range have {
			if slices.Contains(had, address) {
				continue
			}
			a.Write(api.Change{Ref: api.Ref{Kind: kind, Name: address}, Next: claimIPAddress(a, svc, address, i)})
			// This check detects the concurrent deletion of the ServiceCIDR.
			if ip, err := netip.ParseAddr(address); err == nil {
				if r, ok := rangeOf(ranges, ip); ok && r.cidr != nil {
					a.Require(api.Check{Ref: api.Ref{Kind: c.Kinds.ByType(r.cidr), Name: r.cidr.Name}, Seen: r.cidr})
				}
			}
		}
		for _, address := range had {
			if !slices.Contains(have, address) {
				a.Write(api.Change{Ref: api.Ref{Kind: kind, Name: address}, Next: releaseIPAddress(svc)})
			}
		}
		return nil
	}
}

// claimIPAddress returns a change that creates the IPAddress object for an address of a Service.
// The change fails if an IPAddress object with this address belongs to another object. i is the
// index of the address in spec.clusterIPs.
func claimIPAddress(a *api.Attempt, svc *corev1.Service, address string, i int) func(api.Object) (api.Object, error) {
	return func(stored api.Object) (api.Object, error) {
		have, ok := stored.(*networkingv1.IPAddress)
		switch {
		case !ok:
			return networking.NewServiceIPAddress(svc, address), nil
		case networking.IsServiceIPAddress(have, svc):
			return stored, nil
		case a.IsPicked(core.SpaceClusterIPs, address): // taken after it was chosen
			return nil, apierrors.NewConflict(a.Kind.GVR().GroupResource(), svc.Name, errTaken)
		}
		return nil, apierrors.NewInvalid(a.Kind.GVK.GroupKind(), svc.Name, field.ErrorList{
			field.Invalid(field.NewPath("spec", "clusterIPs").Index(i), address, "provided IP is already allocated")})
	}
}

// releaseIPAddress returns a change that deletes an IPAddress object if it belongs to the Service.
func releaseIPAddress(svc *corev1.Service) func(api.Object) (api.Object, error) {
	return func(stored api.Object) (api.Object, error) {
		if have, ok := stored.(*networkingv1.IPAddress); ok && networking.IsServiceIPAddress(have, svc) {
			return nil, nil
		}
		return stored, nil
	}
}
