package oci

import (
	"cmp"
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
	sandboxID  string
	pod        agent.PodUsage
	pid        int // a process in the pod's network namespace; 0 for the host's network
	containers []containerMeasurement
}

type containerMeasurement struct {
	cgroup    string
	id, image string
	container agent.ContainerUsage
}

// MeasureUsage implements agent.MeasuredRuntime.
func (r *Runtime) MeasureUsage(ctx context.Context) (*agent.UsageSnapshot, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	m := podcgroup.Meter{Tree: r.cgroups}
	out := &agent.UsageSnapshot{Machine: m.MachineUsage(), Root: m.CgroupUsage("")}
	return measurePods(ctx, &m, measurablePods(r), out)
}

// MeasureDetails implements agent.MeasuredRuntime.
func (r *Runtime) MeasureDetails(ctx context.Context) (*agent.UsageSnapshot, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	m := podcgroup.Meter{Tree: r.cgroups}
	out := &agent.UsageSnapshot{Machine: m.MachineUsage(), Details: &agent.UsageDetails{}}
	out.Details.Machine, out.Details.MachineNetwork = m.MachineDetails()
	out.Root, out.Details.Root = m.CgroupDetails("")
	return measurePods(ctx, &m, measurablePods(r), out)
}

// measurePods adds the usage of the pods to out, and their details if out has details. It returns
// out with the first error of the meter.
func measurePods(ctx context.Context, m *podcgroup.Meter, pods []*podMeasurement,
	out *agent.UsageSnapshot) (*agent.UsageSnapshot, error) {
	for _, p := range pods {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if p.pid != 0 {
			p.pod.Network = m.NetworkUsage(p.pid)
		}
		var details agent.PodDetails
		if out.Details == nil {
			p.measureUsage(m)
		} else {
			details = p.measureDetails(m)
		}
		if p.pod.HasCPU || p.pod.HasMemory { // the pod has not ended meanwhile
			out.Pods = append(out.Pods, p.pod)
			if out.Details != nil {
				out.Details.Pods = append(out.Details.Pods, details)
			}
		}
	}
	if m.Err != nil {
		return out, fmt.Errorf("measuring: %w", m.Err)
	}
	return out, nil
}

// measureUsage reads the usage of the pod and its containers into p.pod.
func (p *podMeasurement) measureUsage(m *podcgroup.Meter) {
	p.pod.Usage = m.CgroupUsage(p.cgroup)
	for _, c := range p.containers {
		c.container.Usage = m.CgroupUsage(c.cgroup)
		p.pod.Containers = append(p.pod.Containers, c.container)
	}
}

// measureDetails does the same as measureUsage and returns the details. The processes of a pod are
// those of its containers: its pause process is in another cgroup.
func (p *podMeasurement) measureDetails(m *podcgroup.Meter) agent.PodDetails {
	out := agent.PodDetails{SandboxID: p.sandboxID}
	p.pod.Usage, out.CgroupDetails = m.CgroupDetails(p.cgroup)
	processes, descriptors, counted := &agent.ProcessDetails{}, uint64(0), true
	for _, c := range p.containers {
		d := agent.ContainerDetails{ID: c.id, Image: c.image}
		c.container.Usage, d.CgroupDetails = m.CgroupDetails(c.cgroup)
		d.Processes = m.CgroupProcesses(c.cgroup)
		processes.Count += d.Processes.Count
		if n := d.Processes.Descriptors; n != nil {
			descriptors += *n
		} else {
			counted = false
		}
		p.pod.Containers = append(p.pod.Containers, c.container)
		out.Containers = append(out.Containers, d)
	}
	if counted {
		processes.Descriptors = &descriptors
	}
	out.Processes = processes
	return out
}

// measurablePods returns the pods with a ready sandbox and their running containers, sorted by
// name.
func measurablePods(r *Runtime) []*podMeasurement {
	r.mu.Lock()
	defer r.mu.Unlock()
	byID := make(map[string]*podMeasurement, len(r.sandboxes))
	measurements := make([]*podMeasurement, 0, len(r.sandboxes))
	for id, s := range r.sandboxes {
		if s.rec.State != SandboxReady {
			continue
		}
		meta := s.config.GetMetadata()
		m := &podMeasurement{cgroup: s.cgroupPath(), sandboxID: id,
			pod: agent.PodUsage{UID: types.UID(meta.GetUid()), Namespace: meta.GetNamespace(),
				Name: meta.GetName(), Started: time.Unix(0, s.rec.Created)}}
		if !s.usesHostNetwork() {
			m.pid = s.rec.PausePID
		}
		byID[id] = m
		measurements = append(measurements, m)
	}
	for id, c := range r.containers {
		if m := byID[c.rec.Sandbox]; m != nil && c.rec.State == ContainerRunning {
			image := c.config.GetImage()
			m.containers = append(m.containers, containerMeasurement{cgroup: c.rec.Cgroup, id: id,
				image: cmp.Or(image.GetUserSpecifiedImage(), image.GetImage()),
				container: agent.ContainerUsage{Name: c.config.GetMetadata().GetName(),
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
