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
		{"rare collections keep the default", 100, 30 * time.Second, 40 * mib, 192 * mib, 100, 100},
		{"frequent collections raise the percent", 100, 200 * time.Millisecond, 100 * mib, 1000 * mib, 250, 350},
		{"the headroom is the limit", 100, 50 * time.Millisecond, 100 * mib, 192 * mib, 192, 192},
		{"a large heap keeps the default", 100, 50 * time.Millisecond, 200 * mib, 192 * mib, 100, 100},
		{"a small heap is bounded", 700, time.Millisecond, mib, 192 * mib, maxPercent, maxPercent},
		{"nothing lives", 100, 0, 0, mib, maxPercent, maxPercent},
		{"the percent falls when collections are rare again", 400, 10 * time.Second, 40 * mib, 192 * mib, 200, 230},
		{"the target interval keeps the percent", 300, targetInterval, 40 * mib, 192 * mib, 300, 300},
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
		t.Errorf("after minutes without load the percent is %d", percent)
	}
}

// Run observes collections, and restores the GC percent when it ends.
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
			t.Fatal("continuous collections do not raise the percent")
		default:
		}
	}
	cancel()
	<-ended
	if now := currentPercent(); now != 100 {
		t.Errorf("the percent is %d afterwards", now)
	}
}

// A process becomes idle half a minute after its last work. Its own collection then does not count
// as work, and neither do the periodic collections of the runtime.
func TestRests(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(defaultPercent))
	r, now := tuner{percent: defaultPercent, headroom: 192 * mib, worked: true, lastCollection: time.Unix(0, 0)},
		time.Unix(0, 0)
	after := func(d time.Duration) bool {
		now = now.Add(d)
		return r.recordCollection(now, 10*mib)
	}
	for range 20 {
		if !after(10 * time.Millisecond) {
			t.Fatal("a collection under load is not counted")
		}
	}
	if r.percent != maxPercent {
		t.Errorf("the percent is %d under load", r.percent)
	}
	if !r.startIdle() || r.percent != defaultPercent {
		t.Errorf("not idle after work, or a percent of %d", r.percent)
	}
	if after(idleInterval + time.Millisecond) {
		t.Error("the collection of onIdle counts as work")
	}
	if !after(2*time.Minute) || r.startIdle() || r.percent != defaultPercent {
		t.Errorf("a periodic collection of the runtime counts as work: %+v", r)
	}
	if !after(2*time.Minute) || r.startIdle() {
		t.Error("a second periodic collection counts as work")
	}
	after(time.Minute)
	if after(time.Second); !r.startIdle() {
		t.Error("work after an idle phase is not counted")
	}
}

// onIdle is called half a minute after the start, and half a minute after a collection that it did
// not start itself.
func TestRunRests(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		began, collected, ended := time.Now(), make(chan struct{}), make(chan struct{})
		var rests []string
		go func() {
			defer close(ended)
			r := tuner{percent: defaultPercent, headroom: mib, fixed: true, worked: true, lastCollection: began}
			r.adjust(ctx, collected, nil, func(worked bool) {
				rests = append(rests, fmt.Sprint(time.Since(began), worked))
			})
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
			t.Errorf("idle after %q, want %q", rests, want)
		}
	})
}

// currentPercent returns the current GC percent. Reading it sets it to 100 for a moment.
func currentPercent() int {
	p := debug.SetGCPercent(100)
	debug.SetGCPercent(p)
	return p
}

// A restraint lowers the percent at once, keeps it low under load, and ends 10 s after the latest
// call.
func TestRestraint(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(defaultPercent))
	now := time.Unix(0, 0)
	r := tuner{percent: defaultPercent, headroom: 192 * mib, lastCollection: now}
	want := func(percent int, when string) {
		t.Helper()
		if r.percent != percent {
			t.Errorf("%s: the percent is %d, want %d", when, r.percent, percent)
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
	want(minPercent, "a second call does not raise the percent")
	load(24*mib, 9*time.Second)
	want(133, "9 s after the second call")
	load(24*mib, 4*time.Second)
	want(800, "after the restraint")
}

// Restrain reaches Run, and does not block if Run is not running.
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
		runtime.GC() // without a restraint, the percent is at least the default
		select {
		case <-late:
			t.Fatalf("the percent is %d", currentPercent())
		default:
		}
	}
	cancel()
	<-ended
	runtime.KeepAlive(heap)
}
