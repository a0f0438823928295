package network

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/cni"
)

// tunnelTable is the name of the nftables table with the rules for the tunnel, VXLAN or WireGuard.
const tunnelTable = "keelson-tunnel"

// Names of the chains of tunnelTable. The existing chains show for which kind of tunnel the rules
// were created.
const (
	chainSource    = "source"    // for VXLAN: masquerading
	chainEncrypted = "encrypted" // for WireGuard: masquerading
	chainGuard     = "guard"     // drops pod traffic that bypasses the encrypted tunnel
	chainArrived   = "arrived"   // drops packets from pods to the VXLAN port of their own node
	chainForwarded = "forwarded" // drops packets from pods to the VXLAN port of other nodes
)

// tunnelRules maintains the nftables rules of the tunnel to other nodes.
//
// The rules masquerade the node's own packets through the tunnel. Otherwise, replies to another
// address of the node would not return through the tunnel, but over links that may not carry pod
// addresses.
//
// With WireGuard, the rules drop pod-to-pod packets that arrive over a link, because these are
// unencrypted and may be forged. With VXLAN, they prevent pods from reaching the tunnel port on any
// node, because the sender of a VXLAN packet sets its inner source address.
type tunnelRules struct {
	nft       knftables.Interface
	applied   tunnelRuleset
	checkedAt time.Time // zero: never checked
}

// tunnelRuleset contains the parameters of the tunnel's rules for a layout. The zero value means no
// rules.
type tunnelRuleset struct {
	device string // interface of the tunnel
	pods   string // the cluster's pod ranges, separated by spaces; for the guard
	ends   string // inner addresses of the VXLAN interfaces, separated by spaces
}

func tunnelRulesetOf(l Layout) tunnelRuleset {
	switch {
	case l.WireGuard != nil:
		var all []string
		for _, p := range l.WireGuard.Pods {
			all = append(all, p.String())
		}
		return tunnelRuleset{device: wireguardName, pods: strings.Join(all, " ")}
	case l.Tunnel != nil:
		var ends []string
		for _, p := range l.Peers {
			ends = append(ends, p.Outer.String())
		}
		slices.Sort(ends)
		return tunnelRuleset{device: tunnelName, ends: strings.Join(ends, " ")}
	}
	return tunnelRuleset{}
}

func (r tunnelRuleset) chainNames() []string {
	switch r.device {
	case wireguardName:
		return []string{chainEncrypted, chainGuard}
	case tunnelName:
		return []string{chainArrived, chainForwarded, chainSource}
	}
	return nil
}

// syncRules creates, updates or removes the rules of tunnelTable, so that they equal those for
// want.
func (s *tunnelRules) syncRules(ctx context.Context, want tunnelRuleset) error {
	known := !s.checkedAt.IsZero() && s.applied == want
	if known && (want == tunnelRuleset{} || time.Since(s.checkedAt) < sourceEvery) {
		return nil
	}
	if s.nft == nil {
		nft, err := knftables.New(knftables.InetFamily, tunnelTable)
		if err != nil && want != (tunnelRuleset{}) {
			return fmt.Errorf("the tunnel needs nftables: %w: install nft and a kernel with nf_tables", err)
		}
		if err != nil {
			return nil // rules were never created
		}
		s.nft = nft
	}
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	chains, err := s.nft.List(ctx, "chains")
	if err != nil {
		chains = nil // the table does not exist
	}
	slices.Sort(chains)
	// The names of the chains do not show the address ranges. The rules of an earlier agent process
	// are therefore rewritten.
	if same := slices.Equal(chains, want.chainNames()); !same || want.pods+want.ends != "" && !known {
		if err := s.nft.Run(ctx, s.buildTransaction(want)); err != nil {
			return fmt.Errorf("rules of the tunnel: %w", err)
		}
	}
	s.applied, s.checkedAt = want, time.Now()
	return nil
}

func (s *tunnelRules) buildTransaction(want tunnelRuleset) *knftables.Transaction {
	tx := s.nft.NewTransaction()
	table := &knftables.Table{Comment: knftables.PtrTo("Keelson pod network")}
	tx.Add(table) // Delete requires that the table exists
	tx.Delete(&knftables.Table{})
	if want == (tunnelRuleset{}) {
		return tx
	}
	tx.Add(table)
	chain := func(name string, t knftables.BaseChainType, h knftables.BaseChainHook, p knftables.BaseChainPriority) {
		tx.Add(&knftables.Chain{Name: name, Type: &t, Hook: &h, Priority: &p})
	}
	name := chainEncrypted
	if want.device == tunnelName {
		name = chainSource
		s.closeTunnel(tx, want, chain)
	}
	chain(name, knftables.NATType, knftables.PostroutingHook, knftables.SNATPriority)
	tx.Add(&knftables.Rule{Chain: name, Rule: "oifname " + want.device + " fib saddr type local masquerade"})
	if want.pods == "" {
		return tx
	}
	chain(chainGuard, knftables.FilterType, knftables.PreroutingHook, knftables.RawPriority)
	for text := range strings.FieldsSeq(want.pods) {
		pods, err := netip.ParsePrefix(text)
		if err != nil {
			continue // cannot happen: the text was created from a prefix
		}
		ip := "ip"
		if pods.Addr().Is6() {
			ip = "ip6"
		}
		tx.Add(&knftables.Rule{Chain: chainGuard, Rule: knftables.Concat(
			"iifname != {", want.device, ",", cni.Bridge, ", lo }", ip, "saddr", pods, ip, "daddr", pods,
			"counter drop")})
	}
	return tx
}

// closeTunnel adds rules that drop packets from pods to the VXLAN port of any node. The rules apply
// after Service rules have changed the destination.
func (s *tunnelRules) closeTunnel(tx *knftables.Transaction, want tunnelRuleset,
	chain func(string, knftables.BaseChainType, knftables.BaseChainHook, knftables.BaseChainPriority)) {
	from := fmt.Sprintf("iifname %s udp dport %d", cni.Bridge, tunnelPort)
	chain(chainArrived, knftables.FilterType, knftables.InputHook, knftables.FilterPriority)
	tx.Add(&knftables.Rule{Chain: chainArrived, Rule: from + " counter drop"})
	chain(chainForwarded, knftables.FilterType, knftables.ForwardHook, knftables.FilterPriority)
	for _, f := range []struct {
		ip  string
		six bool
	}{{"ip", false}, {"ip6", true}} {
		var ends []string
		for text := range strings.FieldsSeq(want.ends) {
			if a, err := netip.ParseAddr(text); err == nil && a.Is6() == f.six {
				ends = append(ends, text)
			}
		}
		if len(ends) > 0 {
			tx.Add(&knftables.Rule{Chain: chainForwarded,
				Rule: from + " " + f.ip + " daddr { " + strings.Join(ends, ", ") + " } counter drop"})
		}
	}
}
