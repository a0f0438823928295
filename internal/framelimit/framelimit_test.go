package framelimit

import (
	"testing"
	"time"
)

// frame is the head of a frame with a payload of n bytes.
func frame(kind, flags byte, stream uint32, n int) *[frameHead]byte {
	return &[frameHead]byte{byte(n >> 16), byte(n >> 8), byte(n), kind, flags, byte(stream >> 24), byte(stream >> 16), byte(stream >> 8), byte(stream)}
}

// Budgets refill, data and trailers cost nothing, and a client that has proven who it is gets more.
func TestBudgets(t *testing.T) {
	now, known := time.Unix(1000, 0), false
	c := New(nil, func() bool { return known }, Limits{Requests: 1, Resets: 3, Control: 3, KnownResets: 10, Wait: time.Nanosecond})
	c.now = func() time.Time { return now }
	see := func(want bool, what string, head *[frameHead]byte) {
		t.Helper()
		c.head, c.skip = *head, int(head[2])
		if got := c.admit(); got != want {
			t.Errorf("%s: %v", what, got)
		}
	}
	see(true, "a request", frame(frameHeaders, 0, 1, 10))
	see(true, "its trailers", frame(frameHeaders, flagEnd, 1, 10))
	see(false, "another before the first has ended", frame(frameHeaders, 0, 3, 10))
	c.end()
	see(true, "another after that", frame(frameHeaders, 0, 5, 10))
	for range 5 {
		see(true, "data", frame(frameData, 0, 1, 10))
		see(true, "the end of data", frame(frameData, flagEnd, 1, 0))
	}
	see(true, "a ping", frame(6, 0, 0, 8))
	see(true, "data without data", frame(frameData, 0, 1, 0))
	see(false, "a ping beyond the budget", frame(6, 0, 0, 8))
	for range 3 {
		see(true, "a reset", frame(frameReset, 0, 1, 4))
	}
	see(false, "a reset beyond the budget", frame(frameReset, 0, 1, 4))
	now = now.Add(4 * time.Second) // a tenth of three a second
	see(true, "a reset later", frame(frameReset, 0, 1, 4))
	see(false, "another", frame(frameReset, 0, 1, 4))
	known = true
	for range 10 {
		see(true, "a reset of a known client", frame(frameReset, 0, 1, 4))
	}
	see(false, "one too many", frame(frameReset, 0, 1, 4))
	see(true, "a known client's requests", frame(frameHeaders, 0, 7, 10))
	see(true, "a known client's requests", frame(frameHeaders, 0, 9, 10))
	see(true, "a known client's ping", frame(6, 0, 0, 8))
}
