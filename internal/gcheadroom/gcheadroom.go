// Package gcheadroom lets a busy process collect garbage less often.
//
// With the default GOGC, a process with a small heap and a high allocation rate collects many times
// a second, and each collection delays requests. Run raises the GC percent while collections are
// less than a second apart, up to a number of bytes of garbage. If collections are rare or the heap
// is large, the default applies, so memory use stays low. Run also reports when a process becomes
// idle, which is the time to return memory to the kernel.
//
// Restrain bounds garbage more tightly for some seconds. Servers call it when a client exceeds a
// limit, so that hostile clients cannot use the headroom.
package gcheadroom

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// ServerHeadroom is the headroom of a server, in bytes. Under load this much garbage may
// accumulate; with a larger live heap the default GC percent allows more anyway.
const ServerHeadroom = 192 << 20

const (
	defaultPercent = 100 // GOGC
	// maxPercent bounds the GC percent whatever the headroom: a heap of a few megabytes gains
	// nothing from more.
	maxPercent = 800
	// targetInterval is the time between collections that is aimed at.
	targetInterval = time.Second
	// idleInterval is a time between collections that only occurs in an idle process.
	idleInterval = 30 * time.Second
	// restraintDuration is how long a call of Restrain lasts.
	restraintDuration = 10 * time.Second
	// restrainedGarbage is how many bytes of garbage may accumulate during a restraint.
	restrainedGarbage = 32 << 20
	// minPercent is the smallest GC percent during a restraint. It bounds the processor time of
	// collections.
	minPercent = 50
)

// restrainSignal has room for one signal to Run.
var restrainSignal = make(chan struct{}, 1)

// Restrain bounds the garbage of this process to 32 MiB, or to half of the live heap if that is
// more, for 10 s after the latest call. It never raises the GC percent and does not block. It has
// no effect unless Run is running.
func Restrain() {
	select {
	case restrainSignal <- struct{}{}:
	default:
	}
}

// nextPercent returns the GC percent after a collection. interval is the time since the previous
// collection and live the bytes it left. headroom is how much garbage may accumulate if that is
// more than the default allows.
func nextPercent(now int, interval time.Duration, live, headroom uint64) int {
	if interval >= idleInterval {
		return defaultPercent
	}
	want := float64(now) * float64(targetInterval) / float64(max(interval, time.Millisecond))
	allowed := max(defaultPercent, 100*float64(headroom)/float64(max(live, 1)))
	// Go only half of the way: one short interval between collections is not significant.
	want = (float64(now) + want) / 2
	return int(max(defaultPercent, min(want, allowed, maxPercent)))
}

// Run adjusts the GC percent of this process until ctx ends, then restores it. headroom is in
// bytes. If GOGC is set in the environment, the percent is not changed.
//
// onIdle, if not nil, is called when no collection has happened for half a minute after one. worked
// is true if, before that, collections were less than half a minute apart, or the process has just
// started: there is garbage and freed heap to release. worked is false after the collections that
// the runtime itself starts every two minutes in an idle process. onIdle may run one collection if
// worked is true.
func Run(ctx context.Context, headroom uint64, onIdle func(worked bool)) {
	r := tuner{percent: defaultPercent, worked: true, headroom: headroom, fixed: os.Getenv("GOGC") != "", lastCollection: time.Now()}
	if !r.fixed {
		defer debug.SetGCPercent(debug.SetGCPercent(defaultPercent))
	}
	collected := make(chan struct{}, 1)
	notifyCollections(ctx.Done(), collected)
	r.adjust(ctx, collected, restrainSignal, onIdle)
}

// adjust sets the GC percent after collections and on restrain signals, and calls onIdle, until ctx
// ends.
func (r *tuner) adjust(ctx context.Context, collected, restrain <-chan struct{}, onIdle func(worked bool)) {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	idleTimer := time.NewTimer(idleInterval)
	defer idleTimer.Stop()
	for {
		select {
		case <-collected:
			metrics.Read(live)
			if r.recordCollection(time.Now(), live[0].Value.Uint64()) {
				idleTimer.Reset(idleInterval)
			}
		case <-restrain:
			metrics.Read(live)
			r.startRestraint(time.Now(), live[0].Value.Uint64())
		case <-idleTimer.C:
			worked := r.startIdle()
			if onIdle != nil {
				onIdle(worked)
			}
		case <-ctx.Done():
			return
		}
	}
}

// tuner is the state of one process's collections.
type tuner struct {
	percent        int       // current GC percent
	headroom       uint64    // bytes of garbage
	fixed          bool      // GOGC is set in the environment
	worked         bool      // since the process was last idle
	ownCollection  bool      // the next collection is started by onIdle
	lastCollection time.Time // time of the last collection
	restraintEnd   time.Time // end of the restraint; zero if Restrain was never called
}

// recordCollection processes a collection that left live bytes. It returns false if onIdle started
// the collection.
func (r *tuner) recordCollection(now time.Time, live uint64) bool {
	interval := now.Sub(r.lastCollection)
	r.lastCollection = now
	if r.ownCollection {
		r.ownCollection = false
		return false
	}
	r.worked = r.worked || interval < idleInterval
	percent := nextPercent(r.percent, interval, live, r.headroom)
	if now.Before(r.restraintEnd) {
		percent = min(percent, restrainedPercent(live))
	}
	r.setPercent(percent)
	return true
}

// startRestraint starts or extends a restraint. It lowers the GC percent at once, because the next
// collection could come too late.
func (r *tuner) startRestraint(now time.Time, live uint64) {
	r.restraintEnd = now.Add(restraintDuration)
	r.setPercent(min(r.percent, restrainedPercent(live)))
}

// restrainedPercent returns the GC percent during a restraint if the latest collection left live
// bytes.
func restrainedPercent(live uint64) int {
	return int(max(minPercent, min(100*restrainedGarbage/max(live, 1), maxPercent)))
}

// startIdle reports whether the process has worked since it was last idle, and resets the GC
// percent to the default.
func (r *tuner) startIdle() (worked bool) {
	worked, r.worked, r.ownCollection = r.worked, false, r.worked
	r.setPercent(defaultPercent)
	return worked
}

func (r *tuner) setPercent(percent int) {
	if percent != r.percent && !r.fixed {
		r.percent = percent
		debug.SetGCPercent(percent)
	}
}

// sentinel is an object that every collection frees.
type sentinel struct{ _ [16]byte }

// notifyCollections signals collected after every collection until done is closed.
func notifyCollections(done <-chan struct{}, collected chan<- struct{}) {
	runtime.SetFinalizer(new(sentinel), func(*sentinel) {
		select {
		case <-done:
			return
		case collected <- struct{}{}:
		default:
		}
		notifyCollections(done, collected)
	})
}
