// Package l2announce answers address resolution requests for load balancer addresses on the node's
// links: ARP for IPv4, neighbor discovery for IPv6. The control plane assigns each address to one
// node at a time.
//
// It answers through its own raw sockets instead of the kernel's address resolution. If the
// addresses were assigned to interfaces, every node that has one of them would answer, or none,
// depending on arp_ignore. Proxy entries work only for addresses that are routed through another
// interface than the one that received the request. The answers are independent of the proxy mode,
// whose rules handle the packets that follow. They stop when the process stops or hangs.
//
// A node that takes over an address announces it to the whole link, so that the latest announcement
// wins. A node that is disconnected from the control plane continues to answer requests. It does
// not announce an address before a control plane has confirmed its view.
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

// announcedBy is the annotation of a Service that names the node that announces its addresses.
const announcedBy = "keelson.dev/announced-by"

// lookEvery is the interval between checks of the interfaces.
const lookEvery = 5 * time.Second

// repeats are the delays at which a new address is announced; frames may be lost.
var repeats = []time.Duration{0, 200 * time.Millisecond, time.Second, 3 * time.Second}

// Announcer announces the addresses of load balancers.
type Announcer struct {
	Node string
	// NodeIPs are the node's addresses. An address that is in no network of an interface is
	// announced on the link of the first of them.
	NodeIPs []netip.Addr
	Log     *slog.Logger
}

// state is the state of one Run.
type state struct {
	*Announcer
	want      map[types.NamespacedName][]netip.Addr // addresses of each Service
	links     map[int]*link
	at        map[netip.Addr]int // address → index of its link
	due       []due
	confirmed bool
	problem   string // the problem that was logged last
}

// due is a pending announcement of an address.
type due struct {
	at      time.Time
	begun   time.Time
	repeat  int
	address netip.Addr
}

// Run announces the addresses until ctx ends.
func (n *Announcer) Run(ctx context.Context, objects agent.Objects, _ agent.Reporter) error {
	s := &state{Announcer: n, want: map[types.NamespacedName][]netip.Addr{}, links: map[int]*link{}, at: map[netip.Addr]int{}}
	defer func() {
		for _, l := range s.links {
			l.close()
		}
	}()
	changes, confirmed := objects.Follow(ctx, "Service"), objects.Confirmed()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	again := time.NewTimer(time.Hour)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-confirmed:
			confirmed, s.confirmed = nil, true
			for a := range s.at {
				s.tell(a, time.Now())
			}
		case c, ok := <-changes:
			if !ok {
				return ctx.Err()
			}
			if !s.take(objects, c) {
				continue
			}
			s.settle(ctx)
		case <-look.C:
			if len(s.want) > 0 {
				s.settle(ctx)
			}
		case <-again.C:
		}
		again.Reset(s.repeat(time.Now()))
	}
}

// take updates the wanted addresses from the view and reports whether they changed.
func (s *state) take(objects agent.Objects, c agent.Changed) bool {
	changed := false
	one := func(key types.NamespacedName, svc *v1.Service) {
		addresses := s.addressesOf(svc)
		if slices.Equal(addresses, s.want[key]) {
			return
		}
		if changed = true; len(addresses) == 0 {
			delete(s.want, key)
			return
		}
		s.want[key] = addresses
	}
	if c.All {
		gone := maps.Clone(s.want)
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

// addressesOf returns the addresses of a Service that this node announces.
func (s *state) addressesOf(svc *v1.Service) []netip.Addr {
	if svc == nil || svc.Spec.Type != v1.ServiceTypeLoadBalancer || svc.Annotations[announcedBy] != s.Node {
		return nil
	}
	var out []netip.Addr
	for _, in := range svc.Status.LoadBalancer.Ingress {
		a, err := netip.ParseAddr(in.IP)
		if err != nil || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast() ||
			in.IPMode != nil && *in.IPMode == v1.LoadBalancerIPModeProxy || slices.Contains(s.NodeIPs, a) {
			continue
		}
		out = append(out, a)
	}
	return out
}

// settle assigns the wanted addresses to links and announces those that are new on their link.
func (s *state) settle(ctx context.Context) {
	nets, err := networks()
	if err != nil {
		s.trouble(err)
		return
	}
	at, byLink := map[netip.Addr]int{}, map[int]map[netip.Addr]bool{}
	var errs []error
	for _, addresses := range s.want {
		for _, a := range addresses {
			n, ok := s.linkOf(a, nets)
			if !ok {
				errs = append(errs, errors.New("no interface has a network that contains "+a.String()+", and no interface has the node's address: check --node-ip"))
				continue
			}
			at[a] = n.index
			if byLink[n.index] == nil {
				byLink[n.index] = map[netip.Addr]bool{}
			}
			byLink[n.index][a] = true
			if l := s.links[n.index]; l == nil || !slices.Equal(l.mac, n.mac) {
				if l != nil {
					l.close()
				}
				s.links[n.index] = newLink(n.name, n.index, n.mac, s.Log)
				maps.DeleteFunc(s.at, func(_ netip.Addr, index int) bool { return index == n.index })
			}
		}
	}
	for index, l := range s.links {
		if byLink[index] == nil {
			l.close()
			delete(s.links, index)
		} else if err := l.hold(ctx, byLink[index]); err != nil {
			errs = append(errs, err)
			maps.DeleteFunc(at, func(a netip.Addr, on int) bool { return on == index && !l.answers(a) })
		}
	}
	before := s.at
	s.at = at
	for a, index := range at {
		if before[a] != index {
			s.Log.Info("announcing an address of a load balancer", "address", a, "link", s.links[index].name)
			s.tell(a, time.Now())
		}
	}
	for a := range before {
		if at[a] == 0 {
			s.Log.Info("stopped announcing an address of a load balancer", "address", a)
		}
	}
	s.trouble(errors.Join(errs...))
}

// trouble logs an error, once until it changes.
func (s *state) trouble(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != s.problem && text != "" {
		s.Log.Warn("some addresses of load balancers are not announced", "why", text)
	}
	s.problem = text
}

// tell schedules the announcements of an address. It does nothing before the view is confirmed.
func (s *state) tell(a netip.Addr, now time.Time) {
	if s.confirmed {
		s.due = append(slices.DeleteFunc(s.due, func(d due) bool { return d.address == a }), due{at: now, begun: now, address: a})
	}
}

// repeat sends the announcements that are due and returns when to call it again.
func (s *state) repeat(now time.Time) time.Duration {
	next, left := time.Hour, s.due[:0]
	for _, d := range s.due {
		l := s.links[s.at[d.address]]
		if l == nil {
			continue // this node no longer announces the address
		}
		if !d.at.After(now) {
			l.tell(d.address)
			if d.repeat++; d.repeat == len(repeats) {
				continue
			}
			d.at = d.begun.Add(repeats[d.repeat])
		}
		next = min(next, max(d.at.Sub(now), time.Millisecond))
		left = append(left, d)
	}
	s.due = left
	return next
}

// network is a network of an interface.
type network struct {
	prefix netip.Prefix // with the interface's own address
	name   string
	index  int
	mac    net.HardwareAddr
}

// networks returns the networks of interfaces that use ARP and neighbor discovery, longest prefix
// first.
func networks() ([]network, error) {
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // an interrupted dump may miss pod interfaces, but not the node's links
		return nil, errors.Join(errors.New("listing interfaces"), err)
	}
	var out []network
	for _, l := range links {
		at := l.Attrs()
		if at.Flags&net.FlagUp == 0 || at.Flags&(net.FlagLoopback|net.FlagPointToPoint) != 0 || len(at.HardwareAddr) != 6 || at.RawFlags&unixNoARP != 0 {
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
				out = append(out, network{netip.PrefixFrom(ip.Unmap(), ones), at.Name, at.Index, at.HardwareAddr})
			}
		}
	}
	slices.SortFunc(out, func(a, b network) int { return cmp.Compare(b.prefix.Bits(), a.prefix.Bits()) })
	return out, nil
}

// unixNoARP is IFF_NOARP: the interface does not use ARP.
const unixNoARP = 0x80

// linkOf returns the smallest network that contains the address. If there is none, it returns the
// network of the first of the node's addresses.
func (s *state) linkOf(a netip.Addr, nets []network) (network, bool) {
	for _, n := range nets {
		if !n.prefix.IsSingleIP() && n.prefix.Contains(a) {
			return n, true
		}
	}
	for _, ip := range s.NodeIPs {
		if i := slices.IndexFunc(nets, func(n network) bool { return n.prefix.Addr() == ip }); i >= 0 {
			return nets[i], true
		}
	}
	return network{}, false
}
