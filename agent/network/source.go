package network

import (
	"context"
	"fmt"
	"slices"
	"time"

	"sigs.k8s.io/knftables"
)

// tunnelTable has the one rule that belongs to the tunnel.
const tunnelTable = "keelson-tunnel"

// source is the rule by which the node itself speaks through the tunnel as its end of it: answers to another of its
// addresses would come back by the links between, as a pod's packets that those may not carry.
type source struct {
	nft    knftables.Interface
	on     bool
	looked time.Time // zero: never
}

// sync makes the rule or removes it.
func (s *source) sync(ctx context.Context, on bool) error {
	if !s.looked.IsZero() && s.on == on && (!on || time.Since(s.looked) < sourceEvery) {
		return nil
	}
	if s.nft == nil {
		nft, err := knftables.New(knftables.InetFamily, tunnelTable)
		if err != nil && on {
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
	if there := err == nil && slices.Contains(chains, "source"); there != on {
		if err := s.nft.Run(ctx, s.change(on)); err != nil {
			return fmt.Errorf("rule of the tunnel: %w", err)
		}
	}
	s.on, s.looked = on, time.Now()
	return nil
}

func (s *source) change(on bool) *knftables.Transaction {
	tx := s.nft.NewTransaction()
	tx.Add(&knftables.Table{Comment: knftables.PtrTo("Keelson pod network")})
	if !on {
		tx.Delete(&knftables.Table{})
		return tx
	}
	tx.Add(&knftables.Chain{Name: "source", Type: knftables.PtrTo(knftables.NATType), Hook: knftables.PtrTo(knftables.PostroutingHook),
		Priority: knftables.PtrTo(knftables.SNATPriority)})
	tx.Flush(&knftables.Chain{Name: "source"})
	tx.Add(&knftables.Rule{Chain: "source", Rule: "oifname " + tunnelName + " fib saddr type local masquerade"})
	return tx
}
