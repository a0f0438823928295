package proxy

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/agent"
)

// traceParent is the annotation that ties an EndpointSlice to the apply it descends from.
const traceParent = "keelson.dev/traceparent"

// Proxy keeps the node's Service rules as the control plane demands.
type Proxy struct {
	Node   string
	NodeIP netip.Addr
	// Foreign says that pods are attached by a network product, which then gives their traffic to the world its source
	// address; nil: they are not.
	Foreign func() bool
	Flows   *Flows // told of what the rules say; may be nil
	Log     *slog.Logger
}

// state is what one Run has programmed.
type state struct {
	nft     knftables.Interface
	applied ruleset
	built   bool  // the base is in the kernel
	foreign bool  // it was made for a foreign network
	place   Place // where the node stood
	routed  map[netip.Prefix]bool
	seen    map[string]string // EndpointSlice → resourceVersion that was reported
}

// The bounds of Run in time.
const (
	foreignEvery = 5 * time.Second  // between looks at whose network it is
	intactEvery  = 30 * time.Second // between looks at whether the rules are still there
	nftLimit     = 30 * time.Second // for one transaction
)

// Run programs rules until ctx ends or that fails; Run again builds the table anew. Rules stay when it ends: traffic
// outlives the agent.
func (p *Proxy) Run(ctx context.Context, objects agent.Objects, reports agent.Reporter) error {
	nft, err := knftables.New(knftables.IPv4Family, Table)
	if err != nil {
		return fmt.Errorf("Service rules need nftables: %w: install nft and a kernel with nf_tables", err)
	}
	s := &state{nft: nft, seen: map[string]string{}, place: Place{Node: p.Node}}
	changes := objects.Changes(ctx)
	select {
	case <-objects.Synced():
	case <-ctx.Done():
		return ctx.Err()
	}
	tick, check := time.NewTicker(foreignEvery), time.NewTicker(intactEvery)
	defer tick.Stop()
	defer check.Stop()
	for {
		if err := p.apply(ctx, s, objects, reports); err != nil {
			return fmt.Errorf("programming Service rules: %w", err)
		}
		for relevant := false; !relevant; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-tick.C:
				relevant = p.foreign() != s.foreign
			case <-check.C:
				if !s.intact(ctx) {
					p.Log.Warn("the Service rules are gone from the kernel and are made anew: does something flush nftables?")
					s.built, relevant = false, true
				}
			case kinds, ok := <-changes:
				if !ok {
					return ctx.Err()
				}
				relevant = s.concerns(kinds, objects)
			}
		}
	}
}

// concerns says whether a change of kinds may change the rules: of nodes only that of the own one's zone does.
func (s *state) concerns(kinds map[string]struct{}, objects standing) bool {
	_, svc := kinds["Service"]
	_, eps := kinds["EndpointSlice"]
	_, node := kinds["Node"]
	return svc || eps || node && placeOf(s.place.Node, objects) != s.place
}

// standing is who knows the node's own object.
type standing interface{ Node() (*v1.Node, bool) }

// placeOf is where a node stands, as its labels tell.
func placeOf(node string, objects standing) Place {
	at := Place{Node: node}
	if n, ok := objects.Node(); ok {
		at.Zone = n.Labels[v1.LabelTopologyZone]
	}
	return at
}

// intact says whether our table is still in the kernel: firewalls that are reloaded flush more than their own rules.
func (s *state) intact(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, nftLimit)
	defer cancel()
	chains, err := s.nft.List(ctx, "chains")
	return err == nil && slices.Contains(chains, chainDispatch)
}

func (p *Proxy) foreign() bool { return p.Foreign != nil && p.Foreign() }

// apply brings the kernel to the view that objects shows now.
func (p *Proxy) apply(ctx context.Context, s *state, objects agent.Objects, reports agent.Reporter) error {
	revision := objects.Revision() // before reading: the rules show at least this
	begin := time.Now()
	parts := objects.EndpointSlices()
	s.place = placeOf(s.place.Node, objects)
	services := objects.Services()
	model := Compute(services, parts, s.place)
	want := render(model)
	tx := s.nft.NewTransaction()
	from := s.applied
	cidr, _ := netip.ParsePrefix(objects.Cluster().ServiceCIDR)
	if foreign := p.foreign(); !s.built || foreign != s.foreign {
		s.built, s.foreign = false, foreign
		s.routed = nil
		pods, _ := netip.ParsePrefix(objects.Cluster().ClusterCIDR)
		if foreign {
			pods = netip.Prefix{}
		}
		base(tx, cidr, pods)
		from = ruleset{}
	}
	if err := p.follow(s, routesFor(services, cidr)); err != nil {
		return err
	}
	change(tx, from, want)
	if tx.NumOperations() > 0 {
		ctx, cancel := context.WithTimeout(ctx, nftLimit)
		defer cancel()
		if err := s.nft.Run(ctx, tx); err != nil {
			return fmt.Errorf("nft transaction of %d steps: %w", tx.NumOperations(), err)
		}
	}
	s.applied, s.built = want, true
	if p.Flows != nil {
		p.Flows.show(model)
	}
	reports.ProxyApplied(revision)
	s.report(p.Node, parts, reports, begin)
	return nil
}

// report tells the timeline which new EndpointSlices this node routes by now.
func (s *state) report(node string, parts []*discoveryv1.EndpointSlice, reports agent.Reporter, begin time.Time) {
	current := make(map[string]string, len(parts))
	for _, e := range parts {
		key := e.Namespace + "/" + e.Name
		current[key] = e.ResourceVersion
		if tp := e.Annotations[traceParent]; tp != "" && s.seen[key] != e.ResourceVersion {
			reports.Stages(tp, "endpointslice/"+key, []agent.StageTime{{
				Name: "proxy programmed", Start: begin, Duration: time.Since(begin), Detail: "on " + node,
			}})
		}
	}
	s.seen = current
}
