package pod

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

func drawPod(r *rapid.T) *v1.Pod {
	always := v1.ContainerRestartPolicyAlways
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", UID: types.UID("u1")}}
	p.Spec.RestartPolicy = rapid.SampledFrom([]v1.RestartPolicy{v1.RestartPolicyAlways, v1.RestartPolicyOnFailure,
		v1.RestartPolicyNever}).Draw(r, "policy")
	for i := range rapid.IntRange(0, 3).Draw(r, "init") {
		c := v1.Container{Name: fmt.Sprintf("i%d", i), Image: "x:1"}
		if rapid.Bool().Draw(r, "sidecar") {
			c.RestartPolicy = &always
		}
		p.Spec.InitContainers = append(p.Spec.InitContainers, c)
	}
	for i := range rapid.IntRange(1, 3).Draw(r, "containers") {
		p.Spec.Containers = append(p.Spec.Containers, v1.Container{Name: fmt.Sprintf("c%d", i), Image: "x:1"})
	}
	for i := range rapid.IntRange(0, 2).Draw(r, "ephemeral") {
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, v1.EphemeralContainer{
			EphemeralContainerCommon: v1.EphemeralContainerCommon{Name: fmt.Sprintf("e%d", i), Image: "x:1"}})
	}
	if rapid.IntRange(0, 4).Draw(r, "deadline") == 0 {
		d := int64(30)
		p.Spec.ActiveDeadlineSeconds = &d
	}
	return p
}

func containerNames(p *v1.Pod) []string {
	var out []string
	for _, l := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for _, c := range l {
			out = append(out, c.Name)
		}
	}
	for _, c := range p.Spec.EphemeralContainers {
		out = append(out, c.Name)
	}
	return out
}

// checkPlan checks invariants that every plan must satisfy for any observation.
func checkPlan(t interface{ Fatalf(string, ...any) }, d lifecycle.Desired, o lifecycle.Observed, p lifecycle.Plan) {
	seen := map[string]bool{}
	for _, a := range p.Actions {
		key := a.Key()
		if seen[key] {
			t.Fatalf("two actions with key %s in one plan: %v", key, p.Actions)
		}
		seen[key] = true
		if a.Kind != lifecycle.Cancel && o.IsBusy(key) {
			t.Fatalf("%s is planned while %s is under way", a, key)
		}
		if !o.Listed {
			t.Fatalf("%s is planned without having seen the runtime", a)
		}
		switch a.Kind {
		case lifecycle.StartContainer:
			for _, c := range o.Containers {
				if c.Name == a.Container && c.State != lifecycle.Exited {
					t.Fatalf("%s is planned beside %s, which is %s", a, c.ID, c.State)
				}
			}
			if d.Stop != nil {
				t.Fatalf("%s is planned for a pod that has to stop", a)
			}
			sb, ok := o.ReadySandbox()
			early := o.EarlySandbox == a.ID && o.IsBusy("sandbox") && len(o.Sandboxes) == 0
			if !(ok && sb.ID == a.ID || early) || !o.Volumes.Mounted {
				t.Fatalf("%s is planned without its sandbox and volumes", a)
			}
		case lifecycle.UnmountVolumes, lifecycle.ReportGone:
			if o.HasRunningContainer() {
				t.Fatalf("%s is planned while a container runs", a)
			}
		case lifecycle.CreateSandbox:
			if o.HasRunningContainer() {
				t.Fatalf("%s is planned while a container of an older sandbox runs", a)
			}
		}
	}
	if p.Done && (len(o.Containers) > 0 || len(o.Sandboxes) > 0) {
		t.Fatalf("the worker would end with %d sandboxes and %d containers left", len(o.Sandboxes), len(o.Containers))
	}
}

// TestStepOnAnyObservation: for arbitrary observations, even impossible ones, Step and Status do
// not panic. They start no second instance and unmount no volume of a running container. F94
func TestStepOnAnyObservation(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		pod := drawPod(r)
		d := lifecycle.Desired{Pod: pod}
		switch rapid.IntRange(0, 3).Draw(r, "stop") {
		case 0:
			d.Stop = &lifecycle.Stop{Delete: true, Grace: 30 * time.Second, Orphan: rapid.Bool().Draw(r, "orphan")}
		case 1:
			d.Stop = &lifecycle.Stop{Reason: "Evicted"}
		}
		o := lifecycle.Observed{Times: lifecycle.PodTimes{Start: epoch},
			Listed: rapid.IntRange(0, 9).Draw(r, "listed") > 0, Images: map[string]lifecycle.Image{},
			Failures: map[string]lifecycle.Failure{},
			Probes:   map[string]agent.ProbeState{}, Killed: map[string]string{},
			Busy: map[string]lifecycle.RunningAction{}, Finished: map[string]bool{}}
		o.EarlySandbox = rapid.SampledFrom([]string{"", "early"}).Draw(r, "early")
		o.ReclaimDisk = rapid.Bool().Draw(r, "spare")
		o.Volumes = lifecycle.Volumes{Mounted: rapid.Bool().Draw(r, "mounted"), Unmounted: rapid.Bool().Draw(r, "away")}
		for i := range rapid.IntRange(0, 2).Draw(r, "sandboxes") {
			o.Sandboxes = append(o.Sandboxes, lifecycle.Sandbox{ID: fmt.Sprintf("sb%d", i), Attempt: uint32(2 - i),
				Ready: rapid.Bool().Draw(r, "ready"), IPs: []string{"10.0.0.1"}})
		}
		for i, n := range append(containerNames(pod), "stranger") {
			for k := range rapid.IntRange(0, 3).Draw(r, "instances") {
				c := lifecycle.Container{ID: fmt.Sprintf("%s-%d", n, k), Name: n, Attempt: uint32(3 - k),
					Sandbox:  rapid.SampledFrom([]string{"sb0", "sb1", "gone"}).Draw(r, "in"),
					State:    lifecycle.State(rapid.IntRange(0, 3).Draw(r, "state")),
					ExitCode: int32(rapid.IntRange(0, 1).Draw(r, "code")),
					Times: lifecycle.InstanceTimes{Started: epoch,
						Finished: epoch.Add(time.Duration(i) * time.Second)}}
				if rapid.Bool().Draw(r, "hash") && n != "stranger" {
					c.Hash = lifecycle.SpecHash(lifecycle.FindContainerSpec(pod, n))
				}
				o.Containers = append(o.Containers, c)
				o.Probes[c.ID] = agent.ProbeState{Started: rapid.Bool().Draw(r, "started"),
					FailedProbe: rapid.SampledFrom([]string{"", "liveness", "startup"}).Draw(r, "gaveup")}
				o.Images[n] = lifecycle.Image{Ref: "x",
					Attempt: c.Attempt + uint32(rapid.IntRange(0, 1).Draw(r, "image"))}
			}
		}
		for _, a := range []lifecycle.Action{{Kind: lifecycle.MountVolumes}, {Kind: lifecycle.CreateSandbox},
			{Kind: lifecycle.StartContainer, Container: "c0"}, {Kind: lifecycle.EnsureImage, Container: "c0"},
			{Kind: lifecycle.KillContainer, ID: "c0-0"}, {Kind: lifecycle.AwaitGate},
			{Kind: lifecycle.UnmountVolumes}} {
			if rapid.IntRange(0, 3).Draw(r, "busy") == 0 {
				o.Busy[a.Key()] = lifecycle.RunningAction{Kind: a.Kind, Cancelled: rapid.Bool().Draw(r, "cancelled")}
			}
		}
		now := epoch.Add(time.Duration(rapid.IntRange(0, 120).Draw(r, "now")) * time.Second)
		checkPlan(r, d, o, lifecycle.Step(d, o, now))
		st := lifecycle.Status(d, o, v1.PodStatus{}, lifecycle.Host{IPs: []string{"192.0.2.1"}}, now)
		if len(st.ContainerStatuses) != len(pod.Spec.Containers) || st.Phase == "" {
			r.Fatalf("status is incomplete: %+v", st)
		}
	})
}

// TestAnyHistoryEnds: after any sequence of events, at most one instance of a container has run
// (the world checks that). Without a restart policy no second one follows, and never one of an
// ephemeral container. Once the pod is deleted and failures end, nothing is left. F94, F125, F128,
// P9
func TestAnyHistoryEnds(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		x := newWorld(t, drawPod(r))
		step := func() lifecycle.Plan {
			d, o := x.worker.desired, x.worker.observed
			o.Busy = maps.Clone(o.Busy) // plan adds the actions that it starts
			p := x.planActions()
			checkPlan(r, d, o, p)
			return p
		}
		for range rapid.IntRange(1, 60).Draw(r, "length") {
			step()
			keys := slices.DeleteFunc(slices.Sorted(maps.Keys(x.pending)), x.isPending)
			switch rapid.IntRange(0, 11).Draw(r, "what") {
			case 11:
				if rapid.IntRange(0, 3).Draw(r, "reboot") == 0 {
					x.runCommand("reboot")
				}
			case 10:
				if a, ok := x.pending["sandbox"]; ok && a.Kind == lifecycle.CreateSandbox &&
					x.observed().EarlySandbox == "" {
					x.completePreparation()
				}
			case 0, 1, 2, 3:
				if len(keys) > 0 {
					x.completeAction(rapid.SampledFrom(keys).Draw(r, "key"), nil)
				}
			case 4:
				if len(keys) == 0 {
					continue
				}
				key := rapid.SampledFrom(keys).Draw(r, "key")
				lost := key == "sandbox" && x.observed().EarlySandbox != ""
				waiting := slices.DeleteFunc(slices.Collect(maps.Keys(x.pending)), func(k string) bool {
					return !x.isPending(k)
				})
				x.completeAction(key, errors.New("boom"))
				for _, k := range waiting {
					if lost {
						x.completeAction(k, errSandboxFailed)
					}
				}
			case 5:
				name := rapid.SampledFrom(containerNames(x.worker.desired.Pod)).Draw(r, "name")
				x.exitInstances(func(c *lifecycle.Container) bool {
					return c.Name == name
				}, int32(rapid.IntRange(0, 1).Draw(r, "code")), "")
			case 6:
				x.now = x.now.Add(time.Duration(rapid.IntRange(1, 20_000).Draw(r, "ms")) * time.Millisecond)
			case 7:
				if len(x.observed().Sandboxes) > 0 && rapid.Bool().Draw(r, "lose") {
					x.observed().Sandboxes[0].Ready = false
				}
			case 8:
				if rapid.Bool().Draw(r, "die") {
					x.runCommand("restart-agent")
				}
			case 9:
				if rapid.IntRange(0, 3).Draw(r, "delete") == 0 {
					x.runCommand("delete 5")
				}
			}
		}
		for i := range x.worker.desired.Pod.Spec.Containers {
			c := &x.worker.desired.Pod.Spec.Containers[i]
			if n := x.starts[c.Name]; n > 1 && x.worker.desired.Pod.Spec.RestartPolicy == v1.RestartPolicyNever {
				r.Fatalf("%s was started %d times, with restartPolicy Never", c.Name, n)
			}
		}
		for _, c := range x.worker.desired.Pod.Spec.EphemeralContainers {
			if n := x.starts[c.Name]; n > 1 {
				r.Fatalf("ephemeral container %s was started %d times", c.Name, n)
			}
		}
		x.runCommand("delete 5")
		for range 300 {
			if step().Done {
				return
			}
			for _, k := range slices.DeleteFunc(slices.Sorted(maps.Keys(x.pending)), x.isPending) {
				x.completeAction(k, nil)
			}
			x.now = x.now.Add(time.Second)
		}
		r.Fatalf("the pod never goes: busy %v, sandboxes %v, containers %v", x.observed().Busy, x.observed().Sandboxes,
			x.observed().Containers)
	})
}
