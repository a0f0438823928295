package stats

import (
	"context"
	"time"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wait"
)

// TellEvery is how often the control plane is told what was used.
const TellEvery = 15 * time.Second

// Tell measures every TellEvery and tells what was used since the measurement before, until ctx ends. What was measured
// for somebody else a moment ago is not measured again.
func (s *Source) Tell(ctx context.Context, tell func(*agent.NodeAverageUsage)) error {
	m := meter{}
	for {
		sample, err := s.Sample(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case sample == nil:
			return err
		}
		tell(m.used(sample)) // without the figures that are missing, if some are
		if wait.Delay(ctx, TellEvery) != nil {
			return nil
		}
	}
}

// meter computes what was used between samples. Others read samples in between, so that it remembers its own.
type meter map[key]reading

// used is what was used since the sample before, and makes this one the one before.
func (m *meter) used(sample *Sample) *agent.NodeAverageUsage {
	next := make(meter, len(*m))
	out := &agent.NodeAverageUsage{At: sample.At}
	if u, ok := m.since(next, key{}, &sample.Node, time.Time{}); ok {
		out.Node = &u
	}
	for i := range sample.Pods {
		p, whole := &sample.Pods[i], true
		one := agent.PodAverageUsage{UID: p.UID, Containers: make([]agent.ContainerAverageUsage, 0, len(p.Containers))}
		for j := range p.Containers {
			c := &p.Containers[j]
			u, ok := m.since(next, key{p.UID, c.Name}, &c.Usage, c.Started)
			if whole = whole && ok; ok {
				one.Containers = append(one.Containers, agent.ContainerAverageUsage{Name: c.Name, AverageUsage: u})
			}
		}
		// A part of a pod would look like a pod that uses little.
		if whole && len(one.Containers) > 0 {
			out.Pods = append(out.Pods, one)
		}
	}
	*m = next
	return out
}

// since is what was used since the sample before, or since the start of what started after it, unless that is too
// short ago for a figure that means something.
func (m *meter) since(next meter, k key, u *agent.Usage, started time.Time) (out agent.AverageUsage, ok bool) {
	if !u.HasCPU || !u.HasMemory {
		return out, false
	}
	next[k] = reading{u.At, u.CPU}
	before, known := (*m)[k]
	if !started.IsZero() && (!known || started.After(before.at)) {
		if before, known = (reading{at: started}), true; u.At.Sub(started) < Every {
			return out, false
		}
	}
	d := u.At.Sub(before.at)
	if !known || d <= 0 || u.CPU < before.cpu {
		return out, false
	}
	return agent.AverageUsage{CPU: uint64(float64(u.CPU-before.cpu) / d.Seconds()), Memory: u.WorkingSet, Window: d}, true
}
