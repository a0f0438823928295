// Package l2announce answers on the node's links for the addresses of load balancers that the control plane has given it
// to answer for: ARP for IPv4, neighbour discovery for IPv6. Each address has one such node at a time.
//
// It answers by raw sockets of its own and not by the kernel. Addresses of the node's own would be answered for by
// whatever node has them, or by none, as arp_ignore says; proxy entries are heeded only for addresses that are routed by
// another interface than the one that is asked on. What is answered here is the same in all modes of the proxy, whose
// rules take the packets that follow, and ends with the process: a node that hangs answers no more.
//
// Who takes an address over tells the whole link, so that the last to do so has it. A node that was cut off from the
// control plane goes on answering whoever asks, and stops when it hears that another has the address; it tells the link
// of nothing before a control plane has confirmed what it knows.
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

// announcedBy is the annotation of a Service that names the node that answers for its addresses.
const announcedBy = "keelson.dev/announced-by"

// lookEvery is how often the interfaces are looked at without cause.
const lookEvery = 5 * time.Second

// repeats are when the link is told of an address, after it was taken over: a frame may be lost.
var repeats = []time.Duration{0, 200 * time.Millisecond, time.Second, 3 * time.Second}

// Announcer answers for addresses.
type Announcer struct {
	Node string
	// NodeIPs are the node's addresses. Whose link has no network that an address is in answers on that of the first.
	NodeIPs []netip.Addr
	Log     *slog.Logger
}

// state is that of one Run.
type state struct {
	*Announcer
	want      map[types.NamespacedName][]netip.Addr // of each Service
	links     map[int]*link
	at        map[netip.Addr]int // the link of each address
	due       []due
	confirmed bool
	problem   string // that was told last
}

// due is when the link is to be told of an address once more.
type due struct {
	at      time.Time
	begun   time.Time
	repeat  int
	address netip.Addr
}

// Run answers until ctx ends.
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

// take brings what is wanted to the view, and says whether that changed.
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

// addressesOf are those of a Service that this node answers for.
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

// settle makes the links answer for what is wanted, and tells them of what is new on them.
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
				errs = append(errs, errors.New("no interface has a network with "+a.String()+", and none the node's address: check --node-ip"))
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
			s.Log.Info("answers for an address of a load balancer", "address", a, "link", s.links[index].name)
			s.tell(a, time.Now())
		}
	}
	for a := range before {
		if at[a] == 0 {
			s.Log.Info("answers no longer for an address of a load balancer", "address", a)
		}
	}
	s.trouble(errors.Join(errs...))
}

// trouble tells what is wrong, once for as long as it is so.
func (s *state) trouble(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != s.problem && text != "" {
		s.Log.Warn("addresses of load balancers are not answered for", "why", text)
	}
	s.problem = text
}

// tell has the link told of an address, now and some times more.
func (s *state) tell(a netip.Addr, now time.Time) {
	if s.confirmed {
		s.due = append(slices.DeleteFunc(s.due, func(d due) bool { return d.address == a }), due{at: now, begun: now, address: a})
	}
}

// repeat tells what is due, and says when to call again.
func (s *state) repeat(now time.Time) time.Duration {
	next, left := time.Hour, s.due[:0]
	for _, d := range s.due {
		l := s.links[s.at[d.address]]
		if l == nil {
			continue // it is no longer ours
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

// network is one of an interface.
type network struct {
	prefix netip.Prefix // with the interface's own address
	name   string
	index  int
	mac    net.HardwareAddr
}

// networks are those of interfaces on which others are asked for by ARP and neighbour discovery.
func networks() ([]network, error) {
	links, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // pods come and go meanwhile; the node's links do not
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
			continue // it is gone
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

// unixNoARP is IFF_NOARP: nobody asks on such an interface.
const unixNoARP = 0x80

// linkOf is the network that an address is in, the smallest one, else that of the node's first address.
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
