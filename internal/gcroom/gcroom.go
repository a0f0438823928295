// Package gcroom gives the garbage collector more room while it is busy.
//
// With the usual GOGC a process whose live heap is small, but that allocates
// much, collects many times a second, and calls are late by as much as each
// collection takes. Run raises the limit for as long as collections follow one
// another within a second, to no more garbage than a number of bytes; when they
// are rarer, as in a process with little to do, or when the heap is large,
// everything is as usual and memory as small.
package gcroom

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
)

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
func Run(ctx context.Context, room uint64) {
	if os.Getenv("GOGC") != "" {
		return
	}
	collected := make(chan struct{}, 1)
	done := ctx.Done()
	notify(done, collected)
	defer debug.SetGCPercent(debug.SetGCPercent(usual))
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	percent, last := usual, time.Now()
	for {
		select {
		case <-collected:
		case <-done:
			return
		}
		now := time.Now()
		metrics.Read(live)
		if p := next(percent, now.Sub(last), live[0].Value.Uint64(), room); p != percent {
			percent = p
			debug.SetGCPercent(p)
		}
		last = now
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
