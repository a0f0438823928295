package machines

import (
	"context"
	"net/netip"
	"strings"
)

// Surroundings describes those parts of a machine's network and mounts on which Keelson depends.
type Surroundings struct {
	From        string    // address of the SSH client as the machine sees it; "": unknown
	Nameservers []string  // nameservers, except loopback addresses
	Routes      []Network // routes, except default routes and routes of Keelson
	Unmounted   []string  // mount points for Keelson's data at which no disk is mounted
	Firewalls   []string  // "firewalld", "ufw", or "forward": rules that forward only listed traffic
}

// parseSurroundings stores one line of the output of facts.sh, with key k and value v, if the key
// belongs to Surroundings. It ignores other keys and invalid values.
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
		} else if a, err := netip.ParseAddr(to); err == nil { // no prefix length
			f.Routes = append(f.Routes, Network{link, netip.PrefixFrom(a, a.BitLen())})
		}
	}
}

// clientAddress returns the address of the SSH client as the machine sees it, or "" if it is
// unknown. Behind a bastion host or NAT, it is not the address of this computer. It runs without
// sudo, because sudo does not pass on the environment variable SSH_CONNECTION.
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
