package network

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/cni"
)

// watch writes to damage when the kernel tells of a change of what Routes keeps, or of what that follows from, until ctx
// ends. It has subscribed when it returns. cut is written to when the kernel ends a subscription, as with more changes than
// are read: what was missed is not known then.
func (r *Routes) watch(ctx context.Context, damage chan<- struct{}) (cut <-chan struct{}, err error) {
	ended := make(chan struct{}, 1)
	routes, links := make(chan netlink.RouteUpdate, 64), make(chan netlink.LinkUpdate, 64)
	addrs, neighs := make(chan netlink.AddrUpdate, 64), make(chan netlink.NeighUpdate, 64)
	for _, s := range []struct {
		what string
		open func() error
		read func()
	}{
		{"routes", func() error { return netlink.RouteSubscribe(routes, ctx.Done()) }, func() { follow(routes, r.concernsRoute, damage) }},
		{"interfaces", func() error { return netlink.LinkSubscribe(links, ctx.Done()) }, func() { follow(links, r.concernsLink, damage) }},
		{"addresses", func() error { return netlink.AddrSubscribe(addrs, ctx.Done()) },
			func() { follow(addrs, func(netlink.AddrUpdate) bool { return true }, damage) }},
		{"neighbours", func() error { return netlink.NeighSubscribe(neighs, ctx.Done()) }, func() { follow(neighs, r.concernsNeighbour, damage) }},
	} {
		if err := s.open(); err != nil {
			return nil, fmt.Errorf("following the kernel's %s: %w", s.what, err)
		}
		go func() {
			s.read()
			signal(ended)
		}()
	}
	return ended, nil
}

// follow reads a subscription to its end.
func follow[T any](from <-chan T, concerns func(T) bool, damage chan<- struct{}) {
	for u := range from {
		if concerns(u) {
			signal(damage)
		}
	}
}

// signal writes to a channel with room for one, unless one waits there already.
func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (r *Routes) concernsRoute(u netlink.RouteUpdate) bool {
	if u.Protocol == routeProtocol || u.Protocol == unix.RTPROT_KERNEL && u.Table == unix.RT_TABLE_MAIN {
		return true // ours, or what says that a link leads somewhere, which nobody is told of otherwise
	}
	l := r.laid.Load()
	p, ok := prefix(u.Dst)
	if l == nil || !ok {
		return false
	}
	_, wanted := l.layout.Routes[p]
	return wanted
}

// concernsLink spares the ports of pods, which come and go.
func (r *Routes) concernsLink(u netlink.LinkUpdate) bool {
	name := u.Attrs().Name
	if name == tunnelName || name == wireguardName || name == cni.Bridge {
		return true
	}
	l := r.laid.Load()
	return l != nil && l.links[name]
}

// concernsNeighbour spares what comes and goes by itself: entries of the tunnel are permanent. Of one that is removed the kernel
// tells as of one that has failed, whatever it was before: it is known by its address, which another end has.
func (r *Routes) concernsNeighbour(u netlink.NeighUpdate) bool {
	if u.State&netlink.NUD_PERMANENT != 0 {
		return true
	}
	at, ok := netip.AddrFromSlice(u.IP)
	l := r.laid.Load()
	return ok && l != nil && slices.ContainsFunc(l.layout.Peers, func(p Peer) bool { return slices.Contains(p.Inner, at.Unmap()) })
}
