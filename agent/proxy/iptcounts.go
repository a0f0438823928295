package proxy

import (
	"context"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// Counts implements Writer. It reads the packet counters of two kinds of rules: rules that jump to
// a Port's chains, which count one packet per connection, and rules that reject. If one rule serves
// all external addresses of a port, its count is attributed to the first address.
func (w *iptables) Counts(ctx context.Context) (Counts, error) {
	out := newCounts()
	for _, t := range w.tables {
		if !t.built {
			continue
		}
		first := t.firstAddresses()
		for table, into := range map[string]map[servicemodel.Frontend]uint64{"nat": out.Connections,
			"filter": out.Unserved} {
			text, err := t.run(ctx, "", t.programName("-save"), "-c", "-t", table)
			if err != nil {
				return out, err
			}
			for line := range strings.SplitSeq(text, "\n") {
				if at, n, ok := t.parseCounter(line, first); ok {
					into[at] += n
				}
			}
		}
	}
	return out, nil
}

// portAnywhere identifies a port of a Service, independently of the external address.
type portAnywhere struct {
	chain string // chain of the Service (chainAddress)
	proto string
	port  int32
}

// firstAddresses returns the first external address of each port of a Service. Counts attributes to
// it the counter of a rule that serves all addresses.
func (t *iptFamily) firstAddresses() map[portAnywhere]netip.Addr {
	out := map[portAnywhere]netip.Addr{}
	for service, ports := range t.services {
		chain := chainAddress + servicemodel.ShortHash(service)
		for _, p := range ports {
			if i := slices.IndexFunc(p.External, func(f servicemodel.Frontend) bool {
				return !f.IsNodePort()
			}); i >= 0 {
				at := p.External[i]
				out[portAnywhere{chain, at.Proto, at.Port}] = at.IP
			}
		}
	}
	return out
}

// parseCounter parses a line of iptables-save with counters: [packets:bytes] -A KEELSON-SERVICES -d
// IP/32 -p tcp -m tcp --dport N -j ... It returns the frontend of the rule and its packet count. ok
// is false if the line contains no rule for a frontend. If the rule has no address, the frontend
// gets the address of its port in firstAddress.
func (f family) parseCounter(line string, firstAddress map[portAnywhere]netip.Addr) (
	frontend servicemodel.Frontend, packetCount uint64, ok bool,
) {
	words := strings.Fields(line)
	if len(words) < 3 || words[1] != "-A" || words[len(words)-1] == "RETURN" {
		return frontend, 0, false
	}
	chain := words[2]
	ofService := strings.HasPrefix(chain, chainAddress)
	if !ofService && !slices.Contains([]string{chainServices, chainNodePorts, chainRefusals, chainRefusedNode}, chain) {
		return frontend, 0, false
	}
	packets, _, _ := strings.Cut(strings.TrimPrefix(words[0], "["), ":")
	packetCount, err := strconv.ParseUint(packets, 10, 64)
	frontend.IP = netip.IPv4Unspecified()
	if f.v6 {
		frontend.IP = netip.IPv6Unspecified()
	}
	for i := 3; i+1 < len(words); i++ {
		switch words[i] {
		case "-d":
			if p, err := netip.ParsePrefix(words[i+1]); err == nil {
				frontend.IP = p.Addr()
			}
		case "-p":
			frontend.Proto = words[i+1]
		case "--dport":
			port, _ := strconv.Atoi(words[i+1])
			frontend.Port = int32(port)
		}
	}
	if ofService {
		whole := chain[:min(len(chain), len(chainAddress)+servicemodel.ShortHashDigits)]
		if frontend.IP, ok = firstAddress[portAnywhere{whole, frontend.Proto, frontend.Port}]; !ok {
			return frontend, 0, false
		}
	}
	return frontend, packetCount, err == nil && frontend.Port > 0
}
