package pod

import (
	"cmp"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/internal/saturate"
)

// Resize is the state of an in-place resize of a running pod.
type Resize struct {
	// Pending is why the node has not granted the spec of generation Asked: Deferred or Infeasible.
	// It is "" if the spec is granted.
	Pending, Message string
	Asked            int64
	// Open: the grant, made to generation Granted of the pod, is not fully in effect.
	Open    bool
	Granted int64
	// Memory is the node's memory. Limits are the limits that this agent process has set on the
	// pod's cgroup, nil if none.
	Memory int64
	Limits *cri.LinuxContainerResources
}

// Grant decides whether the node can grant the resources in a pod's spec now. An empty reason means
// yes. has is the pod with its current grant. others are the other pods that use resources, with
// their current grants. A resource that does not grow is always granted. Pure.
func Grant(pod, has *v1.Pod, others []*v1.Pod, node *v1.Node) (reason, message string) {
	want, before := resource.PodRequests(pod, resource.PodResourcesOptions{}), resource.PodRequests(has, resource.PodResourcesOptions{})
	used, free := requestsOf(others), node.Status.Allocatable
	var grows []v1.ResourceName
	// Memory first, in the order of Kubernetes' messages.
	for _, name := range []v1.ResourceName{v1.ResourceMemory, v1.ResourceCPU} {
		if q := want[name]; q.Cmp(before[name]) > 0 {
			grows = append(grows, name)
		}
	}
	for _, name := range grows {
		if q := want[name]; q.Cmp(free[name]) > 0 {
			return v1.PodReasonInfeasible, fmt.Sprintf("Node didn't have enough capacity: %s, requested: %d, capacity: %d",
				name, amount(want, name), amount(free, name))
		}
	}
	for _, name := range grows {
		if message := lacking(name, want, used, free); message != "" {
			return v1.PodReasonDeferred, message
		}
	}
	return "", ""
}

// requestsOf returns the sum of the pods' requests. For a pod that is being resized it counts the
// larger of the grant and of its containers' current resources.
func requestsOf(pods []*v1.Pod) v1.ResourceList {
	used := v1.ResourceList{}
	for _, p := range pods {
		for name, q := range resource.PodRequests(p, resource.PodResourcesOptions{UseStatusResources: true}) {
			sum := used[name]
			sum.Add(q)
			used[name] = sum
		}
	}
	return used
}

// lacking returns a message if a node does not have enough of a resource; "" if it has.
func lacking(name v1.ResourceName, want, used, have v1.ResourceList) string {
	q, sum := want[name], used[name].DeepCopy()
	if sum.Add(q); q.IsZero() || sum.Cmp(have[name]) <= 0 {
		return ""
	}
	return fmt.Sprintf("Node didn't have enough resource: %s, requested: %d, used: %d, capacity: %d", name, amount(want, name),
		amount(used, name), amount(have, name))
}

// amount returns a resource in the unit of messages: millicores of CPU, else whole units.
func amount(l v1.ResourceList, name v1.ResourceName) int64 {
	q := l[name]
	if name == v1.ResourceCPU {
		return saturate.MilliValue(&q)
	}
	return saturate.Value(&q)
}

// resizeUpdate is a limit update of a running container.
type resizeUpdate struct {
	ID, Name string
	To       *cri.LinuxContainerResources
}

// resizePlan is the remaining work until a grant is in effect. During the resize the pod's cgroup
// gets the larger of the old and new limits: it grows before its containers and shrinks after them.
type resizePlan struct {
	During, Target *cri.LinuxContainerResources // of the pod's cgroup
	Update         []resizeUpdate               // shrinking containers first
	Restart        []Container                  // containers that must be restarted
}

// planResize compares the limits of running containers with their grants. Pure.
func planResize(pod *v1.Pod, o *Observed) resizePlan {
	p := resizePlan{Target: podResources(pod)}
	p.During = &cri.LinuxContainerResources{CpuShares: p.Target.CpuShares, CpuQuota: p.Target.CpuQuota, CpuPeriod: p.Target.CpuPeriod,
		MemoryLimitInBytes: p.Target.MemoryLimitInBytes}
	eachContainer(pod, func(spec *v1.Container) {
		c, ok := o.newest(spec.Name)
		if !ok || c.State != Running || c.Limits == nil {
			return
		}
		to := containerResources(pod, spec, o.Resize.Memory)
		p.allow(c.Limits, to)
		switch {
		case restartsToResize(spec, c.Limits, to):
			p.Restart = append(p.Restart, c)
		case !sameLimits(c.Limits, to):
			p.Update = append(p.Update, resizeUpdate{c.ID, c.Name, to})
		}
	})
	shrinks := func(u resizeUpdate) int {
		c, _ := o.newest(u.Name)
		if more(u.To.MemoryLimitInBytes, c.Limits.MemoryLimitInBytes) || more(u.To.CpuQuota, c.Limits.CpuQuota) {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(p.Update, func(a, b resizeUpdate) int { return cmp.Compare(shrinks(a), shrinks(b)) })
	return p
}

// allow raises the pod's limits during the resize by the amount that a container has beyond its
// target.
func (p *resizePlan) allow(have, to *cri.LinuxContainerResources) {
	p.During.CpuShares = min(p.During.CpuShares+max(have.CpuShares-to.CpuShares, 0), maxShares)
	p.During.CpuQuota = raised(p.During.CpuQuota, have.CpuQuota, to.CpuQuota)
	p.During.MemoryLimitInBytes = raised(p.During.MemoryLimitInBytes, have.MemoryLimitInBytes, to.MemoryLimitInBytes)
}

// raised returns the pod limit while a container still has the limit have instead of to; 0 is
// unlimited.
func raised(pod, have, to int64) int64 {
	if pod <= 0 || have <= 0 || to <= 0 {
		return 0
	}
	return pod + max(have-to, 0)
}

// more reports whether limit a is higher than b; 0 is unlimited.
func more(a, b int64) bool { return a <= 0 && b > 0 || b > 0 && a > b }

func sameCPU(a, b *cri.LinuxContainerResources) bool {
	return a.CpuShares == b.CpuShares && a.CpuQuota == b.CpuQuota && a.CpuPeriod == b.CpuPeriod
}

func sameLimits(a, b *cri.LinuxContainerResources) bool {
	return sameCPU(a, b) && a.MemoryLimitInBytes == b.MemoryLimitInBytes
}

// restartsToResize reports whether the container's resize policy requires a restart for this
// change. A change of requests changes the CPU shares or the OOM score. The OOM score does not
// change without a restart.
func restartsToResize(spec *v1.Container, have, to *cri.LinuxContainerResources) bool {
	for _, p := range spec.ResizePolicy {
		if p.RestartPolicy != v1.RestartContainer {
			continue
		}
		switch p.ResourceName {
		case v1.ResourceCPU:
			if !sameCPU(have, to) {
				return true
			}
		case v1.ResourceMemory:
			if have.MemoryLimitInBytes != to.MemoryLimitInBytes || have.OomScoreAdj != to.OomScoreAdj {
				return true
			}
		}
	}
	return false
}

// resizeMessage is the event message of a container that is killed because its resize requires a
// restart.
func resizeMessage(container string) string {
	return fmt.Sprintf("Container %s resize requires restart", container)
}

// remade reports whether an instance is replaced whatever its exit code: its image changed, or it
// was stopped for a resize.
func remade(o *Observed, c Container, spec *v1.Container) bool {
	return c.Hash != specHash(spec) || o.Killed[c.ID] == resizeMessage(c.Name)
}

// resize plans the actions that bring a grant into effect.
func (s *step) resize(sb Sandbox) {
	if !s.o.Resize.Open {
		return
	}
	p := planResize(s.pod, s.o)
	a := Action{Kind: ResizePod, ID: sb.ID}
	allowed := s.o.Resize.Limits != nil && sameLimits(s.o.Resize.Limits, p.During)
	if !s.o.busy(a.Key()) && (len(p.Update) > 0 || !allowed || len(p.Restart) == 0) && s.retryDue(a.Key()) {
		s.plan.add(a)
	}
	if !allowed {
		return // a container that starts with more than its pod's cgroup allows would fail
	}
	for _, c := range p.Restart {
		s.kill(c, grace(s.pod), resizeMessage(c.Name))
	}
}
