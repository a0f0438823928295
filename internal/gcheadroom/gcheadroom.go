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

// Server is the room of a process that serves: under load as much garbage may
// gather, as it may anyway where the live heap is larger than that.
const Server = 192 << 20

const (
	usual = 100 // GOGC
	// most bounds the limit whatever the room: a heap of a few megabytes gains
	// nothing beyond.
	most = 800
	// pace is the time between collections that is aimed at.
	pace = time.Second
	// quiet is a time between collections that only a process with little to do has.
	quiet = 30 * time.Second
	// restraint is how long a call of Restrain lasts.
	restraint = 10 * time.Second
	// restrainedRoom is the garbage, in bytes, that may gather during a restraint.
	restrainedRoom = 32 << 20
	// least is the smallest limit in percent during a restraint. It bounds the processor time of
	// collections.
	least = 50
)

// restrain has room for one signal to run.
var restrain = make(chan struct{}, 1)

// Restrain bounds the garbage of this process to 32 MiB, or to half of the live heap where that is
// more, for 10 s after the latest call. It never raises the limit, and it does not block. Without
// Run it has no effect.
func Restrain() {
	select {
	case restrain <- struct{}{}:
	default:
	}
}

// next is the limit in percent after a collection that followed the one before
// within every and left live bytes, when room is how much garbage may gather
// where that is more than usual.
func next(now int, every time.Duration, live, room uint64) int {
	if every >= quiet {
		return usual
	}
	want := float64(now) * float64(pace) / float64(max(every, time.Millisecond))
	allowed := max(usual, 100*float64(room)/float64(max(live, 1)))
	// By half of the way: one short pause between collections says little.
	want = (float64(now) + want) / 2
	return int(max(usual, min(want, allowed, most)))
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
func Run(ctx context.Context, room uint64, rest func(worked bool)) {
	r := rhythm{percent: usual, worked: true, room: room, fixed: os.Getenv("GOGC") != "", last: time.Now()}
	if !r.fixed {
		defer debug.SetGCPercent(debug.SetGCPercent(usual))
	}
	collected := make(chan struct{}, 1)
	notify(ctx.Done(), collected)
	r.run(ctx, collected, restrain, rest)
}

// run adjusts the limit after collections and on signals from restrain, and rests, until ctx ends.
func (r *rhythm) run(ctx context.Context, collected, restrain <-chan struct{}, rest func(worked bool)) {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	resting := time.NewTimer(quiet)
	defer resting.Stop()
	for {
		select {
		case <-collected:
			metrics.Read(live)
			if r.collected(time.Now(), live[0].Value.Uint64()) {
				resting.Reset(quiet)
			}
		case <-restrain:
			metrics.Read(live)
			r.restrain(time.Now(), live[0].Value.Uint64())
		case <-resting.C:
			worked := r.rests()
			if rest != nil {
				rest(worked)
			}
		case <-ctx.Done():
			return
		}
	}
}

// rhythm is how a process collects.
type rhythm struct {
	percent int       // the limit now
	room    uint64    // bytes of garbage
	fixed   bool      // the limit is the environment's
	worked  bool      // since it rested last
	own     bool      // the next collection is that of the rest
	last    time.Time // when there was a collection
	until   time.Time // end of the restraint; zero when Restrain was never called
}

// collected takes a collection in that left live bytes; it is false when that was made by a rest.
func (r *rhythm) collected(now time.Time, live uint64) bool {
	every := now.Sub(r.last)
	r.last = now
	if r.own {
		r.own = false
		return false
	}
	r.worked = r.worked || every < quiet
	percent := next(r.percent, every, live, r.room)
	if now.Before(r.until) {
		percent = min(percent, restrained(live))
	}
	r.set(percent)
	return true
}

// restrain begins a restraint, or extends it. It lowers the limit at once: the next collection could
// come too late.
func (r *rhythm) restrain(now time.Time, live uint64) {
	r.until = now.Add(restraint)
	r.set(min(r.percent, restrained(live)))
}

// restrained returns the limit in percent during a restraint, where the latest collection left live
// bytes.
func restrained(live uint64) int {
	return int(max(least, min(100*restrainedRoom/max(live, 1), most)))
}

// rests says whether the process has worked since it rested last. The limit is as usual from now on.
func (r *rhythm) rests() (worked bool) {
	worked, r.worked, r.own = r.worked, false, r.worked
	r.set(usual)
	return worked
}

func (r *rhythm) set(percent int) {
	if percent != r.percent && !r.fixed {
		r.percent = percent
		debug.SetGCPercent(percent)
	}
}

// sentinel is collected by each collection.
type sentinel struct{ _ [16]byte }

// notify tells of every collection until done.
func notify(done <-chan struct{}, collected chan<- struct{}) {
	runtime.SetFinalizer(new(sentinel), func(*sentinel) {
		select {
		case <-done:
			return
		case collected <- struct{}{}:
		default:
		}
		notify(done, collected)
	})
}
