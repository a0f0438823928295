// Package noderesourcesfit is the plugin NodeResourcesFit. Its Filter keeps the requests on a node
// within the node's allocatable CPU, memory, ephemeral storage, number of pods, and extended
// resources. Its Score prefers nodes with free resources, or uses the configured strategy.
package noderesourcesfit

import (
	"context"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/saturate"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "NodeResourcesFit"

// Refusals that occur often. They are shared by all nodes and pods, to avoid allocations.
var (
	tooManyPods = framework.Refuse(Name, "Too many pods")
	noCPU       = framework.Refuse(Name, "Insufficient cpu")
	noMemory    = framework.Refuse(Name, "Insufficient memory")
)

// Plugin refuses nodes with too few free resources for the pod, and scores nodes by their
// utilization. The zero value is the default configuration.
type Plugin struct {
	// Ignored contains names of extended resources that Filter ignores. IgnoredGroups contains
	// prefixes, such as example.com: Filter ignores all extended resources whose name has this
	// prefix before the slash.
	Ignored, IgnoredGroups []string
	Strategy               *Strategy // nil = free CPU and memory, kind Least
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// Filter implements framework.Filter: it refuses a node with fewer free resources than the pod
// requests, and a node that already has the maximum number of pods.
func (p Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	want, used, have := &c.Pod.Requests, &n.Requested, &n.Allocatable
	pods := len(n.Pods)+1 > n.MaxPods
	cpu := want.MilliCPU > 0 && want.MilliCPU > saturate.Sub(have.MilliCPU, used.MilliCPU)
	memory := want.Memory > 0 && want.Memory > saturate.Sub(have.Memory, used.Memory)
	disk := want.EphemeralStorage > 0 && want.EphemeralStorage >
		saturate.Sub(have.EphemeralStorage, used.EphemeralStorage)
	var scalars []string
	for name, amount := range want.Scalar {
		if amount > 0 && amount > saturate.Sub(have.Scalar[name], used.Scalar[name]) &&
			!p.ignoresResource(string(name)) {
			scalars = append(scalars, "Insufficient "+string(name))
		}
	}
	switch {
	case !pods && !cpu && !memory && !disk && scalars == nil:
		return nil
	case scalars == nil && !disk && !memory && !cpu:
		return tooManyPods
	case scalars == nil && !disk && !memory && !pods:
		return noCPU
	case scalars == nil && !disk && !cpu && !pods:
		return noMemory
	}
	var reasons []string
	for _, r := range []struct {
		is   bool
		what string
	}{{pods, "Too many pods"}, {cpu, "Insufficient cpu"}, {memory, "Insufficient memory"},
		{disk, "Insufficient ephemeral-storage"}} {
		if r.is {
			reasons = append(reasons, r.what)
		}
	}
	slices.Sort(scalars)
	return framework.Refuse(Name, append(reasons, scalars...)...)
}

func (p Plugin) ignoresResource(resource string) bool {
	group, _, _ := strings.Cut(resource, "/")
	return slices.Contains(p.Ignored, resource) || slices.Contains(p.IgnoredGroups, group)
}

// MayHelp implements framework.Requeue. It returns true for a new node, a change of allocatable
// resources, the removal of a pod, and an update of a pod. Other events do not help.
func (Plugin) MayHelp(e framework.Event, _ *v1.Pod, _ any) bool {
	return e == framework.NodeAdded || e == framework.NodeAllocatable || e == framework.PodRemoved ||
		e == framework.PodUpdated
}
