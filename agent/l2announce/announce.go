// Package l2announce answers address resolution requests for load balancer addresses on the node's
// links: ARP for IPv4, neighbor discovery for IPv6. The control plane assigns each address to one
// node at a time.
//
// It answers through its own raw sockets instead of the kernel's address resolution. If the
// addresses were assigned to interfaces, arp_ignore would decide whether every node that has an
// address answers, or no node. Proxy entries work only for addresses that are routed through
// another interface than the one that received the request. The answers are independent of the
// proxy mode; the proxy's rules handle the packets that follow. The answers stop when the process
// stops or hangs.
//
// A node that takes over an address announces it to the whole link. Hosts use the latest
// announcement. A node that is disconnected from the control plane continues to answer requests. It
// does not announce an address before a control plane has confirmed the node's view of the cluster.
package l2announce

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// announcedByAnnotation is an annotation of a Service. Its value is the name of the node that
// announces the Service's load balancer addresses.
const announcedByAnnotation = "keelson.dev/announced-by"

// checkInterval is the interval between checks of the interfaces.
const checkInterval = 5 * time.Second

// repeatDelays are the times after which a new address is announced. It is announced several times
// because frames may be lost.
var repeatDelays = []time.Duration{0, 200 * time.Millisecond, time.Second, 3 * time.Second}

// Announcer announces the load balancer addresses that are assigned to this node, and answers
// address resolution requests for them.
type Announcer struct {
	Node string
	// NodeIPs are the node's addresses. An address that belongs to no network of an interface is
	// announced on the link of the first of NodeIPs.
	NodeIPs []netip.Addr
	Log     *slog.Logger
}

// announcerState is the state of one call of Announcer.Run.
type announcerState struct {
	*Announcer
	wanted    map[types.NamespacedName][]netip.Addr // addresses of each Service
	links     map[int]*announcerLink
	linkIndex map[netip.Addr]int // address → index of its link
	repeats   []pendingRepeat
	confirmed bool
	problem   string // the problem that was logged last
}

// pendingRepeat is a scheduled announcement of an address.
type pendingRepeat struct {
	at        time.Time
	startedAt time.Time
	repeat    int
	address   netip.Addr
}

// Run announces the addresses that are assigned to this node, and answers address resolution
// requests for them, until ctx ends.
func (n *Announcer) Run(ctx context.Context, objects agent.Objects, _ agent.Reporter) error {
	s := &announcerState{Announcer: n, wanted: map[types.NamespacedName][]netip.Addr{}, links: map[int]*announcerLink{},
		linkIndex: map[netip.Addr]int{}}
	defer func() {
		for _, l := range s.links {
			l.shutDown()
		}
	}()
	changes, confirmed := objects.Follow(ctx, "Service"), objects.Confirmed()
	look := time.NewTicker(checkInterval)
	defer look.Stop()
	again := time.NewTimer(time.Hour)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-confirmed:
			confirmed, s.confirmed = nil, true
			for a := range s.linkIndex {
				s.scheduleAnnouncements(a, time.Now())
			}
		case c, ok := <-changes:
			if !ok {
				return ctx.Err()
			}
			if !s.updateWanted(objects, c) {
				continue
			}
			s.updateLinks(ctx)
		case <-look.C:
			if len(s.wanted) > 0 {
				s.updateLinks(ctx)
			}
		case <-again.C:
		}
		again.Reset(s.sendDue(time.Now()))
	}
}

// updateWanted updates the wanted addresses after the changes c of Services in the node's view. It
// reports whether the addresses changed.
func (s *announcerState) updateWanted(objects agent.Objects, c agent.ObjectChanges) bool {
	changed := false
	one := func(key types.NamespacedName, svc *v1.Service) {
		addresses := s.announcedAddresses(svc)
		if slices.Equal(addresses, s.wanted[key]) {
			return
		}
		if changed = true; len(addresses) == 0 {
			delete(s.wanted, key)
			return
		}
		s.wanted[key] = addresses
	}
	if c.All {
		gone := maps.Clone(s.wanted)
		for _, svc := range objects.Services() {
			key := types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name}
			one(key, svc)
			delete(gone, key)
		}
		for key := range gone {
			one(key, nil)
		}
		return changed
	}
	for k := range c.Keys {
		svc, _ := objects.Service(k.Namespace, k.Name)
		one(types.NamespacedName{Namespace: k.Namespace, Name: k.Name}, svc)
	}
	return changed
}

// announcedAddresses returns the load balancer addresses of a Service that this node must announce.
// The result is empty if another node announces them.
func (s *announcerState) announcedAddresses(svc *v1.Service) []netip.Addr {
	if svc == nil || svc.Spec.Type != v1.ServiceTypeLoadBalancer || svc.Annotations[announcedByAnnotation] != s.Node {
		return nil
	}
	var out []netip.Addr
	for _, in := range svc.Status.LoadBalancer.Ingress {
		a, err := netip.ParseAddr(in.IP)
		if err != nil || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() ||
			a.IsLinkLocalUnicast() ||
			in.IPMode != nil && *in.IPMode == v1.LoadBalancerIPModeProxy || slices.Contains(s.NodeIPs, a) {
			continue
		}
		out = append(out, a)
	}
	return out
}

// updateLinks assigns the wanted addresses to network links, and announces each address that was
// not assigned to its link before.
func (s *announcerState) updateLinks(ctx context.Context) {
	nets, err := listNetworks()
	if err != nil {
		s.logProblem(err)
		return
	}
	at, byLink := map[netip.Addr]int{}, map[int]map[netip.Addr]bool{}
	var errs []error
	for _, addresses := range s.wanted {
		for _, a := range addresses {
			n, ok := s.selectLink(a, nets)
			if !ok {
				errs = append(errs, errors.New("no interface has a network that contains "+a.String()+
					", and no interface has the node's address: check --node-ip"))
				continue
			}
			at[a] = n.index
			if byLink[n.index] == nil {
				byLink[n.index] = map[netip.Addr]bool{}
			}
			byLink[n.index][a] = true
			if l := s.links[n.index]; l == nil || !slices.Equal(l.mac, n.mac) {
				if l != nil {
					l.shutDown()
				}
				s.links[n.index] = newLink(n.name, n.index, n.mac, s.Log)
				maps.DeleteFunc(s.linkIndex, func(_ netip.Addr, index int) bool { return index == n.index })
			}
		}
	}
	for index, l := range s.links {
		if byLink[index] == nil {
			l.shutDown()
			delete(s.links, index)
		} else if err := l.setAddresses(ctx, byLink[index]); err != nil {
			errs = append(errs, err)
			maps.DeleteFunc(at, func(a netip.Addr, on int) bool { return on == index && !l.isHeld(a) })
		}
	}
	before := s.linkIndex
	s.linkIndex = at
	for a, index := range at {
		if before[a] != index {
			s.Log.Info("announcing an address of a load balancer", "address", a, "link", s.links[index].name)
			s.scheduleAnnouncements(a, time.Now())
		}
	}
	for a := range before {
		if at[a] == 0 {
			s.Log.Info("stopped announcing an address of a load balancer", "address", a)
		}
	}
	s.logProblem(errors.Join(errs...))
}

// logProblem logs an error, unless it is the error that was logged last.
func (s *announcerState) logProblem(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != s.problem && text != "" {
		s.Log.Warn("some addresses of load balancers are not announced", "why", text)
	}
	s.problem = text
}

// scheduleAnnouncements schedules the announcements of the address a, starting at the time now. It
// does nothing before a control plane has confirmed the view.
func (s *announcerState) scheduleAnnouncements(a netip.Addr, now time.Time) {
	if s.confirmed {
		s.repeats = append(slices.DeleteFunc(s.repeats, func(d pendingRepeat) bool {
			return d.address == a
		}), pendingRepeat{at: now, startedAt: now, address: a})
	}
}

// sendDue sends the announcements that are due at now. It returns the delay after which it must be
// called again.
func (s *announcerState) sendDue(now time.Time) time.Duration {
	next, left := time.Hour, s.repeats[:0]
	for _, d := range s.repeats {
		l := s.links[s.linkIndex[d.address]]
		if l == nil {
			continue // this node no longer announces the address
		}
		if !d.at.After(now) {
			l.announceAddress(d.address)
			if d.repeat++; d.repeat == len(repeatDelays) {
				continue
			}
			d.at = d.startedAt.Add(repeatDelays[d.repeat])
		}
		next = min(next, max(d.at.Sub(now), time.Millisecond))
		left = append(left, d)
	}
	s.repeats = left
	return next
}

// linkNetwork is an IP network of a network interface.
type linkNetwork struct {
	prefix netip.Prefix // the interface's own address, with the prefix length of the network
	name   string
	index  int
	mac    net.HardwareAddr
}

// listNetworks returns the IP networks of the interfaces that use ARP and neighbor discovery,
// longest prefix first.
func listNetworks() ([]linkNetwork, error) {
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		// an interrupted dump may miss pod interfaces, but not the node's links
		return nil, errors.Join(errors.New("listing interfaces"), err)
	}
	var out []linkNetwork
	for _, l := range links {
		at := l.Attrs()
		if at.Flags&net.FlagUp == 0 || at.Flags&(net.FlagLoopback|net.FlagPointToPoint) != 0 ||
			len(at.HardwareAddr) != 6 || at.RawFlags&unixNoARP != 0 {
			continue
		}
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			continue // the interface no longer exists
		}
		for _, a := range addrs {
			ip, ok := netip.AddrFromSlice(a.IP)
			ones, _ := a.Mask.Size()
			if ok && !ip.IsLinkLocalUnicast() {
				out = append(out, linkNetwork{netip.PrefixFrom(ip.Unmap(), ones), at.Name, at.Index, at.HardwareAddr})
			}
		}
	}
	slices.SortFunc(out, func(a, b linkNetwork) int { return cmp.Compare(b.prefix.Bits(), a.prefix.Bits()) })
	return out, nil
}

// unixNoARP is IFF_NOARP: the interface does not use ARP.
const unixNoARP = 0x80

// selectLink returns the interface on which to announce the address a: the interface with the
// smallest network that contains the address. If no network contains it, it is the interface of the
// first of the node's addresses. selectLink returns false if no interface in nets has any of the
// node's addresses.
func (s *announcerState) selectLink(a netip.Addr, nets []linkNetwork) (linkNetwork, bool) {
	for _, n := range nets {
		if !n.prefix.IsSingleIP() && n.prefix.Contains(a) {
			return n, true
		}
	}
	for _, ip := range s.NodeIPs {
		if i := slices.IndexFunc(nets, func(n linkNetwork) bool { return n.prefix.Addr() == ip }); i >= 0 {
			return nets[i], true
		}
	}
	return linkNetwork{}, false
}
