package session

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ackClock stores the send time of the last heartbeat that a replica acknowledged. Only a replica
// that can commit to the store acknowledges heartbeats. The time is measured since boot and
// includes suspension of the machine.
type ackClock struct{ at atomic.Int64 }

// SinceBoot returns the time since the machine booted, including the time in suspension.
func SinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		return 0 // impossible: Linux has this clock since 2.6.39
	}
	return time.Duration(t.Nano())
}

// recordAck records the acknowledgment of a heartbeat that was sent the duration ago before now. If
// ago is negative or more than 1 minute, the wall clock was probably set, and ago counts as 0.
func (h *ackClock) recordAck(ago time.Duration) {
	if ago < 0 || ago > time.Minute {
		ago = 0
	}
	h.at.Store(int64(SinceBoot() - ago))
}

// LastAck returns the time since boot at which the node sent the last acknowledged heartbeat. It is
// 0 if this process has received no acknowledgment.
func (s *Session) LastAck() time.Duration { return time.Duration(s.lastAck.at.Load()) }
