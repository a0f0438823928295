package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wakeup"
)

// Routes keeps the kernel's routes to the pods on other nodes up to date: direct routes to nodes on
// the same link, and tunnels to all other nodes. The rest of the cluster's pod ranges gets
// unreachable routes.
type Routes struct {
	Node    string
	NodeIPs []netip.Addr // addresses of this node, the primary one first
	Mode    Mode
	// Encryption is required in ModeWireGuard.
	Encryption Encryption
	// OwnKey, if not nil, provides the key instead of Encryption.Key, and is followed for changes.
	OwnKey  *OwnKey
	Objects agent.Objects
	// ForeignNetwork reports whether a third-party network plugin attaches pods. The plugin then
	// maintains the routes, and Keelson's routes are removed. nil: no.
	ForeignNetwork func() bool
	Log            *slog.Logger

	current  atomic.Pointer[plannedLayout] // the last planned layout
	problems atomic.Pointer[string]        // the problems that were logged last; nil: none
	source   tunnelRules
}

// plannedLayout is a planned layout with the names of the network links from which it was computed.
type plannedLayout struct {
	layout Layout
	links  map[string]bool
}

// Intervals and timeouts of Routes.Run.
const (
	resyncInterval = 30 * time.Second // between unconditional syncs
	checkInterval  = 5 * time.Second  // between checks for a third-party plugin, and between syncs while problems exist
	nftLimit       = 30 * time.Second // per transaction
	sourceEvery    = 30 * time.Second // between checks of the tunnel's rules
)

// Run enables forwarding and keeps the kernel's routes and tunnels in sync with the nodes, until
// ctx ends or an error occurs. It repairs changes by other programs when the kernel reports them.
// The routes and tunnels remain when Run returns, so that traffic continues without the agent.
func (r *Routes) Run(ctx context.Context) error {
	tick := time.NewTicker(checkInterval)
	defer tick.Stop()
	changes := r.Objects.Changes(ctx)
	select {
	case <-r.Objects.Synced():
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		if err := r.maintain(ctx, changes, tick.C); err != nil {
			return err
		}
	}
}

// maintain syncs the kernel with the layout, and repeats this after each change of the nodes or of
// the kernel's state. changes and tick also trigger a sync. It returns nil when the subscription to
// kernel events ends; the caller must then call it again.
func (r *Routes) maintain(ctx context.Context, changes <-chan map[string]struct{}, tick <-chan time.Time) error {
	var replaced <-chan struct{}
	if r.OwnKey != nil {
		replaced = r.OwnKey.forRoutes
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	damage := wakeup.New()
	cut, err := r.watchKernel(watching, damage)
	if err != nil {
		return err
	}
	for vanished := false; ; {
		foreign, looked := r.ForeignNetwork(), time.Now()
		err := r.syncKernel(ctx, foreign)
		if gone := errors.Is(err, unix.ENODEV); gone && !vanished {
			vanished = true
			continue // another program removed an interface during the sync
		}
		if ctx.Err() != nil {
			return ctx.Err() // the error is only caused by the end of ctx, which also stops nft
		}
		if vanished = false; err != nil {
			return err
		}
		for relevant := false; !relevant; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case kinds, ok := <-changes:
				if !ok {
					return ctx.Err()
				}
				_, peers := kinds["Peer"]
				_, own := kinds["Node"] // the node may have received pod ranges
				relevant = peers || own
			case <-damage:
				relevant = true
			case <-replaced:
				relevant = true
			case <-cut:
				return nil
			case <-tick:
				relevant = r.Unreached() != "" || r.ForeignNetwork() != foreign || time.Since(looked) >= resyncInterval
			}
		}
	}
}

// syncKernel plans the current layout and programs it in the kernel. foreign means that a
// third-party network plugin attaches the pods. In that case, Keelson's routes and tunnels are
// removed.
func (r *Routes) syncKernel(ctx context.Context, foreign bool) error {
	layout, links := Layout{}, map[string]bool{}
	if !foreign {
		cluster := r.Objects.Cluster()
		six := slices.ContainsFunc(cluster.ClusterPrefixes(), func(p netip.Prefix) bool { return p.Addr().Is6() })
		if err := enableForwarding(true, six); err != nil {
			return err
		}
		var err error
		if layout, links, err = r.planLayout(); err != nil {
			return err
		}
	} else if err := enableForwarding(false, false); err != nil {
		return err
	}
	r.current.Store(&plannedLayout{layout, links})
	problems, err := installLayout(layout)
	if err == nil {
		err = r.source.syncRules(ctx, tunnelRulesetOf(layout))
	}
	if err != nil {
		return err
	}
	slices.Sort(problems)
	if told := strings.Join(problems, "; "); told != r.Unreached() {
		r.problems.Store(&told)
		if told != "" {
			r.Log.Warn("the pods of some nodes are not reachable", "why", told)
		} else {
			r.Log.Info("the pods of all nodes are reachable again")
		}
	}
	return nil
}

func (r *Routes) planLayout() (Layout, map[string]bool, error) {
	links, err := nodeLinks(r.NodeIPs)
	if err != nil {
		return Layout{}, nil, err
	}
	names := map[string]bool{}
	for _, l := range links {
		names[l.Name] = true
	}
	cluster := r.Objects.Cluster()
	s := Situation{Mode: r.Mode, Self: r.Node, NodeIPs: r.NodeIPs, Links: links, OwnPods: cluster.PodPrefixes(),
		Nodes: r.Objects.Peers(), Pods: cluster.ClusterPrefixes(), Services: cluster.ServicePrefixes(),
		Encryption: r.currentEncryption()}
	return Plan(s), names, s.CheckOverlap()
}

// Unreached returns one sentence for each node with pods that cannot be reached from this node,
// with the reason. It returns "" if all pods are reachable.
func (r *Routes) Unreached() string {
	if p := r.problems.Load(); p != nil {
		return *p
	}
	return ""
}

// MTU returns the MTU of pod interfaces that the network to other nodes permits, or 0 if it is
// unknown.
func (r *Routes) MTU() int {
	if l := r.current.Load(); l != nil {
		return l.layout.MTU
	}
	l, _, err := r.planLayout() // a pod may start before the first sync
	if err != nil {
		return 0
	}
	return l.MTU
}

// Remove removes all routes, tunnels and rules for the pod network, for a node that leaves its
// cluster. It removes the bridge only if no pods are attached to it.
func Remove(ctx context.Context) error {
	if _, err := installLayout(Layout{}); err != nil {
		return fmt.Errorf("removing the routes to other nodes' pods: %w", err)
	}
	return errors.Join(new(tunnelRules).syncRules(ctx, tunnelRuleset{}), removeSenders(ctx), removeBridge())
}

// currentEncryption returns the encryption settings. If OwnKey is set, they contain its current
// key.
func (r *Routes) currentEncryption() Encryption {
	e := r.Encryption
	if r.OwnKey != nil {
		e.Key = r.OwnKey.Key()
	}
	return e
}
