package probe

import (
	"time"

	v1 "k8s.io/api/core/v1"
)

// The names of the probes.
const (
	Startup   = "startup"
	Liveness  = "liveness"
	Readiness = "readiness"
)

// The first tries of a startup or readiness probe: Kubernetes waits a whole period after
// a first failure, which is where most of its time to Ready goes.
const (
	quickFirst = 2 * time.Millisecond  // a program that was only just executed does not listen yet
	quickExec  = 10 * time.Millisecond // each try is a process, which costs more than the wait
	// livenessAfter is the least age at which liveness is first asked: a container that does not
	// listen yet must not be found dead sooner than under Kubernetes.
	livenessAfter = time.Second
)

// outcome is one probe's result.
type outcome int

const (
	success outcome = iota
	failure
	unknown // the probe itself could not be run: counts for nothing
)

// machine is the state of one probe of one container. Pure: times come in as arguments.
//
//	waiting ──(initial delay)──▶ quick: after 2, 3, 4, 6, 9 ms … ──(first success, or a period has passed)──▶ periodic
//
// Each wait of the quick phase is half as long again as the one before, so that a program is found ready at most
// half its start-up time late, and one that takes the whole period is asked two dozen times; an exec probe's are doubled.
// Failures of the quick phase are not counted: failureThreshold goes on meaning that many periods.
type machine struct {
	kind    string
	period  time.Duration
	need    int // successThreshold
	allow   int // failureThreshold
	started time.Time
	base    time.Time // when probing began: periods count from here
	next    time.Time
	step    time.Duration // of the quick phase; 0 = over
	grow    time.Duration // what a step grows by: its length divided by this
	good    int           // successes in a row
	bad     int           // counted failures in a row
	pass    bool          // what the probe says so far
	gaveUp  bool
}

// newMachine begins at now for a container started at started. pass is the state to begin with.
func newMachine(kind string, p *v1.Probe, started, now time.Time, pass bool) *machine {
	m := &machine{kind: kind, period: seconds(p.PeriodSeconds, 10), need: int(max(p.SuccessThreshold, 1)), allow: 3, started: started, pass: pass}
	if p.FailureThreshold > 0 {
		m.allow = int(p.FailureThreshold)
	}
	m.next = started.Add(time.Duration(p.InitialDelaySeconds) * time.Second)
	switch {
	case kind == Liveness:
		if at := started.Add(min(livenessAfter, m.period)); m.next.Before(at) {
			m.next = at
		}
	case !pass && p.Exec != nil:
		m.step, m.grow = quickExec, 1
	case !pass:
		m.step, m.grow = quickFirst, 2
		if at := started.Add(quickFirst); m.next.Before(at) {
			m.next = at
		}
	}
	if m.next.Before(now) {
		m.next = now
	}
	m.base = m.next
	return m
}

func seconds(n int32, byDefault int32) time.Duration {
	if n <= 0 {
		n = byDefault
	}
	return time.Duration(n) * time.Second
}

// result takes in one result that became known at now. It reports whether the probe's verdict
// changed, and whether this was a quick failure, which counts for nothing.
func (m *machine) result(r outcome, now time.Time) (changed, quick bool) {
	quick = m.step > 0 && now.Before(m.base.Add(m.period))
	switch {
	case r == success:
		m.good, m.bad, m.step = m.good+1, 0, 0
		if !m.pass && m.good >= m.need {
			m.pass, changed = true, true
		}
	case r == failure && !quick:
		m.good, m.bad = 0, m.bad+1
		if m.bad >= m.allow {
			changed = m.pass || m.kind != Readiness && !m.gaveUp
			m.pass, m.gaveUp = false, m.kind != Readiness
		}
	case r == failure:
		m.good = 0
	}
	m.schedule(r, now)
	return changed, quick && r == failure
}

func (m *machine) schedule(r outcome, now time.Time) {
	if m.step > 0 && r != success {
		// A quick try, but none later than the first counted one.
		m.next = now.Add(m.step)
		m.step += m.step / m.grow
		if end := m.base.Add(m.period); !now.Before(end) || m.next.After(end) {
			m.step = 0
			m.next = end
			if m.next.Before(now) {
				m.next = now.Add(m.period)
			}
		}
		return
	}
	m.next = m.next.Add(m.period)
	if m.next.Before(now) {
		m.next = now
	}
}
