package probe

import (
	"time"

	v1 "k8s.io/api/core/v1"
)

// Names of the kinds of probes.
const (
	Startup   = "startup"
	Liveness  = "liveness"
	Readiness = "readiness"
)

// The waits between the first attempts of a startup or readiness probe. In Kubernetes, a probe
// waits for a whole period after its first failure, which delays the time when a pod becomes Ready.
const (
	quickFirstWait = 2 * time.Millisecond  // a process does not listen immediately after its start
	quickExecWait  = 10 * time.Millisecond // each attempt starts a process, which costs more than the wait
	// minLivenessAge is the minimum age of a container at its first liveness probe. A container
	// that does not listen yet must not fail earlier than in Kubernetes.
	minLivenessAge = time.Second
)

// probeResult is the result of one probe.
type probeResult int

const (
	resultSuccess probeResult = iota
	resultFailure
	resultUnknown // the probe could not be run; does not count
)

// stateMachine is the state of one probe of one container. It has no side effects: times are
// arguments.
//
//	waiting ──(initial delay)──▶ quick: after 2, 3, 4, 6, 9 ms … ──(first success, or one period)──▶ periodic
//
// In the quick phase each wait is 1.5 times the previous one (2 times for exec probes). A container
// is therefore found ready after at most 1.5 times its startup time, and a whole period has about
// two dozen attempts. Failures of the quick phase are not counted, so the container has
// failureThreshold periods, as in Kubernetes.
type stateMachine struct {
	kind             string
	period           time.Duration
	successThreshold int // threshold in the probe's spec
	failureThreshold int // threshold in the probe's spec
	started          time.Time
	startAt          time.Time // start of probing, from which periods count
	next             time.Time
	step             time.Duration // next wait of the quick phase; 0 = the quick phase is over
	growthDivisor    time.Duration // each wait grows by 1/growthDivisor
	successes        int           // consecutive successes
	failures         int           // consecutive counted failures
	passing          bool          // current state of the probe
	gaveUp           bool
}

// newStateMachine returns the initial state of a probe. kind is the kind of the probe p, started
// the start time of the container, and passing whether the probe counts as passing before its first
// result.
func newStateMachine(kind string, p *v1.Probe, started, now time.Time, passing bool) *stateMachine {
	m := &stateMachine{kind: kind, period: secondsOrDefault(p.PeriodSeconds, 10),
		successThreshold: int(max(p.SuccessThreshold, 1)), failureThreshold: 3, started: started, passing: passing}
	if p.FailureThreshold > 0 {
		m.failureThreshold = int(p.FailureThreshold)
	}
	m.next = started.Add(time.Duration(p.InitialDelaySeconds) * time.Second)
	switch {
	case kind == Liveness:
		if at := started.Add(min(minLivenessAge, m.period)); m.next.Before(at) {
			m.next = at
		}
	case !passing && p.Exec != nil:
		m.step, m.growthDivisor = quickExecWait, 1
	case !passing:
		m.step, m.growthDivisor = quickFirstWait, 2
		if at := started.Add(quickFirstWait); m.next.Before(at) {
			m.next = at
		}
	}
	if m.next.Before(now) {
		m.next = now
	}
	m.startAt = m.next
	return m
}

func secondsOrDefault(n int32, byDefault int32) time.Duration {
	if n <= 0 {
		n = byDefault
	}
	return time.Duration(n) * time.Second
}

// addResult adds the result of an attempt that ended at now, and schedules the next attempt.
// changed reports whether the state changed. quick reports whether the result was a failure in the
// quick phase, which is not counted.
func (m *stateMachine) addResult(r probeResult, now time.Time) (changed, quick bool) {
	quick = m.step > 0 && now.Before(m.startAt.Add(m.period))
	switch {
	case r == resultSuccess:
		m.successes, m.failures, m.step = m.successes+1, 0, 0
		if !m.passing && m.successes >= m.successThreshold {
			m.passing, changed = true, true
		}
	case r == resultFailure && !quick:
		m.successes, m.failures = 0, m.failures+1
		if m.failures >= m.failureThreshold {
			changed = m.passing || m.kind != Readiness && !m.gaveUp
			m.passing, m.gaveUp = false, m.kind != Readiness
		}
	case r == resultFailure:
		m.successes = 0
	}
	m.scheduleNext(r, now)
	return changed, quick && r == resultFailure
}

func (m *stateMachine) scheduleNext(r probeResult, now time.Time) {
	if m.step > 0 && r != resultSuccess {
		// A quick attempt, but not after the first counted one.
		m.next = now.Add(m.step)
		m.step += m.step / m.growthDivisor
		if end := m.startAt.Add(m.period); !now.Before(end) || m.next.After(end) {
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
