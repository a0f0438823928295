package lifecycle

import (
	"fmt"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"
)

// During a resize, the pod's cgroup always has room for the present and the new limits of its
// containers, whatever the interrupted state. At the end it has the granted limits.
func TestPodGrowsFirstAndShrinksLast(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		draw := func(label string) *v1.Pod {
			p := simplePod("u1", v1.Container{Name: "a", Image: "i"}, v1.Container{Name: "b", Image: "i"})
			for i := range p.Spec.Containers {
				r := &p.Spec.Containers[i].Resources
				cpu, memory := rapid.Int64Range(1, 40).Draw(rt, label), rapid.Int64Range(8, 512).Draw(rt, label)
				r.Requests = amounts(fmt.Sprintf("cpu=%dm memory=%dMi", cpu*50, memory))
				r.Limits = amounts(fmt.Sprintf("cpu=%dm memory=%dMi", cpu*100, memory))
			}
			p.Status.QOSClass = v1.PodQOSBurstable
			return p
		}
		before, after := draw("before"), draw("after")
		o := &Observed{Resize: Resize{InProgress: true, Memory: 8 << 30}}
		for _, name := range []string{"a", "b"} {
			has := before
			if rapid.Bool().Draw(rt, "done") {
				has = after
			}
			o.Containers = append(o.Containers, limited(has, name))
		}
		for round := 0; ; round++ {
			p := PlanResize(after, o)
			var memory, quota int64
			for _, c := range o.Containers {
				to := ContainerResources(after, FindContainerSpec(after, c.Name), 8<<30)
				memory += max(c.Limits.MemoryLimitInBytes, to.MemoryLimitInBytes)
				quota += max(c.Limits.CpuQuota, to.CpuQuota)
			}
			if p.During.MemoryLimitInBytes < memory || p.During.CpuQuota < quota {
				rt.Fatalf("the pod allows %d bytes and %d µs, its containers %d and %d", p.During.MemoryLimitInBytes,
					p.During.CpuQuota, memory, quota)
			}
			if len(p.Update) == 0 {
				if !EqualLimits(p.During, p.Target) || !EqualLimits(p.Target, PodResources(after)) {
					rt.Fatalf("in the end the pod has %v, want %v", p.During, PodResources(after))
				}
				return
			}
			if round > 2 {
				rt.Fatalf("still to do: %v", p.Update)
			}
			for i := range o.Containers { // in any combination, as after a crash
				if u := p.Update[0]; o.Containers[i].ID == u.ID {
					o.Containers[i].Limits = u.To
				}
			}
		}
	})
}

// Containers are shrunk before others grow. While a container has no limit yet, the pod has none
// either. The resize policy decides about restarts.
func TestPlanOfAResize(t *testing.T) {
	before, after := sized("u1", "cpu=100m memory=64Mi", "cpu=200m memory=64Mi"),
		sized("u1", "cpu=200m memory=128Mi", "cpu=400m memory=128Mi")
	for _, p := range []*v1.Pod{before, after} {
		p.Spec.Containers = append(p.Spec.Containers, *p.Spec.Containers[0].DeepCopy())
		p.Spec.Containers[1].Name = "other"
		p.Status.QOSClass = v1.PodQOSBurstable
	}
	after.Spec.Containers[1].Resources = v1.ResourceRequirements{Requests: amounts("cpu=50m memory=32Mi"),
		Limits: amounts("cpu=100m memory=32Mi")}
	o := &Observed{Resize: Resize{InProgress: true, Memory: 8 << 30},
		Containers: []Container{limited(before, "app"), limited(before, "other")}}
	var order []string
	for _, u := range PlanResize(after, o).Update {
		order = append(order, u.Name)
	}
	if !slices.Equal(order, []string{"other", "app"}) {
		t.Errorf("order %v", order)
	}
	o.Containers[0].Limits.MemoryLimitInBytes = 0
	if p := PlanResize(after, o); p.During.MemoryLimitInBytes != 0 || p.Target.MemoryLimitInBytes != 160<<20 {
		t.Errorf("beside a container without a limit: %v, then %v", p.During, p.Target)
	}
	for _, c := range []struct {
		policy  v1.ResourceName
		changes string // requested changes
		restart bool
	}{
		{v1.ResourceCPU, "cpu=150m memory=64Mi", true}, {v1.ResourceCPU, "cpu=100m memory=32Mi", false},
		{v1.ResourceMemory, "cpu=150m memory=64Mi", false}, {v1.ResourceMemory, "cpu=100m memory=32Mi", true},
	} {
		has, want := sized("u1", "cpu=100m memory=64Mi", "cpu=200m memory=128Mi"),
			sized("u1", c.changes, "cpu=200m memory=128Mi")
		want.Spec.Containers[0].ResizePolicy = []v1.ContainerResizePolicy{{ResourceName: c.policy,
			RestartPolicy: v1.RestartContainer}}
		has.Status.QOSClass, want.Status.QOSClass = v1.PodQOSBurstable, v1.PodQOSBurstable
		o := &Observed{Resize: Resize{InProgress: true, Memory: 100 << 20},
			Containers: []Container{{ID: "a", Name: "app", State: Running,
				Limits: ContainerResources(has, &has.Spec.Containers[0], 100<<20)}}}
		if got := len(PlanResize(want, o).Restart) == 1; got != c.restart {
			t.Errorf("restart for %s, asked for %s: %v", c.policy, c.changes, got)
		}
	}
}

// limited returns a running container with the limits of the pod's spec.
func limited(p *v1.Pod, name string) Container {
	return Container{ID: name + "-0", Name: name, Sandbox: "sb", State: Running,
		Hash: SpecHash(FindContainerSpec(p, name)), Delay: NoDelay,
		Limits: ContainerResources(p, FindContainerSpec(p, name), 8<<30)}
}

// F129: while a pod with a limit of its own is resized, its cgroup has room for the largest of its
// containers, and not for their sum.
func TestPlanOfPodLevelResize(t *testing.T) {
	withLimits := func(cpu, memory string) *v1.Pod {
		p := simplePod("u1", v1.Container{Name: "a"}, v1.Container{Name: "b"})
		p.Spec.Resources = &v1.ResourceRequirements{Requests: amounts("cpu=1 memory=64Mi"),
			Limits: amounts("cpu=" + cpu + " memory=" + memory)}
		p.Status.QOSClass = v1.PodQOSBurstable
		return p
	}
	for _, c := range []struct {
		name              string
		before, after     *v1.Pod
		during, target    int64 // memory in MiB
		updated, restarts int
	}{
		{"grows", withLimits("2", "128Mi"), withLimits("2", "256Mi"), 256, 256, 2, 0},
		{"shrinks", withLimits("2", "256Mi"), withLimits("2", "128Mi"), 256, 128, 2, 0},
		{"is unchanged", withLimits("2", "128Mi"), withLimits("2", "128Mi"), 128, 128, 0, 0},
	} {
		o := &Observed{Resize: Resize{InProgress: true, Memory: 8 << 30},
			Containers: []Container{limited(c.before, "a"), limited(c.before, "b")}}
		p := PlanResize(c.after, o)
		if p.During.MemoryLimitInBytes != c.during<<20 || p.Target.MemoryLimitInBytes != c.target<<20 ||
			p.During.CpuQuota != 200_000 || len(p.Update) != c.updated || len(p.Restart) != c.restarts {
			t.Errorf("a pod that %s: %v, then %v, with %d updates and %d restarts", c.name, p.During, p.Target,
				len(p.Update), len(p.Restart))
		}
	}
}

// F129: a grant includes the resources of the pod, and a grant of an earlier release does not cover them.
func TestGrantOfPodLevelResources(t *testing.T) {
	p := simplePod("u1")
	if g := GrantFromSpec(p); g.Pod != nil || !g.CoversSpec(p) {
		t.Errorf("the grant of a plain pod is %+v", g)
	}
	earlier := GrantFromSpec(p)
	p.Spec.Resources = &v1.ResourceRequirements{Requests: amounts("cpu=1")}
	g := GrantFromSpec(p)
	if !g.CoversSpec(p) || earlier.CoversSpec(p) {
		t.Error("the grant of the pod's spec covers it, the earlier grant does not")
	}
	resized := p.DeepCopy()
	resized.Spec.Resources.Requests = amounts("cpu=2")
	if g.CoversSpec(resized) {
		t.Error("the grant covers a larger spec")
	}
	if got := g.ApplyTo(resized).Spec.Resources.Requests.Cpu().String(); got != "1" {
		t.Errorf("the pod has %s CPUs by its grant, want 1", got)
	}
	if got := resized.Spec.Resources.Requests.Cpu().String(); got != "2" {
		t.Errorf("the spec was changed to %s CPUs", got)
	}
	resized.Status.AllocatedResources = amounts("cpu=1 memory=1Gi")
	if got := CPURequest(resized); got != 1000 {
		t.Errorf("the pod counts with %d millicores, want those that are allocated", got)
	}
}
