package session

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ackClock is when the node last sent a heartbeat that a replica acknowledged. Only a replica that
// can commit acknowledges. The clock counts while the machine is suspended.
type ackClock struct{ at atomic.Int64 }

// SinceBoot returns the time since the machine booted, including the time in suspension.
func SinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		return 0 // impossible: Linux has this clock since 2.6.39
	}
	return time.Duration(t.Nano())
}

// recordAck records the acknowledgment of a message that was sent ago. The wall clock may have been
// set since; an age outside 0 to 1 minute therefore counts as 0.
func (h *ackClock) recordAck(ago time.Duration) {
	if ago < 0 || ago > time.Minute {
		ago = 0
	}
	h.at.Store(int64(SinceBoot() - ago))
}

// LastAck returns when the node last sent a heartbeat that was acknowledged, as time since boot. It
// is 0 if this process has received no acknowledgment.
func (s *Session) LastAck() time.Duration { return time.Duration(s.lastAck.at.Load()) }
