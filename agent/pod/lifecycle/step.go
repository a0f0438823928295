package lifecycle

import (
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// Step returns the next actions for one pod, and when to call it again. It is pure and total: every
// combination of inputs gives a plan. The plan is empty if there is nothing to do but wait.
//
// An action with a key in Observed.Busy is never planned again. A container is never started while
// an instance of it might run.
func Step(desired Desired, observed Observed, currentTime time.Time) Plan {
	s := planner{desired: desired, observed: &observed, currentTime: currentTime, pod: desired.Pod}
	switch {
	case !observed.Listed:
		// The runtime could not be listed. Any action might be a repetition of an earlier one.
		s.plan.WakeAt(currentTime.Add(RetryMin))
	case desired.Stop != nil:
		s.planStop(*desired.Stop)
	case isDeadlineExpired(desired.Pod, observed.acknowledgedAt(), currentTime):
		s.planStop(Stop{Reason: "DeadlineExceeded", Message: deadlineMessage, Grace: GracePeriod(desired.Pod)})
	case IsTerminal(desired.Pod) || s.areContainersFinished():
		s.planFinish()
	default:
		s.plan.WakeAt(activeDeadline(desired.Pod, observed.acknowledgedAt()))
		s.planRunning()
	}
	return s.plan
}

const deadlineMessage = "Pod was active on the node longer than the specified deadline"

type planner struct {
	desired     Desired
	observed    *Observed
	currentTime time.Time
	pod         *v1.Pod
	plan        Plan
}

func isDeadlineExpired(pod *v1.Pod, started time.Time, currentTime time.Time) bool {
	t := activeDeadline(pod, started)
	return !t.IsZero() && !currentTime.Before(t)
}

// IsTerminal reports whether the pod's phase in the API is terminal.
func IsTerminal(pod *v1.Pod) bool {
	return agent.IsTerminalPhase(pod.Status.Phase)
}

// GracePeriod returns the termination grace period in the pod's spec, or the default of 30 s. As in
// Kubernetes, a negative period counts as one second.
func GracePeriod(pod *v1.Pod) time.Duration {
	if seconds := pod.Spec.TerminationGracePeriodSeconds; seconds != nil && *seconds < 0 {
		return time.Second // as in Kubernetes; a static pod may have a negative period
	} else if seconds != nil {
		return time.Duration(*seconds) * time.Second
	}
	return v1.DefaultTerminationGracePeriodSeconds * time.Second
}

// areContainersFinished reports whether no container will ever be started again: an init container
// failed permanently, or all containers ended permanently. Sidecars may still run.
func (s *planner) areContainersFinished() bool {
	if hasInitFailed(s.pod, s.observed) {
		return true
	}
	for i := range s.pod.Spec.Containers {
		c := &s.pod.Spec.Containers[i]
		if !hasEndedPermanently(s.pod, c, s.observed) {
			return false
		}
	}
	return len(s.pod.Spec.Containers) > 0
}

// hasEndedPermanently reports whether a container has run and will not be restarted.
func hasEndedPermanently(pod *v1.Pod, spec *v1.Container, observed *Observed) bool {
	c, ok := latestInstance(pod, observed, spec.Name)
	return ok && c.State == Exited && !observed.IsBusy("container/"+spec.Name) &&
		!shouldRestart(pod, spec, c, observed.Killed[c.ID])
}

func hasInitFailed(pod *v1.Pod, observed *Observed) bool {
	for i := range pod.Spec.InitContainers {
		spec := &pod.Spec.InitContainers[i]
		if IsSidecar(pod, spec) {
			continue
		}
		if c, ok := latestInstance(pod, observed, spec.Name); ok && c.State == Exited && c.ExitCode != 0 &&
			!shouldRestart(pod, spec, c, observed.Killed[c.ID]) {
			return true
		}
	}
	return false
}

// planRunning plans the next actions that start the pod's containers or keep them running.
func (s *planner) planRunning() {
	s.planRecordRemoval()
	if !s.ensureDevices() {
		return
	}
	s.planMount()
	sb, ok := s.ensureSandbox()
	if !ok {
		// Pull images while the sandbox is being created.
		s.planImages(s.neverStarted())
		s.planEarlyStarts()
		return
	}
	s.planResize(sb)
	due := append(s.dueEphemeralStarts(sb), s.dueStarts(sb)...)
	s.planImages(append(due, s.neverStarted()...))
	s.planStarts(due)
}

// planEarlyStarts plans to start containers in a sandbox while the sandbox's network is still being
// set up. Such a container is created immediately, but runs only after the setup. A container with
// the pod's address in its environment is not planned before the address is known.
func (s *planner) planEarlyStarts() {
	if s.observed.EarlySandbox == "" || !s.observed.IsBusy((Action{Kind: CreateSandbox}).Key()) ||
		len(s.observed.Sandboxes) > 0 {
		return
	}
	var due []Action
	for _, a := range s.dueStarts(Sandbox{ID: s.observed.EarlySandbox}) {
		if !usesPodAddress(FindContainerSpec(s.pod, a.Container)) {
			due = append(due, a)
		}
	}
	s.planStarts(due)
}

// usesPodAddress reports whether a container's environment contains the pod's address.
func usesPodAddress(spec *v1.Container) bool {
	return slices.ContainsFunc(spec.Env, func(e v1.EnvVar) bool {
		return e.ValueFrom != nil && e.ValueFrom.FieldRef != nil &&
			strings.HasPrefix(e.ValueFrom.FieldRef.FieldPath, "status.podIP")
	})
}

// planStarts plans those start actions in due for which the pod's volumes are mounted and the
// container's image is present. After a failed start it waits until the retry time.
func (s *planner) planStarts(due []Action) {
	if !s.observed.Volumes.Mounted {
		return
	}
	for _, a := range due {
		img, ok := s.observed.Images[a.Container]
		if !ok || img.Ref == "" || img.Attempt != a.Attempt || s.observed.IsBusy(a.Key()) {
			continue
		}
		if f, ok := s.observed.Failures[a.Key()]; ok && f.Attempt == a.Attempt && s.currentTime.Before(f.Retry) {
			s.plan.WakeAt(f.Retry)
			continue
		}
		s.plan.addAction(a)
	}
}

// ensureDevices reports whether the pod has the device-plugin devices that it requests. If not, it
// plans their allocation, before anything of the pod is created: without devices the pod is
// rejected. A pod that has a sandbox or containers counts as allocated.
func (s *planner) ensureDevices() bool {
	if !s.observed.Devices.Missing || len(s.observed.Sandboxes)+len(s.observed.Containers) > 0 {
		return true
	}
	if a := (Action{Kind: AllocateDevices}); !s.observed.IsBusy(a.Key()) {
		s.plan.addAction(a)
	}
	return false
}

func (s *planner) planMount() {
	a := Action{Kind: MountVolumes}
	if s.observed.Volumes.Mounted || s.observed.IsBusy(a.Key()) || !s.isRetryDue(a.Key()) {
		return
	}
	s.plan.addAction(a)
}

// isRetryDue reports whether the action with a key may run now. After a failure, an action may run
// again at its retry time; until then isRetryDue plans to wake at that time.
func (s *planner) isRetryDue(key string) bool {
	f, ok := s.observed.Failures[key]
	if ok && s.currentTime.Before(f.Retry) {
		s.plan.WakeAt(f.Retry)
		return false
	}
	return true
}

// ensureSandbox returns the ready sandbox and true. If no sandbox is ready, it plans to create one
// and returns false. It first plans to stop all containers and the dead sandboxes, so that two
// instances of a container never run at the same time.
func (s *planner) ensureSandbox() (Sandbox, bool) {
	if sb, ok := s.observed.ReadySandbox(); ok {
		s.planOldSandboxes(s.observed.Sandboxes[1:])
		return sb, true
	}
	create := Action{Kind: CreateSandbox}
	if s.observed.IsBusy(create.Key()) {
		return Sandbox{}, false
	}
	stopped := true
	for _, c := range s.observed.Containers {
		if c.State == Running || c.State == Unknown {
			stopped = false
			s.planKill(c, GracePeriod(s.pod), "Pod sandbox changed, it will be killed and re-created.")
		}
	}
	for _, key := range s.startingKeys() {
		stopped = false
		s.planCancel(key)
	}
	for _, sb := range s.observed.Sandboxes {
		create.Attempt = max(create.Attempt, sb.Attempt+1)
		stop := Action{Kind: StopSandbox, ID: sb.ID}
		if s.observed.Finished[stop.Key()] && !sb.Ready {
			continue
		}
		if stopped && !s.observed.IsBusy(stop.Key()) && s.isRetryDue(stop.Key()) {
			s.plan.addAction(stop)
		}
		stopped = false
	}
	if stopped && s.isSandboxDue() && s.isRetryDue(create.Key()) {
		s.plan.addAction(create)
	}
	return Sandbox{}, false
}

// isSandboxDue reports whether the next sandbox may be created. The delay between the creation of
// two sandboxes doubles, so that a sandbox that dies immediately is not recreated in a loop.
func (s *planner) isSandboxDue() bool {
	if len(s.observed.Sandboxes) == 0 {
		return true
	}
	last := s.observed.Sandboxes[0]
	at := last.creationTime().Add(ExponentialDelay(RetryMin, RetryMax, int(min(last.Attempt, 64))+1))
	if s.currentTime.Before(at) {
		s.plan.WakeAt(at)
		return false
	}
	return true
}

// startingKeys returns the keys of running StartContainer actions.
func (s *planner) startingKeys() []string {
	var keys []string
	add := func(spec *v1.Container) {
		if key := "container/" + spec.Name; s.observed.IsBusy(key) {
			keys = append(keys, key)
		}
	}
	ForEachContainer(s.pod, add)
	for i := range s.pod.Spec.EphemeralContainers {
		add(EphemeralSpec(s.pod, i))
	}
	return keys
}

// planOldSandboxes plans to stop the sandboxes that a newer sandbox has replaced. It plans to
// remove each of them when it is stopped and has no containers left.
func (s *planner) planOldSandboxes(old []Sandbox) {
	for _, sb := range old {
		stop, remove := Action{Kind: StopSandbox, ID: sb.ID}, Action{Kind: RemoveSandbox, ID: sb.ID}
		holds := false
		for _, c := range s.observed.Containers {
			holds = holds || c.Sandbox == sb.ID
		}
		switch {
		case s.observed.IsBusy(stop.Key()) || !s.isRetryDue(stop.Key()):
		case !s.observed.Finished[stop.Key()]:
			s.plan.addAction(stop)
		case !holds:
			s.plan.addAction(remove)
		}
	}
}

// dueStarts returns the actions that start containers in the sandbox now. It also plans to kill
// running containers that must be restarted, and to wake when the restart delay of another
// container ends.
func (s *planner) dueStarts(sb Sandbox) []Action {
	var due []Action
	initialized := s.isInitialized(sb)
	for i := range s.pod.Spec.InitContainers {
		spec := &s.pod.Spec.InitContainers[i]
		if initialized && !IsSidecar(s.pod, spec) {
			continue
		}
		a, start := s.planContainer(spec, sb)
		if start {
			due = append(due, a)
		}
		if !initialized && !s.hasPassed(spec, sb) {
			return due
		}
	}
	for i := range s.pod.Spec.Containers {
		if a, start := s.planContainer(&s.pod.Spec.Containers[i], sb); start {
			due = append(due, a)
		}
	}
	return due
}

// isInitialized reports whether the init containers have finished in the sandbox, that is, whether
// a regular container was created in it.
func (s *planner) isInitialized(sb Sandbox) bool { return isInitializedIn(s.pod, s.observed, sb.ID) }

func isInitializedIn(pod *v1.Pod, observed *Observed, sandbox string) bool {
	for _, c := range observed.Containers {
		if c.Sandbox == sandbox && isRegularContainer(pod, c.Name) {
			return true
		}
	}
	return false
}

// hasPassed reports whether the next init container may start. For that, the container must have
// exited with code 0 in the sandbox. A sidecar must run there and have passed its startup probe.
func (s *planner) hasPassed(spec *v1.Container, sb Sandbox) bool {
	return hasPassedContainer(s.pod, s.observed, spec, sb.ID)
}

func hasPassedContainer(pod *v1.Pod, observed *Observed, spec *v1.Container, sandbox string) bool {
	c, ok := observed.NewestInstance(spec.Name)
	if !ok || c.Sandbox != sandbox || observed.IsBusy("container/"+spec.Name) {
		return false
	}
	if IsSidecar(pod, spec) {
		return c.State == Running && observed.Probes[c.ID].Started
	}
	return c.State == Exited && c.ExitCode == 0
}

// planContainer decides about one container in a ready sandbox. It returns the action that starts
// the container, and whether to perform the action now. It plans to remove or stop an existing
// instance that must be replaced.
func (s *planner) planContainer(spec *v1.Container, sb Sandbox) (Action, bool) {
	a := Action{Kind: StartContainer, Container: spec.Name, ID: sb.ID, Delay: NoDelay}
	if s.observed.IsBusy(a.Key()) {
		return a, false
	}
	c, ok := s.observed.NewestInstance(spec.Name)
	if !ok {
		a.Attempt = firstAttempt(s.pod, spec.Name)
		return a, shouldStartAgain(s.pod, spec)
	}
	changed := isReplaced(s.observed, c, spec)
	switch c.State {
	case Created:
		// Its start failed or was interrupted by a crash. The created container is not used.
		s.planRemove(c)
		return a, false
	case Unknown:
		s.planKill(c, GracePeriod(s.pod), fmt.Sprintf("Container %s is in unknown state, try killing it before restart",
			c.Name))
		return a, false
	case Running:
		s.checkRunning(spec, c, sb)
		return a, false
	}
	if s.observed.IsBusy("end/" + c.ID) {
		return a, false
	}
	a.Attempt = c.Attempt + 1
	if c.Sandbox != sb.ID {
		// The sandbox was rebuilt: all containers start again, except those that have ended
		// permanently.
		if !IsInitContainer(s.pod, spec.Name) && !shouldRestart(s.pod, spec, c, s.observed.Killed[c.ID]) {
			return a, false
		}
		return a, true
	}
	if IsInitContainer(s.pod, spec.Name) && !IsSidecar(s.pod, spec) && c.ExitCode == 0 {
		return a, false
	}
	if !changed && !shouldRestart(s.pod, spec, c, s.observed.Killed[c.ID]) {
		return a, false
	}
	a.Delay = restartDelay(s.pod, c, changed)
	if at := c.endTime().Add(a.Delay); s.currentTime.Before(at) {
		s.plan.WakeAt(at)
		return a, false
	}
	return a, true
}

// checkRunning plans to kill a running container if its image changed, its sandbox was replaced, or
// its startup or liveness probe failed.
func (s *planner) checkRunning(spec *v1.Container, instance Container, sb Sandbox) {
	probe := s.observed.Probes[instance.ID]
	switch {
	case instance.Hash != SpecHash(spec):
		s.planKill(instance, GracePeriod(s.pod), fmt.Sprintf("Container %s definition changed, will be restarted",
			instance.Name))
	case instance.Sandbox != sb.ID:
		s.planKill(instance, GracePeriod(s.pod), "Pod sandbox changed, it will be killed and re-created.")
	case probe.FailedProbe != "":
		g := GracePeriod(s.pod)
		p := spec.LivenessProbe
		if probe.FailedProbe == "startup" {
			p = spec.StartupProbe
		}
		if p != nil && p.TerminationGracePeriodSeconds != nil {
			g = time.Duration(*p.TerminationGracePeriodSeconds) * time.Second
		}
		s.planKill(instance, g, fmt.Sprintf("Container %s failed %s probe, will be restarted", instance.Name,
			probe.FailedProbe))
	}
}

// firstAttempt returns the attempt number for a container of which the runtime has no instance. The
// number continues the restart count of the pod's status, because the runtime's records do not
// survive a reboot.
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

// neverStarted returns the start actions of the containers that have no instance yet but will be
// started. Their images can be pulled early.
func (s *planner) neverStarted() []Action {
	var out []Action
	for _, list := range [][]v1.Container{s.pod.Spec.InitContainers, s.pod.Spec.Containers} {
		for i := range list {
			if _, ok := s.observed.NewestInstance(list[i].Name); !ok && shouldStartAgain(s.pod, &list[i]) {
				out = append(out, Action{Kind: StartContainer, Container: list[i].Name,
					Attempt: firstAttempt(s.pod, list[i].Name)})
			}
		}
	}
	return append(out, s.neverStartedEphemeral()...)
}

// planImages plans to look up or pull the image for each of the start actions.
func (s *planner) planImages(starts []Action) {
	planned := map[string]bool{}
	for _, st := range starts {
		a := Action{Kind: EnsureImage, Container: st.Container, Attempt: st.Attempt}
		img, ok := s.observed.Images[st.Container]
		if ok && img.Ref != "" && img.Attempt == st.Attempt || planned[a.Key()] || s.observed.IsBusy(a.Key()) ||
			s.observed.IsBusy(st.Key()) {
			continue
		}
		planned[a.Key()] = true
		if f, ok := s.observed.Failures[a.Key()]; ok {
			if shown := f.At.Add(pullErrorShown); s.currentTime.Before(shown) {
				s.plan.WakeAt(shown)
			}
		}
		if s.isRetryDue(a.Key()) {
			s.plan.addAction(a)
		}
	}
}
