// Package proxy programs the Service rules of a node. Package servicemodel computes the Service
// ports. A Writer programs them in the kernel with nftables, iptables or IPVS. With nftables, the
// cost of a packet does not grow with the number of Services.
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
	"keelson.dev/keelson/agent/proxy/servicemodel"
	"keelson.dev/keelson/internal/agentport"
)

// traceParent is an annotation of an EndpointSlice. Its value is the trace context of the request
// that caused the slice's change.
const traceParent = "keelson.dev/traceparent"

// Proxy programs the Service rules of the node in the kernel. Its fields must be set before Run.
type Proxy struct {
	Node   string
	NodeIP netip.Addr
	Mode   Mode // "" means nftables
	// NodePorts are the addresses at which node ports are served. If empty, they are served at all
	// addresses of the node except loopback.
	NodePorts []netip.Prefix
	// ForeignNetwork reports whether a third-party network plugin attaches pods. The plugin then
	// masquerades the pods' traffic to other networks. nil: no.
	ForeignNetwork func() bool
	// ControlPlane provides the addresses of replicas. If it is nil, they are unknown.
	ControlPlane agent.ControlPlane
	// ListenPorts are ports on which this node's agent listens, in addition to the default ports of
	// every agent.
	ListenPorts []agentport.Port
	Flows       *StaleFlowCleaner // notified of changes of the rules; may be nil
	Health      *HealthChecks     // notified of the health of Services; may be nil
	Metrics     *Metrics          // may be nil
	Synced      Synced            // notified of pending changes; may be nil
	Log         *slog.Logger

	writer func(Mode) (Writer, error) // nil: NewWriter

	mu      sync.Mutex // held while rules are written or read
	current *proxyState
}

// Synced is the interface that a Proxy notifies when changes are pending, and when the kernel's
// rules include all changes.
type Synced interface {
	Queued()  // a change is pending
	Updated() // the kernel's rules include all changes
}

// proxyState is the state of one call of Proxy.Run.
type proxyState struct {
	writer  Writer
	model   *servicemodel.Model
	base    Base
	built   bool // the kernel's rules match the model
	foreign bool // base was computed for a third-party network plugin
	routes  map[netip.Prefix]bool
	// addresses of Services outside the Service ranges, and the number of Ports with each
	addressesOutsideRanges map[netip.Prefix]int
	reportedSlices         map[types.NamespacedName]string
	replicas               []netip.AddrPort // addresses of replicas at the last update
}

// Intervals and timeouts of Proxy.Run.
const (
	foreignEvery = 5 * time.Second  // between checks whether a third-party plugin attaches pods
	intactEvery  = 10 * time.Second // between checks whether the rules are intact
	writeLimit   = 30 * time.Second // per transaction
)

// Run programs the Service rules in the kernel and follows changes of Services and EndpointSlices,
// until ctx ends or an error occurs. The next call of Run first writes all rules. The rules remain
// when Run returns, so that traffic continues without the agent.
func (p *Proxy) Run(ctx context.Context, objects agent.Objects, reports agent.Reporter) error {
	mode := p.Mode
	if mode == "" {
		mode = ModeNFTables
	}
	if mode == ModeNone {
		return p.runWithoutRules(ctx, objects, reports)
	}
	p.notifyQueued() // all rules are pending
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
	p.current = s
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
			if s.built && (p.isForeignNetwork() != s.foreign || !s.model.HasReserved(p.computeReserved(objects))) {
				err = p.applyChanges(ctx, s, objects, reports, agent.ObjectChanges{})
			}
		case <-check.C:
			err = p.repairRules(ctx, s)
		case c, ok := <-changes:
			if !ok {
				return ctx.Err()
			}
			p.notifyQueued()
			err = p.applyChanges(ctx, s, objects, reports, c)
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

func (p *Proxy) notifyQueued() {
	if p.Synced != nil {
		p.Synced.Queued()
	}
}

func newState(w Writer, node string) *proxyState {
	return &proxyState{writer: w, model: servicemodel.NewModel(servicemodel.Location{Node: node}),
		addressesOutsideRanges: map[netip.Prefix]int{},
		reportedSlices:         map[types.NamespacedName]string{}}
}

// runWithoutRules implements Run for mode none, in which another program serves Services. It
// removes all of Keelson's rules, and then reports every revision as applied until ctx ends.
func (p *Proxy) runWithoutRules(ctx context.Context, objects agent.Objects, reports agent.Reporter) error {
	if err := errors.Join(cleanOthers(ctx, ModeNone), removeSink()); err != nil {
		return err
	}
	for c := range objects.Follow(ctx) {
		reports.ProxyApplied(c.Revision)
	}
	return ctx.Err()
}

func (p *Proxy) isForeignNetwork() bool { return p.ForeignNetwork != nil && p.ForeignNetwork() }

// repairRules writes all rules again if another program has changed or removed some of them in the
// kernel.
func (p *Proxy) repairRules(ctx context.Context, s *proxyState) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !s.built {
		return nil
	}
	if len(s.routes) > 0 && !isSinkUp() {
		p.Log.Warn("interface " + sinkName + " was removed or disabled by another program and is created again")
		s.routes = nil
		if err := p.syncRoutes(s, s.wantedRoutes()); err != nil {
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
	return p.writeAllRules(ctx, s)
}

// nodeGetter is the part of agent.Objects that returns this node's own Node object.
type nodeGetter interface{ Node() (*v1.Node, bool) }

// nodeLocation returns the Location of a node: its name, and the zone in the labels of the Node
// object.
func nodeLocation(node string, objects nodeGetter) servicemodel.Location {
	at := servicemodel.Location{Node: node}
	if n, ok := objects.Node(); ok {
		at.Zone = n.Labels[v1.LabelTopologyZone]
	}
	return at
}

// computeBase returns the settings of the rules that do not depend on Services. foreign means that
// a third-party network plugin attaches the pods.
func (p *Proxy) computeBase(c agent.Cluster, foreign bool) Base {
	b := Base{ServiceCIDRs: c.ServicePrefixes(), NodePorts: p.NodePorts}
	if !foreign {
		b.PodCIDRs = c.ClusterPrefixes()
	}
	return b
}

// applyChanges updates the model with the changed objects, and writes the resulting changes of
// Service rules to the kernel. It then reports the objects' revision as applied.
func (p *Proxy) applyChanges(
	ctx context.Context, s *proxyState, objects agent.Objects, reports agent.Reporter, changed agent.ObjectChanges,
) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	begin := time.Now()
	foreign := p.isForeignNetwork()
	base := p.computeBase(objects.Cluster(), foreign)
	if s.foreign = foreign; !base.equalBase(s.base) {
		s.base, s.built, s.routes = base, false, nil
		s.recountOutsideAddresses()
	}
	if replicas := p.replicaAddresses(); mayConcernMachines(changed) || !slices.Equal(replicas, s.replicas) {
		s.replicas = replicas
		s.model.SetReserved(p.computeReserved(objects))
	}
	fresh := s.updateModel(objects, changed)
	changes := s.model.UpdatePorts()
	s.countOutsideAddresses(changes)
	if err := p.syncRoutes(s, s.wantedRoutes()); err != nil {
		return err
	}
	if err := p.writeChanges(ctx, s, changes); err != nil {
		return err
	}
	if p.Synced != nil {
		p.Synced.Updated()
	}
	if p.Flows != nil {
		p.Flows.rulesChanged(changes)
	}
	if p.Health != nil {
		p.Health.setHealth(s.model.HealthChecks())
	}
	if changed.Revision > 0 {
		reports.ProxyApplied(changed.Revision)
	}
	s.reportSlices(p.Node, fresh, reports, begin, p.Metrics)
	return nil
}

// mayConcernMachines reports whether the changed objects may affect the addresses of the cluster's
// machines. It returns true if no object is listed, because a change of replica addresses appears
// in no object.
func mayConcernMachines(changed agent.ObjectChanges) bool {
	if changed.All || changed.Revision == 0 && len(changed.Keys) == 0 {
		return true
	}
	for k := range changed.Keys {
		if k.Kind == "Node" || k.Kind == "Peer" {
			return true
		}
	}
	return false
}

// updateModel copies the changed objects from the node's view to the model. It returns the
// EndpointSlices among them.
func (s *proxyState) updateModel(view agent.Objects, changed agent.ObjectChanges) (fresh []*discoveryv1.EndpointSlice) {
	if changed.All {
		s.model.SetLocation(nodeLocation(s.model.Location().Node, view))
		fresh = view.EndpointSlices()
		s.model.Replace(view.Services(), fresh)
		maps.DeleteFunc(s.reportedSlices, func(k types.NamespacedName, _ string) bool {
			_, ok := view.EndpointSlice(k.Namespace, k.Name)
			return !ok
		})
		return fresh
	}
	for k := range changed.Keys {
		key := types.NamespacedName{Namespace: k.Namespace, Name: k.Name}
		switch k.Kind {
		case "Service":
			svc, _ := view.Service(k.Namespace, k.Name)
			s.model.SetService(key, svc)
		case "EndpointSlice":
			part, ok := view.EndpointSlice(k.Namespace, k.Name)
			s.model.SetSlice(key, part)
			if ok {
				fresh = append(fresh, part)
			} else {
				delete(s.reportedSlices, key)
			}
		case "Node":
			if k.Name == s.model.Location().Node {
				s.model.SetLocation(nodeLocation(k.Name, view))
			}
		}
	}
	return fresh
}

// writeChanges writes the changes of Service rules to the kernel. It writes all rules if the
// kernel's rules do not match the model or if the changes are rejected.
func (p *Proxy) writeChanges(ctx context.Context, s *proxyState, changes []servicemodel.Change) error {
	if s.built && len(changes) == 0 {
		return nil
	}
	if s.built {
		begin := time.Now()
		err := s.writer.Apply(ctx, changes)
		if err == nil {
			p.Metrics.countSync(time.Since(begin), false)
			return nil
		}
		if ctx.Err() != nil {
			return errors.Join(ctx.Err(), err)
		}
		s.built = false
		p.Metrics.countFailure()
		p.Log.Warn("a change of the Service rules was rejected: all rules are written again", "err", err)
	}
	return p.writeAllRules(ctx, s)
}

func (p *Proxy) writeAllRules(ctx context.Context, s *proxyState) error {
	begin := time.Now()
	if err := s.writer.Sync(ctx, s.base, maps.Values(s.model.Ports())); err != nil {
		p.Metrics.countFailure()
		return err
	}
	s.built = true
	p.Metrics.countSync(time.Since(begin), true)
	return nil
}

// reportSlices reports that this node now routes to the endpoints of the slices fresh. The report
// is a stage in the trace that each slice's annotation names. The programming latency is recorded
// in m. A slice version is reported only once.
func (s *proxyState) reportSlices(
	node string, fresh []*discoveryv1.EndpointSlice, reports agent.Reporter, begin time.Time, m *Metrics,
) {
	now := time.Now()
	for _, e := range fresh {
		tp, trigger := e.Annotations[traceParent], e.Annotations[v1.EndpointsLastChangeTriggerTime]
		key := types.NamespacedName{Namespace: e.Namespace, Name: e.Name}
		if tp == "" && trigger == "" || s.reportedSlices[key] == e.ResourceVersion {
			continue
		}
		s.reportedSlices[key] = e.ResourceVersion
		if at, err := time.Parse(time.RFC3339Nano, trigger); err == nil {
			m.observeProgramming(at, now)
		}
		if tp != "" {
			reports.Stages(tp, "endpointslice/"+e.Namespace+"/"+e.Name, []agent.StageTime{{
				Name: "proxy programmed", Start: begin, Duration: now.Sub(begin), Detail: "on " + node,
			}})
		}
	}
}
