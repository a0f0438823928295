package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"keelson.dev/keelson/agent"
)

// routeProtocol marks our routes in the kernel's table, so that stale ones are found after a crash.
const routeProtocol = 75

// Route says that pods of a prefix are behind a node.
type Route struct {
	Pods netip.Prefix
	Via  netip.Addr
}

// Wanted computes the routes to all other nodes' pods. Pure.
func Wanted(peers []*agent.Peer) map[netip.Prefix]Route {
	out := make(map[netip.Prefix]Route, len(peers))
	for _, n := range peers {
		for _, p := range n.PodCIDRs {
			for _, ip := range n.Addresses {
				if ip.Is4() == p.Addr().Is4() {
					out[p.Masked()] = Route{p.Masked(), ip}
					break
				}
			}
		}
	}
	return out
}

// Routes keeps the routes to other nodes' pods.
type Routes struct {
	Objects agent.Objects
	// Foreign says that pods are attached by a network product: routes are its affair, and ours are taken away.
	Foreign func() bool
	Log     *slog.Logger
}

// resync is how often the kernel's routes are looked at without cause.
const resync = 5 * time.Second

// Run checks forwarding and keeps the kernel's routes as the nodes demand, until ctx ends or that is not possible.
// The routes stay when it ends: traffic outlives the agent.
func (r *Routes) Run(ctx context.Context) error {
	tick := time.NewTicker(resync)
	defer tick.Stop()
	changes := r.Objects.Changes(ctx)
	select {
	case <-r.Objects.Synced():
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		foreign := r.Foreign()
		want := map[netip.Prefix]Route{}
		if !foreign {
			want = Wanted(r.Objects.Peers())
		}
		if err := errors.Join(enableForwarding(!foreign), syncRoutes(want)); err != nil {
			return err
		}
		for relevant := false; !relevant; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case kinds, ok := <-changes:
				if !ok {
					return ctx.Err()
				}
				_, relevant = kinds["Peer"]
			case <-tick.C:
				relevant = true
			}
		}
	}
}

// enableForwarding sets the switches without which pods do not reach each other, the second one on a bridge.
// Both are per network namespace.
func enableForwarding(bridged bool) error {
	for _, s := range []struct {
		path, remedy string
		needed       bool
	}{
		{"/proc/sys/net/ipv4/ip_forward", "set net.ipv4.ip_forward=1", true},
		{"/proc/sys/net/bridge/bridge-nf-call-iptables", "load it with 'modprobe br_netfilter'", bridged},
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

// syncRoutes makes the kernel's table show exactly the wanted routes among ours.
func syncRoutes(want map[netip.Prefix]Route) error {
	have, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Protocol: routeProtocol}, netlink.RT_FILTER_PROTOCOL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // the next look sees what this one missed
		return fmt.Errorf("listing routes: %w", err)
	}
	var errs []error
	fine := map[netip.Prefix]bool{}
	for _, h := range have {
		p, ok := prefix(h.Dst)
		if via, is := netip.AddrFromSlice(h.Gw); ok && is && want[p].Via == via.Unmap() {
			fine[p] = true
			continue
		}
		if _, again := want[p]; ok && again {
			continue // replaced below
		}
		if err := netlink.RouteDel(&h); err != nil {
			errs = append(errs, fmt.Errorf("removing route %s: %w", h.Dst, err))
		}
	}
	for p, w := range want {
		if fine[p] {
			continue
		}
		dst := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
		route := &netlink.Route{Dst: dst, Gw: w.Via.AsSlice(), Protocol: routeProtocol}
		if err := netlink.RouteReplace(route); err != nil {
			errs = append(errs, fmt.Errorf("route to pods %s via node %s: %w", p, w.Via, err))
		}
	}
	return errors.Join(errs...)
}

func prefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	ip, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(ip.Unmap(), bits), ok
}
