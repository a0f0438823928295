package network

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/cni"
)

const (
	// routeProtocol is the protocol number (rtm_protocol) of Keelson's routes in the kernel. It
	// identifies them, so that stale routes are found after a crash.
	routeProtocol = 75
	// refusedMetric is the metric of unreachable routes. Every other route to the same range has a
	// lower metric and takes precedence.
	refusedMetric = 8192
)

// kernelFamilies returns the address families that the kernel supports.
func kernelFamilies() []int {
	out := []int{netlink.FAMILY_V4}
	if _, err := os.Stat("/proc/sys/net/ipv6"); err == nil {
		out = append(out, netlink.FAMILY_V6)
	}
	return out
}

// nodeLinks returns the network interfaces of this node that hold one of nodeIPs, the node's
// addresses.
func nodeLinks(nodeIPs []netip.Addr) ([]Link, error) {
	all, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		// an interrupted dump may miss pod interfaces, but not the node's links
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("listing addresses: %w", err)
	}
	var out []Link
	for _, l := range all {
		link, ours := Link{Name: l.Attrs().Name, MTU: l.Attrs().MTU}, false
		if link.Name == tunnelName || link.Name == wireguardName || link.Name == cni.Bridge {
			continue
		}
		for _, a := range addrs {
			p, ok := toPrefix(a.IPNet)
			if !ok || a.LinkIndex != l.Attrs().Index || p.Addr().IsLinkLocalUnicast() {
				continue
			}
			link.Addrs = append(link.Addrs, p)
			ours = ours || slices.Contains(nodeIPs, p.Addr())
		}
		if ours {
			out = append(out, link)
		}
	}
	return out, nil
}

// requiredSysctl is a sysctl that must have the value 1. remedy tells an operator how to set it.
type requiredSysctl struct {
	path, remedy string
	needed       bool
}

// enableForwarding sets the sysctls that pod traffic requires in this network namespace. bridged
// adds the sysctls for traffic between pods on a bridge, and ipv6 adds those for IPv6.
func enableForwarding(bridged, ipv6 bool) error {
	if ipv6 {
		keepRouterAdvertisements()
	}
	for _, s := range []requiredSysctl{
		{"/proc/sys/net/ipv4/ip_forward", "set net.ipv4.ip_forward=1", true},
		{"/proc/sys/net/ipv6/conf/all/forwarding", "set net.ipv6.conf.all.forwarding=1", ipv6},
		{"/proc/sys/net/bridge/bridge-nf-call-iptables", "load it with 'modprobe br_netfilter'", bridged},
		{"/proc/sys/net/bridge/bridge-nf-call-ip6tables", "load it with 'modprobe br_netfilter'", bridged && ipv6},
	} {
		if !s.needed {
			continue
		}
		if raw, err := os.ReadFile(s.path); err == nil && strings.TrimSpace(string(raw)) == "1" {
			continue
		}
		if err := os.WriteFile(s.path, []byte("1"), 0o644); err != nil {
			return fmt.Errorf("enabling pod traffic: %w: %s", err, s.remedy)
		}
	}
	return nil
}

// keepRouterAdvertisements prepares the network interfaces for IPv6 forwarding. Interfaces that
// accept router advertisements continue to do so. Otherwise the kernel would ignore the
// advertisements, and the host would lose its default route.
func keepRouterAdvertisements() {
	if raw, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/forwarding"); err == nil &&
		strings.TrimSpace(string(raw)) == "1" {
		return
	}
	links, err := netlink.LinkList()
	if err != nil {
		return
	}
	for _, l := range links {
		path := "/proc/sys/net/ipv6/conf/" + l.Attrs().Name + "/accept_ra"
		if raw, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(raw)) == "1" {
			_ = os.WriteFile(path, []byte("2"), 0o644)
		}
	}
}

// installLayout programs the routes, tunnels and neighbor entries of the layout in the kernel. A
// problem with a single node does not prevent the rest. Such problems are returned as sentences.
func installLayout(l Layout) (problems []string, err error) {
	problems = slices.Clone(l.Missing)
	index, err := installTunnel(l.Tunnel)
	if err != nil {
		return problems, err
	}
	if l.Tunnel != nil {
		problems = append(problems, installPeers(index, l.Peers)...)
	}
	secure, failed := installWireGuard(l.WireGuard)
	routes := l.Routes
	if l.WireGuard != nil {
		if index = secure; index == 0 {
			// Without a tunnel interface, its routes cannot be installed. Routes of another mode
			// that bypass the tunnel must not remain either.
			routes = maps.Clone(routes)
			maps.DeleteFunc(routes, func(_ netip.Prefix, r Route) bool { return r.Tunnel })
		}
	}
	refused, err := installRoutes(routes, index)
	if err = errors.Join(failed, err); err != nil {
		return problems, err
	}
	return append(problems, refused...), setBridgeMTU(l.MTU)
}

// installTunnel creates or updates this node's VXLAN interface, and returns its interface index. If
// want is nil, it removes the interface.
func installTunnel(want *Tunnel) (index int, err error) {
	have, err := findLink(tunnelName)
	if err != nil {
		return 0, err
	}
	if have != nil && (want == nil || !sameTunnel(have, want)) {
		if err := removeLink(have); err != nil {
			return 0, err
		}
		have = nil
	}
	if want == nil {
		return 0, nil
	}
	if have == nil {
		mac, err := net.ParseMAC(want.MAC)
		if err != nil {
			return 0, err
		}
		made := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: tunnelName, HardwareAddr: mac, MTU: want.MTU},
			VxlanId: tunnelVNI, Port: tunnelPort, SrcAddr: want.Local.AsSlice(), Learning: false}
		if err := netlink.LinkAdd(made); err != nil {
			return 0,
				fmt.Errorf("creating the tunnel to nodes on other links: %w: load it with 'modprobe vxlan', or put "+
					"all nodes on one link", err)
		}
		if have, err = netlink.LinkByName(tunnelName); err != nil {
			return 0, fmt.Errorf("creating the tunnel: %w", err)
		}
	}
	if have.Attrs().MTU != want.MTU {
		if err := netlink.LinkSetMTU(have, want.MTU); err != nil {
			return 0, fmt.Errorf("setting the tunnel's MTU to %d: %w", want.MTU, err)
		}
	}
	if have.Attrs().Flags&net.FlagUp == 0 {
		if err := netlink.LinkSetUp(have); err != nil {
			return 0, fmt.Errorf("setting the tunnel up: %w", err)
		}
	}
	return have.Attrs().Index, setTunnelAddrs(have, want.Addrs)
}

func sameTunnel(have netlink.Link, want *Tunnel) bool {
	v, ok := have.(*netlink.Vxlan)
	if !ok {
		return false
	}
	local, _ := netip.AddrFromSlice(v.SrcAddr)
	return v.VxlanId == tunnelVNI && v.Port == tunnelPort && !v.Learning && local.Unmap() == want.Local &&
		v.Attrs().HardwareAddr.String() == want.MAC
}

// setTunnelAddrs sets the addresses of the VXLAN interface l: it adds the addresses in want and
// removes all others, except link-local addresses.
func setTunnelAddrs(l netlink.Link, want []netip.Addr) error {
	have, err := netlink.AddrList(l, netlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return fmt.Errorf("listing the addresses of the tunnel: %w", err)
	}
	there := map[netip.Addr]bool{}
	for _, a := range have {
		p, ok := toPrefix(a.IPNet)
		if !ok || p.Addr().IsLinkLocalUnicast() {
			continue
		}
		if p.IsSingleIP() && slices.Contains(want, p.Addr()) {
			there[p.Addr()] = true
		} else if err := netlink.AddrDel(l, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("removing %s from the tunnel: %w", p, err)
		}
	}
	for _, a := range want {
		if there[a] {
			continue
		}
		addr := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, a.BitLen()))}
		if a.Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrReplace(l, addr); err != nil {
			return fmt.Errorf("adding address %s to the tunnel: %w", a, err)
		}
	}
	return nil
}

// installPeers sets the neighbor and forwarding entries of the VXLAN interface with index
// linkIndex: it adds the entries for the peers and removes all others. Failures are returned in
// problems, one sentence per entry.
func installPeers(linkIndex int, peers []Peer) (problems []string) {
	type entry struct {
		family int
		mac    string
		ip     netip.Addr
	}
	want := map[entry]string{}
	for _, p := range peers {
		want[entry{unix.AF_BRIDGE, p.MAC, p.Outer}] = p.Node
		for _, ip := range p.Inner {
			f := netlink.FAMILY_V4
			if ip.Is6() {
				f = netlink.FAMILY_V6
			}
			want[entry{f, p.MAC, ip}] = p.Node
		}
	}
	neigh := func(e entry) *netlink.Neigh {
		mac, _ := net.ParseMAC(e.mac)
		n := &netlink.Neigh{LinkIndex: linkIndex, Family: e.family, State: netlink.NUD_PERMANENT, IP: e.ip.AsSlice(),
			HardwareAddr: mac}
		if e.family == unix.AF_BRIDGE {
			n.Flags = netlink.NTF_SELF
		}
		return n
	}
	for _, f := range append(kernelFamilies(), unix.AF_BRIDGE) {
		have, err := netlink.NeighList(linkIndex, f)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			problems = append(problems, fmt.Sprintf("listing the tunnel's neighbors: %v", err))
			continue
		}
		for _, n := range have {
			ip, _ := netip.AddrFromSlice(n.IP)
			e := entry{f, n.HardwareAddr.String(), ip.Unmap()}
			if _, ok := want[e]; ok && n.State&netlink.NUD_PERMANENT != 0 {
				delete(want, e)
			} else if n.State&(netlink.NUD_PERMANENT|netlink.NUD_REACHABLE|netlink.NUD_STALE) != 0 &&
				!ip.IsMulticast() {
				_ = netlink.NeighDel(&n) // an error is ignored: the entry has expired, or is replaced below
			}
		}
	}
	for e, node := range want {
		if err := netlink.NeighSet(neigh(e)); err != nil {
			problems = append(problems, fmt.Sprintf("tunnel to node %s at %s: %v", node, e.ip, err))
		}
	}
	return problems
}

// installRoutes sets Keelson's routes in the kernel, which have the protocol routeProtocol: it adds
// the routes in want and removes all others. tunnelIndex is the interface index of the tunnel.
func installRoutes(want map[netip.Prefix]Route, tunnelIndex int) (problems []string, err error) {
	var have []netlink.Route
	for _, f := range kernelFamilies() {
		list, err := netlink.RouteListFiltered(f, &netlink.Route{Protocol: routeProtocol}, netlink.RT_FILTER_PROTOCOL)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			// the next sync sees the routes that this dump missed
			return nil, fmt.Errorf("listing routes: %w", err)
		}
		have = append(have, list...)
	}
	var errs []error
	fine := map[netip.Prefix]bool{}
	for _, h := range have {
		p, ok := toPrefix(h.Dst)
		w, wanted := want[p]
		if ok && wanted && !fine[p] && sameRoute(h, w, tunnelIndex) {
			fine[p] = true
			continue
		}
		if err := netlink.RouteDel(&h); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("removing route %s: %w", h.Dst, err))
		}
	}
	for p, w := range want {
		if fine[p] {
			continue
		}
		if p.Addr().Is6() && len(kernelFamilies()) < 2 {
			errs = append(errs,
				fmt.Errorf("route to pods %s: this kernel has no IPv6: enable IPv6, or create the cluster "+
					"with IPv4 only", p))
			continue
		}
		if err := netlink.RouteReplace(kernelRoute(w, tunnelIndex)); err != nil {
			if w.Via.IsValid() {
				problems = append(problems, fmt.Sprintf("route to pods %s via node %s: %v", p, w.Via, err))
			} else {
				errs = append(errs, fmt.Errorf("adding the unreachable route to %s: %w", p, err))
			}
		}
	}
	return problems, errors.Join(errs...)
}

func kernelRoute(w Route, tunnel int) *netlink.Route {
	r := &netlink.Route{Dst: ipNet(w.Pods), Protocol: routeProtocol}
	switch {
	case !w.Via.IsValid():
		r.Type, r.Priority = unix.RTN_UNREACHABLE, refusedMetric
	case w.Tunnel:
		r.Gw, r.LinkIndex, r.Flags = w.Via.AsSlice(), tunnel, int(netlink.FLAG_ONLINK)
	default:
		r.Gw = w.Via.AsSlice()
	}
	return r
}

func sameRoute(h netlink.Route, w Route, tunnel int) bool {
	if !w.Via.IsValid() {
		return h.Type == unix.RTN_UNREACHABLE && h.Priority == refusedMetric
	}
	via, ok := netip.AddrFromSlice(h.Gw)
	return ok && via.Unmap() == w.Via && h.Type == unix.RTN_UNICAST &&
		(h.LinkIndex == tunnel && tunnel != 0) == w.Tunnel
}

// prepareBridge creates the bridge of Keelson's network without duplicate address detection, if it
// does not exist. It must be called before the bridge plugin if pods have IPv6. With a bridge that
// the plugin creates, the node could not reach the pods for a second.
func prepareBridge() error {
	if _, err := netlink.LinkByName(cni.Bridge); err == nil {
		return nil
	}
	err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: cni.Bridge}})
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err == nil {
		err = os.WriteFile("/proc/sys/net/ipv6/conf/"+cni.Bridge+"/accept_dad", []byte("0"), 0o644)
	}
	if err != nil {
		return fmt.Errorf("creating bridge %s: %w", cni.Bridge, err)
	}
	return nil
}

// removeBridge removes the bridge of Keelson's network if no pod is attached to it.
func removeBridge() error {
	bridge, err := netlink.LinkByName(cni.Bridge)
	if err != nil {
		return nil
	}
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("listing interfaces: %w", err)
	}
	if slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Attrs().MasterIndex == bridge.Attrs().Index }) {
		return nil
	}
	if err := netlink.LinkDel(bridge); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing bridge %s: %w", cni.Bridge, err)
	}
	return nil
}

// setBridgeMTU sets the MTU of the bridge of Keelson's network to mtu, or to the MTU of its ports
// if that is smaller. Packets that the bridge routes to a pod must fit the pod's interface. It does
// nothing if mtu is 0 or the bridge does not exist.
func setBridgeMTU(mtu int) error {
	bridge, err := netlink.LinkByName(cni.Bridge)
	if err != nil || mtu == 0 {
		return nil // the bridge does not exist yet; the first pod creates it
	}
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return fmt.Errorf("listing interfaces: %w", err)
	}
	for _, l := range links {
		if l.Attrs().MasterIndex == bridge.Attrs().Index {
			mtu = min(mtu, l.Attrs().MTU)
		}
	}
	if bridge.Attrs().MTU == mtu {
		return nil
	}
	if err := netlink.LinkSetMTU(bridge, mtu); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("setting the MTU of %s to %d: %w", cni.Bridge, mtu, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func toPrefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	ip, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(ip.Unmap(), bits), ok
}
