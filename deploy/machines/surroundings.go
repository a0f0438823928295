package machines

import (
	"context"
	"net/netip"
	"strings"
)

// Surroundings are what a machine reaches, and by which it is reached.
type Surroundings struct {
	From        string    // the address that we come from, as the machine sees it; "" where it does not say
	Nameservers []string  // that it asks, but for itself
	Routes      []Network // that lead somewhere, but for default ones and Keelson's own
	Unmounted   []string  // where a disk is to be mounted on which Keelson's data lie, or part of them, and none is
	Firewalls   []string  // in force that pods are nothing to: firewalld, ufw, or forward where rules of others forward only what they name
}

// surroundings takes what the script says of them.
func (f *Facts) surroundings(k, v string) {
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
		} else if a, err := netip.ParseAddr(to); err == nil { // of a single address the length is left out
			f.Routes = append(f.Routes, Network{link, netip.PrefixFrom(a, a.BitLen())})
		}
	}
}

// seenFrom is the address that the machine sees us come from, which is another one than ours behind a bastion or a router that
// translates. The login itself is asked: sudo does not hand on what the ssh server has told it.
func (m *Machine) seenFrom(ctx context.Context) string {
	out, err := m.run(ctx, `echo "$SSH_CONNECTION"`, nil)
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
