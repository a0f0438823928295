package session

import (
	"context"
	"sync"
	"time"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// usedLately is the newest of what the node used, for every replica to be told.
type usedLately struct {
	mu     sync.Mutex
	newest *agent.NodeAverageUsage // nil = nothing was measured
	moved  chan struct{}
}

func newUsedLately() *usedLately { return &usedLately{moved: make(chan struct{})} }

func (l *usedLately) set(u *agent.NodeAverageUsage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.newest = u
	close(l.moved)
	l.moved = make(chan struct{})
}

func (l *usedLately) get() (*agent.NodeAverageUsage, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.newest, l.moved
}

// ReportUsage replaces what the node used lately. It never blocks.
func (s *Session) ReportUsage(u *agent.NodeAverageUsage) { s.used.set(u) }

// sendUsed tells a replica what the node used, whenever it was measured anew.
func (s *Session) sendUsed(ctx context.Context, up *standbyUp) {
	for {
		newest, moved := s.used.get()
		if newest != nil {
			m := usageMessage(newest, time.Now())
			if up.send(&fleetv1.StandbyUp{Kind: &fleetv1.StandbyUp_Usage{Usage: m}}) != nil {
				return // the receiving side reports it
			}
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return
		}
	}
}

func usageMessage(u *agent.NodeAverageUsage, now time.Time) *fleetv1.NodeUsage {
	out := &fleetv1.NodeUsage{AgeNano: int64(now.Sub(u.At))}
	if u.Node != nil {
		out.Node = usedMessage(*u.Node)
	}
	for _, p := range u.Pods {
		one := &fleetv1.PodUsage{Uid: string(p.UID)}
		for _, c := range p.Containers {
			one.Containers = append(one.Containers, &fleetv1.ContainerUsage{Name: c.Name, Used: usedMessage(c.AverageUsage)})
		}
		out.Pods = append(out.Pods, one)
	}
	return out
}

func usedMessage(u agent.AverageUsage) *fleetv1.Used {
	return &fleetv1.Used{CpuNano: u.CPU, Memory: u.Memory, WindowNano: int64(u.Window)}
}
