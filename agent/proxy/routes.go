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
)

// Services have their addresses in the range that the cluster was made with; each address of a range that was added to
// it (ServiceCIDR) is routed by itself.

// beyond are the addresses of a Port that no range holds.
func (s *state) beyond(p *Port) []netip.Prefix {
	var out []netip.Prefix
	for _, at := range p.Internal {
		if !slices.ContainsFunc(s.base.ServiceCIDRs, func(c netip.Prefix) bool { return c.Contains(at.IP) }) {
			out = append(out, netip.PrefixFrom(at.IP, at.IP.BitLen()))
		}
	}
	return out
}

// outlie counts the addresses beyond the ranges.
func (s *state) outlie(changes []Change) {
	for _, c := range changes {
		if c.New != nil {
			for _, ip := range s.beyond(c.New) {
				s.outlying[ip]++
			}
		}
		if c.Old != nil {
			for _, ip := range s.beyond(c.Old) {
				if s.outlying[ip]--; s.outlying[ip] == 0 {
					delete(s.outlying, ip)
				}
			}
		}
	}
}

// recount counts them for other ranges.
func (s *state) recount() {
	clear(s.outlying)
	for _, p := range s.model.Ports() {
		s.outlie([]Change{{New: p}})
	}
}

// routes are where Services have their addresses.
func (s *state) routes() map[netip.Prefix]bool {
	out := map[netip.Prefix]bool{}
	for _, c := range s.base.ServiceCIDRs {
		out[c] = true
	}
	for ip := range s.outlying {
		out[ip] = true
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
		r := &netlink.Route{Dst: &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())},
			LinkIndex: link, Priority: 100}
		if to.Addr().Is4() == p.NodeIP.Is4() {
			r.Src = p.NodeIP.AsSlice()
		}
		if to.Addr().Is4() {
			r.Scope = netlink.SCOPE_LINK
		}
		return r
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
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
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
