package session

import (
	"context"
	"sync"
	"time"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// latestUsage holds the latest measured resource usage of the node, which is sent to every replica.
type latestUsage struct {
	mu      sync.Mutex
	newest  *agent.NodeAverageUsage // nil = not measured yet
	changed chan struct{}
}

func newLatestUsage() *latestUsage { return &latestUsage{changed: make(chan struct{})} }

func (l *latestUsage) setUsage(u *agent.NodeAverageUsage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.newest = u
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *latestUsage) newestUsage() (*agent.NodeAverageUsage, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.newest, l.changed
}

// ReportUsage sets the resource usage of the node that is sent to the replicas. It never blocks.
func (s *Session) ReportUsage(u *agent.NodeAverageUsage) { s.reports.usage.setUsage(u) }

// sendUsage sends the node's resource usage on a standby stream, each time it is measured, until
// ctx ends or sending fails.
func (s *Session) sendUsage(ctx context.Context, up *standbySender) {
	for {
		newest, moved := s.reports.usage.newestUsage()
		if newest != nil {
			m := usageMessage(newest, time.Now())
			if up.sendUp(&fleetv1.StandbyUp{Kind: &fleetv1.StandbyUp_Usage{Usage: m}}) != nil {
				return // the receiving goroutine reports the error
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
		out.Node = resourceUsageMessage(*u.Node)
	}
	for _, p := range u.Pods {
		one := &fleetv1.PodUsage{Uid: string(p.UID)}
		for _, c := range p.Containers {
			one.Containers = append(one.Containers,
				&fleetv1.ContainerUsage{Name: c.Name, Used: resourceUsageMessage(c.AverageUsage)})
		}
		out.Pods = append(out.Pods, one)
	}
	return out
}

func resourceUsageMessage(u agent.AverageUsage) *fleetv1.Used {
	return &fleetv1.Used{CpuNano: u.CPU, Memory: u.Memory, WindowNano: int64(u.Window)}
}
