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

	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// Cluster IPs are in the cluster's Service ranges, which are routed as a whole. Each cluster IP of
// a range that was added later (ServiceCIDR) is routed individually.

// addressesOutsideRange returns the cluster IPs of a Port that no Service range of the cluster
// contains, as single-address prefixes.
func (s *proxyState) addressesOutsideRange(p *servicemodel.Port) []netip.Prefix {
	var out []netip.Prefix
	for _, at := range p.Internal {
		if !slices.ContainsFunc(s.base.ServiceCIDRs, func(c netip.Prefix) bool { return c.Contains(at.IP) }) {
			out = append(out, netip.PrefixFrom(at.IP, at.IP.BitLen()))
		}
	}
	return out
}

// countOutsideAddresses applies the changes to addressesOutsideRanges, the number of Ports per
// cluster IP outside the Service ranges.
func (s *proxyState) countOutsideAddresses(changes []servicemodel.Change) {
	for _, c := range changes {
		if c.New != nil {
			for _, ip := range s.addressesOutsideRange(c.New) {
				s.addressesOutsideRanges[ip]++
			}
		}
		if c.Old != nil {
			for _, ip := range s.addressesOutsideRange(c.Old) {
				if s.addressesOutsideRanges[ip]--; s.addressesOutsideRanges[ip] == 0 {
					delete(s.addressesOutsideRanges, ip)
				}
			}
		}
	}
}

// recountOutsideAddresses recomputes addressesOutsideRanges from all Ports. The caller must call it
// after the Service ranges have changed.
func (s *proxyState) recountOutsideAddresses() {
	clear(s.addressesOutsideRanges)
	for _, p := range s.model.Ports() {
		s.countOutsideAddresses([]servicemodel.Change{{New: p}})
	}
}

// wantedRoutes returns the prefixes that must be routed to Services: the Service ranges, and each
// cluster IP outside these ranges.
func (s *proxyState) wantedRoutes() map[netip.Prefix]bool {
	out := map[netip.Prefix]bool{}
	for _, c := range s.base.ServiceCIDRs {
		out[c] = true
	}
	for ip := range s.addressesOutsideRanges {
		out[ip] = true
	}
	return out
}

// syncRoutes adds a route to the interface sinkName for each prefix in want, and removes all other
// routes that it added before.
//
// Rules in the output hook rewrite the destination of the host's own packets, but only if the
// packets already have a route. Nothing is connected to the interface. It discards packets that no
// rule has rewritten, for example while the rules are flushed. Otherwise, such packets would leave
// through the uplink.
func (p *Proxy) syncRoutes(s *proxyState, want map[netip.Prefix]bool) error {
	if maps.Equal(want, s.routes) || !p.NodeIP.IsValid() {
		return nil
	}
	up, err := p.findUplink()
	if err != nil {
		return err
	}
	link, err := ensureSink(up.link)
	if err != nil {
		return err
	}
	route := func(to netip.Prefix) *netlink.Route {
		r := &netlink.Route{Dst: &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())},
			LinkIndex: link, Priority: 100}
		if from := up.sourceAddress(p.NodeIP, to.Addr().Is4()); from.IsValid() {
			r.Src = from.AsSlice()
		}
		if to.Addr().Is4() {
			r.Scope = netlink.SCOPE_LINK
		}
		return r
	}
	next := maps.Clone(s.routes)
	if next == nil {
		next = map[netip.Prefix]bool{}
	}
	defer func() { s.routes = next }() // record the routes that were changed, even if a later one fails
	for _, to := range slices.SortedFunc(maps.Keys(want), netip.Prefix.Compare) {
		if next[to] {
			continue
		}
		if err := netlink.RouteReplace(route(to)); err != nil {
			return fmt.Errorf("route for Service addresses %s: %w", to, err)
		}
		next[to] = true
	}
	for _, to := range slices.SortedFunc(maps.Keys(s.routes), netip.Prefix.Compare) {
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

// uplink is the network interface that holds the node's address, with its addresses.
type uplink struct {
	link  netlink.Link
	addrs []netip.Addr
}

// sourceAddress returns the source address for the host's own connections to Services, in the
// family that wantIPv4 selects. It returns node, the node's primary address, if that has this
// family. Otherwise it returns the first matching global unicast address of the uplink, or the zero
// Addr.
func (u uplink) sourceAddress(node netip.Addr, wantIPv4 bool) netip.Addr {
	if node.Is4() == wantIPv4 {
		return node
	}
	for _, a := range u.addrs {
		if a.Is4() == wantIPv4 && a.IsGlobalUnicast() {
			return a
		}
	}
	return netip.Addr{}
}

func (p *Proxy) findUplink() (uplink, error) {
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		// an interrupted dump may miss pod interfaces, but not the node's uplink
		return uplink{}, fmt.Errorf("listing interfaces: %w", err)
	}
	for _, l := range links {
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			continue
		}
		u := uplink{link: l}
		for _, a := range addrs {
			if ip, ok := netip.AddrFromSlice(a.IP); ok && a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DEPRECATED) == 0 {
				u.addrs = append(u.addrs, ip.Unmap())
			}
		}
		if slices.Contains(u.addrs, p.NodeIP) {
			return u, nil
		}
	}
	return uplink{}, fmt.Errorf("no interface holds the node's address %s: check --node-ip", p.NodeIP)
}

// sinkName is the name of the interface to which Service routes lead. Nothing is connected to it,
// so packets that no rule rewrites are discarded.
const sinkName = "keelson-sink"

// sinkMTU is the maximum MTU of a bridge; loopback has a larger one.
const sinkMTU = 65535

// ensureSink creates the interface sinkName with the MTU of the uplink up, and returns its index.
// The kernel segments the host's packets to Services by the route's MTU.
//
// The interface is a bridge without ports, because every kernel that can attach pods has bridges.
// It sends no ARP requests.
func ensureSink(up netlink.Link) (int, error) {
	l, err := netlink.LinkByName(sinkName)
	if err != nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = sinkName
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil && !errors.Is(err, unix.EEXIST) {
			return 0, fmt.Errorf("creating interface %s for the routes of Service addresses: %w", sinkName, err)
		}
		if l, err = netlink.LinkByName(sinkName); err != nil {
			return 0, fmt.Errorf("%s: %w", sinkName, err)
		}
	}
	err = errors.Join(netlink.LinkSetARPOff(l), netlink.LinkSetMTU(l, min(up.Attrs().MTU, sinkMTU)),
		netlink.LinkSetUp(l))
	if err != nil {
		return 0, fmt.Errorf("setting up %s: %w", sinkName, err)
	}
	return l.Attrs().Index, nil
}

// isSinkUp reports whether the interface sinkName exists and is up. The kernel removes the Service
// routes with the interface.
func isSinkUp() bool {
	l, err := netlink.LinkByName(sinkName)
	return err == nil && l.Attrs().Flags&net.FlagUp != 0
}

// removeSink removes the interface sinkName, and with it all Service routes. It is for a node
// without Service rules.
func removeSink() error {
	l, err := netlink.LinkByName(sinkName)
	if err != nil {
		return nil // it does not exist
	}
	if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing %s: %w", sinkName, err)
	}
	return nil
}
