package network

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/cni"
	"keelson.dev/keelson/internal/wakeup"
)

// watchKernel subscribes to kernel events about links, routes and neighbors until ctx ends. It
// signals damage when an object that Routes maintains or depends on has changed. All subscriptions
// exist when it returns. cut is signaled when a subscription ends, for example because events were
// lost. The caller must then sync and subscribe again.
func (r *Routes) watchKernel(ctx context.Context, damage wakeup.Signal) (cut <-chan struct{}, err error) {
	ended := wakeup.New()
	routes, links := make(chan netlink.RouteUpdate, 64), make(chan netlink.LinkUpdate, 64)
	addrs, neighs := make(chan netlink.AddrUpdate, 64), make(chan netlink.NeighUpdate, 64)
	for _, s := range []struct {
		what string
		open func() error
		read func()
	}{
		{"routes", func() error {
			return netlink.RouteSubscribe(routes, ctx.Done())
		}, func() { forwardUpdates(routes, r.concernsRoute, damage) }},
		{"interfaces", func() error {
			return netlink.LinkSubscribe(links, ctx.Done())
		}, func() { forwardUpdates(links, r.concernsLink, damage) }},
		{"addresses", func() error { return netlink.AddrSubscribe(addrs, ctx.Done()) },
			func() { forwardUpdates(addrs, func(netlink.AddrUpdate) bool { return true }, damage) }},
		{"neighbours", func() error {
			return netlink.NeighSubscribe(neighs, ctx.Done())
		}, func() { forwardUpdates(neighs, r.concernsNeighbour, damage) }},
	} {
		if err := s.open(); err != nil {
			return nil, fmt.Errorf("subscribing to the kernel's %s: %w", s.what, err)
		}
		go func() {
			s.read()
			ended.Send()
		}()
	}
	return ended, nil
}

// forwardUpdates reads the updates of a subscription until from is closed. It signals damage for
// each update for which concerns returns true.
func forwardUpdates[T any](from <-chan T, concerns func(T) bool, damage wakeup.Signal) {
	for u := range from {
		if concerns(u) {
			damage.Send()
		}
	}
}

func (r *Routes) concernsRoute(u netlink.RouteUpdate) bool {
	if u.Protocol == routeProtocol || u.Protocol == unix.RTPROT_KERNEL && u.Table == unix.RT_TABLE_MAIN {
		return true // Keelson's routes, or the connected routes of links, for which there is no other event
	}
	l := r.current.Load()
	p, ok := toPrefix(u.Dst)
	if l == nil || !ok {
		return false
	}
	_, wanted := l.layout.Routes[p]
	return wanted
}

// concernsLink reports whether a link event may require a sync of the routes. It ignores the bridge
// ports of pods.
func (r *Routes) concernsLink(u netlink.LinkUpdate) bool {
	name := u.Attrs().Name
	if name == tunnelName || name == wireguardName || name == cni.Bridge {
		return true
	}
	l := r.current.Load()
	return l != nil && l.links[name]
}

// concernsNeighbour reports whether a neighbor event may require a sync of the routes. Neighbor
// entries of the tunnel are permanent; other entries expire by themselves. The kernel reports every
// removed entry as failed, whatever its previous state. A removed tunnel entry is therefore
// identified by a peer's address.
func (r *Routes) concernsNeighbour(u netlink.NeighUpdate) bool {
	if u.State&netlink.NUD_PERMANENT != 0 {
		return true
	}
	at, ok := netip.AddrFromSlice(u.IP)
	l := r.current.Load()
	return ok && l != nil && slices.ContainsFunc(l.layout.Peers, func(p Peer) bool {
		return slices.Contains(p.Inner, at.Unmap())
	})
}
