package gcheadroom

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
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
		{"a small heap is bounded too", 700, time.Millisecond, mib, 192 * mib, maxPercent, maxPercent},
		{"nothing lives", 100, 0, 0, mib, maxPercent, maxPercent},
		{"when they are rare again it falls", 400, 10 * time.Second, 40 * mib, 192 * mib, 200, 230},
		{"the pace aimed at is kept", 300, targetInterval, 40 * mib, 192 * mib, 300, 300},
	} {
		if got := nextPercent(c.now, c.every, c.live, c.room); got < c.low || got > c.high {
			t.Errorf("%s: %d, want %d to %d", c.what, got, c.low, c.high)
		}
	}
	percent := 800
	for range 12 {
		percent = nextPercent(percent, time.Minute, 40*mib, 192*mib)
	}
	if percent != defaultPercent {
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
		Run(ctx, 256*mib, nil)
	}()
	late := time.After(time.Minute)
	for currentPercent() == 100 {
		runtime.GC()
		select {
		case <-late:
			t.Fatal("collections without pause do not raise the limit")
		default:
		}
	}
	cancel()
	<-ended
	if now := currentPercent(); now != 100 {
		t.Errorf("the limit is %d afterwards", now)
	}
}

// A process rests half a minute after it worked, and gives memory back then; by what it collects for that it has not
// worked again. After the collections of a process with little to do it rests too, and has not worked.
func TestRests(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(defaultPercent))
	r, now := tuner{percent: defaultPercent, headroom: 192 * mib, worked: true, lastCollection: time.Unix(0, 0)}, time.Unix(0, 0)
	after := func(d time.Duration) bool {
		now = now.Add(d)
		return r.recordCollection(now, 10*mib)
	}
	for range 20 {
		if !after(10 * time.Millisecond) {
			t.Fatal("a collection under load is none")
		}
	}
	if r.percent != maxPercent {
		t.Errorf("the limit is %d under load", r.percent)
	}
	if !r.startIdle() || r.percent != defaultPercent {
		t.Errorf("it rests as one that has not worked, with a limit of %d", r.percent)
	}
	if after(idleInterval + time.Millisecond) {
		t.Error("the rest's own collection is taken for one of work")
	}
	if !after(2*time.Minute) || r.startIdle() || r.percent != defaultPercent {
		t.Errorf("the runtime's own looking through is work: %+v", r)
	}
	if !after(2*time.Minute) || r.startIdle() {
		t.Error("and so is the next")
	}
	after(time.Minute)
	if after(time.Second); !r.startIdle() {
		t.Error("work after a rest is none")
	}
}

// In virtual time: rest is called half a minute after the process has begun, and again half a minute after a collection
// that is not its own.
func TestRunRests(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		began, collected, ended := time.Now(), make(chan struct{}), make(chan struct{})
		var rests []string
		go func() {
			defer close(ended)
			r := tuner{percent: defaultPercent, headroom: mib, fixed: true, worked: true, lastCollection: began}
			r.adjust(ctx, collected, nil, func(worked bool) { rests = append(rests, fmt.Sprint(time.Since(began), worked)) })
		}()
		for _, after := range []time.Duration{time.Second, 30 * time.Second, 2 * time.Minute, time.Hour, time.Second} {
			time.Sleep(after)
			collected <- struct{}{}
		}
		time.Sleep(time.Hour)
		cancel()
		<-ended
		want := []string{"31s true", "3m1s false", "1h3m2s true"}
		if !slices.Equal(rests, want) {
			t.Errorf("it rested after %q, want %q", rests, want)
		}
	})
}

// currentPercent is the limit now. Reading it sets it, for a moment, to itself.
func currentPercent() int {
	p := debug.SetGCPercent(100)
	debug.SetGCPercent(p)
	return p
}

// A restraint lowers the limit at once, keeps the limit low under load, and ends 10 s after the
// latest call.
func TestRestraint(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(defaultPercent))
	now := time.Unix(0, 0)
	r := tuner{percent: defaultPercent, headroom: 192 * mib, lastCollection: now}
	want := func(percent int, when string) {
		t.Helper()
		if r.percent != percent {
			t.Errorf("%s: the limit is %d, want %d", when, r.percent, percent)
		}
	}
	load := func(live uint64, d time.Duration) {
		for end := now.Add(d); now.Before(end); {
			now = now.Add(100 * time.Millisecond)
			r.recordCollection(now, live)
		}
	}
	load(24*mib, 3*time.Second)
	want(800, "under load")
	r.startRestraint(now, 24*mib)
	want(133, "at once")
	load(24*mib, 5*time.Second)
	want(133, "under load during a restraint")
	load(100*mib, time.Second)
	want(minPercent, "with a large heap")
	r.startRestraint(now, 24*mib)
	want(minPercent, "a second call does not raise the limit")
	load(24*mib, 9*time.Second)
	want(133, "9 s after the second call")
	load(24*mib, 4*time.Second)
	want(800, "after the restraint")
}

// Restrain reaches Run, and does not block without it.
func TestRestrain(t *testing.T) {
	t.Setenv("GOGC", "")
	defer debug.SetGCPercent(debug.SetGCPercent(defaultPercent))
	Restrain()
	Restrain()
	heap := make([]byte, 128*mib)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		Run(ctx, 1024*mib, nil)
	}()
	late := time.After(time.Minute)
	for currentPercent() != minPercent {
		runtime.GC() // without a restraint, the limit is at least the usual one
		select {
		case <-late:
			t.Fatalf("the limit is %d", currentPercent())
		default:
		}
	}
	cancel()
	<-ended
	runtime.KeepAlive(heap)
}
