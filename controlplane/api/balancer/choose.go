package balancer

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Class is the loadBalancerClass of Services that get addresses from Keelson's pools. Services
// without a class get them too.
const Class = "keelson.dev/announced"

// Annotations for load balancers, on Services, Nodes and Leases.
const (
	// AddressesAnnotation on a Service requests addresses: one address, or one of each family
	// separated by a comma.
	AddressesAnnotation = "keelson.dev/load-balancer-ips"
	// PoolAnnotation on a Service requests an address of the pool of this name.
	PoolAnnotation = "keelson.dev/load-balancer-pool"
	// AnnouncedBy on a Service is the node that answers ARP and NDP for its addresses. Only the
	// control plane writes it.
	AnnouncedBy = "keelson.dev/announced-by"
	// Announces marks Nodes with an agent that can answer for addresses of Services.
	Announces = "keelson.dev/announces"
	// Unheard on the Lease of a node that has missed heartbeats is the time since which they are
	// missing, in RFC 3339.
	Unheard = "keelson.dev/unheard-since"
)

// Allocator is the value of label ipaddress.kubernetes.io/managed-by on the IPAddresses of load
// balancers.
const Allocator = "load-balancer.keelson.dev"

// The type of the Service condition and its reasons, which Events use too.
const (
	Condition     = "keelson.dev/LoadBalancer"
	ReasonReady   = "AddressAllocated"
	ReasonNone    = "NoLoadBalancerPool"
	ReasonFull    = "LoadBalancerPoolExhausted"
	ReasonWish    = "LoadBalancerAddressNotAvailable"
	ReasonOutside = "LoadBalancerAddressOutOfPools"
)

// Ours reports whether a Service of type LoadBalancer gets its addresses from Keelson's pools: it
// has Class or no class.
func Ours(s *corev1.Service) bool {
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer &&
		(s.Spec.LoadBalancerClass == nil || *s.Spec.LoadBalancerClass == Class)
}

// Asked reports whether a Service explicitly has the loadBalancerClass Class.
func Asked(s *corev1.Service) bool {
	return Ours(s) && s.Spec.LoadBalancerClass != nil
}

// Wish is a Service's request for particular addresses or a pool.
type Wish struct {
	Pool      string
	Addresses []netip.Addr // from the annotation, or else from spec.loadBalancerIP
	Field     string       // the field or annotation that requests Addresses
}

// WishOf returns the Wish of a Service, or an error that names the invalid address.
func WishOf(s *corev1.Service) (Wish, error) {
	w := Wish{Pool: s.Annotations[PoolAnnotation]}
	text, asked := s.Annotations[AddressesAnnotation]
	if w.Field = "metadata.annotations[" + AddressesAnnotation + "]"; !asked {
		text, w.Field = s.Spec.LoadBalancerIP, "spec.loadBalancerIP"
	}
	if text == "" && !asked {
		w.Field = ""
		return w, nil
	}
	for _, part := range strings.Split(text, ",") {
		a, err := address(part)
		if err != nil || a.Is4In6() {
			return Wish{}, fmt.Errorf("%q is no IP address: give one, or one of each family with a comma between", strings.TrimSpace(part))
		}
		if slices.ContainsFunc(w.Addresses, func(o netip.Addr) bool { return o.Is4() == a.Is4() }) {
			return Wish{}, fmt.Errorf("%q has two addresses of one family: give one of each", text)
		}
		w.Addresses = append(w.Addresses, a)
	}
	return w, nil
}

// Refusal is the reason and message for a Service that has not got all requested addresses.
type Refusal struct{ Reason, Message string }

// Question is the input of Choose.
type Question struct {
	Service   *corev1.Service
	Namespace labels.Set // labels of the Service's namespace
	Pools     []*Pool
	// Has are the addresses that are reserved for the Service. It keeps them unless it requests
	// others that it may have.
	Has []netip.Addr
	// Free reports whether an address is unused.
	Free func(a netip.Addr) bool
	// After maps pools to the address allocated last. The search for a free address starts behind
	// it, so that a released address is not reused at once. For a missing pool the search starts at
	// its first address.
	After map[string]netip.Addr
}

// Answer is the result of Choose. With a Refusal, Addresses are fewer than or different from the
// requested ones.
type Answer struct {
	Addresses []netip.Addr // in the order of the Service's IP families
	Refusal   *Refusal
	// Outside is set if the Service has an address that no pool contains any more.
	Outside *Refusal
}

// Choose returns the addresses that a Service is to have. A Service keeps an address even if the
// pools change: removing the address would break connections, so only a change of the Service
// itself can do that.
func Choose(q Question) Answer {
	wish, err := WishOf(q.Service)
	if err != nil { // written by an older release that did not check this
		return Answer{Addresses: q.Has, Refusal: &Refusal{ReasonWish, wish.Field + ": " + err.Error()}}
	}
	var out Answer
	for _, family := range families(q.Service) {
		six := family == corev1.IPv6Protocol
		a, refused := q.one(wish, six)
		if refused != nil {
			i := slices.IndexFunc(q.Has, func(a netip.Addr) bool { return a.Is6() == six })
			if i < 0 && q.optional(wish, six, len(out.Addresses) > 0) {
				continue
			}
			if out.Refusal = refused; i < 0 {
				continue
			}
			a = q.Has[i] // kept until the requested address is available
		}
		out.Addresses = append(out.Addresses, a)
		if p := poolOf(q.Pools, a); p == nil {
			out.Outside = &Refusal{ReasonOutside, fmt.Sprintf("address %s is in no pool any more; the Service keeps it: to give it another, "+
				"delete and create the Service, or ask for one with annotation %s", a, AddressesAnnotation)}
		}
	}
	return out
}

// families returns the IP families of a Service in its order. It returns IPv4 if the list is empty,
// which admission prevents.
func families(s *corev1.Service) []corev1.IPFamily {
	if len(s.Spec.IPFamilies) == 0 {
		return []corev1.IPFamily{corev1.IPv4Protocol}
	}
	return s.Spec.IPFamilies
}

// optional reports whether a Service can do without an address of the second family. That is so if
// it only prefers dual stack and no pool that it may use has addresses of the family. first reports
// whether it has an address of the first family; six selects IPv6.
func (q Question) optional(wish Wish, six, first bool) bool {
	p := q.Service.Spec.IPFamilyPolicy
	if !first || p == nil || *p == corev1.IPFamilyPolicyRequireDualStack {
		return false
	}
	return !slices.ContainsFunc(q.Pools, func(p *Pool) bool { return p.has(six) && q.may(p, wish) == "" })
}

// one returns the Service's address of a family (six selects IPv6), or a Refusal.
func (q Question) one(wish Wish, six bool) (netip.Addr, *Refusal) {
	has := func(a netip.Addr) bool { return slices.Contains(q.Has, a) }
	if i := slices.IndexFunc(wish.Addresses, func(a netip.Addr) bool { return a.Is6() == six }); i >= 0 {
		a := wish.Addresses[i]
		p := poolOf(q.Pools, a)
		switch {
		case has(a):
			return a, nil
		case p == nil:
			return a, &Refusal{ReasonWish, fmt.Sprintf("%s asks for %s, which is in no pool: ask for another, or add it to a pool of ConfigMap %s/%s", wish.Field, a, Namespace, ConfigMap)}
		case q.may(p, wish) != "":
			return a, &Refusal{ReasonWish, fmt.Sprintf("%s asks for %s of pool %s, %s", wish.Field, a, p.Name, q.may(p, wish))}
		case !q.Free(a):
			return a, &Refusal{ReasonWish, fmt.Sprintf("%s asks for %s of pool %s, which another Service, a node or something else has: ask for another", wish.Field, a, p.Name)}
		}
		return a, nil
	}
	if i := slices.IndexFunc(q.Has, func(a netip.Addr) bool { return a.Is6() == six }); i >= 0 {
		p := poolOf(q.Pools, q.Has[i])
		if wish.Pool == "" || p == nil || p.Name == wish.Pool {
			return q.Has[i], nil
		}
	}
	return q.any(wish, six)
}

// any returns a free address of a family from a pool that the Service may use, or a Refusal.
func (q Question) any(wish Wish, six bool) (netip.Addr, *Refusal) {
	family := "IPv4"
	if six {
		family = "IPv6"
	}
	var full []string
	var why string
	for _, p := range q.Pools {
		switch reason := q.may(p, wish); {
		case !p.has(six):
		case wish.Pool == "" && !p.AutoAssign:
			why = fmt.Sprintf("pool %s is given on request only", p.Name)
		case reason != "":
			why = fmt.Sprintf("pool %s, %s", p.Name, reason)
		default:
			if a, ok := p.next(six, q.After[p.Name], q.Free); ok {
				return a, nil
			}
			full = append(full, p.Name)
		}
	}
	remedy := fmt.Sprintf("add addresses to ConfigMap %s/%s", Namespace, ConfigMap)
	switch {
	case len(full) > 0:
		return netip.Addr{}, &Refusal{ReasonFull, fmt.Sprintf("no %s address is free in pool %s: %s, or delete Services that have some; the next free one is taken by itself",
			family, strings.Join(full, ", "), remedy)}
	case len(q.Pools) == 0:
		return netip.Addr{}, &Refusal{ReasonNone, fmt.Sprintf("there is no pool of addresses for load balancers: make one in ConfigMap %s/%s", Namespace, ConfigMap)}
	case wish.Pool != "" && !slices.ContainsFunc(q.Pools, func(p *Pool) bool { return p.Name == wish.Pool }):
		return netip.Addr{}, &Refusal{ReasonNone, fmt.Sprintf("annotation %s asks for pool %s, which there is not: ask for another, or make it in ConfigMap %s/%s", PoolAnnotation, wish.Pool, Namespace, ConfigMap)}
	case why != "":
		return netip.Addr{}, &Refusal{ReasonNone, fmt.Sprintf("no pool has %s addresses for this Service (%s): %s", family, why, remedy)}
	}
	return netip.Addr{}, &Refusal{ReasonNone, fmt.Sprintf("no pool has %s addresses: %s", family, remedy)}
}

// may returns the reason why a Service may not use a pool, or "" if it may.
func (q Question) may(p *Pool, wish Wish) string {
	switch {
	case wish.Pool != "" && wish.Pool != p.Name:
		return fmt.Sprintf("and annotation %s asks for pool %s", PoolAnnotation, wish.Pool)
	case !p.namespaces.Matches(q.Namespace):
		return "whose namespaceSelector does not select its namespace"
	case !p.services.Matches(labels.Set(q.Service.Labels)):
		return "whose serviceSelector does not select it"
	}
	return ""
}

func poolOf(pools []*Pool, a netip.Addr) *Pool {
	if i := slices.IndexFunc(pools, func(p *Pool) bool { return p.Contains(a) }); i >= 0 {
		return pools[i]
	}
	return nil
}

// PoolOf returns the pool that contains an address, or nil.
func PoolOf(pools []*Pool, a netip.Addr) *Pool { return poolOf(pools, a) }

// next returns the first free address of a family behind after. The search wraps around to the
// pool's start. It calls free for at most one address more than are in use.
func (p *Pool) next(six bool, after netip.Addr, free func(netip.Addr) bool) (netip.Addr, bool) {
	var order []Range
	for _, r := range p.Ranges {
		if r.From.Is6() == six {
			order = append(order, r)
		}
	}
	if i := slices.IndexFunc(order, func(r Range) bool { return r.Contains(after) }); i >= 0 {
		last := order[i]
		order = slices.Concat([]Range{{after.Next(), last.To}}, order[i+1:], order[:i], []Range{{last.From, after}})
	}
	for _, r := range order {
		for a := r.From; r.Contains(a); a = a.Next() {
			if free(a) {
				return a, true
			}
		}
	}
	return netip.Addr{}, false
}
