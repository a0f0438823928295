// Package stats measures resource usage of a node and its pods. It writes the kubelet's formats:
// Prometheus text for /metrics/resource and /metrics/cadvisor, and JSON for /stats/summary. All
// formats report the values of the same measurement.
//
// ReportUsage measures for the control plane every ReportInterval. Other measurements are made on
// request, at most once per MinInterval: an earlier request gets the previous values with their
// times. The details for /metrics/cadvisor are measured at most once per MinInterval, too.
package stats

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// MinInterval is the minimum time between two measurements. It is shorter than the 15 s of
// metrics-server, so that each of its requests gets new values.
const MinInterval = 10 * time.Second

// Config is the configuration of a Source.
type Config struct {
	NodeName string
	Measure  func(context.Context) (*agent.UsageSnapshot, error)
	// MeasureDetails is like Measure and also reads UsageSnapshot.Details. It is required for
	// Cadvisor.
	MeasureDetails func(context.Context) (*agent.UsageSnapshot, error)
	// Share is true if the node has a configured capacity, which is a share of its machine. The
	// usage of the node is then the usage of the cgroup of all pods.
	Share bool
	// Memory is the node's memory capacity in bytes if Share is set.
	Memory int64
	// Started is the start time of the node's measurements.
	Started time.Time
	// Disk returns the usage of the file system with the data of pods and images.
	Disk func() (agent.Disk, error)
	// DiskDevice returns the block device of that file system, for example "/dev/sda1". It is
	// required with Disk for Cadvisor.
	DiskDevice func() string
	// Machine identifies the machine in the metrics of /metrics/cadvisor.
	Machine Machine
	// Storage returns the disk and volume usage of those pods for which it is known. May be nil.
	Storage func() map[types.UID]agent.PodStorage
	// Pods returns the pods of the node. Static pods get the names that they have in the API.
	Pods func() []*v1.Pod
}

// Machine identifies the machine of a node.
type Machine struct {
	BootID, MachineID, SystemUUID string
	CPUs                          float64 // CPU capacity of the node
}

// Source measures the resource usage of the node and its pods. It is safe for concurrent use.
type Source struct {
	cfg Config

	mu       sync.Mutex
	last     *Sample
	previous map[usageKey]cpuReading // CPU readings of the previous sample, from which rates are computed
}

// Sample is one measurement of the node and its pods. It is shared and must not be modified.
type Sample struct {
	At   time.Time
	Node agent.Usage
	Root agent.Usage // the cgroup of all pods and everything else in it
	Pods []agent.PodUsage
	// nil in a measurement without details; Details.Pods is parallel to Pods
	Details *agent.UsageDetails
	// CPU usage since the previous sample in nanocores
	rates map[usageKey]uint64
	err   error // some values are missing
}

// usageKey identifies a pod or a container by UID and name. The zero value is the node.
type usageKey struct {
	pod       types.UID
	container string
}

type cpuReading struct {
	at  time.Time
	cpu uint64
}

// New returns a Source. It does not measure yet.
func New(cfg Config) *Source {
	if cfg.Started.IsZero() {
		cfg.Started = time.Now()
	}
	return &Source{cfg: cfg}
}

// Sample returns a measurement that is at most MinInterval old. If it also returns an error, some
// values are missing; the Sample may be nil then.
func (s *Source) Sample(ctx context.Context) (*Sample, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil && time.Since(s.last.At) < MinInterval {
		return s.last, s.last.err
	}
	return s.takeSample(ctx, s.cfg.Measure)
}

// sampleWithDetails returns a measurement with details that is at most MinInterval old, like
// Sample. It measures again if the last measurement has no details.
func (s *Source) sampleWithDetails(ctx context.Context) (*Sample, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil && time.Since(s.last.At) < MinInterval && s.last.Details != nil {
		return s.last, s.last.err
	}
	return s.takeSample(ctx, s.cfg.MeasureDetails)
}

// takeSample makes a measurement and stores it. The caller holds s.mu.
func (s *Source) takeSample(ctx context.Context, measure func(context.Context) (*agent.UsageSnapshot, error)) (
	*Sample, error,
) {
	m, err := measure(ctx)
	if m == nil {
		return nil, fmt.Errorf("measuring node %s: %w", s.cfg.NodeName, cmp.Or(err, errNoMeasurement))
	}
	out := &Sample{At: time.Now(), Node: m.Machine, Root: m.Root, Pods: m.Pods, Details: m.Details, err: err}
	if s.cfg.Share {
		out.Node = m.Root
		out.Node.Limit = uint64(s.cfg.Memory)
	}
	s.setPodNames(out.Pods)
	s.setRates(out)
	s.last = out
	return out, err
}

var errNoMeasurement = fmt.Errorf("the runtime measures nothing")

// setPodNames sets the namespaces and names that the pods have in the API. The runtime may have
// measured them under other names.
func (s *Source) setPodNames(pods []agent.PodUsage) {
	if s.cfg.Pods == nil {
		return
	}
	known := map[types.UID]*v1.Pod{}
	for _, p := range s.cfg.Pods() {
		known[p.UID] = p
	}
	for i := range pods {
		if p := known[pods[i].UID]; p != nil {
			pods[i].Namespace, pods[i].Name = p.Namespace, p.Name
		}
	}
}

// setRates computes the CPU usage between the previous sample and out, and stores it in out. A
// sample that follows the previous one within MinInterval gets the same rates, because rates over a
// short time have no meaning.
func (s *Source) setRates(out *Sample) {
	if s.last != nil && out.At.Sub(s.last.At) < MinInterval {
		out.rates = s.last.rates
		return
	}
	now := make(map[usageKey]cpuReading, len(s.previous))
	out.rates = make(map[usageKey]uint64, len(s.previous))
	note := func(k usageKey, u *agent.Usage) {
		if !u.HasCPU {
			return
		}
		now[k] = cpuReading{u.At, u.CPU}
		was, ok := s.previous[k]
		if d := u.At.Sub(was.at); ok && d > 0 && u.CPU >= was.cpu {
			out.rates[k] = uint64(float64(u.CPU-was.cpu) / d.Seconds())
		}
	}
	note(usageKey{}, &out.Node)
	for i := range out.Pods {
		p := &out.Pods[i]
		note(usageKey{pod: p.UID}, &p.Usage)
		for j := range p.Containers {
			note(usageKey{p.UID, p.Containers[j].Name}, &p.Containers[j].Usage)
		}
	}
	s.previous = now
}
