package pod

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

// world simulates a runtime, a clock and a worker's state without goroutines, for tests of the pure
// functions.
type world struct {
	t       *testing.T
	now     time.Time
	worker  *worker
	seq     int
	pending map[string]lifecycle.Action // started and not completed
	starts  map[string]int              // instances of each container, across reboots
	log     strings.Builder
	epoch   time.Time
}

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newWorld(t *testing.T, pod *v1.Pod) *world {
	x := &world{t: t, now: epoch, epoch: epoch, pending: map[string]lifecycle.Action{}, starts: map[string]int{}}
	x.restart(pod)
	return x
}

// restart simulates an agent restart: the worker's state is lost, the runtime continues.
func (x *world) restart(pod *v1.Pod) {
	c := fake.NewCluster()
	cfg := &Config{Identity: Identity{HostIPs: []string{"192.0.2.1"}}, Deps: Dependencies{Reporter: c, Objects: c},
		Now: func() time.Time { return x.now }}
	s := New(*cfg)
	old := x.worker
	x.worker = newWorker(&s.cfg, lifecycle.Desired{Pod: pod})
	if old != nil {
		x.worker.observed.Sandboxes, x.worker.observed.Containers = old.observed.Sandboxes, old.observed.Containers
		x.worker.desired = old.desired
		x.worker.status.last = old.status.last
		if x.worker.status.last.StartTime != nil {
			x.worker.observed.Times.Start = x.worker.status.last.StartTime.Time
		}
		p := *pod
		p.Status = old.status.last
		x.worker.desired.Pod = &p
	}
	x.worker.observed.Listed = true
	x.pending = map[string]lifecycle.Action{}
}

func (x *world) observed() *lifecycle.Observed { return &x.worker.observed }

// planActions calls Step and Status and starts the planned actions.
func (x *world) planActions() lifecycle.Plan {
	p := lifecycle.Step(x.worker.desired, x.worker.observed, x.now)
	x.worker.status.last = lifecycle.Status(x.worker.desired, x.worker.observed, x.worker.status.last,
		x.worker.cfg.statusHost(), x.now)
	for _, a := range p.Actions {
		if a.Kind == lifecycle.Cancel {
			if _, ok := x.pending[a.Target]; !ok {
				x.t.Errorf("Step cancels %s, which is not under way", a.Target)
			}
			b := x.observed().Busy[a.Target]
			b.Cancelled = true
			x.observed().Busy[a.Target] = b
			continue
		}
		if _, ok := x.pending[a.Key()]; ok {
			x.t.Errorf("Step plans %s while %s is under way", a, x.pending[a.Key()])
		}
		b := lifecycle.RunningAction{Kind: a.Kind, Since: x.now}
		if a.Kind == lifecycle.KillContainer {
			b.Until = x.now.Add(a.Grace)
			if x.worker.desired.Stop == nil {
				x.worker.observed.Killed[a.ID] = a.Message
			}
		}
		x.observed().Busy[a.Key()], x.pending[a.Key()] = b, a
	}
	return p
}

// completeAction ends an action with the result err.
func (x *world) completeAction(key string, err error) {
	a, ok := x.pending[key]
	if !ok {
		x.t.Fatalf("%s is not under way; under way: %v", key, slices.Sorted(maps.Keys(x.pending)))
	}
	delete(x.pending, key)
	cancelled := x.observed().Busy[key].Cancelled
	delete(x.observed().Busy, key)
	if err == nil && !cancelled {
		x.applyEffect(a)
	} else if cancelled && err == nil {
		err = errors.New("cancelled")
	}
	x.worker.actions.recordResult(a, err, cancelled)
}

// completePreparation simulates a sandbox in which containers can be created while its network is
// being attached.
func (x *world) completePreparation() {
	x.seq++
	x.observed().EarlySandbox = fmt.Sprintf("sb%d", x.seq)
}

// isPending reports whether a running action cannot complete yet: a start waits for the sandbox's
// network.
func (x *world) isPending(key string) bool {
	a := x.pending[key]
	return a.Kind == lifecycle.StartContainer && a.ID == x.observed().EarlySandbox
}

func (x *world) applyEffect(a lifecycle.Action) {
	o := x.observed()
	switch a.Kind {
	case lifecycle.CreateSandbox:
		if o.EarlySandbox == "" {
			x.seq++
		}
		o.Sandboxes = append([]lifecycle.Sandbox{{ID: fmt.Sprintf("sb%d", x.seq), Attempt: a.Attempt, Ready: true,
			IPs: []string{fmt.Sprintf("10.88.0.%d", x.seq)}, Created: x.now}}, o.Sandboxes...)
	case lifecycle.EnsureImage:
		o.Images[a.Container] = lifecycle.Image{Ref: "sha256:1", Attempt: a.Attempt}
	case lifecycle.StartContainer:
		x.addInstance(a)
	case lifecycle.KillContainer:
		x.exitInstances(func(c *lifecycle.Container) bool { return c.ID == a.ID }, 143, "")
	case lifecycle.RemoveContainer:
		o.Containers = slices.DeleteFunc(o.Containers, func(c lifecycle.Container) bool { return c.ID == a.ID })
	case lifecycle.StopSandbox:
		x.exitInstances(func(c *lifecycle.Container) bool { return c.Sandbox == a.ID }, 137, "")
		for i := range o.Sandboxes {
			o.Sandboxes[i].Ready = o.Sandboxes[i].Ready && o.Sandboxes[i].ID != a.ID
		}
	case lifecycle.RemoveSandbox:
		o.Containers = slices.DeleteFunc(o.Containers, func(c lifecycle.Container) bool { return c.Sandbox == a.ID })
		o.Sandboxes = slices.DeleteFunc(o.Sandboxes, func(s lifecycle.Sandbox) bool { return s.ID == a.ID })
	}
}

func (x *world) addInstance(a lifecycle.Action) {
	o := x.observed()
	spec := lifecycle.FindContainerSpec(x.worker.desired.Pod, a.Container)
	for _, c := range o.Containers {
		if c.Name == a.Container && c.State == lifecycle.Running {
			x.t.Errorf("second instance of %s started beside %s", a.Container, c.ID)
		}
	}
	x.seq++
	x.starts[a.Container]++
	c := lifecycle.Container{ID: fmt.Sprintf("%s-%d", a.Container, a.Attempt), Sandbox: a.ID, Name: a.Container,
		Attempt: a.Attempt, State: lifecycle.Running, Times: lifecycle.InstanceTimes{Created: x.now, Started: x.now},
		Image: lifecycle.InstanceImage{Name: spec.Image, ID: "sha256:1"}, Hash: lifecycle.SpecHash(spec),
		Delay: a.Delay}
	if slices.ContainsFunc(o.Containers, func(old lifecycle.Container) bool { return old.ID == c.ID }) {
		c.ID += fmt.Sprintf("-%d", x.seq)
	}
	o.Containers = append(o.Containers, c)
	x.sortObserved()
	probe := agent.ProbeState{Started: spec.StartupProbe == nil}
	probe.Ready = probe.Started && spec.ReadinessProbe == nil
	pod := x.worker.desired.Pod
	if !lifecycle.IsEphemeralContainer(pod, a.Container) &&
		(!lifecycle.IsInitContainer(pod, a.Container) || lifecycle.IsSidecar(pod, spec)) {
		o.Probes[c.ID] = probe
	}
}

func (x *world) sortObserved() {
	slices.SortFunc(x.observed().Containers, func(a, b lifecycle.Container) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(b.Attempt, a.Attempt),
			b.Times.Created.Compare(a.Times.Created))
	})
}

func (x *world) exitInstances(which func(*lifecycle.Container) bool, code int32, reason string) {
	for i := range x.observed().Containers {
		c := &x.observed().Containers[i]
		if which(c) && (c.State == lifecycle.Running || c.State == lifecycle.Unknown) {
			c.State, c.ExitCode, c.Times.Finished, c.Reason = lifecycle.Exited, code, x.now, reason
		}
	}
}

// runCommand executes one line of a script.
func (x *world) runCommand(line string) {
	f := strings.Fields(line)
	switch f[0] {
	case "prepared":
		x.completePreparation()
	case "lose-network":
		waiting := slices.DeleteFunc(slices.Sorted(maps.Keys(x.pending)), func(k string) bool {
			return !x.isPending(k)
		})
		x.completeAction("sandbox", errors.New("no address is left"))
		for _, k := range waiting {
			x.completeAction(k, errSandboxFailed)
		}
	case "ok":
		for _, k := range f[1:] {
			x.completeAction(k, nil)
		}
	case "fail":
		x.completeAction(f[1], &waitingError{f[2], errors.New(strings.Join(f[3:], " "))})
	case "exit":
		code, _ := strconv.Atoi(f[2])
		reason := ""
		if len(f) > 3 {
			reason = f[3]
		}
		x.exitInstances(func(c *lifecycle.Container) bool { return c.Name == f[1] }, int32(code), reason)
	case "advance":
		d, err := time.ParseDuration(f[1])
		if err != nil {
			x.t.Fatal(err)
		}
		x.now = x.now.Add(d)
	case "delete":
		g, _ := strconv.ParseInt(f[1], 10, 64)
		p := x.worker.desired.Pod.DeepCopy()
		t := metav1.NewTime(x.now.Add(time.Duration(g) * time.Second))
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &t, &g
		x.worker.desired = lifecycle.Desired{Pod: p, Stop: lifecycle.DeletionStop(p)}
	case "refuse":
		x.worker.desired.Stop = &lifecycle.Stop{Reason: f[1], Message: strings.Join(f[2:], " "), Rejected: true}
	case "image":
		p := x.worker.desired.Pod.DeepCopy()
		lifecycle.FindContainerSpec(p, f[1]).Image = f[2]
		x.worker.desired.Pod = p
	case "debug":
		p := x.worker.desired.Pod.DeepCopy()
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, v1.EphemeralContainer{
			EphemeralContainerCommon: v1.EphemeralContainerCommon{Name: f[1], Image: "debug:1"}})
		x.worker.desired.Pod = p
	case "lose-sandbox":
		x.observed().Sandboxes[0].Ready = false
	case "blind":
		x.observed().Listed = false
	case "see":
		x.observed().Listed = true
	case "reboot":
		x.observed().Sandboxes, x.observed().Containers = nil, nil
		x.restart(x.worker.desired.Pod)
	case "restart-agent":
		x.restart(x.worker.desired.Pod)
	case "crash-between-create-and-start":
		a := x.pending["container/"+f[1]]
		delete(x.pending, a.Key())
		x.addInstance(a)
		for i := range x.observed().Containers {
			if c := &x.observed().Containers[i]; c.Name == f[1] && c.State == lifecycle.Running {
				c.State, c.Times.Started = lifecycle.Created, time.Time{}
			}
		}
		x.restart(x.worker.desired.Pod)
	case "probe":
		c, _ := x.observed().NewestInstance(f[1])
		st := x.observed().Probes[c.ID]
		for _, kv := range f[2:] {
			k, v, _ := strings.Cut(kv, "=")
			switch k {
			case "started":
				st.Started = v == "true"
				st.Ready = st.Started && lifecycle.FindContainerSpec(x.worker.desired.Pod, f[1]).ReadinessProbe == nil
			case "ready":
				st.Ready = v == "true"
			case "gave-up":
				st.FailedProbe = v
			}
		}
		x.observed().Probes[c.ID] = st
	default:
		x.t.Fatalf("unknown command %q", line)
	}
}

// completeAll completes all planned actions until no more are planned.
func (x *world) completeAll() {
	for range 200 {
		if len(x.pending) == 0 {
			return
		}
		for _, k := range slices.Sorted(maps.Keys(x.pending)) {
			x.logf("> ok %s\n", k)
			x.completeAction(k, nil)
		}
		x.showState()
	}
	x.t.Fatal("the plan never comes to rest")
}

func (x *world) logf(format string, args ...any) { fmt.Fprintf(&x.log, format, args...) }

// showState calls Step and appends the plan and the status to the transcript.
func (x *world) showState() {
	p := x.planActions()
	for _, a := range p.Actions {
		x.logf("  %s\n", a)
	}
	if p.Done {
		x.logf("  done\n")
	} else if !p.Wake.IsZero() {
		x.logf("  wake at %s\n", p.Wake.Sub(x.epoch))
	}
	x.logf("  = %s\n", statusSummary(&x.worker.status.last))
}

func statusSummary(st *v1.PodStatus) string {
	var b strings.Builder
	b.WriteString(string(st.Phase))
	if st.Reason != "" {
		fmt.Fprintf(&b, " (%s)", st.Reason)
	}
	if st.PodIP != "" {
		b.WriteString(" " + st.PodIP)
	}
	for _, c := range st.Conditions {
		if c.Status == v1.ConditionTrue && c.Type != v1.PodScheduled {
			b.WriteString(" " + string(c.Type))
		}
	}
	for _, cs := range slices.Concat(st.InitContainerStatuses, st.ContainerStatuses, st.EphemeralContainerStatuses) {
		fmt.Fprintf(&b, "; %s", cs.Name)
		switch s := cs.State; {
		case s.Waiting != nil:
			fmt.Fprintf(&b, " waits: %s", s.Waiting.Reason)
			if s.Waiting.Message != "" {
				fmt.Fprintf(&b, " %q", s.Waiting.Message)
			}
		case s.Running != nil:
			b.WriteString(" runs")
		case s.Terminated != nil:
			fmt.Fprintf(&b, " ended: %s %d", s.Terminated.Reason, s.Terminated.ExitCode)
		}
		if cs.Ready {
			b.WriteString(", ready")
		}
		if cs.RestartCount > 0 {
			fmt.Fprintf(&b, ", %d restarts", cs.RestartCount)
		}
		if t := cs.LastTerminationState.Terminated; t != nil {
			fmt.Fprintf(&b, ", before: %s %d", t.Reason, t.ExitCode)
		}
	}
	return b.String()
}
