package admission

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
)

// serviceRange is a range of Service addresses. cidr is its ServiceCIDR, nil for a range with which
// the cluster was created.
type serviceRange struct {
	netip.Prefix
	cidr *networkingv1.ServiceCIDR
}

// serviceRanges returns the ranges of Services: those with which the cluster was created, and
// ServiceCIDRs in the same IP families. fresh reads the ServiceCIDRs from the store. A request must
// not be rejected because of the cache, which may lack a new ServiceCIDR.
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
			if slices.Contains(families, familyOf(p.Addr())) && p != c.ServiceCIDR.Masked() && p != c.SecondServiceCIDR {
				out = append(out, serviceRange{p, cidr})
			}
		}
	}
	return out, nil
}

// rangeOf returns the first of the ranges in which the address can be allocated.
func rangeOf(ranges []serviceRange, a netip.Addr) (serviceRange, bool) {
	i := slices.IndexFunc(ranges, func(r serviceRange) bool { return usable(r.Prefix, a) })
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

// maxForeign is the maximum number of addresses tried that are in use by something other than a
// Service.
const maxForeign = 1024

// pick chooses a free address of a family. Ranges are used in order, those with which the cluster
// was created first. If no address is free, it retries with ranges from the store.
func (a *allocator) pick(family corev1.IPFamily) (netip.Addr, error) {
	ip, err := a.pickOf(family)
	if err == nil || a.fresh {
		return ip, err
	}
	a.fresh = true
	ranges, unread := serviceRanges(a.ctx, a.c, true)
	if unread != nil {
		return netip.Addr{}, asStatus(unread)
	}
	a.ranges = ranges
	return a.pickOf(family)
}

func (a *allocator) pickOf(family corev1.IPFamily) (netip.Addr, error) {
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
			if _, foreign := a.foreign(ip); !foreign {
				return ip, nil
			}
		}
	}
	return netip.Addr{}, err
}

// foreign returns the IPAddress object of an address that no Service has. The registry knows the
// addresses of Services.
func (a *allocator) foreign(ip netip.Addr) (api.Object, bool) {
	if a.c.Cluster == nil {
		return nil, false
	}
	return a.c.Cluster.Get(a.ctx, "ipaddresses", "", ip.String())
}

// serviceAddresses returns a plugin that creates and deletes the IPAddress objects of a Service in
// the commit that changes its addresses. When a Service is deleted, the registry deletes them.
func serviceAddresses(c Config) func(ctx context.Context, a *api.Attempt) error {
	var kind *api.Kind
	if c.Kinds != nil {
		kind = c.Kinds.ByType(&networkingv1.IPAddress{})
	}
	return func(ctx context.Context, a *api.Attempt) error {
		if kind == nil || !a.Is("services") || !a.Creates() && !a.Updates() {
			return nil
		}
		svc := a.Whole.(*corev1.Service)
		var had []string
		if before, ok := a.Stored.(*corev1.Service); ok {
			had = networking.ClusterAddresses(before)
		}
		have := networking.ClusterAddresses(svc)
		ranges, err := serviceRanges(ctx, c, false)
		if err == nil && slices.ContainsFunc(have, func(address string) bool { return !slices.Contains(had, address) && !inAny(ranges, address) }) {
			ranges, err = serviceRanges(ctx, c, true)
		}
		if err != nil {
			return asStatus(err)
		}
		for i, address := range have {
			if slices.Contains(had, address) {
				continue
			}
			a.Write(api.Change{Ref: api.Ref{Kind: kind, Name: address}, Next: take(a, svc, address, i)})
			// This check detects the concurrent deletion of the ServiceCIDR.
			if ip, err := netip.ParseAddr(address); err == nil {
				if r, ok := rangeOf(ranges, ip); ok && r.cidr != nil {
					a.Require(api.Check{Ref: api.Ref{Kind: c.Kinds.ByType(r.cidr), Name: r.cidr.Name}, Seen: r.cidr})
				}
			}
		}
		for _, address := range had {
			if !slices.Contains(have, address) {
				a.Write(api.Change{Ref: api.Ref{Kind: kind, Name: address}, Next: release(svc)})
			}
		}
		return nil
	}
}

// take returns a change that creates the IPAddress of a Service. It fails if the address belongs to
// something else.
func take(a *api.Attempt, svc *corev1.Service, address string, i int) func(api.Object) (api.Object, error) {
	return func(stored api.Object) (api.Object, error) {
		have, ok := stored.(*networkingv1.IPAddress)
		switch {
		case !ok:
			return networking.AddressOf(svc, address), nil
		case networking.IsAddressOf(have, svc):
			return stored, nil
		case a.Picked(core.SpaceClusterIPs, address): // taken after it was chosen
			return nil, apierrors.NewConflict(a.Kind.GVR().GroupResource(), svc.Name, errTaken)
		}
		return nil, apierrors.NewInvalid(a.Kind.GVK.GroupKind(), svc.Name, field.ErrorList{
			field.Invalid(field.NewPath("spec", "clusterIPs").Index(i), address, "provided IP is already allocated")})
	}
}

// release returns a change that deletes the IPAddress of a Service.
func release(svc *corev1.Service) func(api.Object) (api.Object, error) {
	return func(stored api.Object) (api.Object, error) {
		if have, ok := stored.(*networkingv1.IPAddress); ok && networking.IsAddressOf(have, svc) {
			return nil, nil
		}
		return stored, nil
	}
}
