// Package probe runs container probes: exec, HTTP, TCP and gRPC. A state machine without side
// effects evaluates the results (machine.go). ask.go runs single probes. This file connects the
// two.
//
// Each probe of a watched container has a goroutine, which sleeps between two probes.
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

// Config is the configuration of a Prober.
type Config struct {
	Runtime agent.Runtime // for exec probes
	// Pods returns the pods of the node, whose results are counted. May be nil: results are then
	// counted while their container is watched.
	Pods func() []*v1.Pod
	Log  *slog.Logger // may be nil
	// Ask replaces the real probes; nil: exec, HTTP, TCP, gRPC. A fake node passes AlwaysPass.
	Ask func(ctx context.Context, p *v1.Probe, t agent.ProbeTarget) (ok bool, message string, err error)
}

// Prober runs the probes of containers. It implements agent.Prober.
type Prober struct {
	cfg      Config
	probe    func(ctx context.Context, p *v1.Probe, t agent.ProbeTarget) (ok bool, message string, err error)
	counters probeCounters
}

var _ agent.Prober = (*Prober)(nil)

// New returns a Prober. It starts nothing.
func New(cfg Config) *Prober {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Prober{cfg: cfg, probe: cfg.Ask}
	if p.probe == nil {
		p.probe = newProbeRunner(cfg.Runtime).runProbe
	}
	return p
}

// AlwaysPass is a function for Config.Ask. It returns true without a message, so that every probe
// succeeds. It is for nodes without real containers.
func AlwaysPass(context.Context, *v1.Probe, agent.ProbeTarget) (bool, string, error) {
	return true, "", nil
}

// containerWatch is the state of one call of Watch: the container, its probes and their current
// state.
type containerWatch struct {
	prober        *Prober
	target        agent.ProbeTarget
	report        func(agent.ProbeEvent)
	mu            sync.Mutex
	state         agent.ProbeState
	startupPassed chan struct{} // closed when the startup probe has succeeded
	stop          context.CancelFunc
}

// Watch runs the probes of a container and calls onEvent for each event, until ctx ends or a
// liveness or startup probe reaches its failure threshold. It implements agent.Prober.
func (p *Prober) Watch(ctx context.Context, t agent.ProbeTarget, onEvent func(agent.ProbeEvent)) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := t.Container
	w := &containerWatch{prober: p, target: t, report: onEvent, startupPassed: make(chan struct{}), stop: cancel}
	w.state.Started = c.StartupProbe == nil
	w.state.Ready = w.state.Started && c.ReadinessProbe == nil
	if t.Resume != nil {
		w.state.Started = w.state.Started || t.Resume.Started
		w.state.Ready = w.state.Started && (c.ReadinessProbe == nil || t.Resume.Ready)
	}
	if w.state.Started {
		close(w.startupPassed)
	}
	begin := w.state // a copy, because the first probe may change it
	onEvent(agent.ProbeEvent{State: begin})
	var wg sync.WaitGroup
	run := func(kind string, spec *v1.Probe, pass bool) {
		if spec != nil {
			wg.Go(func() { w.runProbeLoop(ctx, kind, spec, pass) })
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

// runProbeLoop runs one probe repeatedly, until its result is final or ctx ends. kind is the kind
// of the probe. passing is its initial state.
func (w *containerWatch) runProbeLoop(ctx context.Context, kind string, spec *v1.Probe, passing bool) {
	if kind != Startup {
		select {
		case <-ctx.Done():
			return
		case <-w.startupPassed:
		}
	}
	now := time.Now()
	// The start is converted to the monotonic clock. It is never in the future, even if the node's
	// clock was set.
	started := now.Add(-max(0, now.Sub(w.target.StartedAt)))
	m := newStateMachine(kind, spec, started, now, passing)
	counter := w.prober.counters.startWatch(&w.target, kind)
	defer w.prober.counters.endWatch(counter, w.prober.knownPods)
	timer := time.NewTimer(time.Until(m.next))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		begin := time.Now()
		actx, cancel := context.WithTimeout(ctx, secondsOrDefault(spec.TimeoutSeconds, 1))
		ok, message, err := w.prober.probe(actx, spec, w.target)
		cancel()
		if ctx.Err() != nil {
			return
		}
		r, warned := resultFailure, probeWarning("")
		switch {
		case errors.As(err, &warned):
			r = resultSuccess
		case err != nil:
			r = resultUnknown
			w.prober.cfg.Log.Warn("probe could not be run", "probe", kind, "pod",
				w.target.Pod.Namespace+"/"+w.target.Pod.Name, "container", w.target.Container.Name, "err", err)
		case ok:
			r = resultSuccess
		}
		now := time.Now()
		changed, quick := m.addResult(r, now)
		if !quick {
			w.prober.counters.countResult(counter, r, now.Sub(begin))
		}
		event := agent.ProbeEvent{Probe: kind, OK: ok, Message: message, Warning: string(warned), Start: begin,
			Took: now.Sub(begin), Uncounted: quick}
		if done := w.reportResult(m, r, changed, event); done {
			return
		}
		timer.Reset(time.Until(m.next))
	}
}

// reportResult applies a probe result to the container's state. It reports changes, failures and
// warnings to the caller of Watch. It returns true if the probe need not run again.
func (w *containerWatch) reportResult(m *stateMachine, r probeResult, changed bool, e agent.ProbeEvent) (done bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if changed {
		switch m.kind {
		case Startup:
			if done = m.passing; done {
				w.state.Started = true
				w.state.Ready = w.target.Container.ReadinessProbe == nil
				close(w.startupPassed)
			}
		case Readiness:
			w.state.Ready = m.passing
		}
		if m.gaveUp {
			w.state.FailedProbe, w.state.Cause = m.kind, e.Message
			done = true
		}
	}
	if changed || r == resultFailure || e.Warning != "" {
		e.State = w.state
		w.report(e)
	}
	if m.gaveUp {
		w.stop()
	}
	return done
}
