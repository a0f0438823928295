package dns

import (
	"net"
	"net/netip"
	"strings"

	"github.com/miekg/dns"

	"keelson.dev/keelson/agent/dns/zone"
)

// hostsTable holds the names and addresses of a hosts plugin.
type hostsTable struct {
	byName    map[string][]netip.Addr // fully qualified, in lower case
	byAddress map[netip.Addr][]string
}

// maxHostNames is the maximum number of names in a table.
const maxHostNames = 50000

// parseHosts parses texts in the format of a hosts file: an address and its names per line, with
// comments after #. Invalid lines are skipped, as in other parsers of hosts files.
func parseHosts(texts ...string) *hostsTable {
	t := &hostsTable{byName: map[string][]netip.Addr{}, byAddress: map[netip.Addr][]string{}}
	count := 0
	for _, text := range texts {
		for line := range strings.Lines(text) {
			line, _, _ = strings.Cut(line, "#")
			f := strings.Fields(line)
			if len(f) < 2 {
				continue
			}
			ip, err := netip.ParseAddr(f[0])
			if err != nil {
				continue
			}
			ip = ip.WithZone("").Unmap()
			for _, name := range f[1:] {
				if _, ok := dns.IsDomainName(name); !ok || count >= maxHostNames {
					continue
				}
				count++
				fqdn := strings.ToLower(dns.Fqdn(name))
				t.byName[fqdn] = append(t.byName[fqdn], ip)
				t.byAddress[ip] = append(t.byAddress[ip], fqdn)
			}
		}
	}
	return t
}

// answerHosts returns the records of type kind for a name in the hosts table, with the given TTL.
// owner is the name in the client's spelling. If reverse is true, PTR queries are answered too.
// found reports whether the name has records of any type.
func (t *hostsTable) answerHosts(owner, name string, kind uint16, ttl uint32, reverse bool) (out []dns.RR, found bool) {
	h := dns.RR_Header{Name: owner, Rrtype: kind, Class: dns.ClassINET, Ttl: ttl}
	if reverse && kind == dns.TypePTR {
		if addr, ok := zone.ReverseAddress(name); ok {
			for _, n := range t.byAddress[addr] {
				out = append(out, &dns.PTR{Hdr: h, Ptr: n})
			}
			return out, len(out) > 0
		}
	}
	all, found := t.byName[name]
	for _, a := range all {
		switch {
		case kind == dns.TypeA && a.Is4():
			out = append(out, &dns.A{Hdr: h, A: net.IP(a.AsSlice())})
		case kind == dns.TypeAAAA && a.Is6():
			out = append(out, &dns.AAAA{Hdr: h, AAAA: net.IP(a.AsSlice())})
		}
	}
	return out, found
}
