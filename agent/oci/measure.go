package oci

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/podcgroup"
)

// podMeasurement is a pod with its cgroup and its measured usage.
type podMeasurement struct {
	cgroup     string // relative to the runtime's root
	pod        agent.PodUsage
	pid        int // a process in the pod's network namespace; 0 for the host's network
	containers []containerMeasurement
}

type containerMeasurement struct {
	cgroup    string
	container agent.ContainerUsage
}

// MeasureUsage implements agent.MeasuredRuntime.
func (r *Runtime) MeasureUsage(ctx context.Context) (*agent.UsageSnapshot, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	m := podcgroup.Meter{Tree: r.cgroups}
	out := &agent.UsageSnapshot{Machine: m.MachineUsage(), Root: m.CgroupUsage("")}
	for _, p := range r.measurablePods() {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		p.pod.Usage = m.CgroupUsage(p.cgroup)
		if p.pid != 0 {
			p.pod.Network = m.NetworkUsage(p.pid)
		}
		for _, c := range p.containers {
			c.container.Usage = m.CgroupUsage(c.cgroup)
			p.pod.Containers = append(p.pod.Containers, c.container)
		}
		if p.pod.HasCPU || p.pod.HasMemory { // the pod has not ended meanwhile
			out.Pods = append(out.Pods, p.pod)
		}
	}
	if m.Err != nil {
		return out, fmt.Errorf("measuring: %w", m.Err)
	}
	return out, nil
}

// measurablePods returns the pods with a ready sandbox and their running containers, sorted by
// name.
func (r *Runtime) measurablePods() []*podMeasurement {
	r.mu.Lock()
	defer r.mu.Unlock()
	byID := make(map[string]*podMeasurement, len(r.sandboxes))
	measurements := make([]*podMeasurement, 0, len(r.sandboxes))
	for id, s := range r.sandboxes {
		if s.rec.State != SandboxReady {
			continue
		}
		meta := s.config.GetMetadata()
		m := &podMeasurement{cgroup: s.cgroupPath(),
			pod: agent.PodUsage{UID: types.UID(meta.GetUid()), Namespace: meta.GetNamespace(),
				Name: meta.GetName(), Started: time.Unix(0, s.rec.Created)}}
		if !s.usesHostNetwork() {
			m.pid = s.rec.PausePID
		}
		byID[id] = m
		measurements = append(measurements, m)
	}
	for _, c := range r.containers {
		if m := byID[c.rec.Sandbox]; m != nil && c.rec.State == ContainerRunning {
			m.containers = append(m.containers, containerMeasurement{c.rec.Cgroup,
				agent.ContainerUsage{Name: c.config.GetMetadata().GetName(),
					Started: time.Unix(0, max(c.rec.Started, c.rec.Created))}})
		}
	}
	slices.SortFunc(measurements, func(a, b *podMeasurement) int {
		return strings.Compare(a.pod.Namespace+"/"+a.pod.Name, b.pod.Namespace+"/"+b.pod.Name)
	})
	for _, m := range measurements {
		slices.SortFunc(m.containers, func(a, b containerMeasurement) int {
			return strings.Compare(a.container.Name, b.container.Name)
		})
	}
	return measurements
}
