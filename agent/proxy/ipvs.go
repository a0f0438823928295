package proxy

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	moby "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// ipvs is the Writer of mode ipvs. It writes IPVS virtual servers. A dummy interface holds their
// addresses. An nftables table does the rest: masquerading, rejects and source ranges.
//
// Each pair of an address and a port is a separate virtual server. IPVS could also identify a
// virtual server by firewall mark, but it compares all bits of a packet's mark. Some of these bits
// are used for masquerading, for the agent's connections to replicas, and by other programs. The
// API limits the number of pairs.
//
// Like IPVS mode of kube-proxy, it differs from the other modes in one point: a Service with
// externalTrafficPolicy Local is served only by this node's endpoints, even for clients on this
// node (pods and the node itself).
type ipvs struct {
	nft                *nft
	base               Base
	nodeIPs            []netip.Addr // addresses at which node ports are served
	servers            map[virtualServer]realServers
	addressUses        map[netip.Addr]int // address → number of virtual servers
	open               func() (ipvsInterface, error)
	linkExists         func() (bool, error) // reports whether ipvsLink exists
	interfaceAddresses func() (map[netip.Addr]bool, error)
	checkKernel        func() error
}

// virtualServer identifies an IPVS virtual server by address, port, protocol and session affinity.
type virtualServer struct {
	servicemodel.Frontend
	affinity int32
}

// realServers maps the real servers of a virtual server to their weights. The weight is 1, or 0 for
// a server that only keeps its existing connections.
type realServers map[netip.AddrPort]int

// ipvsLink is the name of the dummy interface that holds the addresses of IPVS virtual servers.
const ipvsLink = "keelson-ipvs0"

// ipvsTable is the name of the nftables table of mode ipvs.
const ipvsTable = "keelson-ipvs"

// ipvsInterface reads and changes IPVS in the kernel, and the addresses of ipvsLink.
type ipvsInterface interface {
	Do(ipvsCommand) error
	// Read returns Keelson's virtual servers and the addresses of its interface.
	Read() (servers map[virtualServer]realServers, addresses map[netip.Addr]bool, err error)
	Close()
}

func newIPVS() *ipvs {
	return &ipvs{nft: newNFTDialect(tableDialect{table: ipvsTable, skeleton: ipvsSkeleton, render: renderForIPVS}),
		servers:     map[virtualServer]realServers{},
		addressUses: map[netip.Addr]int{}, open: openIPVS, linkExists: hasIPVSLink,
		interfaceAddresses: interfaceAddresses, checkKernel: hasIPVS}
}

// Check returns an error with a remedy if this machine does not support IPVS and nftables. It
// implements Writer.
func (w *ipvs) Check(ctx context.Context) error {
	if err := w.checkKernel(); err != nil {
		return err
	}
	return w.nft.Check(ctx)
}

func hasIPVS() error {
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
		return errors.New("--proxy-mode=ipvs needs a kernel with IPVS, and this one has none: load " +
			"ip_vs and ip_vs_rr (modprobe), or choose another --proxy-mode")
	}
	return nil
}

// ipvsCommand is one change of IPVS virtual servers or of the addresses of ipvsLink. Its text is
// the equivalent command line of ip or ipvsadm.
type ipvsCommand struct {
	verb   string // "address add", "address del", "-A", "-D", "-a", "-e", "-d"
	server virtualServer
	to     netip.AddrPort
	weight int
}

func (c ipvsCommand) String() string {
	if strings.HasPrefix(c.verb, "address") {
		return fmt.Sprintf("ip %s %s dev %s", c.verb, netip.PrefixFrom(c.server.IP, c.server.IP.BitLen()), ipvsLink)
	}
	kind := map[string]string{"tcp": "-t", "udp": "-u", "sctp": "--sctp-service"}[c.server.Proto]
	text := fmt.Sprintf("ipvsadm %s %s %s", c.verb, kind, netip.AddrPortFrom(c.server.IP, uint16(c.server.Port)))
	switch c.verb {
	case "-A":
		text += " -s rr"
		if c.server.affinity > 0 {
			text += fmt.Sprintf(" -p %d", c.server.affinity)
		}
	case "-a", "-e":
		text += fmt.Sprintf(" -r %s -m -w %d", c.to, c.weight)
	case "-d":
		text += fmt.Sprintf(" -r %s", c.to)
	}
	return text
}

// ipvsPlan returns the commands that change the virtual servers from current to wanted, and the
// addresses of ipvsLink from heldAddrs to wantedAddrs. It is pure.
func ipvsPlan(current, wanted map[virtualServer]realServers, heldAddrs, wantedAddrs map[netip.Addr]bool) []ipvsCommand {
	var out []ipvsCommand
	byAddress := func(a, b netip.Addr) int { return a.Compare(b) }
	for _, ip := range slices.SortedFunc(maps.Keys(wantedAddrs), byAddress) {
		if !heldAddrs[ip] {
			out = append(out, ipvsCommand{verb: "address add",
				server: virtualServer{Frontend: servicemodel.Frontend{IP: ip}}})
		}
	}
	for _, v := range slices.SortedFunc(maps.Keys(current), virtualServer.compareServers) {
		if _, ok := wanted[v]; !ok {
			out = append(out, ipvsCommand{verb: "-D", server: v})
		}
	}
	for _, v := range slices.SortedFunc(maps.Keys(wanted), virtualServer.compareServers) {
		old, ok := current[v]
		if !ok {
			out = append(out, ipvsCommand{verb: "-A", server: v})
		}
		for _, at := range slices.SortedFunc(maps.Keys(wanted[v]), netip.AddrPort.Compare) {
			was, ok := old[at]
			switch {
			case !ok:
				out = append(out, ipvsCommand{"-a", v, at, wanted[v][at]})
			case was != wanted[v][at]:
				out = append(out, ipvsCommand{"-e", v, at, wanted[v][at]})
			}
		}
		for _, at := range slices.SortedFunc(maps.Keys(old), netip.AddrPort.Compare) {
			if _, ok := wanted[v][at]; !ok {
				out = append(out, ipvsCommand{verb: "-d", server: v, to: at})
			}
		}
	}
	for _, ip := range slices.SortedFunc(maps.Keys(heldAddrs), byAddress) {
		if !wantedAddrs[ip] {
			out = append(out, ipvsCommand{verb: "address del",
				server: virtualServer{Frontend: servicemodel.Frontend{IP: ip}}})
		}
	}
	return out
}

func (v virtualServer) compareServers(w virtualServer) int {
	return strings.Compare(fmt.Sprint(v.IP.StringExpanded(), v.Proto, 100000+v.Port, v.affinity),
		fmt.Sprint(w.IP.StringExpanded(), w.Proto, 100000+w.Port, w.affinity))
}

// nodeAddresses returns the addresses of this node at which node ports are served, sorted.
func (w *ipvs) nodeAddresses() ([]netip.Addr, error) {
	own, err := w.interfaceAddresses()
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for ip := range own {
		in := func(p netip.Prefix) bool { return p.Contains(ip) }
		if w.addressUses[ip] == 0 && !ip.IsLinkLocalUnicast() &&
			(len(w.base.NodePorts) == 0 || slices.ContainsFunc(w.base.NodePorts, in)) {
			out = append(out, ip)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out, nil
}

// Sync replaces all virtual servers and nftables rules of mode ipvs with those for base and ports.
// It implements Writer.
func (w *ipvs) Sync(ctx context.Context, base Base, ports iter.Seq[*servicemodel.Port]) error {
	if err := w.Check(ctx); err != nil {
		return err
	}
	door, err := w.open()
	if err != nil {
		return err
	}
	defer door.Close()
	w.base = base
	there, held, err := door.Read()
	if err != nil {
		return err
	}
	w.addressUses = map[netip.Addr]int{}
	for ip := range held {
		w.addressUses[ip] = 1
	}
	if w.nodeIPs, err = w.nodeAddresses(); err != nil {
		return err
	}
	want := map[virtualServer]realServers{}
	for p := range ports {
		maps.Copy(want, virtualServers(p, w.nodeIPs))
	}
	// The masquerading rules must exist before the servers that require them.
	if err := w.nft.Sync(ctx, base, ports); err != nil {
		return err
	}
	w.servers, w.addressUses = want, w.countAddressUses(want)
	return runCommands(door, ipvsPlan(there, want, held, addressSet(w.addressUses)))
}

// countAddressUses returns the number of virtual servers per address. It omits the node's own
// addresses, because other interfaces hold them.
func (w *ipvs) countAddressUses(servers map[virtualServer]realServers) map[netip.Addr]int {
	out := map[netip.Addr]int{}
	for v := range servers {
		if !slices.Contains(w.nodeIPs, v.IP) {
			out[v.IP]++
		}
	}
	return out
}

func addressSet(counts map[netip.Addr]int) map[netip.Addr]bool {
	out := make(map[netip.Addr]bool, len(counts))
	for ip := range counts {
		out[ip] = true
	}
	return out
}

func runCommands(door ipvsInterface, plan []ipvsCommand) error {
	for _, c := range plan {
		if err := door.Do(c); err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
	}
	return nil
}

// Apply changes the virtual servers and nftables rules of the changed Ports. It implements Writer.
func (w *ipvs) Apply(ctx context.Context, changes []servicemodel.Change) error {
	if err := w.nft.Apply(ctx, changes); err != nil {
		return err
	}
	door, err := w.open()
	if err != nil {
		return err
	}
	defer door.Close()
	from, to := map[virtualServer]realServers{}, map[virtualServer]realServers{}
	for _, c := range changes {
		if c.Old != nil {
			maps.Copy(from, virtualServers(c.Old, w.nodeIPs))
		}
		if c.New != nil {
			maps.Copy(to, virtualServers(c.New, w.nodeIPs))
		}
	}
	held, wanted := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	for _, side := range []struct {
		servers map[virtualServer]realServers
		by      int
	}{{to, 1}, {from, -1}} {
		for ip, n := range w.countAddressUses(side.servers) {
			if w.addressUses[ip] > 0 {
				held[ip] = true
			}
			w.addressUses[ip] += side.by * n
		}
	}
	for _, servers := range []map[virtualServer]realServers{from, to} {
		for ip := range w.countAddressUses(servers) {
			if w.addressUses[ip] > 0 {
				wanted[ip] = true
			} else {
				delete(w.addressUses, ip)
			}
		}
	}
	for v := range from {
		delete(w.servers, v)
	}
	maps.Copy(w.servers, to)
	return runCommands(door, ipvsPlan(from, to, held, wanted))
}

// Intact reports whether the kernel still has the virtual servers, the addresses and the nftables
// rules that were written. It implements Writer.
func (w *ipvs) Intact(ctx context.Context) (bool, error) {
	if ok, err := w.nft.Intact(ctx); !ok || err != nil {
		return ok, err
	}
	now, err := w.nodeAddresses()
	if err != nil || !slices.Equal(now, w.nodeIPs) {
		return false, err
	}
	door, err := w.open()
	if err != nil {
		return false, err
	}
	defer door.Close()
	there, held, err := door.Read()
	return err == nil && len(ipvsPlan(there, w.servers, held, addressSet(w.addressUses))) == 0, err
}

// Clean removes the virtual servers, the interface ipvsLink and the nftables rules of mode ipvs. It
// implements Writer.
//
// If ipvsLink does not exist, mode ipvs was not in use, and all virtual servers belong to other
// programs. Clean therefore removes the interface last, so that an interrupted call can be
// repeated.
func (w *ipvs) Clean(ctx context.Context) error {
	err := w.nft.Clean(ctx)
	if there, lerr := w.linkExists(); !there || lerr != nil {
		return errors.Join(err, lerr)
	}
	return errors.Join(err, w.cleanServers())
}

func (w *ipvs) cleanServers() error {
	door, err := w.open()
	if err != nil {
		return err
	}
	defer door.Close()
	there, held, err := door.Read()
	if err != nil {
		return err
	}
	if err := runCommands(door, ipvsPlan(there, nil, held, nil)); err != nil {
		return err
	}
	return removeIPVSLink()
}

// Remove removes the virtual servers of mode ipvs and the interface ipvsLink, which holds their
// addresses. It is for a node that leaves its cluster, after the agent has exited. It does nothing
// if the interface does not exist.
func Remove() error { return newIPVS().removeServersAndLink() }

func (w *ipvs) removeServersAndLink() error {
	there, err := w.linkExists()
	if !there || err != nil {
		return err
	}
	if w.checkKernel() == nil {
		err = w.cleanServers()
	} else {
		err = removeIPVSLink() // a kernel without IPVS has no virtual servers
	}
	if err != nil {
		return fmt.Errorf("removing virtual servers of Services: %w", err)
	}
	return nil
}

func hasIPVSLink() (bool, error) {
	_, err := netlink.LinkByName(ipvsLink)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%s: %w", ipvsLink, err)
	}
	return true, nil
}

func removeIPVSLink() error {
	link, err := netlink.LinkByName(ipvsLink)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil {
		return fmt.Errorf("removing interface %s: %w", ipvsLink, err)
	}
	return nil
}

// Counts returns the counters of connections, which IPVS keeps, and of rejected packets, which
// nftables keeps. It implements Writer.
func (w *ipvs) Counts(ctx context.Context) (Counts, error) {
	out, err := w.nft.Counts(ctx)
	if err != nil {
		return out, err
	}
	h, err := moby.New("")
	if err != nil {
		return out, err
	}
	defer h.Close()
	all, err := h.GetServices()
	for _, s := range all {
		if v, ok := parseVirtualServer(s); ok {
			out.Connections[v.Frontend] += uint64(s.Stats.Connections)
		}
	}
	return out, err
}

// parseVirtualServer converts a virtual server from its netlink type. It returns false for a server
// with a firewall mark, or with a protocol that Services do not support.
func parseVirtualServer(s *moby.Service) (virtualServer, bool) {
	ip, ok := netip.AddrFromSlice(s.Address)
	v := virtualServer{Frontend: servicemodel.Frontend{IP: ip.Unmap(), Proto: protocolName(byte(s.Protocol)),
		Port: int32(s.Port)}}
	if s.Flags&ipvsPersistent != 0 {
		v.affinity = int32(s.Timeout)
	}
	return v, ok && s.FWMark == 0 && v.Proto != ""
}

// ipvsPersistent is the flag of a virtual server with client affinity: IP_VS_SVC_F_PERSISTENT of
// linux/ip_vs.h.
const ipvsPersistent = 1

// ipvsKernel implements ipvsInterface with netlink.
type ipvsKernel struct {
	h    *moby.Handle
	link netlink.Link
}

func openIPVS() (ipvsInterface, error) {
	link, err := netlink.LinkByName(ipvsLink)
	if err != nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = ipvsLink
		if err := netlink.LinkAdd(&netlink.Dummy{LinkAttrs: attrs}); err != nil {
			return nil, fmt.Errorf("creating interface %s for Service addresses: %w: load the kernel's dummy module",
				ipvsLink, err)
		}
		if link, err = netlink.LinkByName(ipvsLink); err != nil {
			return nil, fmt.Errorf("%s: %w", ipvsLink, err)
		}
	}
	// Replies are translated back, which requires connection tracking.
	if err := os.WriteFile("/proc/sys/net/ipv4/vs/conntrack", []byte("1"), 0); err != nil {
		return nil, fmt.Errorf("enabling the connection tracking of IPVS: %w", err)
	}
	// The interface holds the load balancer addresses on every node. Only one node may answer ARP
	// requests for each of them.
	for name, value := range map[string]string{"arp_ignore": "1", "arp_announce": "2"} {
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/all/"+name, []byte(value), 0); err != nil {
			return nil, fmt.Errorf("restricting ARP replies for addresses of Services: %w", err)
		}
	}
	h, err := moby.New("")
	if err != nil {
		return nil, fmt.Errorf("IPVS: %w", err)
	}
	return &ipvsKernel{h, link}, nil
}

func (k *ipvsKernel) Close() { k.h.Close() }

// isOurs reports whether a virtual server belongs to Keelson: its address is in held, the addresses
// of ipvsLink, or in own, the addresses of the node.
func (v virtualServer) isOurs(held, own map[netip.Addr]bool) bool { return held[v.IP] || own[v.IP] }

// Read returns Keelson's virtual servers in the kernel, and the addresses of ipvsLink. It
// implements ipvsInterface.
func (k *ipvsKernel) Read() (map[virtualServer]realServers, map[netip.Addr]bool, error) {
	list, err := netlink.AddrList(k.link, netlink.FAMILY_ALL)
	if err != nil {
		return nil, nil, err
	}
	held := map[netip.Addr]bool{}
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && !ip.IsLinkLocalUnicast() {
			held[ip.Unmap()] = true
		}
	}
	own, err := interfaceAddresses()
	if err != nil {
		return nil, nil, err
	}
	all, err := k.h.GetServices()
	if err != nil {
		return nil, nil, fmt.Errorf("reading virtual servers: %w", err)
	}
	out := map[virtualServer]realServers{}
	for _, s := range all {
		v, ok := parseVirtualServer(s)
		if !ok || !v.isOurs(held, own) {
			continue
		}
		destinations, err := k.h.GetDestinations(s)
		if err != nil {
			return nil, nil, fmt.Errorf("reading a virtual server: %w", err)
		}
		out[v] = realServers{}
		for _, d := range destinations {
			if ip, ok := netip.AddrFromSlice(d.Address); ok {
				out[v][netip.AddrPortFrom(ip.Unmap(), d.Port)] = d.Weight
			}
		}
	}
	return out, held, nil
}

// Do executes one change of IPVS or of an address of ipvsLink. It implements ipvsInterface.
func (k *ipvsKernel) Do(c ipvsCommand) error {
	switch c.verb {
	case "address add", "address del":
		bits := c.server.IP.BitLen()
		a := &netlink.Addr{IPNet: &net.IPNet{IP: c.server.IP.AsSlice(), Mask: net.CIDRMask(bits, bits)}}
		if c.verb == "address add" {
			return netlink.AddrReplace(k.link, a)
		}
		return netlink.AddrDel(k.link, a)
	}
	s, d := c.netlinkMessage()
	switch c.verb {
	case "-A":
		return k.h.NewService(s)
	case "-D":
		return k.h.DelService(s)
	case "-a":
		return k.h.NewDestination(s, d)
	case "-e":
		return k.h.UpdateDestination(s, d)
	default:
		return k.h.DelDestination(s, d)
	}
}

// netlinkMessage returns the virtual server and the real server of the command as the types of the
// netlink interface.
func (c ipvsCommand) netlinkMessage() (*moby.Service, *moby.Destination) {
	family, bits := uint16(unix.AF_INET), ^uint32(0)
	if c.server.IP.Is6() {
		family, bits = unix.AF_INET6, 128
	}
	proto := map[string]uint16{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP,
		"sctp": unix.IPPROTO_SCTP}[c.server.Proto]
	s := &moby.Service{Address: c.server.IP.AsSlice(), Protocol: proto, Port: uint16(c.server.Port),
		SchedName:     moby.RoundRobin,
		AddressFamily: family, Netmask: bits}
	if c.server.affinity > 0 {
		s.Flags, s.Timeout = ipvsPersistent, uint32(c.server.affinity)
	}
	if !c.to.IsValid() {
		return s, nil
	}
	return s, &moby.Destination{Address: c.to.Addr().AsSlice(), Port: c.to.Port(), Weight: c.weight,
		ConnectionFlags: moby.ConnectionFlagMasq, AddressFamily: family}
}
