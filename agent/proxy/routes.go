package proxy

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
)

// routesFor are where Services have their addresses: the range that the cluster was made with, and each address of a
// range that was added to it (ServiceCIDR) by itself.
func routesFor(services []*v1.Service, cidr netip.Prefix) map[netip.Prefix]bool {
	out := map[netip.Prefix]bool{}
	if cidr.IsValid() {
		out[cidr] = true
	}
	for _, s := range services {
		ip, err := netip.ParseAddr(s.Spec.ClusterIP)
		if err == nil && ip.Is4() && s.Spec.Type != v1.ServiceTypeExternalName && !cidr.Contains(ip) {
			out[netip.PrefixFrom(ip, 32)] = true
		}
	}
	return out
}

// follow gives Service addresses a way out of the host's own sockets, and takes it from those that are gone: the
// destination is rewritten in the output hook, but only for packets that have a route before. Nothing ever leaves by
// it: what was not rewritten is refused.
func (p *Proxy) follow(s *state, want map[netip.Prefix]bool) error {
	if maps.Equal(want, s.routed) || !p.NodeIP.IsValid() {
		return nil
	}
	link, err := p.link()
	if err != nil {
		return err
	}
	route := func(to netip.Prefix) *netlink.Route {
		return &netlink.Route{Dst: &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), 32)}, LinkIndex: link,
			Src: p.NodeIP.AsSlice(), Scope: netlink.SCOPE_LINK, Priority: 100}
	}
	next := maps.Clone(s.routed)
	if next == nil {
		next = map[netip.Prefix]bool{}
	}
	defer func() { s.routed = next }() // what was done is done, also where the rest fails
	for _, to := range slices.SortedFunc(maps.Keys(want), netip.Prefix.Compare) {
		if next[to] {
			continue
		}
		if err := netlink.RouteReplace(route(to)); err != nil {
			return fmt.Errorf("route for Service addresses %s: %w", to, err)
		}
		next[to] = true
	}
	for _, to := range slices.SortedFunc(maps.Keys(s.routed), netip.Prefix.Compare) {
		if want[to] {
			continue
		}
		if err := netlink.RouteDel(route(to)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("removing the route of Service address %s: %w", to, err)
		}
		delete(next, to)
	}
	return nil
}

// link is the interface that has the node's address.
func (p *Proxy) link() (int, error) {
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // pods come and go meanwhile; the node's link does not
		return 0, fmt.Errorf("listing interfaces: %w", err)
	}
	for _, l := range links {
		addrs, err := netlink.AddrList(l, netlink.FAMILY_V4)
		if err != nil {
			continue
		}
		for _, a := range addrs {
			if ip, ok := netip.AddrFromSlice(a.IP); ok && ip.Unmap() == p.NodeIP {
				return l.Attrs().Index, nil
			}
		}
	}
	return 0, fmt.Errorf("no interface holds the node's address %s: check --node-ip", p.NodeIP)
}
