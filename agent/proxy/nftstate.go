package proxy

import "net/netip"

// tableState is the content that an nftables table should have. With it, a change of Services does
// not require reading the kernel's rules.
type tableState struct {
	sharedUses  map[string]int           // chain → number of Ports that use it
	hairpinUses map[netip.Addr]int       // pod → number of Ports through which it may reach itself
	elements    map[string]elementDigest // map → digest of the elements that it should contain
	rules       map[string]int           // chain → number of rules that it should contain
}

func newTableState() tableState {
	return tableState{sharedUses: map[string]int{}, hairpinUses: map[netip.Addr]int{},
		elements: map[string]elementDigest{},
		rules:    map[string]int{}}
}

// countUses adds delta to the number of users of each shared chain and hairpin address of p. delta
// is
// 1 if a Port is added, and -1 if it is removed.
func (s *tableState) countUses(p portRules, delta int) {
	for _, c := range p.shared {
		s.rules[c.name] = len(c.rules)
		if s.sharedUses[c.name] += delta; s.sharedUses[c.name] == 0 {
			delete(s.sharedUses, c.name)
			delete(s.rules, c.name)
		}
	}
	for _, ip := range distinctAddrs(p.hairpin) {
		if s.hairpinUses[ip] += delta; s.hairpinUses[ip] == 0 {
			delete(s.hairpinUses, ip)
		}
	}
}
