// Package probe runs the probes of containers: exec, HTTP, TCP and gRPC health. What a
// series of results means is a pure state machine (machine.go); how one result is
// obtained is ask.go; this file is the loop between the two.
//
// Goroutines: for each watched container one for each of its probes, sleeping between two results.
package probe

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// Config is what probes need.
type Config struct {
	Runtime agent.Runtime // for exec probes
	Log     *slog.Logger  // may be nil
	// Ask replaces the real probes; nil: exec, HTTP, TCP, gRPC. A fake node passes AlwaysPass.
	Ask func(ctx context.Context, p *v1.Probe, t agent.ProbeTarget) (ok bool, message string, err error)
}

// Prober implements agent.Prober.
type Prober struct {
	cfg Config
	ask func(ctx context.Context, p *v1.Probe, t agent.ProbeTarget) (ok bool, message string, err error)
}

var _ agent.Prober = (*Prober)(nil)

// New starts nothing.
func New(cfg Config) *Prober {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Prober{cfg: cfg, ask: cfg.Ask}
	if p.ask == nil {
		p.ask = newAsker(cfg.Runtime).ask
	}
	return p
}

// AlwaysPass is an Ask for nodes whose containers are not real.
func AlwaysPass(context.Context, *v1.Probe, agent.ProbeTarget) (bool, string, error) {
	return true, "", nil
}

// watch is one container under observation.
type watch struct {
	p      *Prober
	t      agent.ProbeTarget
	on     func(agent.ProbeEvent)
	mu     sync.Mutex
	state  agent.ProbeState
	start  chan struct{} // closed when the startup probe has passed
	finish context.CancelFunc
}

// Watch implements agent.Prober.
func (p *Prober) Watch(ctx context.Context, t agent.ProbeTarget, on func(agent.ProbeEvent)) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := t.Container
	w := &watch{p: p, t: t, on: on, start: make(chan struct{}), finish: cancel}
	w.state.Started = c.StartupProbe == nil
	w.state.Ready = w.state.Started && c.ReadinessProbe == nil
	if t.Resume != nil {
		w.state.Started = w.state.Started || t.Resume.Started
		w.state.Ready = w.state.Started && (c.ReadinessProbe == nil || t.Resume.Ready)
	}
	if w.state.Started {
		close(w.start)
	}
	begin := w.state // the first probe that runs may change it
	on(agent.ProbeEvent{State: begin})
	var wg sync.WaitGroup
	run := func(kind string, spec *v1.Probe, pass bool) {
		if spec != nil {
			wg.Go(func() { w.run(ctx, kind, spec, pass) })
		}
	}
	if !begin.Started {
		run(Startup, c.StartupProbe, false)
	}
	run(Readiness, c.ReadinessProbe, begin.Ready)
	run(Liveness, c.LivenessProbe, true)
	<-ctx.Done()
	wg.Wait()
}

// run is the life of one probe.
func (w *watch) run(ctx context.Context, kind string, spec *v1.Probe, pass bool) {
	if kind != Startup {
		select {
		case <-ctx.Done():
			return
		case <-w.start:
		}
	}
	now := time.Now()
	// By this process's clock, whatever becomes of the node's: nothing was started in the future.
	started := now.Add(-max(0, now.Sub(w.t.StartedAt)))
	m := newMachine(kind, spec, started, now, pass)
	timer := time.NewTimer(time.Until(m.next))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		begin := time.Now()
		actx, cancel := context.WithTimeout(ctx, seconds(spec.TimeoutSeconds, 1))
		ok, message, err := w.p.ask(actx, spec, w.t)
		cancel()
		if ctx.Err() != nil {
			return
		}
		r, warned := failure, warning("")
		switch {
		case errors.As(err, &warned):
			r = success
		case err != nil:
			r = unknown
			w.p.cfg.Log.Warn("probe could not be run", "probe", kind, "pod", w.t.Pod.Namespace+"/"+w.t.Pod.Name, "container", w.t.Container.Name, "err", err)
		case ok:
			r = success
		}
		now := time.Now()
		changed, quick := m.result(r, now)
		event := agent.ProbeEvent{Probe: kind, OK: ok, Message: message, Warning: string(warned), Start: begin,
			Took: now.Sub(begin), Uncounted: quick}
		if done := w.tell(m, r, changed, event); done {
			return
		}
		timer.Reset(time.Until(m.next))
	}
}

// tell applies a result to the container's state and passes it on. It returns true when the probe is over.
func (w *watch) tell(m *machine, r outcome, changed bool, e agent.ProbeEvent) (done bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if changed {
		switch m.kind {
		case Startup:
			if done = m.pass; done {
				w.state.Started = true
				w.state.Ready = w.t.Container.ReadinessProbe == nil
				close(w.start)
			}
		case Readiness:
			w.state.Ready = m.pass
		}
		if m.gaveUp {
			w.state.FailedProbe, w.state.Cause = m.kind, e.Message
			done = true
		}
	}
	if changed || r == failure || e.Warning != "" {
		e.State = w.state
		w.on(e)
	}
	if m.gaveUp {
		w.finish()
	}
	return done
}
