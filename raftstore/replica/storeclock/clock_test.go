package storeclock

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The store's time goes neither back nor ahead with a clock that jumps.
func TestClockCountsWhatPasses(t *testing.T) {
	wall := time.UnixMilli(1_000_000_000)
	var c Clock
	c.Initialize(func() time.Time { return wall })
	want := func(what string, ms int64) {
		t.Helper()
		if got := c.CurrentTime(); got != ms {
			t.Errorf("%s: %d, want %d", what, got, ms)
		}
	}
	want("before anything is known", 0)
	c.StartFromWallClock()
	want("founded", 1_000_000_000)
	wall = wall.Add(700 * time.Millisecond)
	want("a while later", 1_000_000_700)
	wall = wall.Add(-time.Hour)
	want("after a jump back", 1_000_000_700)
	wall = wall.Add(time.Second)
	want("a second after it", 1_000_001_700)
	wall = wall.Add(24 * time.Hour)
	want("after a jump ahead", 1_000_006_700)
	c.ObserveTime(1_000_006_000)
	want("having heard of an earlier time", 1_000_006_700)
	c.ObserveLeaderTime(1_000_009_000)
	want("told of a later time", 1_000_009_000)
	c.StartFromWallClock()
	want("leading after another", 1_000_009_000)

	// One that starts where nobody can tell it the time looks at the wall clock,
	// but never goes back behind what was applied.
	for applied, later := range map[int64]int64{500: wall.UnixMilli(), 1 << 50: 1 << 50} {
		var n Clock
		n.Initialize(func() time.Time { return wall })
		n.ObserveTime(applied)
		n.StartFromWallClock()
		if got := n.CurrentTime(); got != later {
			t.Errorf("founded at %d having applied %d: %d", wall.UnixMilli(), applied, got)
		}
	}
}

// Whatever clocks do, the time of replicas that hear of each other moves at
// least as fast as the slowest and runs ahead of what passed by jumps only, five
// seconds for each.
func TestClocksTogether(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const n = 3
		var walls [n]time.Time
		var clocks [n]Clock
		start := time.UnixMilli(1_700_000_000_000)
		for i := range walls {
			walls[i] = start.Add(time.Duration(rapid.IntRange(-3600, 3600).Draw(t, "offset")) * time.Second)
			clocks[i].Initialize(func() time.Time { return walls[i] })
		}
		clocks[0].StartFromWallClock()
		begin := clocks[0].CurrentTime()
		for i := range clocks {
			clocks[i].ObserveLeaderTime(begin)
		}
		var passed, jumps int64
		last := begin
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			step := time.Duration(rapid.IntRange(0, 1000).Draw(t, "ms")) * time.Millisecond
			passed += step.Milliseconds()
			for i := range walls {
				walls[i] = walls[i].Add(step)
				if rapid.IntRange(0, 9).Draw(t, "jump") == 0 {
					walls[i] = walls[i].Add(time.Duration(rapid.IntRange(-100_000, 100_000).Draw(t, "by")) *
						time.Second)
					jumps++
				}
			}
			leader := rapid.IntRange(0, n-1).Draw(t, "leader")
			now := clocks[leader].CurrentTime()
			if now < last {
				t.Fatalf("time went from %d to %d", last, now)
			}
			if ahead := now - begin - passed; ahead > jumps*maxStep.Milliseconds() {
				t.Fatalf("%d ms ahead after %d jumps", ahead, jumps)
			}
			last = now
			for i := range clocks {
				clocks[i].ObserveTime(now)
				clocks[i].CurrentTime()
			}
		}
		if jumps == 0 && last-begin != passed {
			t.Fatalf("%d ms counted, %d passed", last-begin, passed)
		}
	})
}
