package pod

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// syncProbes runs the probes of exactly those containers that run and have finished their postStart
// hook. The lock is held.
func (w *worker) syncProbes(ctx context.Context) {
	d, o := w.desired, &w.o
	want := map[string]Container{}
	sb, up := o.sandbox()
	for _, c := range o.Containers {
		spec := containerSpec(d.Pod, c.Name)
		if c.State != Running || spec == nil || !up || c.Sandbox != sb.ID || o.busy("container/"+c.Name) || d.Stop != nil && d.Stop.Orphan {
			continue
		}
		if isInit(d.Pod, c.Name) && !sidecar(d.Pod, spec) {
			continue
		}
		want[c.ID] = c
	}
	for id, cancel := range w.probes {
		if _, ok := want[id]; !ok {
			cancel()
			delete(w.probes, id)
		}
	}
	for id, c := range want {
		if _, ok := w.probes[id]; !ok {
			w.probe(ctx, d.Pod, c, sb)
		}
	}
}

// probe starts the probes of one container. Its initial state is set at once: the state that an
// earlier agent process reported, or success for each probe that is not defined. The lock is held.
func (w *worker) probe(ctx context.Context, pod *v1.Pod, c Container, sb Sandbox) {
	spec, resume := containerSpec(pod, c.Name), w.resume(pod, c)
	state := agent.ProbeState{Started: spec.StartupProbe == nil || resume != nil}
	state.Ready = state.Started && (spec.ReadinessProbe == nil || resume != nil && resume.Ready)
	w.o.Probes[c.ID] = state
	if spec.StartupProbe == nil && spec.ReadinessProbe == nil && spec.LivenessProbe == nil {
		w.probes[c.ID] = func() {}
		return
	}
	ip := ""
	if len(sb.IPs) > 0 {
		ip = sb.IPs[0]
	}
	if pod.Spec.HostNetwork && len(w.cfg.HostIPs) > 0 {
		ip = w.cfg.HostIPs[0]
	}
	pctx, cancel := context.WithCancel(ctx)
	w.probes[c.ID] = cancel
	t := agent.ProbeTarget{Pod: pod, Container: spec, ContainerID: c.ID, IP: ip, StartedAt: c.started(), Resume: resume}
	w.wg.Go(func() {
		w.cfg.Prober.Watch(pctx, t, func(e agent.ProbeEvent) { w.probed(pctx, t, e) })
	})
}

// resume returns the probe state of this instance from the pod's last status, or nil. With it a pod
// stays ready when the agent restarts.
func (w *worker) resume(pod *v1.Pod, c Container) *agent.ProbeState {
	g := gen{host: w.cfg.host()}
	for _, list := range [][]v1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for _, st := range list {
			if st.ContainerID == g.id(c.ID) && st.Started != nil && *st.Started {
				return &agent.ProbeState{Started: true, Ready: st.Ready}
			}
		}
	}
	return nil
}

// probed records one probe result and emits its event.
func (w *worker) probed(ctx context.Context, t agent.ProbeTarget, e agent.ProbeEvent) {
	if ctx.Err() != nil {
		return
	}
	w.mu.Lock()
	old, had := w.o.Probes[t.ContainerID]
	changed := !had || old != e.State
	stopping := w.desired.Stop != nil
	w.mu.Unlock()
	// Report the probe before its state takes effect, so that Ready follows it in the stage report.
	switch {
	case e.Probe == "" || stopping:
	case e.Warning != "":
		w.events.event(t.Pod, fieldPath(t.Pod, t.Container.Name), v1.EventTypeWarning, "ProbeWarning",
			fmt.Sprintf("%s probe warning: %s", title(e.Probe), e.Warning))
	case !e.OK && !e.Uncounted:
		w.events.event(t.Pod, fieldPath(t.Pod, t.Container.Name), v1.EventTypeWarning, "Unhealthy", fmt.Sprintf("%s probe failed: %s", title(e.Probe), e.Message))
	}
	if e.Probe != "" && !stopping && e.OK && changed {
		w.stage(agent.StageTime{Name: "probe passed", Start: e.Start, Duration: e.Took, Detail: t.Container.Name + " " + e.Probe})
	}
	if changed {
		w.mu.Lock()
		w.o.Probes[t.ContainerID] = e.State
		w.mu.Unlock()
		w.poke()
	}
}

func title(s string) string { return string(s[0]-'a'+'A') + s[1:] }
