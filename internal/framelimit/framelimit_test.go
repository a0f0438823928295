package framelimit

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"
)

// frameHeader returns the header of a frame with a payload of n bytes.
func frameHeader(kind, flags byte, stream uint32, n int) *[frameHead]byte {
	return &[frameHead]byte{byte(n >> 16), byte(n >> 8), byte(n), kind, flags, byte(stream >> 24), byte(stream >> 16),
		byte(stream >> 8), byte(stream)}
}

// Budgets refill, data and trailers cost nothing, and an authenticated client gets larger budgets.
func TestBudgets(t *testing.T) {
	now, known := time.Unix(1000, 0), false
	c := New(nil, func() bool {
		return known
	}, Limits{Requests: 1, Resets: 3, Control: 3, AuthenticatedResets: 10, Wait: time.Nanosecond})
	c.now = func() time.Time { return now }
	see := func(want bool, what string, head *[frameHead]byte) {
		t.Helper()
		c.frames.head, c.frames.bytesToSkip = *head, int(head[2])
		if got := c.admitFrame(); got != want {
			t.Errorf("%s: %v", what, got)
		}
	}
	see(true, "a request", frameHeader(frameHeaders, 0, 1, 10))
	see(true, "its trailers", frameHeader(frameHeaders, flagEnd, 1, 10))
	see(false, "another request before the first has finished", frameHeader(frameHeaders, 0, 3, 10))
	c.requests.finishRequest()
	see(true, "another request after that", frameHeader(frameHeaders, 0, 5, 10))
	for range 5 {
		see(true, "data", frameHeader(frameData, 0, 1, 10))
		see(true, "the end of data", frameHeader(frameData, flagEnd, 1, 0))
	}
	see(true, "a ping", frameHeader(6, 0, 0, 8))
	see(true, "an empty data frame", frameHeader(frameData, 0, 1, 0))
	see(false, "a ping beyond the budget", frameHeader(6, 0, 0, 8))
	for range 3 {
		see(true, "a reset", frameHeader(frameReset, 0, 1, 4))
	}
	see(false, "a reset beyond the budget", frameHeader(frameReset, 0, 1, 4))
	now = now.Add(4 * time.Second) // a tenth of three per second
	see(true, "a reset later", frameHeader(frameReset, 0, 1, 4))
	see(false, "another", frameHeader(frameReset, 0, 1, 4))
	known = true
	for range 10 {
		see(true, "a reset of an authenticated client", frameHeader(frameReset, 0, 1, 4))
	}
	see(false, "a reset beyond the budget of an authenticated client", frameHeader(frameReset, 0, 1, 4))
	see(true, "an authenticated client's requests", frameHeader(frameHeaders, 0, 7, 10))
	see(true, "an authenticated client's requests", frameHeader(frameHeaders, 0, 9, 10))
	see(true, "an authenticated client's ping", frameHeader(6, 0, 0, 8))
}

// A reset of a request with many header fields costs an unauthenticated client as much as many
// resets. The first reset always passes. An authenticated client pays the same for each reset.
func TestResetsOfLargeHeaders(t *testing.T) {
	now, known := time.Unix(1000, 0), false
	c := NewWithoutTLS(nil, func() bool { return known }, Limits{Requests: 1, Resets: 20, AuthenticatedResets: 10})
	c.now = func() time.Time { return now }
	stream := uint32(1)
	reset := func(headers ...int) bool {
		t.Helper()
		for i, n := range headers {
			kind := byte(frameHeaders)
			if i > 0 {
				kind = frameContinuation
			}
			if c.frames.head, c.frames.bytesToSkip = *frameHeader(kind, 0, stream, n), n; !c.admitFrame() {
				t.Fatalf("the headers of stream %d are refused", stream)
			}
		}
		c.requests.finishRequest()
		c.frames.head, c.frames.bytesToSkip = *frameHeader(frameReset, 0, stream, 4), 4
		stream += 2
		return c.admitFrame()
	}
	resets := 0
	for reset(600, 800, 100) { // each reset costs 6
		resets++
	}
	if resets != 4 {
		t.Errorf("%d resets of 1,500 bytes of headers passed, want 4", resets)
	}
	now = now.Add(30 * time.Second)
	if !reset(16<<10) || reset(10) {
		t.Error("want one reset of 16 KiB of headers, and no other")
	}
	known = true
	for i := range 10 {
		if !reset(16 << 10) {
			t.Errorf("reset %d of an authenticated client is refused", i+1)
		}
	}
}

// Exceeded is called once per connection, however many frames follow.
func TestExceeded(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	called := 0
	c := NewWithoutTLS(server, func() bool { return false }, Limits{Control: 2, Exceeded: func() { called++ }})
	ping := append(frameHeader(6, 0, 0, 8)[:], make([]byte, 8)...)
	go func() { _, _ = client.Write(bytes.Repeat(ping, 5)) }()
	for i, want := range []int{0, 0, 1, 1, 1} {
		if _, err := io.ReadFull(c, make([]byte, len(ping))); err != nil {
			t.Fatal(err)
		}
		if called != want {
			t.Errorf("after ping %d, Exceeded was called %d times, want %d", i+1, called, want)
		}
	}
}
