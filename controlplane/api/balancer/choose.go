package balancer

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Class is the loadBalancerClass of Services that get their addresses here; those without a class do as well.
const Class = "keelson.dev/announced"

// Annotations of Services and others.
const (
	// AddressesAnnotation asks for addresses: one, or one of each family with a comma between.
	AddressesAnnotation = "keelson.dev/load-balancer-ips"
	// PoolAnnotation asks for a pool.
	PoolAnnotation = "keelson.dev/load-balancer-pool"
	// AnnouncedBy names the node that answers for the addresses of a Service. The control plane alone writes it.
	AnnouncedBy = "keelson.dev/announced-by"
	// Announces is on Nodes whose agent answers for addresses when it is asked to.
	Announces = "keelson.dev/announces"
	// Unheard is on the Lease of a node that has missed heartbeats: since when, RFC 3339.
	Unheard = "keelson.dev/unheard-since"
)

// Allocator marks the IPAddresses of load balancers, by their label ipaddress.kubernetes.io/managed-by.
const Allocator = "load-balancer.keelson.dev"

// The reasons of condition Condition and of Events.
const (
	Condition     = "keelson.dev/LoadBalancer"
	ReasonReady   = "AddressAllocated"
	ReasonNone    = "NoLoadBalancerPool"
	ReasonFull    = "LoadBalancerPoolExhausted"
	ReasonWish    = "LoadBalancerAddressNotAvailable"
	ReasonOutside = "LoadBalancerAddressOutOfPools"
)

// Ours says whether a Service is one that gets its addresses here.
func Ours(s *corev1.Service) bool {
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer &&
		(s.Spec.LoadBalancerClass == nil || *s.Spec.LoadBalancerClass == Class)
}

// Asked says whether a Service names the class of what this package gives.
func Asked(s *corev1.Service) bool {
	return Ours(s) && s.Spec.LoadBalancerClass != nil
}

// Wish is what a Service asks for.
type Wish struct {
	Pool      string
	Addresses []netip.Addr // those of the annotation, else that of spec.loadBalancerIP
	Field     string       // that says so
}

// WishOf reads it. The error names what cannot be followed.
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

// Refusal says why a Service has not got all addresses.
type Refusal struct{ Reason, Message string }

// Question is what decides which addresses a Service gets.
type Question struct {
	Service   *corev1.Service
	Namespace labels.Set // the labels of its namespace
	Pools     []*Pool
	// Has are the addresses that are reserved for it; it keeps them unless it asks for others that it may have.
	Has []netip.Addr
	// Free says whether an address is nobody's.
	Free func(a netip.Addr) bool
	// After is where the search for a free address of a pool begins, behind the one given out last, so that one that was
	// given back rests; nil: at the first.
	After map[string]netip.Addr
}

// Answer is what a Service shall have. With a Refusal that is less than it wants, or something else.
type Answer struct {
	Addresses []netip.Addr // in the order of the Service's families
	Refusal   *Refusal
	// Outside says that it has an address that is in none of the pools any more.
	Outside *Refusal
}

// Choose decides. An address that a Service has stays its own whatever becomes of the pools: connections end when an
// address goes, so that goes by the Service alone.
func Choose(q Question) Answer {
	wish, err := WishOf(q.Service)
	if err != nil { // of a release without that check
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
			a = q.Has[i] // until there is the other one
		}
		out.Addresses = append(out.Addresses, a)
		if p := poolOf(q.Pools, a); p == nil {
			out.Outside = &Refusal{ReasonOutside, fmt.Sprintf("address %s is in no pool any more; the Service keeps it: to give it another, "+
				"delete and create the Service, or ask for one with annotation %s", a, AddressesAnnotation)}
		}
	}
	return out
}

// families are those of a Service, in its order; IPv4 where it says none, which admission does not let happen.
func families(s *corev1.Service) []corev1.IPFamily {
	if len(s.Spec.IPFamilies) == 0 {
		return []corev1.IPFamily{corev1.IPv4Protocol}
	}
	return s.Spec.IPFamilies
}

// optional says that a second family need not be had: the Service prefers it, and no pool that it may use has it.
func (q Question) optional(wish Wish, six, first bool) bool {
	p := q.Service.Spec.IPFamilyPolicy
	if !first || p == nil || *p == corev1.IPFamilyPolicyRequireDualStack {
		return false
	}
	return !slices.ContainsFunc(q.Pools, func(p *Pool) bool { return p.has(six) && q.may(p, wish) == "" })
}

// one is the address of a family.
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

// any is a free address of a pool that the Service may use.
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

// may says why a Service may not use a pool; "" = it may.
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

// PoolOf is the pool that has an address; nil = none.
func PoolOf(pools []*Pool, a netip.Addr) *Pool { return poolOf(pools, a) }

// next is the first free address of a family behind after, from the beginning where none exists. It looks at one address
// more than are taken, at most.
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
