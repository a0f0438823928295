package pod

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

// probeRunner runs the probes of the pod's containers. Its fields are guarded by worker.mu.
type probeRunner struct {
	w       *worker
	cancels map[string]context.CancelFunc // cancel functions of running probes, by container ID
}

// syncProbes starts and stops probes, so that exactly those containers are probed that run and have
// finished their postStart hook. The lock is held.
func (pb *probeRunner) syncProbes(ctx context.Context) {
	d, o := pb.w.desired, &pb.w.observed
	wanted := map[string]lifecycle.Container{}
	sb, up := o.ReadySandbox()
	for _, c := range o.Containers {
		spec := lifecycle.FindContainerSpec(d.Pod, c.Name)
		if c.State != lifecycle.Running || spec == nil || !up || c.Sandbox != sb.ID || o.IsBusy("container/"+c.Name) ||
			d.Stop != nil && d.Stop.Orphan {
			continue
		}
		if lifecycle.IsInitContainer(d.Pod, c.Name) && !lifecycle.IsSidecar(d.Pod, spec) ||
			lifecycle.IsEphemeralContainer(d.Pod, c.Name) {
			continue
		}
		wanted[c.ID] = c
	}
	for id, cancel := range pb.cancels {
		if _, ok := wanted[id]; !ok {
			cancel()
			delete(pb.cancels, id)
		}
	}
	for id, c := range wanted {
		if _, ok := pb.cancels[id]; !ok {
			pb.startProbes(ctx, d.Pod, c, sb)
		}
	}
}

// startProbes starts the probes of one container. It sets the initial probe state immediately: the
// state that an earlier agent process reported, or success for each probe that is not defined. The
// lock is held.
func (pb *probeRunner) startProbes(ctx context.Context, pod *v1.Pod, instance lifecycle.Container,
	sb lifecycle.Sandbox) {
	spec, resume := lifecycle.FindContainerSpec(pod, instance.Name), pb.previousProbeState(pod, instance)
	state := agent.ProbeState{Started: spec.StartupProbe == nil || resume != nil}
	state.Ready = state.Started && (spec.ReadinessProbe == nil || resume != nil && resume.Ready)
	pb.w.observed.Probes[instance.ID] = state
	if spec.StartupProbe == nil && spec.ReadinessProbe == nil && spec.LivenessProbe == nil {
		pb.cancels[instance.ID] = func() {}
		return
	}
	ip := ""
	if len(sb.IPs) > 0 {
		ip = sb.IPs[0]
	}
	if pod.Spec.HostNetwork && len(pb.w.cfg.Identity.HostIPs) > 0 {
		ip = pb.w.cfg.Identity.HostIPs[0]
	}
	pctx, cancel := context.WithCancel(ctx)
	pb.cancels[instance.ID] = cancel
	t := agent.ProbeTarget{Pod: pod, Container: spec, ContainerID: instance.ID, IP: ip, StartedAt: instance.StartTime(),
		Resume: resume}
	pb.w.actions.wg.Go(func() {
		pb.w.cfg.Deps.Prober.Watch(pctx, t, func(e agent.ProbeEvent) { pb.recordProbeResult(pctx, t, e) })
	})
}

// previousProbeState returns the probe state of this instance from the pod's last status, or nil if
// the status does not show that the instance has started. It keeps a pod ready when the agent
// restarts.
func (pb *probeRunner) previousProbeState(pod *v1.Pod, instance lifecycle.Container) *agent.ProbeState {
	host := pb.w.cfg.statusHost()
	for _, list := range [][]v1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for _, st := range list {
			if st.ContainerID == host.ContainerID(instance.ID) && st.Started != nil && *st.Started {
				return &agent.ProbeState{Started: true, Ready: st.Ready}
			}
		}
	}
	return nil
}

// recordProbeResult updates the probe state of a container with one probe result, and emits the
// event of the result.
func (pb *probeRunner) recordProbeResult(ctx context.Context, target agent.ProbeTarget, event agent.ProbeEvent) {
	if ctx.Err() != nil {
		return
	}
	pb.w.mu.Lock()
	old, had := pb.w.observed.Probes[target.ContainerID]
	changed := !had || old != event.State
	stopping := pb.w.desired.Stop != nil
	pb.w.mu.Unlock()
	// Report the probe before its state takes effect, so that Ready follows it in the stage report.
	switch {
	case event.Probe == "" || stopping:
	case event.Warning != "":
		pb.w.events.Emit(target.Pod, containerFieldPath(target.Pod, target.Container.Name), v1.EventTypeWarning,
			"ProbeWarning", fmt.Sprintf("%s probe warning: %s", capitalize(event.Probe), event.Warning))
	case !event.OK && !event.Uncounted:
		pb.w.events.Emit(target.Pod, containerFieldPath(target.Pod, target.Container.Name), v1.EventTypeWarning,
			"Unhealthy", fmt.Sprintf("%s probe failed: %s", capitalize(event.Probe), event.Message))
	}
	if event.Probe != "" && !stopping && event.OK && changed {
		pb.w.status.reportStage(agent.StageTime{Name: "probe passed", Start: event.Start, Duration: event.Took,
			Detail: target.Container.Name + " " + event.Probe})
	}
	if changed {
		pb.w.mu.Lock()
		pb.w.observed.Probes[target.ContainerID] = event.State
		pb.w.mu.Unlock()
		pb.w.wakeUp()
	}
}

func capitalize(text string) string { return string(text[0]-'a'+'A') + text[1:] }
