package machines

import (
	"context"
	"net/netip"
	"strings"
)

// Surroundings are the addresses, routes, and firewalls around a machine.
type Surroundings struct {
	From        string    // the caller's address as the machine sees it; "": unknown
	Nameservers []string  // nameservers other than itself
	Routes      []Network // routes except default routes and Keelson's own
	Unmounted   []string  // mount points of missing disks with Keelson's data
	Firewalls   []string  // firewalls that may block pods: firewalld, ufw, or "forward" for rules that forward only listed traffic
}

// parseSurroundings parses a line of the script's output.
func (f *Facts) parseSurroundings(k, v string) {
	switch k {
	case "nameserver":
		if a, err := netip.ParseAddr(v); err == nil && !a.IsLoopback() {
			f.Nameservers = append(f.Nameservers, v)
		}
	case "firewall":
		f.Firewalls = append(f.Firewalls, v)
	case "unmounted":
		f.Unmounted = append(f.Unmounted, v)
	case "route":
		link, to, _ := strings.Cut(v, " ")
		if p, err := netip.ParsePrefix(to); err == nil {
			f.Routes = append(f.Routes, Network{link, p})
		} else if a, err := netip.ParseAddr(to); err == nil { // the prefix length of a single address is omitted
			f.Routes = append(f.Routes, Network{link, netip.PrefixFrom(a, a.BitLen())})
		}
	}
}

// clientAddress returns the caller's address as the machine sees it. It differs from the local
// address behind a bastion host or NAT. It is read in the login session, because sudo does not pass
// on the SSH environment.
func (m *Machine) clientAddress(ctx context.Context) string {
	out, err := m.runCommand(ctx, `echo "$SSH_CONNECTION"`, nil)
	if err != nil {
		return ""
	}
	from, _, _ := strings.Cut(strings.TrimSpace(out), " ")
	from, _, _ = strings.Cut(from, "%")
	a, err := netip.ParseAddr(from)
	if err != nil {
		return ""
	}
	return a.Unmap().String()
}
