package pod

import (
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Host is the node's data in a pod's status.
type Host struct {
	IPs         []string // the first is the primary address
	RuntimeName string   // scheme of container IDs; "" = "keelson"
}

// Status computes the pod's status by the rules of Kubernetes. last is the last reported status:
// transition times and conditions of other owners are taken from it. Pure.
func Status(d Desired, o Observed, last v1.PodStatus, host Host, now time.Time) v1.PodStatus {
	g := gen{d: d, o: &o, pod: d.Pod, last: last, host: host, now: now}
	st := *last.DeepCopy()
	st.ObservedGeneration = d.Pod.Generation
	if st.QOSClass == "" {
		st.QOSClass = QOS(d.Pod)
	}
	if !o.StartTime.IsZero() {
		t := metav1.NewTime(o.StartTime)
		st.StartTime = &t
	}
	g.addresses(&st)
	sandbox := ""
	if sb, ok := o.sandbox(); ok {
		sandbox = sb.ID
	}
	// Removing the records of an ended pod must not reset its condition Initialized.
	was := find(last.Conditions, v1.PodInitialized)
	g.initDone = initialized(d.Pod, &o, sandbox) || onRecord(d) && was != nil && was.Status == v1.ConditionTrue
	st.InitContainerStatuses = g.containers(d.Pod.Spec.InitContainers)
	st.ContainerStatuses = g.containers(d.Pod.Spec.Containers)
	st.Phase, st.Reason, st.Message = g.phase(&st)
	g.conditions(&st)
	return st
}

// initialized reports whether the pod has passed its init containers: in this sandbox, or in any
// sandbox if sandbox is "".
func initialized(pod *v1.Pod, o *Observed, sandbox string) bool {
	if len(pod.Spec.InitContainers) == 0 {
		return true
	}
	for _, c := range o.Containers {
		if !isInit(pod, c.Name) && (sandbox == "" || c.Sandbox == sandbox) {
			return true
		}
	}
	for i := range pod.Spec.InitContainers {
		if !initPassed(pod, o, &pod.Spec.InitContainers[i], sandbox) {
			return false
		}
	}
	return true
}

type gen struct {
	d        Desired
	o        *Observed
	pod      *v1.Pod
	last     v1.PodStatus
	host     Host
	now      time.Time
	initDone bool
}

func (g *gen) addresses(st *v1.PodStatus) {
	st.HostIP, st.HostIPs = "", nil
	for _, ip := range g.host.IPs {
		st.HostIPs = append(st.HostIPs, v1.HostIP{IP: ip})
	}
	if len(g.host.IPs) > 0 {
		st.HostIP = g.host.IPs[0]
	}
	ips := []string(nil)
	if g.pod.Spec.HostNetwork {
		if len(g.o.Sandboxes) > 0 || st.PodIP != "" {
			ips = g.host.IPs
		}
	} else if sb, ok := g.o.sandbox(); ok {
		ips = sb.IPs
	} else if len(g.o.Sandboxes) > 0 || final(g.pod) {
		for _, ip := range st.PodIPs { // kept after the sandbox has ended
			ips = append(ips, ip.IP)
		}
	}
	st.PodIP, st.PodIPs = "", nil
	for _, ip := range ips {
		st.PodIPs = append(st.PodIPs, v1.PodIP{IP: ip})
	}
	if len(ips) > 0 {
		st.PodIP = ips[0]
	}
}

func (g *gen) containers(specs []v1.Container) []v1.ContainerStatus {
	var out []v1.ContainerStatus
	for i := range specs {
		if g.statusless(specs[i].Name) {
			continue
		}
		cs := g.container(&specs[i])
		g.devices(&cs)
		if cs.Resources == nil && (g.pendingResize() || g.openResize()) {
			g.resources(&specs[i], &cs) // without resources the container would count as zero during the resize
		}
		out = append(out, cs)
	}
	return out
}

// statusless reports whether the status omits a container. It never ran, and either the pod was
// rejected, or the pod has ended without a status of the container.
func (g *gen) statusless(name string) bool {
	if c, ok := g.o.newest(name); ok && c.State != Created {
		return false
	}
	old, had := lastStatus(&g.last, name)
	if had && old.ContainerID != "" {
		return false
	}
	return g.d.Stop != nil && g.d.Stop.Refused || !had && final(g.pod)
}

func lastStatus(st *v1.PodStatus, name string) (v1.ContainerStatus, bool) {
	for _, list := range [][]v1.ContainerStatus{st.InitContainerStatuses, st.ContainerStatuses} {
		for _, cs := range list {
			if cs.Name == name {
				return cs, true
			}
		}
	}
	return v1.ContainerStatus{}, false
}

func (g *gen) container(spec *v1.Container) v1.ContainerStatus {
	cs := v1.ContainerStatus{Name: spec.Name, Image: spec.Image}
	no := false
	cs.Started = &no
	c, ok := g.o.newest(spec.Name)
	if !ok {
		g.noInstance(spec, &cs)
		return cs
	}
	cs.RestartCount = int32(c.Attempt)
	if c.Image != "" {
		cs.Image = c.Image
	}
	cs.ImageID = c.ImageID
	if p, ok := g.o.previous(spec.Name); ok && p.State == Exited {
		cs.LastTerminationState = v1.ContainerState{Terminated: g.terminated(p)}
	} else if old, had := lastStatus(&g.last, spec.Name); had && c.Attempt > 0 && c.State != Exited {
		cs.LastTerminationState = old.LastTerminationState // the previous instance's record was lost in a reboot
	}
	if c.State != Created {
		cs.ContainerID = g.id(c.ID)
	}
	switch c.State {
	case Created:
		g.waiting(spec, &cs, c.Attempt)
	case Running, Unknown:
		if g.o.busy("container/"+spec.Name) && g.o.Busy["container/"+spec.Name].Kind == StartContainer {
			// A container counts as waiting until its postStart hook has ended.
			g.waiting(spec, &cs, c.Attempt)
			return cs
		}
		probe := g.o.Probes[c.ID]
		cs.State.Running = &v1.ContainerStateRunning{StartedAt: metav1.NewTime(c.Started)}
		started := probe.Started
		cs.Started, cs.Ready = &started, probe.Started && probe.Ready
		if isInit(g.pod, spec.Name) && !sidecar(g.pod, spec) {
			cs.Ready = false
		}
		g.resources(spec, &cs)
		g.mounts(spec, &cs)
	default:
		g.exited(spec, c, &cs)
	}
	return cs
}

func (g *gen) id(id string) string {
	scheme := g.host.RuntimeName
	if scheme == "" {
		scheme = "keelson"
	}
	return scheme + "://" + id
}

func (g *gen) terminated(c Container) *v1.ContainerStateTerminated {
	t := &v1.ContainerStateTerminated{ExitCode: c.ExitCode, Signal: c.Signal, Reason: c.Reason, Message: c.Message, ContainerID: g.id(c.ID),
		FinishedAt: metav1.NewTime(c.Finished)}
	switch {
	case !c.Started.IsZero():
		t.StartedAt = metav1.NewTime(c.Started)
	case c.Created.IsZero() || c.Finished.Before(c.Created):
		t.StartedAt = t.FinishedAt
	default: // it failed before it started: clients require both times
		t.StartedAt = metav1.NewTime(c.Created)
	}
	if most := shareOfMessages(g.pod); len(t.Message) > most {
		t.Message = strings.ToValidUTF8(t.Message[:most], "")
	}
	if t.Reason == "" {
		t.Reason = "Error"
		if c.ExitCode == 0 {
			t.Reason = "Completed"
		}
	}
	return t
}

// noInstance sets the status of a container that the runtime does not know: not created yet, or its
// record was lost.
func (g *gen) noInstance(spec *v1.Container, cs *v1.ContainerStatus) {
	old, had := lastStatus(&g.last, spec.Name)
	if had && old.ContainerID != "" && (final(g.pod) || g.d.Stop != nil || g.over() || !again(g.pod, spec)) {
		// The last status has an instance of an earlier boot, of which the runtime has no record.
		*cs = *old.DeepCopy()
		no := false
		cs.Started = &no
		if end := lostEnd(&old); cs.State.Terminated == nil {
			if end == old.LastTerminationState.Terminated {
				cs.LastTerminationState = v1.ContainerState{}
			}
			cs.State = v1.ContainerState{Terminated: end.DeepCopy()}
		}
		cs.Ready = isInit(g.pod, spec.Name) && !sidecar(g.pod, spec) && cs.State.Terminated.ExitCode == 0
		return
	}
	if had && old.ContainerID != "" {
		// It ran, but the runtime's record was lost in a reboot. Its ID stays in the status: the
		// next instance's count continues from it.
		cs.ContainerID, cs.RestartCount, cs.LastTerminationState = old.ContainerID, old.RestartCount, old.LastTerminationState
		switch {
		case old.State.Terminated != nil:
			cs.LastTerminationState = v1.ContainerState{Terminated: old.State.Terminated}
		case old.State.Running != nil:
			cs.LastTerminationState = v1.ContainerState{Terminated: &v1.ContainerStateTerminated{Reason: "ContainerStatusUnknown", ExitCode: 137,
				Message: "The container could not be located when the pod was deleted.  The container used to be Running", ContainerID: old.ContainerID}}
		}
	}
	g.waiting(spec, cs, firstAttempt(g.pod, spec.Name))
}

// waiting sets the waiting state of a container, with its reason.
func (g *gen) waiting(spec *v1.Container, cs *v1.ContainerStatus, attempt uint32) {
	reason, message := "ContainerCreating", ""
	if len(g.pod.Spec.InitContainers) > 0 {
		reason = "PodInitializing"
	}
	_, sandbox := g.o.sandbox()
	if g.turn(spec) {
		if f, ok := g.o.Failures["image/"+spec.Name]; ok && g.o.Images[spec.Name].Ref == "" && (sandbox || len(g.o.Sandboxes) == 0) {
			reason, message = pullReason(f, spec.Image, g.now)
		}
		if f, ok := g.o.Failures["container/"+spec.Name]; ok && f.Attempt == attempt {
			reason, message = f.Reason, f.Message
		}
	}
	cs.State.Waiting = &v1.ContainerStateWaiting{Reason: reason, Message: message}
}

// pullReason returns the waiting reason of a failed pull: first the error itself, after
// pullErrorShown the back-off.
func pullReason(f Failure, image string, now time.Time) (reason, message string) {
	if f.Reason == "ErrImagePull" && !now.Before(f.At.Add(pullErrorShown)) {
		return "ImagePullBackOff", fmt.Sprintf("Back-off pulling image %q: ErrImagePull: %s", image, f.Message)
	}
	return f.Reason, f.Message
}

// turn reports whether the container may be started now. Only then its failures are shown.
func (g *gen) turn(spec *v1.Container) bool {
	if !isInit(g.pod, spec.Name) || g.initDone {
		return g.initDone
	}
	sb, _ := g.o.sandbox()
	for i := range g.pod.Spec.InitContainers {
		c := &g.pod.Spec.InitContainers[i]
		if c.Name == spec.Name {
			return true
		}
		if !initPassed(g.pod, g.o, c, sb.ID) {
			return false
		}
	}
	return false
}

// exited sets the status of a container after its newest instance has ended: terminated, or waiting
// for a restart.
func (g *gen) exited(spec *v1.Container, c Container, cs *v1.ContainerStatus) {
	cs.State.Terminated = g.terminated(c)
	if isInit(g.pod, spec.Name) && !sidecar(g.pod, spec) {
		cs.Ready = c.ExitCode == 0
	}
	if g.d.Stop != nil || final(g.pod) || !restarts(g.pod, spec, c, g.o.Killed[c.ID]) || g.o.busy("container/"+spec.Name) {
		return
	}
	if sb, ok := g.o.sandbox(); ok && sb.ID != c.Sandbox {
		return
	}
	wait := func(reason, message string) {
		cs.LastTerminationState = v1.ContainerState{Terminated: cs.State.Terminated}
		cs.State = v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: reason, Message: message}}
	}
	delay := restartDelay(g.pod, c, remade(g.o, c, spec))
	failed, hasFailed := g.o.Failures["container/"+spec.Name]
	switch img, bad := g.o.Failures["image/"+spec.Name]; {
	case g.now.Before(c.end().Add(delay)):
		wait("CrashLoopBackOff", crashMessage(delay, spec.Name, g.pod))
	case bad && g.o.Images[spec.Name].Attempt != c.Attempt+1:
		wait(pullReason(img, spec.Image, g.now))
	case hasFailed && failed.Attempt == c.Attempt+1:
		wait(failed.Reason, failed.Message)
	case hasFailed && failed.Attempt == c.Attempt && failed.Reason == "RunContainerError":
		wait(failed.Reason, failed.Message)
	}
}

func crashMessage(delay time.Duration, container string, pod *v1.Pod) string {
	return fmt.Sprintf("back-off %s restarting failed container=%s pod=%s_%s(%s)", delay, container, pod.Name, pod.Namespace, pod.UID)
}

// resources sets the container's granted and actual resources.
func (g *gen) resources(spec *v1.Container, cs *v1.ContainerStatus) {
	cs.AllocatedResources = spec.Resources.Requests.DeepCopy()
	cs.Resources = spec.Resources.DeepCopy()
	c, ok := g.o.newest(spec.Name)
	if !ok || c.State != Running || !g.o.Resize.Open || c.Limits == nil {
		return
	}
	to := containerResources(g.pod, spec, g.o.Resize.Memory)
	if old, had := lastStatus(&g.last, spec.Name); had && old.Resources != nil &&
		(!sameLimits(c.Limits, to) || restartsToResize(spec, c.Limits, to)) {
		cs.Resources = old.Resources.DeepCopy()
	}
}

// mounts sets the status of the container's volume mounts.
func (g *gen) mounts(spec *v1.Container, cs *v1.ContainerStatus) {
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

// devices sets the health of the container's devices. The last known health stays after the devices
// are released.
func (g *gen) devices(cs *v1.ContainerStatus) {
	cs.AllocatedResourcesStatus = g.o.Devices.Health[cs.Name]
	if old, had := lastStatus(&g.last, cs.Name); had && !g.o.Devices.Held {
		cs.AllocatedResourcesStatus = old.AllocatedResourcesStatus
	}
}

// phase returns the pod's phase by the rules of Kubernetes. A terminal phase is held back until the
// pod's devices are released, because after it the devices are allocated to other pods.
func (g *gen) phase(st *v1.PodStatus) (phase v1.PodPhase, reason, message string) {
	phase, reason, message = g.reached(st)
	refused := g.d.Stop != nil && g.d.Stop.Refused
	if terminal(phase) && !terminal(g.last.Phase) && !final(g.pod) && (len(g.pod.Spec.ResourceClaims) > 0 || g.o.Devices.Held) && !g.o.Volumes.Away && !refused {
		return v1.PodRunning, reason, message
	}
	return phase, reason, message
}

func (g *gen) reached(st *v1.PodStatus) (phase v1.PodPhase, reason, message string) {
	if final(g.pod) {
		return g.pod.Status.Phase, g.pod.Status.Reason, g.pod.Status.Message
	}
	if g.last.Phase == v1.PodSucceeded || g.last.Phase == v1.PodFailed {
		return g.last.Phase, g.last.Reason, g.last.Message // a terminal phase is final, also before the API has it
	}
	if s := g.d.Stop; s != nil && !s.Delete {
		if g.o.anyRunning() {
			return v1.PodRunning, s.Reason, s.Message
		}
		return v1.PodFailed, s.Reason, s.Message
	}
	if expired(g.pod, g.o.since(), g.now) {
		if g.o.anyRunning() {
			return v1.PodRunning, "DeadlineExceeded", deadlineMessage
		}
		return v1.PodFailed, "DeadlineExceeded", deadlineMessage
	}
	if failedInit(g.pod, g.o) && !g.o.anyRunning() {
		return v1.PodFailed, "", ""
	}
	return g.phaseOf(st), "", ""
}

func (g *gen) phaseOf(st *v1.PodStatus) v1.PodPhase {
	if !g.initDone && !g.anyEver(st) {
		return v1.PodPending
	}
	waiting, running, succeeded, failed := 0, 0, 0, 0
	for _, cs := range st.ContainerStatuses {
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
	over := g.d.Stop != nil || g.allEnded()
	sidecars := g.sidecarRunning()
	switch {
	case waiting > 0:
		return v1.PodPending
	case running > 0, sidecars, !over:
		return v1.PodRunning
	case failed > 0:
		return v1.PodFailed
	default:
		return v1.PodSucceeded
	}
}

// anyEver reports whether a regular container has ever run. If so, the pod stays Running while its
// sandbox is rebuilt.
func (g *gen) anyEver(st *v1.PodStatus) bool {
	return slices.ContainsFunc(st.ContainerStatuses, func(c v1.ContainerStatus) bool { return c.ContainerID != "" })
}

func (g *gen) allEnded() bool {
	for i := range g.pod.Spec.Containers {
		if !ended(g.pod, &g.pod.Spec.Containers[i], g.o) {
			return false
		}
	}
	return true
}

// over reports whether no container will be started any more.
func (g *gen) over() bool { return failedInit(g.pod, g.o) || g.allEnded() }

func (g *gen) sidecarRunning() bool {
	return slices.ContainsFunc(g.o.Containers, func(c Container) bool {
		return c.State == Running && isInit(g.pod, c.Name)
	})
}
