package node

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"keelson.dev/keelson/agent/kubelet"
)

// resolveAndRoute resolves a host name with the node's resolver, and returns its addresses and
// whether the node has routes to them. It sends packets to DNS servers only.
func resolveAndRoute(ctx context.Context, host string) (out kubelet.Reachability) {
	ips := []netip.Addr{}
	if ip, err := netip.ParseAddr(host); err == nil {
		ips = append(ips, ip)
	} else {
		found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		if err != nil {
			var dns *net.DNSError
			if errors.As(err, &dns) {
				out.Unresolved = dns.Err
			} else {
				out.Unresolved = err.Error()
			}
			return out
		}
		for _, ip := range found {
			ips = append(ips, ip.Unmap())
			out.Addresses = append(out.Addresses, ip.Unmap().String())
		}
	}
	for _, ip := range ips {
		if _, err := netlink.RouteGet(ip.AsSlice()); err != nil {
			out.NoRoute = err.Error()
			continue
		}
		out.NoRoute = ""
		break
	}
	return out
}
