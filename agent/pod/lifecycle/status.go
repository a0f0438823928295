package lifecycle

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/resource"

	"keelson.dev/keelson/agent"
)

// Host has the data of the node that a pod's status contains.
type Host struct {
	IPs         []string // the first is the primary address
	RuntimeName string   // scheme of container IDs; "" = "keelson"
}

// ContainerID returns a container's ID as the status shows it, with the runtime's scheme.
func (h Host) ContainerID(id string) string {
	scheme := h.RuntimeName
	if scheme == "" {
		scheme = "keelson"
	}
	return scheme + "://" + id
}

// Status computes the pod's status by the rules of Kubernetes. last is the last reported status.
// Status copies the conditions of other components from last, and the transition times of unchanged
// conditions. Pure.
func Status(desired Desired, observed Observed, last v1.PodStatus, host Host, currentTime time.Time) v1.PodStatus {
	g := statusBuilder{desired: desired, observed: &observed, pod: desired.Pod, last: last, host: host,
		currentTime: currentTime}
	st := *last.DeepCopy()
	st.ObservedGeneration = desired.Pod.Generation
	if st.QOSClass == "" {
		st.QOSClass = QOS(desired.Pod)
	}
	if !observed.Times.Start.IsZero() {
		t := metav1.NewTime(observed.Times.Start)
		st.StartTime = &t
	}
	g.setAddresses(&st)
	sandbox := ""
	if sb, ok := observed.ReadySandbox(); ok {
		sandbox = sb.ID
	}
	// Removing the records of an ended pod must not reset its condition Initialized.
	previous := FindCondition(last.Conditions, v1.PodInitialized)
	g.initialized = hasPassedInit(desired.Pod, &observed, sandbox) ||
		IsEndRecorded(desired) && previous != nil && previous.Status == v1.ConditionTrue
	st.InitContainerStatuses = g.containerStatuses(desired.Pod.Spec.InitContainers)
	st.ContainerStatuses = g.containerStatuses(desired.Pod.Spec.Containers)
	st.EphemeralContainerStatuses = g.ephemeralStatuses()
	g.setPodResources(&st)
	st.Phase, st.Reason, st.Message = g.podPhase(&st)
	g.setConditions(&st)
	return st
}

// hasPassedInit reports whether the pod has passed its init containers in a sandbox, or in any
// sandbox if sandbox is "". It has passed them if each of them has finished there, or if a regular
// container was created there.
func hasPassedInit(pod *v1.Pod, observed *Observed, sandbox string) bool {
	if len(pod.Spec.InitContainers) == 0 {
		return true
	}
	for _, c := range observed.Containers {
		if isRegularContainer(pod, c.Name) && (sandbox == "" || c.Sandbox == sandbox) {
			return true
		}
	}
	for i := range pod.Spec.InitContainers {
		if !hasPassedContainer(pod, observed, &pod.Spec.InitContainers[i], sandbox) {
			return false
		}
	}
	return true
}

type statusBuilder struct {
	desired     Desired
	observed    *Observed
	pod         *v1.Pod
	last        v1.PodStatus
	host        Host
	currentTime time.Time
	initialized bool
}

func (g *statusBuilder) setAddresses(status *v1.PodStatus) {
	status.HostIP, status.HostIPs = "", nil
	for _, ip := range g.host.IPs {
		status.HostIPs = append(status.HostIPs, v1.HostIP{IP: ip})
	}
	if len(g.host.IPs) > 0 {
		status.HostIP = g.host.IPs[0]
	}
	ips := []string(nil)
	if g.pod.Spec.HostNetwork {
		if len(g.observed.Sandboxes) > 0 || status.PodIP != "" {
			ips = g.host.IPs
		}
	} else if sb, ok := g.observed.ReadySandbox(); ok {
		ips = sb.IPs
	} else if len(g.observed.Sandboxes) > 0 || IsTerminal(g.pod) {
		for _, ip := range status.PodIPs { // kept after the sandbox has ended
			ips = append(ips, ip.IP)
		}
	}
	status.PodIP, status.PodIPs = "", nil
	for _, ip := range ips {
		status.PodIPs = append(status.PodIPs, v1.PodIP{IP: ip})
	}
	if len(ips) > 0 {
		status.PodIP = ips[0]
	}
}

func (g *statusBuilder) containerStatuses(specs []v1.Container) []v1.ContainerStatus {
	var out []v1.ContainerStatus
	for i := range specs {
		if g.omitsStatus(specs[i].Name) {
			continue
		}
		cs := g.containerStatus(&specs[i])
		g.setDeviceHealth(&cs)
		if cs.Resources == nil && (g.isResizePending() || g.isResizeInProgress()) {
			g.setResources(&specs[i], &cs) // without resources the container would count as zero during the resize
		}
		out = append(out, cs)
	}
	return out
}

// omitsStatus reports whether the status omits a container. That is the case if the container never
// ran, and either the pod was rejected or an ended pod has no status of this container.
func (g *statusBuilder) omitsStatus(name string) bool {
	if c, ok := g.observed.NewestInstance(name); ok && c.State != Created {
		return false
	}
	old, had := findContainerStatus(&g.last, name)
	if had && old.ContainerID != "" {
		return false
	}
	return g.desired.Stop != nil && g.desired.Stop.Rejected || !had && IsTerminal(g.pod)
}

func findContainerStatus(status *v1.PodStatus, name string) (v1.ContainerStatus, bool) {
	for _, list := range [][]v1.ContainerStatus{status.InitContainerStatuses, status.ContainerStatuses,
		status.EphemeralContainerStatuses} {
		for _, cs := range list {
			if cs.Name == name {
				return cs, true
			}
		}
	}
	return v1.ContainerStatus{}, false
}

func (g *statusBuilder) containerStatus(spec *v1.Container) v1.ContainerStatus {
	cs := v1.ContainerStatus{Name: spec.Name, Image: spec.Image}
	no := false
	cs.Started = &no
	c, ok := g.observed.NewestInstance(spec.Name)
	if !ok {
		g.setMissingInstance(spec, &cs)
		return cs
	}
	cs.RestartCount = int32(c.Attempt)
	if c.Image.Name != "" {
		cs.Image = c.Image.Name
	}
	cs.ImageID = c.Image.ID
	if p, ok := g.observed.previousInstance(spec.Name); ok && p.State == Exited {
		cs.LastTerminationState = v1.ContainerState{Terminated: g.terminatedState(p)}
	} else if old, had := findContainerStatus(&g.last, spec.Name); had && c.Attempt > 0 && c.State != Exited {
		cs.LastTerminationState = old.LastTerminationState // the previous instance's record was lost in a reboot
	}
	if c.State != Created {
		cs.ContainerID = g.host.ContainerID(c.ID)
		cs.User, cs.StopSignal = c.Process.User.DeepCopy(), c.Process.StopSignal
	}
	switch c.State {
	case Created:
		g.setWaiting(spec, &cs, c.Attempt)
	case Running, Unknown:
		if g.observed.IsBusy("container/"+spec.Name) && g.observed.Busy["container/"+spec.Name].Kind == StartContainer {
			// A container counts as waiting until its postStart hook has ended.
			g.setWaiting(spec, &cs, c.Attempt)
			return cs
		}
		probe := g.observed.Probes[c.ID]
		cs.State.Running = &v1.ContainerStateRunning{StartedAt: metav1.NewTime(c.Times.Started)}
		started := probe.Started
		cs.Started, cs.Ready = &started, probe.Started && probe.Ready
		if IsInitContainer(g.pod, spec.Name) && !IsSidecar(g.pod, spec) {
			cs.Ready = false
		}
		g.setResources(spec, &cs)
		g.setVolumeMounts(spec, &cs)
	default:
		g.setResources(spec, &cs)
		g.setExited(spec, c, &cs)
	}
	return cs
}

func (g *statusBuilder) terminatedState(instance Container) *v1.ContainerStateTerminated {
	t := &v1.ContainerStateTerminated{ExitCode: instance.ExitCode, Reason: instance.Reason, Message: instance.Message,
		ContainerID: g.host.ContainerID(instance.ID),
		FinishedAt:  metav1.NewTime(instance.Times.Finished)}
	switch {
	case !instance.Times.Started.IsZero():
		t.StartedAt = metav1.NewTime(instance.Times.Started)
	case instance.Times.Created.IsZero() || instance.Times.Finished.Before(instance.Times.Created):
		t.StartedAt = t.FinishedAt
	default: // it failed before it started: clients require both times
		t.StartedAt = metav1.NewTime(instance.Times.Created)
	}
	if limit := terminationMessageLimit(g.pod); len(t.Message) > limit {
		t.Message = strings.ToValidUTF8(t.Message[:limit], "")
	}
	if t.Reason == "" {
		t.Reason = "Error"
		if instance.ExitCode == 0 {
			t.Reason = "Completed"
		}
	}
	return t
}

// setMissingInstance sets the status of a container of which the runtime has no instance, because
// the container was not created yet or its record was lost.
func (g *statusBuilder) setMissingInstance(spec *v1.Container, cs *v1.ContainerStatus) {
	old, had := findContainerStatus(&g.last, spec.Name)
	if had && old.ContainerID != "" &&
		(IsTerminal(g.pod) || g.desired.Stop != nil || g.startsNothing() || !shouldStartAgain(g.pod, spec)) {
		// The last status has an instance of an earlier boot, of which the runtime has no record.
		*cs = *old.DeepCopy()
		no := false
		cs.Started = &no
		if end := lostTermination(&old); cs.State.Terminated == nil {
			if end == old.LastTerminationState.Terminated {
				cs.LastTerminationState = v1.ContainerState{}
			}
			cs.State = v1.ContainerState{Terminated: end.DeepCopy()}
		}
		cs.Ready = IsInitContainer(g.pod, spec.Name) && !IsSidecar(g.pod, spec) && cs.State.Terminated.ExitCode == 0
		return
	}
	if had && old.ContainerID != "" {
		// It ran, but the runtime's record was lost in a reboot. Its ID stays in the status: the
		// next instance's count continues from it.
		cs.ContainerID, cs.RestartCount, cs.LastTerminationState = old.ContainerID, old.RestartCount,
			old.LastTerminationState
		switch {
		case old.State.Terminated != nil:
			cs.LastTerminationState = v1.ContainerState{Terminated: old.State.Terminated}
		case old.State.Running != nil:
			cs.LastTerminationState = v1.ContainerState{
				Terminated: &v1.ContainerStateTerminated{Reason: "ContainerStatusUnknown", ExitCode: 137,
					Message: "The container could not be located when the pod was deleted.  The container " +
						"used to be Running",
					ContainerID: old.ContainerID}}
		}
	}
	g.setWaiting(spec, cs, firstAttempt(g.pod, spec.Name))
}

// setWaiting sets the waiting state of a container, with its reason.
func (g *statusBuilder) setWaiting(spec *v1.Container, cs *v1.ContainerStatus, attempt uint32) {
	reason, message := "ContainerCreating", ""
	if len(g.pod.Spec.InitContainers) > 0 {
		reason = "PodInitializing"
	}
	_, sandbox := g.observed.ReadySandbox()
	if g.mayStart(spec) {
		if f, ok := g.observed.Failures["image/"+spec.Name]; ok && g.observed.Images[spec.Name].Ref == "" &&
			(sandbox || len(g.observed.Sandboxes) == 0) {
			reason, message = pullFailureReason(f, spec.Image, g.currentTime)
		}
		if f, ok := g.observed.Failures["container/"+spec.Name]; ok && f.Attempt == attempt {
			reason, message = f.Reason, f.Message
		}
	}
	cs.State.Waiting = &v1.ContainerStateWaiting{Reason: reason, Message: message}
}

// pullFailureReason returns the waiting reason of a container with a failed image pull: the reason
// of the failure, for example ErrImagePull. After pullErrorShown, ErrImagePull becomes
// ImagePullBackOff.
func pullFailureReason(failure Failure, image string, currentTime time.Time) (reason, message string) {
	if failure.Reason == "ErrImagePull" && !currentTime.Before(failure.At.Add(pullErrorShown)) {
		return "ImagePullBackOff", fmt.Sprintf("Back-off pulling image %q: ErrImagePull: %s", image, failure.Message)
	}
	return failure.Reason, failure.Message
}

// mayStart reports whether the container may be started now, as far as init containers are
// concerned: all init containers that precede it have passed. An ephemeral container waits for none
// of them. A status shows failures only of such a container.
func (g *statusBuilder) mayStart(spec *v1.Container) bool {
	if IsEphemeralContainer(g.pod, spec.Name) {
		return true
	}
	if !IsInitContainer(g.pod, spec.Name) || g.initialized {
		return g.initialized
	}
	sb, _ := g.observed.ReadySandbox()
	for i := range g.pod.Spec.InitContainers {
		c := &g.pod.Spec.InitContainers[i]
		if c.Name == spec.Name {
			return true
		}
		if !hasPassedContainer(g.pod, g.observed, c, sb.ID) {
			return false
		}
	}
	return false
}

// setExited sets the status of a container after its newest instance has ended: terminated, or
// waiting for a restart.
func (g *statusBuilder) setExited(spec *v1.Container, instance Container, cs *v1.ContainerStatus) {
	cs.State.Terminated = g.terminatedState(instance)
	if IsInitContainer(g.pod, spec.Name) && !IsSidecar(g.pod, spec) {
		cs.Ready = instance.ExitCode == 0
	}
	if g.desired.Stop != nil || IsTerminal(g.pod) ||
		!shouldRestart(g.pod, spec, instance, g.observed.Killed[instance.ID]) ||
		g.observed.IsBusy("container/"+spec.Name) {
		return
	}
	if sb, ok := g.observed.ReadySandbox(); ok && sb.ID != instance.Sandbox {
		return
	}
	wait := func(reason, message string) {
		cs.LastTerminationState = v1.ContainerState{Terminated: cs.State.Terminated}
		cs.State = v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: reason, Message: message}}
	}
	delay := restartDelay(g.pod, instance, isReplaced(g.observed, instance, spec))
	failed, hasFailed := g.observed.Failures["container/"+spec.Name]
	switch img, bad := g.observed.Failures["image/"+spec.Name]; {
	case g.currentTime.Before(instance.endTime().Add(delay)):
		wait("CrashLoopBackOff", crashLoopMessage(delay, spec.Name, g.pod))
	case bad && g.observed.Images[spec.Name].Attempt != instance.Attempt+1:
		wait(pullFailureReason(img, spec.Image, g.currentTime))
	case hasFailed && failed.Attempt == instance.Attempt+1:
		wait(failed.Reason, failed.Message)
	case hasFailed && failed.Attempt == instance.Attempt && failed.Reason == "RunContainerError":
		wait(failed.Reason, failed.Message)
	}
}

func crashLoopMessage(delay time.Duration, container string, pod *v1.Pod) string {
	return fmt.Sprintf("back-off %s restarting failed container=%s pod=%s_%s(%s)", delay, container, pod.Name,
		pod.Namespace, pod.UID)
}

// setResources sets the container's allocated resources, which are the granted requests, and its
// current resources. While a resize is not in effect, it reports the previous current resources.
func (g *statusBuilder) setResources(spec *v1.Container, cs *v1.ContainerStatus) {
	cs.AllocatedResources = spec.Resources.Requests.DeepCopy()
	cs.Resources = spec.Resources.DeepCopy()
	c, ok := g.observed.NewestInstance(spec.Name)
	if !ok || c.State != Running || !g.observed.Resize.InProgress || c.Limits == nil {
		return
	}
	target := ContainerResources(g.pod, spec, g.observed.Resize.Memory)
	if old, had := findContainerStatus(&g.last, spec.Name); had && old.Resources != nil &&
		(!EqualLimits(c.Limits, target) || resizeNeedsRestart(spec, c.Limits, target)) {
		cs.Resources = old.Resources.DeepCopy()
	}
}

// setPodResources sets the pod's allocated resources, which are the granted requests of the whole
// pod, and its current resources. As the sum over the containers, they do not include the overhead.
// While a resize is not in effect, the previous current resources stay.
func (g *statusBuilder) setPodResources(status *v1.PodStatus) {
	if g.desired.Stop != nil && g.desired.Stop.Rejected {
		return
	}
	own := resource.PodResourcesOptions{ExcludeOverhead: true}
	requests, limits := resource.PodRequests(g.pod, own), resource.PodLimits(g.pod, own)
	if len(requests)+len(limits) == 0 {
		status.AllocatedResources, status.Resources = nil, nil
		return
	}
	status.AllocatedResources = requests
	if !g.observed.Resize.InProgress || status.Resources == nil {
		status.Resources = &v1.ResourceRequirements{Requests: maps.Clone(requests), Limits: limits}
	}
}

// setVolumeMounts sets the status of the container's volume mounts.
func (g *statusBuilder) setVolumeMounts(spec *v1.Container, cs *v1.ContainerStatus) {
	for _, m := range spec.VolumeMounts {
		s := v1.VolumeMountStatus{Name: m.Name, MountPath: m.MountPath, ReadOnly: m.ReadOnly}
		if m.ReadOnly {
			mode := v1.RecursiveReadOnlyDisabled
			if m.RecursiveReadOnly != nil && *m.RecursiveReadOnly != mode {
				mode = v1.RecursiveReadOnlyEnabled
			}
			s.RecursiveReadOnly = &mode
		}
		cs.VolumeMounts = append(cs.VolumeMounts, s)
	}
}

// setDeviceHealth sets the health of the container's devices. After the devices are released, it
// sets their last known health.
func (g *statusBuilder) setDeviceHealth(cs *v1.ContainerStatus) {
	cs.AllocatedResourcesStatus = g.observed.Devices.Health[cs.Name]
	if old, had := findContainerStatus(&g.last, cs.Name); had && !g.observed.Devices.Held {
		cs.AllocatedResourcesStatus = old.AllocatedResourcesStatus
	}
}

// podPhase returns the pod's phase by the rules of Kubernetes, with its reason and message. A
// terminal phase is held back until the pod's devices are released, because after it the devices
// are allocated to other pods.
func (g *statusBuilder) podPhase(status *v1.PodStatus) (phase v1.PodPhase, reason, message string) {
	phase, reason, message = g.reachedPhase(status)
	refused := g.desired.Stop != nil && g.desired.Stop.Rejected
	if agent.IsTerminalPhase(phase) && !agent.IsTerminalPhase(g.last.Phase) && !IsTerminal(g.pod) &&
		(len(g.pod.Spec.ResourceClaims) > 0 || g.observed.Devices.Held) && !g.observed.Volumes.Unmounted && !refused {
		return v1.PodRunning, reason, message
	}
	return phase, reason, message
}

func (g *statusBuilder) reachedPhase(status *v1.PodStatus) (phase v1.PodPhase, reason, message string) {
	if IsTerminal(g.pod) {
		return g.pod.Status.Phase, g.pod.Status.Reason, g.pod.Status.Message
	}
	if agent.IsTerminalPhase(g.last.Phase) {
		return g.last.Phase, g.last.Reason, g.last.Message // a terminal phase is final, also before the API has it
	}
	if s := g.desired.Stop; s != nil && !s.Delete {
		if g.observed.HasRunningContainer() {
			return v1.PodRunning, s.Reason, s.Message
		}
		return v1.PodFailed, s.Reason, s.Message
	}
	if isDeadlineExpired(g.pod, g.observed.acknowledgedAt(), g.currentTime) {
		if g.observed.HasRunningContainer() {
			return v1.PodRunning, "DeadlineExceeded", deadlineMessage
		}
		return v1.PodFailed, "DeadlineExceeded", deadlineMessage
	}
	if hasInitFailed(g.pod, g.observed) && !g.observed.HasRunningContainer() {
		return v1.PodFailed, "", ""
	}
	return g.phaseFromContainers(status), "", ""
}

func (g *statusBuilder) phaseFromContainers(status *v1.PodStatus) v1.PodPhase {
	if !g.initialized && !g.hasEverRun(status) {
		return v1.PodPending
	}
	waiting, running, succeeded, failed := 0, 0, 0, 0
	for _, cs := range status.ContainerStatuses {
		t := cs.State.Terminated
		switch {
		case cs.State.Running != nil:
			running++
			continue
		case t == nil && cs.LastTerminationState.Terminated != nil:
			t = cs.LastTerminationState.Terminated
		case t == nil:
			waiting++
			continue
		}
		if t.ExitCode == 0 {
			succeeded++
		} else {
			failed++
		}
	}
	ended := g.desired.Stop != nil || g.haveAllEnded()
	others := g.hasRunningOther()
	switch {
	case waiting > 0:
		return v1.PodPending
	case running > 0, others, !ended:
		return v1.PodRunning
	case failed > 0:
		return v1.PodFailed
	default:
		return v1.PodSucceeded
	}
}

// hasEverRun reports whether a regular container has ever run. Such a pod stays Running while its
// sandbox is recreated.
func (g *statusBuilder) hasEverRun(status *v1.PodStatus) bool {
	return slices.ContainsFunc(status.ContainerStatuses, func(c v1.ContainerStatus) bool { return c.ContainerID != "" })
}

func (g *statusBuilder) haveAllEnded() bool {
	for i := range g.pod.Spec.Containers {
		if !hasEndedPermanently(g.pod, &g.pod.Spec.Containers[i], g.observed) {
			return false
		}
	}
	return true
}

// startsNothing reports whether no container of the pod will be started again: an init container
// failed permanently, or all regular containers have ended permanently.
func (g *statusBuilder) startsNothing() bool {
	return hasInitFailed(g.pod, g.observed) || g.haveAllEnded()
}

// hasRunningOther reports whether a sidecar or an ephemeral container runs. A pod does not reach a
// terminal phase before they have ended.
func (g *statusBuilder) hasRunningOther() bool {
	return slices.ContainsFunc(g.observed.Containers, func(c Container) bool {
		return c.State == Running && (IsInitContainer(g.pod, c.Name) || IsEphemeralContainer(g.pod, c.Name))
	})
}

// MaxMessages is the documented limit of the termination messages of a pod, in bytes.
const MaxMessages = 12 << 10

// terminationMessageLimit returns the maximum size of one container's termination message in the
// pod's status.
func terminationMessageLimit(pod *v1.Pod) int {
	return MaxMessages / max(1, len(pod.Spec.InitContainers)+len(pod.Spec.Containers)+
		len(pod.Spec.EphemeralContainers))
}
