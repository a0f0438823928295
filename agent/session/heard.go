package session

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ackClock stores the send time of the last heartbeat that a replica acknowledged. Only a replica
// that can commit to the store acknowledges heartbeats. The time is measured since boot, including
// the time in which the machine was suspended.
type ackClock struct{ at atomic.Int64 }

// SinceBoot returns the time since the machine booted, including the time in suspension.
func SinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		return 0 // impossible: Linux has this clock since 2.6.39
	}
	return time.Duration(t.Nano())
}

// recordAck records the acknowledgment of a heartbeat. age is the time since the heartbeat was
// sent. If it is negative or more than 1 minute, the wall clock was probably set, and 0 is used
// instead.
func (h *ackClock) recordAck(age time.Duration) {
	if age < 0 || age > time.Minute {
		age = 0
	}
	h.at.Store(int64(SinceBoot() - age))
}

// LastAck returns the time since boot at which the node sent the last acknowledged heartbeat. It is
// 0 if this process has received no acknowledgment.
func (s *Session) LastAck() time.Duration { return time.Duration(s.lastAck.at.Load()) }
