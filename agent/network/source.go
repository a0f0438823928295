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

// tunnelTable has the rules that belong to a tunnel.
const tunnelTable = "keelson-tunnel"

// The chains of the table. Which are there says which tunnel they are for.
const (
	chainSource    = "source"    // of the tunnel of VXLAN
	chainEncrypted = "encrypted" // the same of the encrypted one
	chainGuard     = "guard"     // against what comes past the encrypted one
	chainArrived   = "arrived"   // against what pods put into the tunnel of VXLAN at their own node
	chainForwarded = "forwarded" // and at another one
)

// source is the rule by which the node itself speaks through the tunnel as its end of it: answers to another of its
// addresses would come back by the links between, as a pod's packets that those may not carry. With an encrypted tunnel
// there is a second: what a link brings from one pod to another is dropped, for it came in the clear, and from anybody.
// With VXLAN, pods do not reach the port of the tunnel on any node: packets in it have the source that their sender writes.
type source struct {
	nft    knftables.Interface
	is     rules
	looked time.Time // zero: never
}

// rules are what a layout needs; the zero value is none.
type rules struct {
	device string // of the tunnel
	pods   string // ranges of the cluster, with spaces between; for the guard
	ends   string // nodes' addresses at which the tunnel of VXLAN ends, with spaces between
}

func rulesOf(l Layout) rules {
	switch {
	case l.WireGuard != nil:
		var all []string
		for _, p := range l.WireGuard.Pods {
			all = append(all, p.String())
		}
		return rules{device: wireguardName, pods: strings.Join(all, " ")}
	case l.Tunnel != nil:
		var ends []string
		for _, p := range l.Peers {
			ends = append(ends, p.Outer.String())
		}
		slices.Sort(ends)
		return rules{device: tunnelName, ends: strings.Join(ends, " ")}
	}
	return rules{}
}

func (r rules) chains() []string {
	switch r.device {
	case wireguardName:
		return []string{chainEncrypted, chainGuard}
	case tunnelName:
		return []string{chainArrived, chainForwarded, chainSource}
	}
	return nil
}

// sync makes the rules or removes them.
func (s *source) sync(ctx context.Context, want rules) error {
	known := !s.looked.IsZero() && s.is == want
	if known && (want == rules{} || time.Since(s.looked) < sourceEvery) {
		return nil
	}
	if s.nft == nil {
		nft, err := knftables.New(knftables.InetFamily, tunnelTable)
		if err != nil && want != (rules{}) {
			return fmt.Errorf("the tunnel needs nftables: %w: install nft and a kernel with nf_tables", err)
		}
		if err != nil {
			return nil // then there never was a rule
		}
		s.nft = nft
	}
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	chains, err := s.nft.List(ctx, "chains")
	if err != nil {
		chains = nil // there is no such table
	}
	slices.Sort(chains)
	// Ranges do not follow from chains: those of an agent before this one are written anew.
	if same := slices.Equal(chains, want.chains()); !same || want.pods+want.ends != "" && !known {
		if err := s.nft.Run(ctx, s.change(want)); err != nil {
			return fmt.Errorf("rules of the tunnel: %w", err)
		}
	}
	s.is, s.looked = want, time.Now()
	return nil
}

func (s *source) change(want rules) *knftables.Transaction {
	tx := s.nft.NewTransaction()
	table := &knftables.Table{Comment: knftables.PtrTo("Keelson pod network")}
	tx.Add(table) // so that there is one to delete
	tx.Delete(&knftables.Table{})
	if want == (rules{}) {
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
			continue // it was one
		}
		ip := "ip"
		if pods.Addr().Is6() {
			ip = "ip6"
		}
		tx.Add(&knftables.Rule{Chain: chainGuard, Rule: knftables.Concat(
			"iifname != {", want.device, ",", cni.Bridge, ", lo }", ip, "saddr", pods, ip, "daddr", pods, "counter drop")})
	}
	return tx
}

// closeTunnel adds the rules by which pods do not reach the port of the tunnel, after Services have changed destinations.
func (s *source) closeTunnel(tx *knftables.Transaction, want rules,
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
			tx.Add(&knftables.Rule{Chain: chainForwarded, Rule: from + " " + f.ip + " daddr { " + strings.Join(ends, ", ") + " } counter drop"})
		}
	}
}
