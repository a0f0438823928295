package report

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Writes: at most one at a time per key, the newest wins, failures are retried, and the limit
// holds.
func TestWriteQueue(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		w := newWriteQueue(ctx, 3)
		var now, most atomic.Int64
		busy := make(map[string]bool)
		last := make(map[string]int)
		runs := 0
		var mu sync.Mutex
		for i := range 200 {
			k := fmt.Sprint("k", i%10)
			w.enqueueWrite(k, 0, func(context.Context) error {
				mu.Lock()
				if busy[k] {
					t.Errorf("two writes of %s at once", k)
				}
				busy[k] = true
				runs++
				mu.Unlock()
				most.Store(max(most.Load(), now.Add(1)))
				time.Sleep(10 * time.Millisecond)
				now.Add(-1)
				mu.Lock()
				defer mu.Unlock()
				busy[k] = false
				if runs%4 == 0 {
					return errors.New("conflict")
				}
				last[k] = i
				return nil
			})
		}
		time.Sleep(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		for i := range 10 {
			if got := last[fmt.Sprint("k", i)]; got != 190+i {
				t.Errorf("key %d ended with write %d, want %d", i, got, 190+i)
			}
		}
		if runs > 40 {
			t.Errorf("%d writes for 10 keys: they must coalesce", runs)
		}
		if most.Load() != 3 {
			t.Errorf("%d writes at once, want 3", most.Load())
		}
		w.enqueueWrite("late", 0, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		cancel()
		w.closeAndWait()
	})
}

// Queued writes of a node are bounded in size. A newer write for the same object replaces the older
// one, and the queue is empty after the store has recovered.
func TestWriteQueueIsBounded(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		w := newWriteQueue(ctx, 16)
		stuck := make(chan struct{})
		do := func(ctx context.Context) error {
			<-stuck
			return nil
		}
		const size = 1 << 20
		let := 0
		for w.enqueueWrite(fmt.Sprintf("pod/%d", let), size, do) && let < 1000 {
			let++
			virtual.Wait()
		}
		if most := maxQueuedBytes/size + 16; let > most {
			t.Errorf("%d MiB were taken on, want at most %d", let, most)
		}
		if last := fmt.Sprintf("pod/%d", let-1); !w.enqueueWrite(last, size, do) {
			t.Error("a newer word for what waits already is refused")
		}
		close(stuck)
		virtual.Wait()
		if w.bytes != 0 || len(w.queued) != 0 {
			t.Errorf("%d bytes of %d jobs are left", w.bytes, len(w.queued))
		}
		if !w.enqueueWrite("pod/again", size, do) {
			t.Error("nothing is taken on any more")
		}
		w.closeAndWait()
	})
}

// Overlong object names are refused before they are stored.
func TestOverlongNamesInReports(t *testing.T) {
	x := &Reporter{writes: newWriteQueue(t.Context(), 1)}
	long := strings.Repeat("x", 1<<20)
	for what, err := range map[string]error{
		"status": x.HandlePodStatus(&fleetv1.PodStatus{Uid: long}),
		"gone":   x.HandlePodGone(&fleetv1.PodGone{Name: long}),
	} {
		if err == nil || x.writes.queuedKeys() != 0 {
			t.Errorf("%s of a pod with a name of a megabyte: %v, %d jobs", what, err, x.writes.queuedKeys())
		}
	}
}
