package lifecycle

import (
	"cmp"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Resize is the state of an in-place resize of a running pod.
type Resize struct {
	// Pending is the reason for which the node has not granted the spec of generation
	// RequestedGeneration: Deferred or Infeasible. It is "" if the spec is granted.
	Pending, Message    string
	RequestedGeneration int64
	// InProgress is true if the grant for generation GrantedGeneration of the pod is not fully in
	// effect.
	InProgress        bool
	GrantedGeneration int64
	// Memory is the node's memory in bytes. Limits are the limits that this agent process has set
	// on the pod's cgroup; nil if it has set none.
	Memory int64
	Limits *cri.LinuxContainerResources
}

// ResourceUpdate is a change of the limits of a running container to the values To.
type ResourceUpdate struct {
	ID, Name string
	To       *cri.LinuxContainerResources
}

// ResizePlan is the remaining work until a grant is in effect. During the resize, the limits of the
// pod's cgroup are large enough for the old and the new limits of its containers: for their sum, or
// for the largest of them if the pod has a limit of its own. Therefore the pod's cgroup grows
// before the containers do, and shrinks after them.
type ResizePlan struct {
	During, Target *cri.LinuxContainerResources // limits of the pod's cgroup during and after it
	Update         []ResourceUpdate             // shrinking containers first
	Restart        []Container                  // containers that must be restarted
}

// PlanResize compares the limits of a pod's running containers with the granted limits, and returns
// the remaining work. Update and Restart of the result are empty if the granted limits of all
// containers are in effect. Pure.
func PlanResize(pod *v1.Pod, observed *Observed) ResizePlan {
	p := ResizePlan{Target: PodResources(pod)}
	p.During = &cri.LinuxContainerResources{CpuShares: p.Target.CpuShares, CpuQuota: p.Target.CpuQuota,
		CpuPeriod: p.Target.CpuPeriod, MemoryLimitInBytes: p.Target.MemoryLimitInBytes}
	ForEachContainer(pod, func(spec *v1.Container) {
		c, ok := observed.NewestInstance(spec.Name)
		if !ok || c.State != Running || c.Limits == nil {
			return
		}
		target := ContainerResources(pod, spec, observed.Resize.Memory)
		p.raisePodLimits(pod, c.Limits, target)
		switch {
		case resizeNeedsRestart(spec, c.Limits, target):
			p.Restart = append(p.Restart, c)
		case !EqualLimits(c.Limits, target):
			p.Update = append(p.Update, ResourceUpdate{c.ID, c.Name, target})
		}
	})
	shrinks := func(u ResourceUpdate) int {
		c, _ := observed.NewestInstance(u.Name)
		if isHigherLimit(u.To.MemoryLimitInBytes, c.Limits.MemoryLimitInBytes) ||
			isHigherLimit(u.To.CpuQuota, c.Limits.CpuQuota) {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(p.Update, func(a, b ResourceUpdate) int { return cmp.Compare(shrinks(a), shrinks(b)) })
	return p
}

// raisePodLimits raises p.During, the pod's limits during the resize, by the amount by which a
// container's current limits exceed its target limits. Where the pod has a limit of its own, it is
// raised only to the container's current limit.
func (p *ResizePlan) raisePodLimits(pod *v1.Pod, current, target *cri.LinuxContainerResources) {
	p.During.CpuShares = min(p.During.CpuShares+max(current.CpuShares-target.CpuShares, 0), maxShares)
	raise := func(name v1.ResourceName, during *int64, current, target int64) {
		if !hasPodLimit(pod, name) {
			*during = raisedLimit(*during, current, target)
		} else if isHigherLimit(current, *during) {
			*during = max(current, 0)
		}
	}
	raise(v1.ResourceCPU, &p.During.CpuQuota, current.CpuQuota, target.CpuQuota)
	raise(v1.ResourceMemory, &p.During.MemoryLimitInBytes, current.MemoryLimitInBytes, target.MemoryLimitInBytes)
}

// raisedLimit returns the limit of a pod's cgroup while one of its containers still has the limit
// current instead of target. pod is the limit that the cgroup would have without this container's
// difference. A value of 0 means unlimited.
func raisedLimit(pod, current, target int64) int64 {
	if pod <= 0 || current <= 0 || target <= 0 {
		return 0
	}
	return pod + max(current-target, 0)
}

// isHigherLimit reports whether limit a is higher than b; 0 is unlimited.
func isHigherLimit(a, b int64) bool { return a <= 0 && b > 0 || b > 0 && a > b }

func equalCPULimits(a, b *cri.LinuxContainerResources) bool {
	return a.CpuShares == b.CpuShares && a.CpuQuota == b.CpuQuota && a.CpuPeriod == b.CpuPeriod
}

// EqualLimits reports whether two settings have the same CPU and memory limits.
func EqualLimits(a, b *cri.LinuxContainerResources) bool {
	return equalCPULimits(a, b) && a.MemoryLimitInBytes == b.MemoryLimitInBytes
}

// resizeNeedsRestart reports whether the container's resize policy requires a restart for a change
// from current to target. For CPU it compares limits and shares, and for memory the limit and the
// OOM score. A changed memory request changes the OOM score, which cannot change without a restart.
func resizeNeedsRestart(spec *v1.Container, current, target *cri.LinuxContainerResources) bool {
	for _, p := range spec.ResizePolicy {
		if p.RestartPolicy != v1.RestartContainer {
			continue
		}
		switch p.ResourceName {
		case v1.ResourceCPU:
			if !equalCPULimits(current, target) {
				return true
			}
		case v1.ResourceMemory:
			if current.MemoryLimitInBytes != target.MemoryLimitInBytes || current.OomScoreAdj != target.OomScoreAdj {
				return true
			}
		}
	}
	return false
}

// resizeKillMessage returns the event message for a container that is stopped because its resize
// requires a restart.
func resizeKillMessage(container string) string {
	return fmt.Sprintf("Container %s resize requires restart", container)
}

// isReplaced reports whether an ended instance is replaced whatever its exit code: the container's
// image has changed, or the instance was stopped for a resize.
func isReplaced(observed *Observed, instance Container, spec *v1.Container) bool {
	return instance.Hash != SpecHash(spec) || observed.Killed[instance.ID] == resizeKillMessage(instance.Name)
}

// planResize plans the actions that apply a grant to the running containers: an update of cgroup
// limits, and the stop of containers with a resize policy that requires a restart.
func (s *planner) planResize(sb Sandbox) {
	if !s.observed.Resize.InProgress {
		return
	}
	p := PlanResize(s.pod, s.observed)
	a := Action{Kind: ResizePod, ID: sb.ID}
	allowed := s.observed.Resize.Limits != nil && EqualLimits(s.observed.Resize.Limits, p.During)
	if !s.observed.IsBusy(a.Key()) && (len(p.Update) > 0 || !allowed || len(p.Restart) == 0) && s.isRetryDue(a.Key()) {
		s.plan.addAction(a)
	}
	if !allowed {
		return // a container that starts with more than its pod's cgroup allows would fail
	}
	for _, c := range p.Restart {
		s.planKill(c, GracePeriod(s.pod), resizeKillMessage(c.Name))
	}
}
