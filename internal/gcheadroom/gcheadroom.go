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

	"keelson.dev/keelson/internal/wakeup"
)

// ServerHeadroom is the value of Run's headroom for servers, in bytes. Under load this much garbage
// may accumulate. With a larger live heap, the default GC percent allows more anyway.
const ServerHeadroom = 192 << 20

const (
	defaultPercent = 100 // GOGC
	// maxPercent is the largest GC percent that is ever set, whatever the headroom. A heap of a few
	// megabytes gains nothing from more.
	maxPercent = 800
	// targetInterval is the time between collections that the GC percent is adjusted for.
	targetInterval = time.Second
	// idleInterval is the time without a collection after which the process counts as idle.
	idleInterval = 30 * time.Second
	// restraintDuration is how long a call of Restrain bounds garbage more tightly.
	restraintDuration = 10 * time.Second
	// restrainedGarbage is how many bytes of garbage may accumulate while Restrain is in effect.
	restrainedGarbage = 32 << 20
	// minPercent is the smallest GC percent while Restrain is in effect. It bounds the processor
	// time of collections.
	minPercent = 50
)

// restrainSignal wakes Run after a call of Restrain.
var restrainSignal = wakeup.New()

// Restrain bounds the garbage of this process for 10 s after the latest call: to 32 MiB, or to half
// of the live heap if that is more. It never raises the GC percent and does not block. It has no
// effect unless Run is running.
func Restrain() {
	restrainSignal.Send()
}

// nextPercent returns the GC percent to set after a collection. percent is the current value,
// interval is the time since the previous collection, and liveBytes is the heap in use after the
// collection. headroom is how many bytes of garbage may accumulate if that is more than the default
// percent allows.
func nextPercent(percent int, interval time.Duration, liveBytes, headroom uint64) int {
	if interval >= idleInterval {
		return defaultPercent
	}
	want := float64(percent) * float64(targetInterval) / float64(max(interval, time.Millisecond))
	allowed := max(defaultPercent, 100*float64(headroom)/float64(max(liveBytes, 1)))
	// Go only half of the way: one short interval between collections is not significant.
	want = (float64(percent) + want) / 2
	return int(max(defaultPercent, min(want, allowed, maxPercent)))
}

// Run adjusts the GC percent of this process until ctx ends, then restores it. Up to headroom bytes
// of garbage may accumulate. If GOGC is set in the environment, the percent is not changed.
//
// onIdle, if not nil, is called when the process becomes idle: when 30 s have passed since the last
// collection. worked is true if the process was busy since the previous call of onIdle, that is,
// two collections were less than 30 s apart. It is also true in the first call. There is then
// garbage and freed heap to release, and onIdle may run one collection. worked is false if the only
// collections were those that the runtime itself starts every two minutes in an idle process.
func Run(ctx context.Context, headroom uint64, onIdle func(worked bool)) {
	r := tuner{percent: defaultPercent, worked: true, headroom: headroom, fixed: os.Getenv("GOGC") != "",
		lastCollection: time.Now()}
	if !r.fixed {
		defer debug.SetGCPercent(debug.SetGCPercent(defaultPercent))
	}
	collected := make(chan struct{}, 1)
	notifyCollections(ctx.Done(), collected)
	r.adjust(ctx, collected, restrainSignal, onIdle)
}

// adjust sets the GC percent after each collection and each signal of Restrain, and calls onIdle
// when the process becomes idle, until ctx ends.
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

// tuner adjusts the GC percent of this process. It is the state of one call of Run.
type tuner struct {
	percent        int       // current GC percent
	headroom       uint64    // how many bytes of garbage may accumulate
	fixed          bool      // GOGC is set in the environment, so the percent must not change
	worked         bool      // the process has been busy since it was last idle
	ownCollection  bool      // the next collection is expected to be one that onIdle started
	lastCollection time.Time // time of the last collection
	restraintEnd   time.Time // until when garbage is bounded more tightly; zero if Restrain was never called
}

// recordCollection is called after a garbage collection and sets the GC percent for the next one.
// collectedAt is the time of the collection, and liveBytes is the heap in use after it. It returns
// whether the collection counts as activity, which is false if onIdle started the collection.
func (r *tuner) recordCollection(collectedAt time.Time, liveBytes uint64) bool {
	interval := collectedAt.Sub(r.lastCollection)
	r.lastCollection = collectedAt
	if r.ownCollection {
		r.ownCollection = false
		return false
	}
	r.worked = r.worked || interval < idleInterval
	percent := nextPercent(r.percent, interval, liveBytes, r.headroom)
	if collectedAt.Before(r.restraintEnd) {
		percent = min(percent, restrainedPercent(liveBytes))
	}
	r.setPercent(percent)
	return true
}

// startRestraint lowers the GC percent until restraintDuration after now. The new percent takes
// effect at once, because the next collection could come too late. liveBytes is the heap in use
// after the last collection.
func (r *tuner) startRestraint(now time.Time, liveBytes uint64) {
	r.restraintEnd = now.Add(restraintDuration)
	r.setPercent(min(r.percent, restrainedPercent(liveBytes)))
}

// restrainedPercent returns the largest GC percent that is allowed while Restrain is in effect.
// liveBytes is the heap in use after the last collection.
func restrainedPercent(liveBytes uint64) int {
	return int(max(minPercent, min(100*restrainedGarbage/max(liveBytes, 1), maxPercent)))
}

// startIdle resets the GC percent to the default, because the process is idle. It returns whether
// the process has been busy since the previous call.
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

// sentinel is an object without references, so every collection frees it and runs its finalizer.
type sentinel struct{ _ [16]byte }

// notifyCollections sends on collected after every collection, without blocking, until done is
// closed.
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
