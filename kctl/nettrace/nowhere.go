package nettrace

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// unknownAddressStep returns the failed step for ip if no Service, pod or node has this address and
// it is not routable. It returns nil if the connection may leave the cluster.
func (x *tracer) unknownAddressStep(ip netip.Addr) *Step {
	stop := func(mend, format string, args ...any) *Step {
		return &Step{Name: "route", Stops: true, Says: fmt.Sprintf(format, args...), Mend: []string{mend}}
	}
	const other = "# correct the address"
	switch {
	case ip.IsLoopback():
		return stop(other, "%s is the pod itself: a loopback address leads to no other pod or machine", ip)
	case ip.IsUnspecified(), ip.IsMulticast(), ip == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return stop(other, "there is no route to %s: it is not the address of one machine", ip)
	}
	if !x.hasFamily(ip) {
		return stop("# connect to an IPv"+map[bool]string{true: "4", false: "6"}[x.podFamily4()]+" address",
			"there is no route to %s: the pod has no address of that family", ip)
	}
	for _, n := range x.Nodes {
		if inRanges(ip, podRanges(&n)) && !slices.Contains(x.Unread, Pods) {
			return stop("kctl get pods -A -o wide",
				"no pod has the address %s of the range of node %s: packets to it are dropped there", ip, n.Name)
		}
	}
	for _, r := range x.Ranges {
		if inRanges(ip, r.Spec.CIDRs) && !slices.Contains(x.Unread, Services) {
			return stop("kctl get services -A",
				"no Service has the address %s of the range of Services: there is no route to it", ip)
		}
	}
	return nil
}

// noRouteStep returns the failed step for a destination to which the pod's node has no route.
// destination describes it in the text of the step. x.Reach must not be nil.
func (x *tracer) noRouteStep(destination string) Step {
	return Step{Name: "route", Stops: true,
		Says: fmt.Sprintf("node %s of the pod has no route to %s, which no Service, pod or node has: %s",
			x.Pod.Spec.NodeName, destination, x.Reach.NoRoute),
		Mend: []string{"# add a route on node " + x.Pod.Spec.NodeName + ", such as a default route"}}
}

// podRanges returns the pod CIDRs of a node.
func podRanges(n *corev1.Node) []string {
	if len(n.Spec.PodCIDRs) == 0 && n.Spec.PodCIDR != "" {
		return []string{n.Spec.PodCIDR}
	}
	return n.Spec.PodCIDRs
}

func inRanges(ip netip.Addr, cidrs []string) bool {
	return slices.ContainsFunc(cidrs, func(cidr string) bool {
		p, err := netip.ParsePrefix(cidr)
		return err == nil && p.Contains(ip)
	})
}

// hasFamily reports whether the pod has an address of the same IP family (IPv4 or IPv6) as ip. A
// pod in the host network has the addresses of its node.
func (x *tracer) hasFamily(ip netip.Addr) bool {
	own := podAddresses(x.Pod)
	if n := x.nodeNamed(x.Pod.Spec.NodeName); x.Pod.Spec.HostNetwork && n != nil {
		for _, a := range n.Status.Addresses {
			own = append(own, a.Address)
		}
	}
	return slices.ContainsFunc(own, func(s string) bool {
		a, err := netip.ParseAddr(s)
		return err == nil && a.Unmap().Is4() == ip.Is4()
	})
}

// podFamily4 reports whether the pod's first address is an IPv4 address.
func (x *tracer) podFamily4() bool {
	a, err := netip.ParseAddr(x.Pod.Status.PodIP)
	return err == nil && a.Unmap().Is4()
}
