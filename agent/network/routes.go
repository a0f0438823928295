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
)

// Routes keeps the way to other nodes' pods: routes where nodes share a link, a tunnel to all others, and refusals for
// whatever else is an address of the cluster.
type Routes struct {
	Node    string
	NodeIPs []netip.Addr // of this node, the first one first
	Mode    Mode
	// Encryption is needed in ModeWireGuard.
	Encryption Encryption
	// OwnKey, where there is one, has the key in Encryption's place, also after it was replaced.
	OwnKey  *OwnKey
	Objects agent.Objects
	// Foreign says that pods are attached by a network product: routes are its affair, and ours are taken away.
	Foreign func() bool
	Log     *slog.Logger

	laid     atomic.Pointer[laid]   // last
	problems atomic.Pointer[string] // that were told last; nil: none were
	source   source
}

// laid is what was planned, and the links that it follows from.
type laid struct {
	layout Layout
	links  map[string]bool
}

// The bounds of Run in time.
const (
	resync      = 30 * time.Second // between looks at the kernel without cause
	lookAgain   = 5 * time.Second  // between looks at whose network it is, and at the kernel while something is missing
	nftLimit    = 30 * time.Second // for one transaction
	sourceEvery = 30 * time.Second // between looks at whether the tunnel's rule is still there
)

// Run checks forwarding and keeps the kernel as the nodes demand, until ctx ends or that is not possible. What somebody
// else changes of it is mended when the kernel tells of the change. All of it stays when Run ends: traffic outlives the agent.
func (r *Routes) Run(ctx context.Context) error {
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	changes := r.Objects.Changes(ctx)
	select {
	case <-r.Objects.Synced():
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		if err := r.keep(ctx, changes, tick.C); err != nil {
			return err
		}
	}
}

// keep does Run's work for as long as the kernel tells of changes. It returns nil when it no longer does.
func (r *Routes) keep(ctx context.Context, changes <-chan map[string]struct{}, tick <-chan time.Time) error {
	var replaced <-chan struct{}
	if r.OwnKey != nil {
		replaced = r.OwnKey.forRoutes
	}
	watching, stop := context.WithCancel(ctx)
	defer stop()
	damage := make(chan struct{}, 1)
	cut, err := r.watch(watching, damage)
	if err != nil {
		return err
	}
	for vanished := false; ; {
		foreign, looked := r.Foreign(), time.Now()
		err := r.sync(ctx, foreign)
		if gone := errors.Is(err, unix.ENODEV); gone && !vanished {
			vanished = true
			continue // somebody took an interface away meanwhile
		}
		if ctx.Err() != nil {
			return ctx.Err() // what was cut off by that very end, as nft is, says nothing
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
				_, own := kinds["Node"] // which may have got addresses for pods
				relevant = peers || own
			case <-damage:
				relevant = true
			case <-replaced:
				relevant = true
			case <-cut:
				return nil
			case <-tick:
				relevant = r.Unreached() != "" || r.Foreign() != foreign || time.Since(looked) >= resync
			}
		}
	}
}

// sync brings the kernel to what the view shows now.
func (r *Routes) sync(ctx context.Context, foreign bool) error {
	layout, links := Layout{}, map[string]bool{}
	if !foreign {
		cluster := r.Objects.Cluster()
		six := slices.ContainsFunc(cluster.ClusterPrefixes(), func(p netip.Prefix) bool { return p.Addr().Is6() })
		if err := enableForwarding(true, six); err != nil {
			return err
		}
		var err error
		if layout, links, err = r.plan(); err != nil {
			return err
		}
	} else if err := enableForwarding(false, false); err != nil {
		return err
	}
	r.laid.Store(&laid{layout, links})
	problems, err := install(layout)
	if err == nil {
		err = r.source.sync(ctx, rulesOf(layout))
	}
	if err != nil {
		return err
	}
	slices.Sort(problems)
	if told := strings.Join(problems, "; "); told != r.Unreached() {
		r.problems.Store(&told)
		if told != "" {
			r.Log.Warn("pods of some nodes are not reached", "why", told)
		} else {
			r.Log.Info("pods of all nodes are reached again")
		}
	}
	return nil
}

func (r *Routes) plan() (Layout, map[string]bool, error) {
	links, err := linksOf(r.NodeIPs)
	if err != nil {
		return Layout{}, nil, err
	}
	names := map[string]bool{}
	for _, l := range links {
		names[l.Name] = true
	}
	cluster := r.Objects.Cluster()
	s := Situation{Mode: r.Mode, Self: r.Node, NodeIPs: r.NodeIPs, Links: links, Own: cluster.PodPrefixes(),
		Nodes: r.Objects.Peers(), Pods: cluster.ClusterPrefixes(), Services: cluster.ServicePrefixes(),
		Encryption: r.encryption()}
	return Plan(s), names, s.Overlap()
}

// Unreached says of which nodes the pods are not reached, and why, as far as is known; "" when all are.
func (r *Routes) Unreached() string {
	if p := r.problems.Load(); p != nil {
		return *p
	}
	return ""
}

// MTU is that of pods' interfaces, 0 where it follows from nothing.
func (r *Routes) MTU() int {
	if l := r.laid.Load(); l != nil {
		return l.layout.MTU
	}
	l, _, err := r.plan() // a pod is faster than the first sync
	if err != nil {
		return 0
	}
	return l.MTU
}

// Remove takes away what leads to other nodes' pods, and the bridge of the own ones unless some are on it: for a node that
// leaves its cluster.
func Remove(ctx context.Context) error {
	if _, err := install(Layout{}); err != nil {
		return fmt.Errorf("removing what leads to other nodes' pods: %w", err)
	}
	return errors.Join(new(source).sync(ctx, rules{}), removeSenders(ctx), removeBridge())
}

// encryption is with the key as it is now.
func (r *Routes) encryption() Encryption {
	e := r.Encryption
	if r.OwnKey != nil {
		e.Key = r.OwnKey.Key()
	}
	return e
}
