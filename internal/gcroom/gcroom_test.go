package gcroom

import (
	"context"
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

const mib = 1 << 20

func TestNext(t *testing.T) {
	for _, c := range []struct {
		what       string
		now        int
		every      time.Duration
		live, room uint64
		low, high  int
	}{
		{"rare collections leave the usual", 100, 30 * time.Second, 40 * mib, 192 * mib, 100, 100},
		{"frequent ones get more", 100, 200 * time.Millisecond, 100 * mib, 1000 * mib, 250, 350},
		{"no more than the room", 100, 50 * time.Millisecond, 100 * mib, 192 * mib, 192, 192},
		{"a large heap has room as usual", 100, 50 * time.Millisecond, 200 * mib, 192 * mib, 100, 100},
		{"a small heap is bounded too", 700, time.Millisecond, mib, 192 * mib, most, most},
		{"nothing lives", 100, 0, 0, mib, most, most},
		{"when they are rare again it falls", 400, 10 * time.Second, 40 * mib, 192 * mib, 200, 230},
		{"the pace aimed at is kept", 300, pace, 40 * mib, 192 * mib, 300, 300},
	} {
		if got := next(c.now, c.every, c.live, c.room); got < c.low || got > c.high {
			t.Errorf("%s: %d, want %d to %d", c.what, got, c.low, c.high)
		}
	}
	percent := 800
	for range 12 {
		percent = next(percent, time.Minute, 40*mib, 192*mib)
	}
	if percent != usual {
		t.Errorf("after minutes of quiet the limit is %d", percent)
	}
}

// Run hears of collections, and leaves the limit as it found it.
func TestRun(t *testing.T) {
	t.Setenv("GOGC", "")
	old := debug.SetGCPercent(100)
	defer debug.SetGCPercent(old)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		Run(ctx, 256*mib)
	}()
	late := time.After(20 * time.Second)
	for current() == 100 {
		runtime.GC()
		select {
		case <-late:
			t.Fatal("collections without pause do not raise the limit")
		default:
		}
	}
	cancel()
	<-ended
	if now := current(); now != 100 {
		t.Errorf("the limit is %d afterwards", now)
	}
}

// current is the limit now. Reading it sets it, for a moment, to itself.
func current() int {
	p := debug.SetGCPercent(100)
	debug.SetGCPercent(p)
	return p
}
