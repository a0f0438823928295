// Package stats says what a node and its pods use, in the forms of kubelet: Prometheus text of /metrics/resource, and
// the JSON of /stats/summary.
//
// Tell measures for the control plane, every TellEvery; others are measured for when they ask. At most once in Every
// anything is read: who asks sooner gets the figures of before, with the times at which they were read.
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

// Every is the least time between two measurements. Who computes rates of what is read, as metrics-server does every
// 15 s, gets new figures each time.
const Every = 10 * time.Second

// Config is what figures are made from.
type Config struct {
	NodeName string
	Measure  func(context.Context) (*agent.UsageSnapshot, error)
	// Share says that the node is only a part of its machine, with a capacity of its own: what the cgroup of its pods
	// uses counts then.
	Share bool
	// Memory is the node's, in bytes, where Share is set.
	Memory int64
	// Started is when the node began to count.
	Started time.Time
	// Disk looks at the file system that holds the pods' and images' files.
	Disk func() (agent.Disk, error)
	// Storage is what the pods have on disk and in their volumes, as far as it is known. May be nil.
	Storage func() map[types.UID]agent.PodStorage
	// Pods are those of the node: static pods are known by the names that the API gives them.
	Pods func() []*v1.Pod
}

// Source measures. It is safe for concurrent use.
type Source struct {
	cfg Config

	mu     sync.Mutex
	last   *Sample
	before map[key]reading // of the sample before, for rates
}

// Sample is one measurement. It is shared: do not modify.
type Sample struct {
	At   time.Time
	Node agent.Usage
	Pods []agent.PodUsage
	// rates are processors in use since the sample before, in thousandths of a thousandth of a thousandth (nanocores).
	rates map[key]uint64
	err   error // some figures are missing
}

// key names what a rate is of; the zero key is the node.
type key struct {
	pod       types.UID
	container string
}

type reading struct {
	at  time.Time
	cpu uint64
}

// New measures nothing yet.
func New(cfg Config) *Source {
	if cfg.Started.IsZero() {
		cfg.Started = time.Now()
	}
	return &Source{cfg: cfg}
}

// Sample returns figures that are not older than Every. An error comes with the figures that there are, if any.
func (s *Source) Sample(ctx context.Context) (*Sample, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil && time.Since(s.last.At) < Every {
		return s.last, s.last.err
	}
	m, err := s.cfg.Measure(ctx)
	if m == nil {
		return nil, fmt.Errorf("measuring node %s: %w", s.cfg.NodeName, cmp.Or(err, errNothing))
	}
	out := &Sample{At: time.Now(), Node: m.Machine, Pods: m.Pods, err: err}
	if s.cfg.Share {
		out.Node = m.Root
		out.Node.Limit = uint64(s.cfg.Memory)
	}
	s.rename(out.Pods)
	s.rate(out)
	s.last = out
	return out, err
}

var errNothing = fmt.Errorf("the runtime measures nothing")

// rename gives pods the names under which the API knows them; what is measured of a pod lives longer than its name.
func (s *Source) rename(pods []agent.PodUsage) {
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

// rate computes what was in use between the sample before and this one.
func (s *Source) rate(out *Sample) {
	now := make(map[key]reading, len(s.before))
	out.rates = make(map[key]uint64, len(s.before))
	note := func(k key, u *agent.Usage) {
		if !u.HasCPU {
			return
		}
		now[k] = reading{u.At, u.CPU}
		was, ok := s.before[k]
		if d := u.At.Sub(was.at); ok && d > 0 && u.CPU >= was.cpu {
			out.rates[k] = uint64(float64(u.CPU-was.cpu) / d.Seconds())
		}
	}
	note(key{}, &out.Node)
	for i := range out.Pods {
		p := &out.Pods[i]
		note(key{pod: p.UID}, &p.Usage)
		for j := range p.Containers {
			note(key{p.UID, p.Containers[j].Name}, &p.Containers[j].Usage)
		}
	}
	s.before = now
}
