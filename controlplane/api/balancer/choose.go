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
	// AddressesAnnotation on a Service requests addresses: one address, or one address of each IP
	// family, separated by a comma.
	AddressesAnnotation = "keelson.dev/load-balancer-ips"
	// PoolAnnotation on a Service requests an address of the pool with this name.
	PoolAnnotation = "keelson.dev/load-balancer-pool"
	// AnnouncedBy on a Service is the node that announces the Service's addresses: it answers ARP
	// and NDP requests for them. Only the control plane writes it.
	AnnouncedBy = "keelson.dev/announced-by"
	// Announces marks Nodes with an agent that can announce addresses of Services.
	Announces = "keelson.dev/announces"
	// MissingSince on the Lease of a node that misses heartbeats is the time of the first missing
	// heartbeat, in RFC 3339.
	MissingSince = "keelson.dev/unheard-since"
)

// Allocator is the value of label ipaddress.kubernetes.io/managed-by on the IPAddresses of load
// balancers.
const Allocator = "load-balancer.keelson.dev"

// The type of the Service condition and its reasons, which are also the reasons of Events.
const (
	Condition         = "keelson.dev/LoadBalancer"
	ReasonReady       = "AddressAllocated"
	ReasonNone        = "NoLoadBalancerPool"
	ReasonFull        = "LoadBalancerPoolExhausted"
	ReasonUnavailable = "LoadBalancerAddressNotAvailable"
	ReasonOutside     = "LoadBalancerAddressOutOfPools"
)

// IsManaged reports whether a Service of type LoadBalancer gets its addresses from Keelson's pools:
// its loadBalancerClass is Class or not set.
func IsManaged(service *corev1.Service) bool {
	return service.Spec.Type == corev1.ServiceTypeLoadBalancer &&
		(service.Spec.LoadBalancerClass == nil || *service.Spec.LoadBalancerClass == Class)
}

// HasClass reports whether a Service explicitly has the loadBalancerClass Class.
func HasClass(service *corev1.Service) bool {
	return IsManaged(service) && service.Spec.LoadBalancerClass != nil
}

// AddressRequest is a Service's request for particular addresses or a pool.
type AddressRequest struct {
	Pool      string
	Addresses []netip.Addr // from the annotation, or else from spec.loadBalancerIP
	Field     string       // the field or annotation that requests Addresses
}

// ParseAddressRequest returns the AddressRequest of a Service. An error contains the invalid
// address.
func ParseAddressRequest(service *corev1.Service) (AddressRequest, error) {
	w := AddressRequest{Pool: service.Annotations[PoolAnnotation]}
	text, asked := service.Annotations[AddressesAnnotation]
	if w.Field = "metadata.annotations[" + AddressesAnnotation + "]"; !asked {
		text, w.Field = service.Spec.LoadBalancerIP, "spec.loadBalancerIP"
	}
	if text == "" && !asked {
		w.Field = ""
		return w, nil
	}
	for _, part := range strings.Split(text, ",") {
		a, err := parseAddress(part)
		if err != nil || a.Is4In6() {
			return AddressRequest{},
				fmt.Errorf("%q is not an IP address: specify one address, or one of each family separated by a comma",
					strings.TrimSpace(part))
		}
		if slices.ContainsFunc(w.Addresses, func(o netip.Addr) bool { return o.Is4() == a.Is4() }) {
			return AddressRequest{},
				fmt.Errorf("%q has two addresses of one family: specify one address of each family", text)
		}
		w.Addresses = append(w.Addresses, a)
	}
	return w, nil
}

// Refusal is the reason and the message for a Service that does not get all requested addresses.
type Refusal struct{ Reason, Message string }

// ChooseInput is the input of ChooseAddresses.
type ChooseInput struct {
	Service   *corev1.Service
	Namespace labels.Set // labels of the Service's namespace
	Pools     []*Pool
	// Reserved are the addresses that are reserved for the Service. It keeps them unless it
	// requests other addresses that it may have.
	Reserved []netip.Addr
	// Free reports whether an address is unused.
	Free func(a netip.Addr) bool
	// After maps the name of each pool to the address that was allocated last. The search for a
	// free address starts after that address, so that a released address is not reused immediately.
	// For a pool without an entry, the search starts at its first address.
	After map[string]netip.Addr
}

// ChooseResult is the result of ChooseAddresses. If Refusal is set, some addresses are missing or
// differ from the requested addresses.
type ChooseResult struct {
	Addresses []netip.Addr // in the order of the Service's IP families
	Refusal   *Refusal
	// Outside is set if the Service has an address that is no longer in any pool.
	Outside *Refusal
}

// ChooseAddresses returns the addresses that a Service should have. A Service keeps an address when
// the pools change, because removing the address would break connections. Only a change of the
// Service itself changes its addresses.
func ChooseAddresses(input ChooseInput) ChooseResult {
	wish, err := ParseAddressRequest(input.Service)
	if err != nil { // written by an older release that did not check this
		return ChooseResult{Addresses: input.Reserved,
			Refusal: &Refusal{ReasonUnavailable, wish.Field + ": " + err.Error()}}
	}
	var out ChooseResult
	for _, family := range ipFamilies(input.Service) {
		six := family == corev1.IPv6Protocol
		a, refused := input.chooseForFamily(wish, six)
		if refused != nil {
			i := slices.IndexFunc(input.Reserved, func(a netip.Addr) bool { return a.Is6() == six })
			if i < 0 && input.isFamilyOptional(wish, six, len(out.Addresses) > 0) {
				continue
			}
			if out.Refusal = refused; i < 0 {
				continue
			}
			a = input.Reserved[i] // the current address, until the requested address is available
		}
		out.Addresses = append(out.Addresses, a)
		if p := findPool(input.Pools, a); p == nil {
			out.Outside = &Refusal{ReasonOutside,
				fmt.Sprintf("address %s is no longer in a pool; the Service keeps the address: to change it, "+
					"delete and create the Service, or request an address with annotation %s", a, AddressesAnnotation)}
		}
	}
	return out
}

// ipFamilies returns the IP families of a Service in its order. It returns IPv4 if the list is
// empty, which admission prevents.
func ipFamilies(service *corev1.Service) []corev1.IPFamily {
	if len(service.Spec.IPFamilies) == 0 {
		return []corev1.IPFamily{corev1.IPv4Protocol}
	}
	return service.Spec.IPFamilies
}

// isFamilyOptional reports whether a Service may go without an address of one IP family: IPv6 if
// ipv6 is true, otherwise IPv4. This is the case if all of the following hold: it already has an
// address of its first family (hasFirst); its policy does not require dual stack; and no pool that
// it may use has addresses of the family.
func (q ChooseInput) isFamilyOptional(request AddressRequest, ipv6, hasFirst bool) bool {
	p := q.Service.Spec.IPFamilyPolicy
	if !hasFirst || p == nil || *p == corev1.IPFamilyPolicyRequireDualStack {
		return false
	}
	return !slices.ContainsFunc(q.Pools, func(p *Pool) bool {
		return p.hasFamily(ipv6) && q.whyNotAllowed(p, request) == ""
	})
}

// chooseForFamily returns the Service's address of one IP family: IPv6 if ipv6 is true, otherwise
// IPv4. If the Service cannot have such an address, or not the requested one, it also returns a
// Refusal.
func (q ChooseInput) chooseForFamily(request AddressRequest, ipv6 bool) (netip.Addr, *Refusal) {
	has := func(a netip.Addr) bool { return slices.Contains(q.Reserved, a) }
	if i := slices.IndexFunc(request.Addresses, func(a netip.Addr) bool { return a.Is6() == ipv6 }); i >= 0 {
		a := request.Addresses[i]
		p := findPool(q.Pools, a)
		switch {
		case has(a):
			return a, nil
		case p == nil:
			return a,
				&Refusal{ReasonUnavailable,
					fmt.Sprintf("%s requests %s, which is in no pool: request another address, or add it to a pool of "+
						"ConfigMap %s/%s", request.Field, a, Namespace, ConfigMap)}
		case q.whyNotAllowed(p, request) != "":
			return a,
				&Refusal{ReasonUnavailable, fmt.Sprintf("%s requests %s of pool %s, %s", request.Field, a, p.Name,
					q.whyNotAllowed(p, request))}
		case !q.Free(a):
			return a,
				&Refusal{ReasonUnavailable,
					fmt.Sprintf("%s requests %s of pool %s, which a Service, a node or another object uses: request "+
						"another address", request.Field, a, p.Name)}
		}
		return a, nil
	}
	if i := slices.IndexFunc(q.Reserved, func(a netip.Addr) bool { return a.Is6() == ipv6 }); i >= 0 {
		p := findPool(q.Pools, q.Reserved[i])
		if request.Pool == "" || p == nil || p.Name == request.Pool {
			return q.Reserved[i], nil
		}
	}
	return q.chooseFreeAddress(request, ipv6)
}

// chooseFreeAddress returns a free address from a pool that the Service may use, or a Refusal. The
// address is an IPv6 address if ipv6 is true, otherwise IPv4.
func (q ChooseInput) chooseFreeAddress(request AddressRequest, ipv6 bool) (netip.Addr, *Refusal) {
	family := "IPv4"
	if ipv6 {
		family = "IPv6"
	}
	var full []string
	var why string
	for _, p := range q.Pools {
		switch reason := q.whyNotAllowed(p, request); {
		case !p.hasFamily(ipv6):
		case request.Pool == "" && !p.AutoAssign:
			why = fmt.Sprintf("pool %s is used on request only", p.Name)
		case reason != "":
			why = fmt.Sprintf("pool %s, %s", p.Name, reason)
		default:
			if a, ok := p.nextFree(ipv6, q.After[p.Name], q.Free); ok {
				return a, nil
			}
			full = append(full, p.Name)
		}
	}
	remedy := fmt.Sprintf("add addresses to ConfigMap %s/%s", Namespace, ConfigMap)
	switch {
	case len(full) > 0:
		return netip.Addr{},
			&Refusal{ReasonFull,
				fmt.Sprintf("no %s address is free in pool %s: %s, or delete Services with addresses; a released "+
					"address is assigned automatically",
					family, strings.Join(full, ", "), remedy)}
	case len(q.Pools) == 0:
		return netip.Addr{},
			&Refusal{ReasonNone,
				fmt.Sprintf("no address pool for load balancers exists: create a pool in ConfigMap %s/%s",
					Namespace, ConfigMap)}
	case request.Pool != "" && !slices.ContainsFunc(q.Pools, func(p *Pool) bool { return p.Name == request.Pool }):
		return netip.Addr{},
			&Refusal{ReasonNone,
				fmt.Sprintf("annotation %s requests pool %s, which does not exist: request another pool, or create it "+
					"in ConfigMap %s/%s", PoolAnnotation, request.Pool, Namespace, ConfigMap)}
	case why != "":
		return netip.Addr{}, &Refusal{ReasonNone,
			fmt.Sprintf("no pool has %s addresses for this Service (%s): %s", family, why, remedy)}
	}
	return netip.Addr{}, &Refusal{ReasonNone, fmt.Sprintf("no pool has %s addresses: %s", family, remedy)}
}

// whyNotAllowed returns the reason why a Service with this request may not use a pool. It returns
// "" if the Service may use it.
func (q ChooseInput) whyNotAllowed(pool *Pool, request AddressRequest) string {
	switch {
	case request.Pool != "" && request.Pool != pool.Name:
		return fmt.Sprintf("but annotation %s requests pool %s", PoolAnnotation, request.Pool)
	case !pool.namespaces.Matches(q.Namespace):
		return "whose namespaceSelector does not select its namespace"
	case !pool.services.Matches(labels.Set(q.Service.Labels)):
		return "whose serviceSelector does not select it"
	}
	return ""
}

func findPool(pools []*Pool, a netip.Addr) *Pool {
	if i := slices.IndexFunc(pools, func(p *Pool) bool { return p.Contains(a) }); i >= 0 {
		return pools[i]
	}
	return nil
}

// FindPool returns the pool that contains an address. It returns nil if no pool contains the
// address.
func FindPool(pools []*Pool, address netip.Addr) *Pool { return findPool(pools, address) }

// nextFree returns the first free address of the pool after the given address. It searches IPv6
// addresses if ipv6 is true, otherwise IPv4. After the end of the pool, the search continues at its
// start. It calls isFree at most once more than the number of used addresses.
func (p *Pool) nextFree(ipv6 bool, after netip.Addr, isFree func(netip.Addr) bool) (netip.Addr, bool) {
	var order []Range
	for _, r := range p.Ranges {
		if r.From.Is6() == ipv6 {
			order = append(order, r)
		}
	}
	if i := slices.IndexFunc(order, func(r Range) bool { return r.Contains(after) }); i >= 0 {
		last := order[i]
		order = slices.Concat([]Range{{after.Next(), last.To}}, order[i+1:], order[:i], []Range{{last.From, after}})
	}
	for _, r := range order {
		for a := r.From; r.Contains(a); a = a.Next() {
			if isFree(a) {
				return a, true
			}
		}
	}
	return netip.Addr{}, false
}
