package failover

import "time"

// Bounds of an ExitProbe.
const (
	// DialTimeout is the timeout of one dial, and ProbeTimeout that of a whole probe. After a
	// process has exited, its kernel may accept connections for a moment longer, and closes its
	// connections one after the other.
	DialTimeout  = 50 * time.Millisecond
	ProbeTimeout = 100 * time.Millisecond
	// ProbeInterval is the pause between two dials.
	ProbeInterval = 5 * time.Millisecond
	// maxAccepted is the number of accepted dials in one probe after which the leader's process
	// counts as running.
	maxAccepted = 5
)

// DialResult is the result of dialing the leader's address.
type DialResult int

// The possible results of dialing the leader's address.
const (
	// DialFailed does not show whether the process has exited: the machine does not respond, or a
	// router reports that it cannot be reached.
	DialFailed DialResult = iota
	DialRefused
	DialAccepted
)

// Verdict states whether an ExitProbe has found the leader's process exited.
type Verdict int

// The possible verdicts on whether the leader's process has exited.
const (
	Undecided Verdict = iota // the result is open: dial again after ProbeInterval, until ProbeTimeout
	Running                  // the process may be running: it does not count as exited
	Exited
)

// ExitProbe determines whether the leader's process has exited. If it has, its kernel refuses
// connections, and has closed all of its connections to this replica. One of these signs alone may
// be misleading:
//
//   - If the listener of a running leader is closed, or a firewall refuses connections to it, the
//     leader still has open connections to its followers, which carry its heartbeats.
//   - If the leader was started again, or another process uses its port, connections are accepted.
//
// The zero value is a new probe.
type ExitProbe struct{ accepted int }

// Observe adds the result of a dial and returns the verdict so far. connected reports whether a
// raft connection of the leader to this replica is open.
func (p *ExitProbe) Observe(result DialResult, connected bool) Verdict {
	switch {
	case result == DialFailed:
		return Running
	case result == DialRefused && !connected:
		return Exited
	case result == DialAccepted:
		if p.accepted++; p.accepted == maxAccepted {
			return Running
		}
	}
	return Undecided
}
