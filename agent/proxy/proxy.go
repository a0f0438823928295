package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/agentport"
)

// traceParent is the annotation of an EndpointSlice with the trace of the apply that caused it.
const traceParent = "keelson.dev/traceparent"

// Proxy programs the Service rules of the node.
type Proxy struct {
	Node   string
	NodeIP netip.Addr
	Mode   Mode // "" means nftables
	// NodePorts are the addresses at which node ports are served. If empty, they are served at all
	// addresses of the node except loopback.
	NodePorts []netip.Prefix
	// Foreign reports whether a third-party network plugin attaches pods. The plugin then
	// masquerades the pods' traffic to other networks. nil: no.
	Foreign func() bool
	// ControlPlane provides the addresses of replicas; nil: unknown.
	ControlPlane agent.ControlPlane
	// Listens are ports on which this node's agent listens, in addition to the default ports of
	// every agent.
	Listens []agentport.Port
	Flows   *Flows        // notified of changes of the rules; may be nil
	Health  *HealthChecks // notified of the health of Services; may be nil
	Metrics *Metrics      // may be nil
	Synced  Synced        // notified of pending changes; may be nil
	Log     *slog.Logger

	writer func(Mode) (Writer, error) // nil: NewWriter

	mu  sync.Mutex // held while rules are written or read
	now *state
}

// Synced is notified when changes are pending and when the rules include all changes.
type Synced interface {
	Queued()  // a change is pending
	Updated() // the rules include all changes
}

// state is the state of one Run.
type state struct {
	writer   Writer
	model    *Model
	base     Base
	built    bool // the kernel's rules match the model
	foreign  bool // the base was computed for a third-party network
	routed   map[netip.Prefix]bool
	outlying map[netip.Prefix]int // addresses of Services outside the Service ranges, and the number of Ports with each
	seen     map[types.NamespacedName]string
	replicas []netip.AddrPort // addresses of replicas at the last update
}

// Intervals and timeouts of Run.
const (
	foreignEvery = 5 * time.Second  // between checks whether a third-party plugin attaches pods
	intactEvery  = 10 * time.Second // between checks whether the rules are intact
	writeLimit   = 30 * time.Second // per transaction
)

// Run programs the rules until ctx ends or an error occurs. The next Run first writes all rules.
// The rules remain when Run returns, so that traffic continues without the agent.
func (p *Proxy) Run(ctx context.Context, objects agent.Objects, reports agent.Reporter) error {
	mode := p.Mode
	if mode == "" {
		mode = ModeNFTables
	}
	if mode == ModeNone {
		return p.idle(ctx, objects, reports)
	}
	p.queued() // all rules are pending
	open := p.writer
	if open == nil {
		open = NewWriter
	}
	w, err := open(mode)
	if err != nil {
		return err
	}
	if err := w.Check(ctx); err != nil {
		return err
	}
	s := newState(w, p.Node)
	p.mu.Lock()
	p.now = s
	p.mu.Unlock()
	changes := objects.Follow(ctx, "Service", "EndpointSlice", "Node", "Peer")
	tick, check := time.NewTicker(foreignEvery), time.NewTicker(intactEvery)
	defer tick.Stop()
	defer check.Stop()
	for cleaned := false; ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			if s.built && (p.foreign() != s.foreign || !s.model.taken.equal(p.reserved(objects))) {
				err = p.apply(ctx, s, objects, reports, agent.Changed{})
			}
		case <-check.C:
			err = p.mend(ctx, s)
		case c, ok := <-changes:
			if !ok {
				return ctx.Err()
			}
			p.queued()
			err = p.apply(ctx, s, objects, reports, c)
		}
		if err != nil {
			return fmt.Errorf("programming Service rules: %w", err)
		}
		if s.built && !cleaned { // after the rules of this mode exist, so that no connection is left without rules
			cleaned = true
			if err := cleanOthers(ctx, mode); err != nil {
				p.Log.Warn("removing the rules of another proxy mode failed", "err", err)
			}
		}
	}
}

func (p *Proxy) queued() {
	if p.Synced != nil {
		p.Synced.Queued()
	}
}

func newState(w Writer, node string) *state {
	return &state{writer: w, model: NewModel(Place{Node: node}), outlying: map[netip.Prefix]int{},
		seen: map[types.NamespacedName]string{}}
}

// idle runs on a node whose Services another program serves. It removes all rules and reports every
// revision as applied.
func (p *Proxy) idle(ctx context.Context, objects agent.Objects, reports agent.Reporter) error {
	if err := errors.Join(cleanOthers(ctx, ModeNone), removeSink()); err != nil {
		return err
	}
	for c := range objects.Follow(ctx) {
		reports.ProxyApplied(c.Revision)
	}
	return ctx.Err()
}

func (p *Proxy) foreign() bool { return p.Foreign != nil && p.Foreign() }

// mend writes all rules again if another program has changed or removed some of them.
func (p *Proxy) mend(ctx context.Context, s *state) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !s.built {
		return nil
	}
	if len(s.routed) > 0 && !sunk() {
		p.Log.Warn("interface " + sinkName + " was removed or disabled by another program and is created again")
		s.routed = nil
		if err := p.follow(s, s.routes()); err != nil {
			return err
		}
	}
	ok, err := s.writer.Intact(ctx)
	if err != nil {
		p.Log.Warn("the Service rules cannot be read", "err", err)
		return nil
	}
	if ok {
		return nil
	}
	p.Log.Warn("the Service rules were changed by another program and are written again: does something flush them?")
	s.built = false
	return p.sync(ctx, s)
}

// standing returns the node's own object.
type standing interface{ Node() (*v1.Node, bool) }

// placeOf returns the location of a node according to its labels.
func placeOf(node string, objects standing) Place {
	at := Place{Node: node}
	if n, ok := objects.Node(); ok {
		at.Zone = n.Labels[v1.LabelTopologyZone]
	}
	return at
}

// baseOf returns the settings of the rules from those of the cluster.
func (p *Proxy) baseOf(c agent.Cluster, foreign bool) Base {
	b := Base{ServiceCIDRs: c.ServicePrefixes(), NodePorts: p.NodePorts}
	if !foreign {
		b.PodCIDRs = c.ClusterPrefixes()
	}
	return b
}

// apply updates the model with the changed objects and programs the resulting changes.
func (p *Proxy) apply(ctx context.Context, s *state, objects agent.Objects, reports agent.Reporter, news agent.Changed) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	begin := time.Now()
	foreign := p.foreign()
	base := p.baseOf(objects.Cluster(), foreign)
	if s.foreign = foreign; !base.equal(s.base) {
		s.base, s.built, s.routed = base, false, nil
		s.recount()
	}
	if replicas := p.replicas(); machinesMayDiffer(news) || !slices.Equal(replicas, s.replicas) {
		s.replicas = replicas
		s.model.Reserve(p.reserved(objects))
	}
	fresh := s.take(objects, news)
	changes := s.model.Settle()
	s.outlie(changes)
	if err := p.follow(s, s.routes()); err != nil {
		return err
	}
	if err := p.write(ctx, s, changes); err != nil {
		return err
	}
	if p.Synced != nil {
		p.Synced.Updated()
	}
	if p.Flows != nil {
		p.Flows.show(changes)
	}
	if p.Health != nil {
		p.Health.show(s.model.health)
	}
	if news.Revision > 0 {
		reports.ProxyApplied(news.Revision)
	}
	s.report(p.Node, fresh, reports, begin, p.Metrics)
	return nil
}

// machinesMayDiffer reports whether a change may concern the cluster's machines. An empty change
// stands for one that no object shows.
func machinesMayDiffer(news agent.Changed) bool {
	if news.All || news.Revision == 0 && len(news.Keys) == 0 {
		return true
	}
	for k := range news.Keys {
		if k.Kind == "Node" || k.Kind == "Peer" {
			return true
		}
	}
	return false
}

// take updates the model from the view and returns the EndpointSlices among the changed objects.
func (s *state) take(objects agent.Objects, news agent.Changed) (fresh []*discoveryv1.EndpointSlice) {
	if news.All {
		s.model.Move(placeOf(s.model.At().Node, objects))
		fresh = objects.EndpointSlices()
		s.model.Replace(objects.Services(), fresh)
		maps.DeleteFunc(s.seen, func(k types.NamespacedName, _ string) bool {
			_, ok := objects.EndpointSlice(k.Namespace, k.Name)
			return !ok
		})
		return fresh
	}
	for k := range news.Keys {
		key := types.NamespacedName{Namespace: k.Namespace, Name: k.Name}
		switch k.Kind {
		case "Service":
			svc, _ := objects.Service(k.Namespace, k.Name)
			s.model.Service(key, svc)
		case "EndpointSlice":
			part, ok := objects.EndpointSlice(k.Namespace, k.Name)
			s.model.Slice(key, part)
			if ok {
				fresh = append(fresh, part)
			} else {
				delete(s.seen, key)
			}
		case "Node":
			if k.Name == s.model.At().Node {
				s.model.Move(placeOf(k.Name, objects))
			}
		}
	}
	return fresh
}

// write programs the changes. It writes all rules if the kernel's rules do not match the model or
// if the changes are rejected.
func (p *Proxy) write(ctx context.Context, s *state, changes []Change) error {
	if s.built && len(changes) == 0 {
		return nil
	}
	if s.built {
		begin := time.Now()
		err := s.writer.Apply(ctx, changes)
		if err == nil {
			p.Metrics.synced(time.Since(begin), false)
			return nil
		}
		if ctx.Err() != nil {
			return errors.Join(ctx.Err(), err)
		}
		s.built = false
		p.Metrics.failed()
		p.Log.Warn("a change of the Service rules was rejected: all rules are written again", "err", err)
	}
	return p.sync(ctx, s)
}

func (p *Proxy) sync(ctx context.Context, s *state) error {
	begin := time.Now()
	if err := s.writer.Sync(ctx, s.base, maps.Values(s.model.Ports())); err != nil {
		p.Metrics.failed()
		return err
	}
	s.built = true
	p.Metrics.synced(time.Since(begin), true)
	return nil
}

// report reports to the timeline which new EndpointSlices this node routes.
func (s *state) report(node string, fresh []*discoveryv1.EndpointSlice, reports agent.Reporter, begin time.Time, m *Metrics) {
	now := time.Now()
	for _, e := range fresh {
		tp, trigger := e.Annotations[traceParent], e.Annotations[v1.EndpointsLastChangeTriggerTime]
		key := types.NamespacedName{Namespace: e.Namespace, Name: e.Name}
		if tp == "" && trigger == "" || s.seen[key] == e.ResourceVersion {
			continue
		}
		s.seen[key] = e.ResourceVersion
		if at, err := time.Parse(time.RFC3339Nano, trigger); err == nil {
			m.programmed(at, now)
		}
		if tp != "" {
			reports.Stages(tp, "endpointslice/"+e.Namespace+"/"+e.Name, []agent.StageTime{{
				Name: "proxy programmed", Start: begin, Duration: now.Sub(begin), Detail: "on " + node,
			}})
		}
	}
}
