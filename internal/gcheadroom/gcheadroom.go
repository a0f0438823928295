// Package gcheadroom gives the garbage collector more room while it is busy.
//
// With the usual GOGC a process whose live heap is small, but that allocates
// much, collects many times a second, and calls are late by as much as each
// collection takes. Run raises the limit for as long as collections follow one
// another within a second, to no more garbage than a number of bytes; when they
// are rarer, as in a process with little to do, or when the heap is large,
// everything is as usual and memory as small. It also knows when a process
// begins to rest, which is when it can give memory back.
//
// Restrain bounds garbage more tightly for some seconds. Servers call it when a
// client exceeds a limit, so that hostile clients cannot use the room for load.
package gcheadroom

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// ServerHeadroom is the room of a process that serves: under load as much garbage may
// gather, as it may anyway where the live heap is larger than that.
const ServerHeadroom = 192 << 20

const (
	defaultPercent = 100 // GOGC
	// maxPercent bounds the limit whatever the room: a heap of a few megabytes gains
	// nothing beyond.
	maxPercent = 800
	// targetInterval is the time between collections that is aimed at.
	targetInterval = time.Second
	// idleInterval is a time between collections that only a process with little to do has.
	idleInterval = 30 * time.Second
	// restraintDuration is how long a call of Restrain lasts.
	restraintDuration = 10 * time.Second
	// restrainedGarbage is the garbage, in bytes, that may gather during a restraint.
	restrainedGarbage = 32 << 20
	// minPercent is the smallest limit in percent during a restraint. It bounds the processor time of
	// collections.
	minPercent = 50
)

// restrainSignal has room for one signal to run.
var restrainSignal = make(chan struct{}, 1)

// Restrain bounds the garbage of this process to 32 MiB, or to half of the live heap where that is
// more, for 10 s after the latest call. It never raises the limit, and it does not block. Without
// Run it has no effect.
func Restrain() {
	select {
	case restrainSignal <- struct{}{}:
	default:
	}
}

// nextPercent is the limit in percent after a collection that followed the one before
// within every and left live bytes, when room is how much garbage may gather
// where that is more than usual.
func nextPercent(now int, interval time.Duration, live, headroom uint64) int {
	if interval >= idleInterval {
		return defaultPercent
	}
	want := float64(now) * float64(targetInterval) / float64(max(interval, time.Millisecond))
	allowed := max(defaultPercent, 100*float64(headroom)/float64(max(live, 1)))
	// By half of the way: one short pause between collections says little.
	want = (float64(now) + want) / 2
	return int(max(defaultPercent, min(want, allowed, maxPercent)))
}

// Run adjusts the limit of this process until ctx ends, then restores it. room
// is in bytes. A GOGC in the environment is left alone.
//
// rest, where it is not nil, is called when no collection has come for half a
// minute after one. worked is true when collections had been following one
// another faster than that, or the process has just begun: there is garbage of
// that time then, and memory that held more. It is false after the collections
// by which the runtime looks through a process with little to do, every two
// minutes. rest may collect, once, where worked is true.
func Run(ctx context.Context, headroom uint64, onIdle func(worked bool)) {
	r := tuner{percent: defaultPercent, worked: true, headroom: headroom, fixed: os.Getenv("GOGC") != "", lastCollection: time.Now()}
	if !r.fixed {
		defer debug.SetGCPercent(debug.SetGCPercent(defaultPercent))
	}
	collected := make(chan struct{}, 1)
	notifyCollections(ctx.Done(), collected)
	r.adjust(ctx, collected, restrainSignal, onIdle)
}

// adjust adjusts the limit after collections and on signals from restrain, and rests, until ctx ends.
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

// tuner is how a process collects.
type tuner struct {
	percent        int       // the limit now
	headroom       uint64    // bytes of garbage
	fixed          bool      // the limit is the environment's
	worked         bool      // since it rested last
	ownCollection  bool      // the next collection is that of the rest
	lastCollection time.Time // when there was a collection
	restraintEnd   time.Time // end of the restraint; zero when Restrain was never called
}

// recordCollection takes a collection in that left live bytes; it is false when that was made by a rest.
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

// startRestraint begins a restraint, or extends it. It lowers the limit at once: the next collection could
// come too late.
func (r *tuner) startRestraint(now time.Time, live uint64) {
	r.restraintEnd = now.Add(restraintDuration)
	r.setPercent(min(r.percent, restrainedPercent(live)))
}

// restrainedPercent returns the limit in percent during a restraint, where the latest collection left live
// bytes.
func restrainedPercent(live uint64) int {
	return int(max(minPercent, min(100*restrainedGarbage/max(live, 1), maxPercent)))
}

// startIdle says whether the process has worked since it rested last. The limit is as usual from now on.
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

// sentinel is collected by each collection.
type sentinel struct{ _ [16]byte }

// notifyCollections tells of every collection until done.
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
