// Package noderesourcesfit keeps the requests on a node within its allocatable resources: CPU,
// memory, ephemeral storage, number of pods, and extended resources. It scores feasible nodes by
// free resources, or by the configured strategy.
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

// Frequent refusals, allocated once.
var (
	tooManyPods = framework.Refuse(Name, "Too many pods")
	noCPU       = framework.Refuse(Name, "Insufficient cpu")
	noMemory    = framework.Refuse(Name, "Insufficient memory")
)

// Plugin refuses nodes with too few free resources for the pod, and scores nodes by their
// utilization. The zero value is the default.
type Plugin struct {
	// Ignored are names of extended resources that the filter ignores. IgnoredGroups are the
	// prefixes, before the slash, of further such names.
	Ignored, IgnoredGroups []string
	Strategy               *Strategy // nil = Least
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// Filter implements framework.Filter: it refuses a node if the pod's requests exceed its free
// resources, or if it has the maximum number of pods.
func (p Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	want, used, have := &c.Pod.Requests, &n.Requested, &n.Allocatable
	pods := len(n.Pods)+1 > n.MaxPods
	cpu := want.MilliCPU > 0 && want.MilliCPU > saturate.Sub(have.MilliCPU, used.MilliCPU)
	memory := want.Memory > 0 && want.Memory > saturate.Sub(have.Memory, used.Memory)
	disk := want.EphemeralStorage > 0 && want.EphemeralStorage > saturate.Sub(have.EphemeralStorage, used.EphemeralStorage)
	var scalars []string
	for name, amount := range want.Scalar {
		if amount > 0 && amount > saturate.Sub(have.Scalar[name], used.Scalar[name]) && !p.ignoresResource(string(name)) {
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
	}{{pods, "Too many pods"}, {cpu, "Insufficient cpu"}, {memory, "Insufficient memory"}, {disk, "Insufficient ephemeral-storage"}} {
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

// MayHelp implements framework.Requeue: a node or allocatable resources were added, or a pod was
// removed or changed its resources.
func (Plugin) MayHelp(e framework.Event, _ *v1.Pod, _ any) bool {
	return e == framework.NodeAdded || e == framework.NodeAllocatable || e == framework.PodRemoved || e == framework.PodUpdated
}
