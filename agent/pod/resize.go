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

// Resize is what is known of a pod whose resources were changed while it runs.
type Resize struct {
	// Pending is why the node has not granted what the spec of generation Asked wants: Deferred or Infeasible; "" when it
	// has.
	Pending, Message string
	Asked            int64
	// Open: what was granted, to the pod of generation Granted, is not all in effect.
	Open    bool
	Granted int64
	// Memory is the node's; Limits are those that this life of the agent gave the pod's cgroup, nil when it gave none.
	Memory int64
	Limits *cri.LinuxContainerResources
}

// Grant says whether the node can give a pod what its spec asks for now; reason "" = it can. has is what is granted to
// the pod, others are the pods besides it that take resources, as they hold them. What does not grow is always granted.
// Pure.
func Grant(pod, has *v1.Pod, others []*v1.Pod, node *v1.Node) (reason, message string) {
	want, before := resource.PodRequests(pod, resource.PodResourcesOptions{}), resource.PodRequests(has, resource.PodResourcesOptions{})
	used, free := requestsOf(others), node.Status.Allocatable
	var grows []v1.ResourceName
	// Memory first, as Kubernetes tells it.
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

// requestsOf is what pods hold together: of one whose resources change, the most of what it was granted and what its
// containers still have.
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

// lacking says that a node has not enough of a resource; "" when it has.
func lacking(name v1.ResourceName, want, used, have v1.ResourceList) string {
	q, sum := want[name], used[name].DeepCopy()
	if sum.Add(q); q.IsZero() || sum.Cmp(have[name]) <= 0 {
		return ""
	}
	return fmt.Sprintf("Node didn't have enough resource: %s, requested: %d, used: %d, capacity: %d", name, amount(want, name),
		amount(used, name), amount(have, name))
}

// amount is a resource as messages tell it: thousandths of CPUs, whole units of anything else.
func amount(l v1.ResourceList, name v1.ResourceName) int64 {
	q := l[name]
	if name == v1.ResourceCPU {
		return saturate.MilliValue(&q)
	}
	return saturate.Value(&q)
}

// resizeUpdate is a running container that gets other limits.
type resizeUpdate struct {
	ID, Name string
	To       *cri.LinuxContainerResources
}

// resizePlan is what is left to do until a grant is in effect. In between the pod's own cgroup allows the most of what
// the containers have and what they are to have: it grows before them and shrinks after them.
type resizePlan struct {
	During, Target *cri.LinuxContainerResources // of the pod
	Update         []resizeUpdate               // those that shrink first
	Restart        []Container                  // those that have to be started anew
}

// planResize compares what containers have with what is granted to them. Pure.
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

// allow raises what the pod may use meanwhile by what a container has beyond its share of the target.
func (p *resizePlan) allow(have, to *cri.LinuxContainerResources) {
	p.During.CpuShares = min(p.During.CpuShares+max(have.CpuShares-to.CpuShares, 0), maxShares)
	p.During.CpuQuota = raised(p.During.CpuQuota, have.CpuQuota, to.CpuQuota)
	p.During.MemoryLimitInBytes = raised(p.During.MemoryLimitInBytes, have.MemoryLimitInBytes, to.MemoryLimitInBytes)
}

// raised is a limit of the pod with a container that has another limit than it is to have; 0 is none.
func raised(pod, have, to int64) int64 {
	if pod <= 0 || have <= 0 || to <= 0 {
		return 0
	}
	return pod + max(have-to, 0)
}

// more says that limit a allows more than b; 0 is none.
func more(a, b int64) bool { return a <= 0 && b > 0 || b > 0 && a > b }

func sameCPU(a, b *cri.LinuxContainerResources) bool {
	return a.CpuShares == b.CpuShares && a.CpuQuota == b.CpuQuota && a.CpuPeriod == b.CpuPeriod
}

func sameLimits(a, b *cri.LinuxContainerResources) bool {
	return sameCPU(a, b) && a.MemoryLimitInBytes == b.MemoryLimitInBytes
}

// restartsToResize says that the container's policy has it started anew for what changes. A change of what is requested
// shows in the CPU shares or in the OOM score, which without a restart stays what it was.
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

// resizeMessage says why a container is killed that its resize policy has started anew.
func resizeMessage(container string) string {
	return fmt.Sprintf("Container %s resize requires restart", container)
}

// remade says that an instance is followed by another whatever its exit code: its image is another by now, or it was
// ended to get other resources.
func remade(o *Observed, c Container, spec *v1.Container) bool {
	return c.Hash != specHash(spec) || o.Killed[c.ID] == resizeMessage(c.Name)
}

// resize plans what brings a grant into effect.
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
		return // a container that is started with more than its pod has would fail
	}
	for _, c := range p.Restart {
		s.kill(c, grace(s.pod), resizeMessage(c.Name))
	}
}
