package pod

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// syncProbes runs the probes of exactly the containers that run and whose postStart hook is over.
func (w *worker) syncProbes(ctx context.Context, d Desired, o Observed) {
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
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, cancel := range w.probes {
		if _, ok := want[id]; !ok {
			cancel()
			delete(w.probes, id)
		}
	}
	for id, c := range want {
		if _, ok := w.probes[id]; ok {
			continue
		}
		spec := containerSpec(d.Pod, c.Name)
		if spec.StartupProbe == nil && spec.ReadinessProbe == nil && spec.LivenessProbe == nil {
			w.probes[id] = func() {}
			w.o.Probes[id] = agent.ProbeState{Started: true, Ready: true}
			w.poke()
			continue
		}
		ip := ""
		if len(sb.IPs) > 0 {
			ip = sb.IPs[0]
		}
		if d.Pod.Spec.HostNetwork && len(w.cfg.HostIPs) > 0 {
			ip = w.cfg.HostIPs[0]
		}
		pctx, cancel := context.WithCancel(ctx)
		w.probes[id] = cancel
		t := agent.ProbeTarget{Pod: d.Pod, Container: spec, ContainerID: id, IP: ip, StartedAt: c.Started, Resume: w.resume(d.Pod, c)}
		w.wg.Go(func() {
			w.cfg.Prober.Watch(pctx, t, func(e agent.ProbeEvent) { w.probed(pctx, t, e) })
		})
	}
}

// resume is what the last status on record says of this very instance, so that a pod
// does not lose its readiness because the agent restarted.
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

// probed takes in one result.
func (w *worker) probed(ctx context.Context, t agent.ProbeTarget, e agent.ProbeEvent) {
	if ctx.Err() != nil {
		return
	}
	w.mu.Lock()
	old, had := w.o.Probes[t.ContainerID]
	changed := !had || old != e.State
	w.o.Probes[t.ContainerID] = e.State
	stopping := w.desired.Stop != nil
	w.mu.Unlock()
	switch {
	case e.Probe == "" || stopping:
	case !e.OK && !e.Quick:
		w.events.event(t.Pod, fieldPath(t.Pod, t.Container.Name), v1.EventTypeWarning, "Unhealthy", fmt.Sprintf("%s probe failed: %s", title(e.Probe), e.Message))
	case e.OK && changed:
		w.stage(agent.StageTime{Name: "probe passed", Start: e.Start, Duration: e.Took, Detail: t.Container.Name + " " + e.Probe})
	}
	if changed {
		w.poke()
	}
}

func title(s string) string { return string(s[0]-'a'+'A') + s[1:] }
