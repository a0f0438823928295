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
)

// world simulates a runtime, a clock and a worker's state without goroutines, for tests of the pure
// functions.
type world struct {
	t       *testing.T
	now     time.Time
	w       *worker
	seq     int
	pending map[string]Action // started and not completed
	starts  map[string]int    // instances of each container, across reboots
	log     strings.Builder
	epoch   time.Time
}

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newWorld(t *testing.T, pod *v1.Pod) *world {
	x := &world{t: t, now: epoch, epoch: epoch, pending: map[string]Action{}, starts: map[string]int{}}
	x.restart(pod)
	return x
}

// restart simulates an agent restart: the worker's state is lost, the runtime continues.
func (x *world) restart(pod *v1.Pod) {
	c := fake.NewCluster()
	cfg := &Config{Reporter: c, Objects: c, HostIPs: []string{"192.0.2.1"}, Now: func() time.Time { return x.now }}
	s := New(*cfg)
	old := x.w
	x.w = newWorker(&s.cfg, Desired{Pod: pod})
	if old != nil {
		x.w.o.Sandboxes, x.w.o.Containers = old.o.Sandboxes, old.o.Containers
		x.w.desired = old.desired
		x.w.last = old.last
		if x.w.last.StartTime != nil {
			x.w.o.StartTime = x.w.last.StartTime.Time
		}
		p := *pod
		p.Status = old.last
		x.w.desired.Pod = &p
	}
	x.w.o.Listed = true
	x.pending = map[string]Action{}
}

func (x *world) o() *Observed { return &x.w.o }

// plan calls Step and Status and starts the planned actions.
func (x *world) plan() Plan {
	p := Step(x.w.desired, x.w.o, x.now)
	x.w.last = Status(x.w.desired, x.w.o, x.w.last, x.w.cfg.host(), x.now)
	for _, a := range p.Actions {
		if a.Kind == Cancel {
			if _, ok := x.pending[a.Target]; !ok {
				x.t.Errorf("Step cancels %s, which is not under way", a.Target)
			}
			b := x.o().Busy[a.Target]
			b.Cancelled = true
			x.o().Busy[a.Target] = b
			continue
		}
		if _, ok := x.pending[a.Key()]; ok {
			x.t.Errorf("Step plans %s while %s is under way", a, x.pending[a.Key()])
		}
		b := Busy{Kind: a.Kind, Since: x.now}
		if a.Kind == KillContainer {
			b.Until = x.now.Add(a.Grace)
			if x.w.desired.Stop == nil {
				x.w.o.Killed[a.ID] = a.Why
			}
		}
		x.o().Busy[a.Key()], x.pending[a.Key()] = b, a
	}
	return p
}

// complete ends an action with the result err.
func (x *world) complete(key string, err error) {
	a, ok := x.pending[key]
	if !ok {
		x.t.Fatalf("%s is not under way; under way: %v", key, slices.Sorted(maps.Keys(x.pending)))
	}
	delete(x.pending, key)
	cancelled := x.o().Busy[key].Cancelled
	delete(x.o().Busy, key)
	if err == nil && !cancelled {
		x.effect(a)
	} else if cancelled && err == nil {
		err = errors.New("cancelled")
	}
	x.w.settle(a, err, cancelled)
}

// prepared simulates a sandbox in which containers can be created while its network is being
// attached.
func (x *world) prepared() {
	x.seq++
	x.o().Early = fmt.Sprintf("sb%d", x.seq)
}

// waits reports whether a running action cannot complete yet: a start waits for the sandbox's
// network.
func (x *world) waits(key string) bool {
	a := x.pending[key]
	return a.Kind == StartContainer && a.ID == x.o().Early
}

func (x *world) effect(a Action) {
	o := x.o()
	switch a.Kind {
	case CreateSandbox:
		if o.Early == "" {
			x.seq++
		}
		o.Sandboxes = append([]Sandbox{{ID: fmt.Sprintf("sb%d", x.seq), Attempt: a.Attempt, Ready: true, IPs: []string{fmt.Sprintf("10.88.0.%d", x.seq)}, Created: x.now}}, o.Sandboxes...)
	case EnsureImage:
		o.Images[a.Container] = Image{Ref: "sha256:1", Attempt: a.Attempt}
	case StartContainer:
		x.started(a)
	case KillContainer:
		x.exit(func(c *Container) bool { return c.ID == a.ID }, 143, "")
	case RemoveContainer:
		o.Containers = slices.DeleteFunc(o.Containers, func(c Container) bool { return c.ID == a.ID })
	case StopSandbox:
		x.exit(func(c *Container) bool { return c.Sandbox == a.ID }, 137, "")
		for i := range o.Sandboxes {
			o.Sandboxes[i].Ready = o.Sandboxes[i].Ready && o.Sandboxes[i].ID != a.ID
		}
	case RemoveSandbox:
		o.Containers = slices.DeleteFunc(o.Containers, func(c Container) bool { return c.Sandbox == a.ID })
		o.Sandboxes = slices.DeleteFunc(o.Sandboxes, func(s Sandbox) bool { return s.ID == a.ID })
	}
}

func (x *world) started(a Action) {
	o := x.o()
	spec := containerSpec(x.w.desired.Pod, a.Container)
	for _, c := range o.Containers {
		if c.Name == a.Container && c.State == Running {
			x.t.Errorf("second instance of %s started beside %s", a.Container, c.ID)
		}
	}
	x.seq++
	x.starts[a.Container]++
	c := Container{ID: fmt.Sprintf("%s-%d", a.Container, a.Attempt), Sandbox: a.ID, Name: a.Container, Attempt: a.Attempt, State: Running, Created: x.now, Started: x.now, Image: spec.Image, ImageID: "sha256:1", Hash: specHash(spec), Delay: a.Delay}
	if slices.ContainsFunc(o.Containers, func(old Container) bool { return old.ID == c.ID }) {
		c.ID += fmt.Sprintf("-%d", x.seq)
	}
	o.Containers = append(o.Containers, c)
	x.sort()
	probe := agent.ProbeState{Started: spec.StartupProbe == nil}
	probe.Ready = probe.Started && spec.ReadinessProbe == nil
	if !isInit(x.w.desired.Pod, a.Container) || sidecar(x.w.desired.Pod, spec) {
		o.Probes[c.ID] = probe
	}
}

func (x *world) sort() {
	slices.SortFunc(x.o().Containers, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(b.Attempt, a.Attempt), b.Created.Compare(a.Created))
	})
}

func (x *world) exit(which func(*Container) bool, code int32, reason string) {
	for i := range x.o().Containers {
		c := &x.o().Containers[i]
		if which(c) && (c.State == Running || c.State == Unknown) {
			c.State, c.ExitCode, c.Finished, c.Reason = Exited, code, x.now, reason
		}
	}
}

// command executes one line of a script.
func (x *world) command(line string) {
	f := strings.Fields(line)
	switch f[0] {
	case "prepared":
		x.prepared()
	case "lose-network":
		waiting := slices.DeleteFunc(slices.Sorted(maps.Keys(x.pending)), func(k string) bool { return !x.waits(k) })
		x.complete("sandbox", errors.New("no address is left"))
		for _, k := range waiting {
			x.complete(k, errNoSandbox)
		}
	case "ok":
		for _, k := range f[1:] {
			x.complete(k, nil)
		}
	case "fail":
		x.complete(f[1], &reasoned{f[2], errors.New(strings.Join(f[3:], " "))})
	case "exit":
		code, _ := strconv.Atoi(f[2])
		reason := ""
		if len(f) > 3 {
			reason = f[3]
		}
		x.exit(func(c *Container) bool { return c.Name == f[1] }, int32(code), reason)
	case "advance":
		d, err := time.ParseDuration(f[1])
		if err != nil {
			x.t.Fatal(err)
		}
		x.now = x.now.Add(d)
	case "delete":
		g, _ := strconv.ParseInt(f[1], 10, 64)
		p := x.w.desired.Pod.DeepCopy()
		t := metav1.NewTime(x.now.Add(time.Duration(g) * time.Second))
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &t, &g
		x.w.desired = Desired{Pod: p, Stop: DeletionStop(p)}
	case "refuse":
		x.w.desired.Stop = &Stop{Reason: f[1], Message: strings.Join(f[2:], " "), Refused: true}
	case "image":
		p := x.w.desired.Pod.DeepCopy()
		containerSpec(p, f[1]).Image = f[2]
		x.w.desired.Pod = p
	case "lose-sandbox":
		x.o().Sandboxes[0].Ready = false
	case "blind":
		x.o().Listed = false
	case "see":
		x.o().Listed = true
	case "reboot":
		x.o().Sandboxes, x.o().Containers = nil, nil
		x.restart(x.w.desired.Pod)
	case "restart-agent":
		x.restart(x.w.desired.Pod)
	case "crash-between-create-and-start":
		a := x.pending["container/"+f[1]]
		delete(x.pending, a.Key())
		x.started(a)
		for i := range x.o().Containers {
			if c := &x.o().Containers[i]; c.Name == f[1] && c.State == Running {
				c.State, c.Started = Created, time.Time{}
			}
		}
		x.restart(x.w.desired.Pod)
	case "probe":
		c, _ := x.o().newest(f[1])
		st := x.o().Probes[c.ID]
		for _, kv := range f[2:] {
			k, v, _ := strings.Cut(kv, "=")
			switch k {
			case "started":
				st.Started = v == "true"
				st.Ready = st.Started && containerSpec(x.w.desired.Pod, f[1]).ReadinessProbe == nil
			case "ready":
				st.Ready = v == "true"
			case "gave-up":
				st.FailedProbe = v
			}
		}
		x.o().Probes[c.ID] = st
	default:
		x.t.Fatalf("unknown command %q", line)
	}
}

// auto completes all planned actions until no more are planned.
func (x *world) auto() {
	for range 200 {
		if len(x.pending) == 0 {
			return
		}
		for _, k := range slices.Sorted(maps.Keys(x.pending)) {
			x.print("> ok %s\n", k)
			x.complete(k, nil)
		}
		x.show()
	}
	x.t.Fatal("the plan never comes to rest")
}

func (x *world) print(format string, args ...any) { fmt.Fprintf(&x.log, format, args...) }

// show calls Step and appends the plan and the status to the transcript.
func (x *world) show() {
	p := x.plan()
	for _, a := range p.Actions {
		x.print("  %s\n", a)
	}
	if p.Done {
		x.print("  done\n")
	} else if !p.Wake.IsZero() {
		x.print("  wake at %s\n", p.Wake.Sub(x.epoch))
	}
	x.print("  = %s\n", summary(&x.w.last))
}

func summary(st *v1.PodStatus) string {
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
	for _, cs := range append(slices.Clone(st.InitContainerStatuses), st.ContainerStatuses...) {
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
