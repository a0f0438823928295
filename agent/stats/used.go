package stats

import (
	"context"
	"time"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wait"
)

// ReportInterval is how often usage is reported to the control plane.
const ReportInterval = 15 * time.Second

// ReportUsage measures every ReportInterval and calls report with the average usage since the
// previous measurement, until ctx ends. It reuses a recent measurement of another caller. It
// returns an error if nothing can be measured.
func (s *Source) ReportUsage(ctx context.Context, report func(*agent.NodeAverageUsage)) error {
	m := usageMeter{}
	for {
		sample, err := s.Sample(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case sample == nil:
			return err
		}
		report(m.usageSince(sample)) // missing values are omitted
		if wait.Delay(ctx, ReportInterval) != nil {
			return nil
		}
	}
}

// usageMeter computes the average usage between the samples that are passed to it. It keeps its own
// previous readings, because other callers measure in between.
type usageMeter map[usageKey]cpuReading

// usageSince returns the average usage between the sample of the previous call and this sample.
func (m *usageMeter) usageSince(sample *Sample) *agent.NodeAverageUsage {
	next := make(usageMeter, len(*m))
	out := &agent.NodeAverageUsage{At: sample.At}
	if u, ok := m.containerUsage(next, usageKey{}, &sample.Node, time.Time{}); ok {
		out.Node = &u
	}
	for i := range sample.Pods {
		p, whole := &sample.Pods[i], true
		one := agent.PodAverageUsage{UID: p.UID, Containers: make([]agent.ContainerAverageUsage, 0, len(p.Containers))}
		for j := range p.Containers {
			c := &p.Containers[j]
			u, ok := m.containerUsage(next, usageKey{p.UID, c.Name}, &c.Usage, c.Started)
			if whole = whole && ok; ok {
				one.Containers = append(one.Containers, agent.ContainerAverageUsage{Name: c.Name, AverageUsage: u})
			}
		}
		// Incomplete usage would look like low usage.
		if whole && len(one.Containers) > 0 {
			out.Pods = append(out.Pods, one)
		}
	}
	*m = next
	return out
}

// containerUsage returns a container's average usage since the previous call of usageSince, or
// since the container's start if that was later. It stores the current reading in next. It returns
// false if the start is too recent for a meaningful rate.
func (m *usageMeter) containerUsage(next usageMeter, k usageKey, u *agent.Usage, started time.Time) (
	out agent.AverageUsage, ok bool,
) {
	if !u.HasCPU || !u.HasMemory {
		return out, false
	}
	next[k] = cpuReading{u.At, u.CPU}
	before, known := (*m)[k]
	if !started.IsZero() && (!known || started.After(before.at)) {
		if before, known = (cpuReading{at: started}), true; u.At.Sub(started) < MinInterval {
			return out, false
		}
	}
	d := u.At.Sub(before.at)
	if !known || d <= 0 || u.CPU < before.cpu {
		return out, false
	}
	return agent.AverageUsage{CPU: uint64(float64(u.CPU-before.cpu) / d.Seconds()), Memory: u.WorkingSet, Window: d},
		true
}
