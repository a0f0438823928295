package proxy

import (
	"context"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Counts implements Writer. It reads the packet counters of the rules that jump to a Port's chains
// (one packet per connection) and of the rules that reject. A rule for all external addresses of a
// port is counted at the first address.
func (w *iptables) Counts(ctx context.Context) (Counts, error) {
	out := newCounts()
	for _, t := range w.tables {
		if !t.built {
			continue
		}
		first := t.firstAddresses()
		for table, into := range map[string]map[Frontend]uint64{"nat": out.Connections, "filter": out.Unserved} {
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

// portAnywhere is a port at all external addresses of a Service.
type portAnywhere struct {
	chain string // chain of the Service (chainAddress)
	proto string
	port  int32
}

// firstAddresses returns the first external address of the Service for each portAnywhere. A rule
// for all addresses is counted there.
func (t *iptFamily) firstAddresses() map[portAnywhere]netip.Addr {
	out := map[portAnywhere]netip.Addr{}
	for service, ports := range t.services {
		chain := chainAddress + shortHash(service)
		for _, p := range ports {
			if i := slices.IndexFunc(p.External, func(f Frontend) bool { return !f.IsNodePort() }); i >= 0 {
				at := p.External[i]
				out[portAnywhere{chain, at.Proto, at.Port}] = at.IP
			}
		}
	}
	return out
}

// parseCounter parses a line of iptables-save with counters: [packets:bytes] -A KEELSON-SERVICES -d
// IP/32 -p tcp -m tcp --dport N -j ... It returns the frontend of the rule and its packet count.
// first contains the addresses of rules for all addresses.
func (f family) parseCounter(line string, first map[portAnywhere]netip.Addr) (at Frontend, n uint64, ok bool) {
	words := strings.Fields(line)
	if len(words) < 3 || words[1] != "-A" || words[len(words)-1] == "RETURN" {
		return at, 0, false
	}
	chain := words[2]
	ofService := strings.HasPrefix(chain, chainAddress)
	if !ofService && !slices.Contains([]string{chainServices, chainNodePorts, chainRefusals, chainRefusedNode}, chain) {
		return at, 0, false
	}
	packets, _, _ := strings.Cut(strings.TrimPrefix(words[0], "["), ":")
	n, err := strconv.ParseUint(packets, 10, 64)
	at.IP = netip.IPv4Unspecified()
	if f.v6 {
		at.IP = netip.IPv6Unspecified()
	}
	for i := 3; i+1 < len(words); i++ {
		switch words[i] {
		case "-d":
			if p, err := netip.ParsePrefix(words[i+1]); err == nil {
				at.IP = p.Addr()
			}
		case "-p":
			at.Proto = words[i+1]
		case "--dport":
			port, _ := strconv.Atoi(words[i+1])
			at.Port = int32(port)
		}
	}
	if ofService {
		whole := chain[:min(len(chain), len(chainAddress)+shortHashDigits)]
		if at.IP, ok = first[portAnywhere{whole, at.Proto, at.Port}]; !ok {
			return at, 0, false
		}
	}
	return at, n, err == nil && at.Port > 0
}
