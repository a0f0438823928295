package pod

import (
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Step returns the next actions for one pod. It is pure and total: every combination of inputs
// gives a plan. The plan is empty if there is nothing to do but wait.
//
// An action with a key in Observed.Busy is never planned again. A container is never started
// while an instance of it might run.
func Step(d Desired, o Observed, now time.Time) Plan {
	s := step{d: d, o: &o, now: now, pod: d.Pod}
	switch {
	case !o.Listed:
		// The runtime could not be listed. Any action might be a repetition of an earlier one.
		s.plan.wakeAt(now.Add(retryMin))
	case d.Stop != nil:
		s.stop(*d.Stop)
	case expired(d.Pod, o.since(), now):
		s.stop(Stop{Reason: "DeadlineExceeded", Message: deadlineMessage, Grace: grace(d.Pod)})
	case final(d.Pod) || s.finished():
		s.finish()
	default:
		s.plan.wakeAt(deadline(d.Pod, o.since()))
		s.run()
	}
	return s.plan
}

const deadlineMessage = "Pod was active on the node longer than the specified deadline"

type step struct {
	d    Desired
	o    *Observed
	now  time.Time
	pod  *v1.Pod
	plan Plan
}

func expired(pod *v1.Pod, started time.Time, now time.Time) bool {
	t := deadline(pod, started)
	return !t.IsZero() && !now.Before(t)
}

// final reports whether the pod's phase in the API is terminal.
func final(pod *v1.Pod) bool {
	return terminal(pod.Status.Phase)
}

func terminal(p v1.PodPhase) bool { return p == v1.PodSucceeded || p == v1.PodFailed }

func grace(pod *v1.Pod) time.Duration {
	if seconds := pod.Spec.TerminationGracePeriodSeconds; seconds != nil && *seconds < 0 {
		return time.Second // as in Kubernetes; a static pod may have a negative period
	} else if seconds != nil {
		return time.Duration(*seconds) * time.Second
	}
	return v1.DefaultTerminationGracePeriodSeconds * time.Second
}

// finished reports whether no container will ever be started again: an init container failed
// permanently, or all containers ended permanently. Sidecars may still run.
func (s *step) finished() bool {
	if failedInit(s.pod, s.o) {
		return true
	}
	for i := range s.pod.Spec.Containers {
		c := &s.pod.Spec.Containers[i]
		if !ended(s.pod, c, s.o) {
			return false
		}
	}
	return len(s.pod.Spec.Containers) > 0
}

// ended reports whether a container has run and will not be restarted.
func ended(pod *v1.Pod, spec *v1.Container, o *Observed) bool {
	c, ok := latest(pod, o, spec.Name)
	return ok && c.State == Exited && !o.busy("container/"+spec.Name) && !restarts(pod, spec, c, o.Killed[c.ID])
}

func failedInit(pod *v1.Pod, o *Observed) bool {
	for i := range pod.Spec.InitContainers {
		spec := &pod.Spec.InitContainers[i]
		if sidecar(pod, spec) {
			continue
		}
		if c, ok := latest(pod, o, spec.Name); ok && c.State == Exited && c.ExitCode != 0 && !restarts(pod, spec, c, o.Killed[c.ID]) {
			return true
		}
	}
	return false
}

// run plans the actions that start the pod and keep it running.
func (s *step) run() {
	s.collect()
	if !s.allocated() {
		return
	}
	s.mount()
	sb, ok := s.ensureSandbox()
	if !ok {
		// Pull images while the sandbox is being created.
		s.images(s.neverStarted())
		s.early()
		return
	}
	s.resize(sb)
	due := s.due(sb)
	s.images(append(due, s.neverStarted()...))
	s.start(due)
}

// early starts containers in a sandbox while its network is still being set up. They are created at
// once but run only after the setup. A container with the pod's address in its environment is not
// created before the address is known.
func (s *step) early() {
	if s.o.Early == "" || !s.o.busy((Action{Kind: CreateSandbox}).Key()) || len(s.o.Sandboxes) > 0 {
		return
	}
	var due []Action
	for _, a := range s.due(Sandbox{ID: s.o.Early}) {
		if !asksAddress(containerSpec(s.pod, a.Container)) {
			due = append(due, a)
		}
	}
	s.start(due)
}

// asksAddress reports whether a container's environment contains the pod's address.
func asksAddress(spec *v1.Container) bool {
	return slices.ContainsFunc(spec.Env, func(e v1.EnvVar) bool {
		return e.ValueFrom != nil && e.ValueFrom.FieldRef != nil && strings.HasPrefix(e.ValueFrom.FieldRef.FieldPath, "status.podIP")
	})
}

// start plans those starts for which the volumes and the image are ready.
func (s *step) start(due []Action) {
	if !s.o.Volumes.Mounted {
		return
	}
	for _, a := range due {
		img, ok := s.o.Images[a.Container]
		if !ok || img.Ref == "" || img.Attempt != a.Attempt || s.o.busy(a.Key()) {
			continue
		}
		if f, ok := s.o.Failures[a.Key()]; ok && f.Attempt == a.Attempt && s.now.Before(f.Retry) {
			s.plan.wakeAt(f.Retry)
			continue
		}
		s.plan.add(a)
	}
}

// allocated reports whether the pod has the devices that it requests. If not, it plans their
// allocation, because the pod may have to be rejected. A pod that has a sandbox or containers
// counts as allocated.
func (s *step) allocated() bool {
	if !s.o.Devices.Missing || len(s.o.Sandboxes)+len(s.o.Containers) > 0 {
		return true
	}
	if a := (Action{Kind: AllocateDevices}); !s.o.busy(a.Key()) {
		s.plan.add(a)
	}
	return false
}

func (s *step) mount() {
	a := Action{Kind: MountVolumes}
	if s.o.Volumes.Mounted || s.o.busy(a.Key()) || !s.retryDue(a.Key()) {
		return
	}
	s.plan.add(a)
}

// retryDue reports whether an action may run now. After a failure, it waits for the retry time.
func (s *step) retryDue(key string) bool {
	f, ok := s.o.Failures[key]
	if ok && s.now.Before(f.Retry) {
		s.plan.wakeAt(f.Retry)
		return false
	}
	return true
}

// ensureSandbox returns the usable sandbox, or plans to create one. All containers of a dead
// sandbox are stopped before, so that never two instances of a container run.
func (s *step) ensureSandbox() (Sandbox, bool) {
	if sb, ok := s.o.sandbox(); ok {
		s.oldSandboxes(s.o.Sandboxes[1:])
		return sb, true
	}
	create := Action{Kind: CreateSandbox}
	if s.o.busy(create.Key()) {
		return Sandbox{}, false
	}
	clear := true
	for _, c := range s.o.Containers {
		if c.State == Running || c.State == Unknown {
			clear = false
			s.kill(c, grace(s.pod), "Pod sandbox changed, it will be killed and re-created.")
		}
	}
	for _, key := range s.starting() {
		clear = false
		s.cancel(key)
	}
	for _, sb := range s.o.Sandboxes {
		create.Attempt = max(create.Attempt, sb.Attempt+1)
		stop := Action{Kind: StopSandbox, ID: sb.ID}
		if s.o.Settled[stop.Key()] && !sb.Ready {
			continue
		}
		if clear && !s.o.busy(stop.Key()) && s.retryDue(stop.Key()) {
			s.plan.add(stop)
		}
		clear = false
	}
	if clear && s.sandboxDue() && s.retryDue(create.Key()) {
		s.plan.add(create)
	}
	return Sandbox{}, false
}

// sandboxDue reports whether the next sandbox may be created. Sandboxes that die at once are spaced
// out.
func (s *step) sandboxDue() bool {
	if len(s.o.Sandboxes) == 0 {
		return true
	}
	last := s.o.Sandboxes[0]
	at := last.made().Add(grow(retryMin, retryMax, int(min(last.Attempt, 64))+1))
	if s.now.Before(at) {
		s.plan.wakeAt(at)
		return false
	}
	return true
}

// starting returns the keys of running StartContainer actions.
func (s *step) starting() []string {
	var keys []string
	for _, list := range [][]v1.Container{s.pod.Spec.InitContainers, s.pod.Spec.Containers} {
		for i := range list {
			if key := "container/" + list[i].Name; s.o.busy(key) {
				keys = append(keys, key)
			}
		}
	}
	return keys
}

// oldSandboxes stops previous sandboxes, and removes each of them when it has no containers left.
func (s *step) oldSandboxes(old []Sandbox) {
	for _, sb := range old {
		stop, remove := Action{Kind: StopSandbox, ID: sb.ID}, Action{Kind: RemoveSandbox, ID: sb.ID}
		holds := false
		for _, c := range s.o.Containers {
			holds = holds || c.Sandbox == sb.ID
		}
		switch {
		case s.o.busy(stop.Key()) || !s.retryDue(stop.Key()):
		case !s.o.Settled[stop.Key()]:
			s.plan.add(stop)
		case !holds:
			s.plan.add(remove)
		}
	}
}

// due returns the containers to start now in the sandbox. It plans to kill running containers that
// must not go on, and sets the wake time of later starts.
func (s *step) due(sb Sandbox) []Action {
	var due []Action
	initialized := s.initialized(sb)
	for i := range s.pod.Spec.InitContainers {
		spec := &s.pod.Spec.InitContainers[i]
		if initialized && !sidecar(s.pod, spec) {
			continue
		}
		a, start := s.container(spec, sb)
		if start {
			due = append(due, a)
		}
		if !initialized && !s.passed(spec, sb) {
			return due
		}
	}
	for i := range s.pod.Spec.Containers {
		if a, start := s.container(&s.pod.Spec.Containers[i], sb); start {
			due = append(due, a)
		}
	}
	return due
}

// initialized reports whether the init containers of this sandbox have finished: a regular
// container was created in it.
func (s *step) initialized(sb Sandbox) bool { return initializedIn(s.pod, s.o, sb.ID) }

func initializedIn(pod *v1.Pod, o *Observed, sandbox string) bool {
	for _, c := range o.Containers {
		if c.Sandbox == sandbox && !isInit(pod, c.Name) && containerSpec(pod, c.Name) != nil {
			return true
		}
	}
	return false
}

// passed reports whether the next init container may start after this one.
func (s *step) passed(spec *v1.Container, sb Sandbox) bool {
	return initPassed(s.pod, s.o, spec, sb.ID)
}

func initPassed(pod *v1.Pod, o *Observed, spec *v1.Container, sandbox string) bool {
	c, ok := o.newest(spec.Name)
	if !ok || c.Sandbox != sandbox || o.busy("container/"+spec.Name) {
		return false
	}
	if sidecar(pod, spec) {
		return c.State == Running && o.Probes[c.ID].Started
	}
	return c.State == Exited && c.ExitCode == 0
}

// container decides about one container in a usable sandbox. It returns the start action, and
// whether to perform it now.
func (s *step) container(spec *v1.Container, sb Sandbox) (Action, bool) {
	a := Action{Kind: StartContainer, Container: spec.Name, ID: sb.ID, Delay: noDelay}
	if s.o.busy(a.Key()) {
		return a, false
	}
	c, ok := s.o.newest(spec.Name)
	if !ok {
		a.Attempt = firstAttempt(s.pod, spec.Name)
		return a, again(s.pod, spec)
	}
	changed := remade(s.o, c, spec)
	switch c.State {
	case Created:
		// Its start failed or was interrupted by a crash. The created container is not used.
		s.remove(c)
		return a, false
	case Unknown:
		s.kill(c, grace(s.pod), fmt.Sprintf("Container %s is in unknown state, try killing it before restart", c.Name))
		return a, false
	case Running:
		s.watch(spec, c, sb)
		return a, false
	}
	if s.o.busy("end/" + c.ID) {
		return a, false
	}
	a.Attempt = c.Attempt + 1
	if c.Sandbox != sb.ID {
		// The sandbox was rebuilt: all containers start again, except those that have ended
		// permanently.
		if !isInit(s.pod, spec.Name) && !restarts(s.pod, spec, c, s.o.Killed[c.ID]) {
			return a, false
		}
		return a, true
	}
	if isInit(s.pod, spec.Name) && !sidecar(s.pod, spec) && c.ExitCode == 0 {
		return a, false
	}
	if !changed && !restarts(s.pod, spec, c, s.o.Killed[c.ID]) {
		return a, false
	}
	a.Delay = restartDelay(s.pod, c, changed)
	if at := c.end().Add(a.Delay); s.now.Before(at) {
		s.plan.wakeAt(at)
		return a, false
	}
	return a, true
}

// watch kills a running container if its spec changed, its sandbox was replaced, or its startup or
// liveness probe failed.
func (s *step) watch(spec *v1.Container, c Container, sb Sandbox) {
	probe := s.o.Probes[c.ID]
	switch {
	case c.Hash != specHash(spec):
		s.kill(c, grace(s.pod), fmt.Sprintf("Container %s definition changed, will be restarted", c.Name))
	case c.Sandbox != sb.ID:
		s.kill(c, grace(s.pod), "Pod sandbox changed, it will be killed and re-created.")
	case probe.FailedProbe != "":
		g := grace(s.pod)
		p := spec.LivenessProbe
		if probe.FailedProbe == "startup" {
			p = spec.StartupProbe
		}
		if p != nil && p.TerminationGracePeriodSeconds != nil {
			g = time.Duration(*p.TerminationGracePeriodSeconds) * time.Second
		}
		s.kill(c, g, fmt.Sprintf("Container %s failed %s probe, will be restarted", c.Name, probe.FailedProbe))
	}
}

// firstAttempt returns the attempt number of the first instance that the runtime knows. It
// continues the restart count of the last status, because the runtime's records do not survive a
// reboot.
func firstAttempt(pod *v1.Pod, name string) uint32 {
	for _, list := range [][]v1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for _, st := range list {
			if st.Name == name && st.ContainerID != "" {
				return uint32(st.RestartCount) + 1
			}
		}
	}
	return 0
}

// neverStarted returns the containers without any instance that will be started, so that their
// images can be pulled early.
func (s *step) neverStarted() []Action {
	var out []Action
	for _, list := range [][]v1.Container{s.pod.Spec.InitContainers, s.pod.Spec.Containers} {
		for i := range list {
			if _, ok := s.o.newest(list[i].Name); !ok && again(s.pod, &list[i]) {
				out = append(out, Action{Kind: StartContainer, Container: list[i].Name, Attempt: firstAttempt(s.pod, list[i].Name)})
			}
		}
	}
	return out
}

// images plans to look up or pull the image of each start.
func (s *step) images(starts []Action) {
	planned := map[string]bool{}
	for _, st := range starts {
		a := Action{Kind: EnsureImage, Container: st.Container, Attempt: st.Attempt}
		img, ok := s.o.Images[st.Container]
		if ok && img.Ref != "" && img.Attempt == st.Attempt || planned[a.Key()] || s.o.busy(a.Key()) || s.o.busy(st.Key()) {
			continue
		}
		planned[a.Key()] = true
		if f, ok := s.o.Failures[a.Key()]; ok {
			if shown := f.At.Add(pullErrorShown); s.now.Before(shown) {
				s.plan.wakeAt(shown)
			}
		}
		if s.retryDue(a.Key()) {
			s.plan.add(a)
		}
	}
}
