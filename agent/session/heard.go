package session

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// heard is when the node asked something last that a control plane which can commit has answered. It runs on while the
// machine is suspended.
type heard struct{ at atomic.Int64 }

// SinceBoot is the time since the machine was started, suspended or not.
func SinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		return 0 // the clock is there since Linux 2.6.39
	}
	return time.Duration(t.Nano())
}

// answered notes an answer to what was asked so long ago, by a clock that may have been set meanwhile.
func (h *heard) answered(ago time.Duration) {
	if ago < 0 || ago > time.Minute {
		ago = 0
	}
	h.at.Store(int64(SinceBoot() - ago))
}

// Heard is when, counted from the start of the machine, the node asked last what a control plane has answered; 0 = not in
// this process.
func (s *Session) Heard() time.Duration { return time.Duration(s.heard.at.Load()) }
