package watch_test

import (
	"testing"

	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/watch"
)

// busyTape is a history in which a revision is published exactly when a reader has found that there
// are no more.
type busyTape struct {
	tape
	onExhausted func()
}

func (h *busyTape) Read(after raftstore.Revision, limit int) ([]raftstore.Events, error) {
	found, err := h.tape.Read(after, limit)
	if err == nil && len(found) == 0 {
		h.onExhausted()
	}
	return found, err
}

// A watcher that has read all history and is about to become synced misses no revision that is
// published meanwhile.
func TestNothingFallsBetweenHistoryAndLive(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		h := new(busyTape)
		hub := watch.New(h, 0, watch.Options{})
		const busy = 5
		left := busy
		h.onExhausted = func() {
			if left--; left >= 0 {
				hub.Publish([]raftstore.Events{h.recordPuts("/a")})
			}
		}
		for range 3 {
			hub.Publish([]raftstore.Events{h.recordPuts("/a")})
		}
		w, err := hub.Watch(t.Context(), "/", 1)
		if err != nil {
			t.Fatal(err)
		}
		virtual.Wait()
		hub.Publish([]raftstore.Events{h.recordPuts("/a")})
		for want := raftstore.Revision(2); want <= 3+busy+1; want++ {
			if ev := <-w.C(); ev.Revision != want {
				t.Fatalf("revision %d, want %d", ev.Revision, want)
			}
		}
		w.Stop()
	})
}

// If the state is replaced, a watcher receives missing revisions from the history of the new state.
func TestWatchGoesOnThroughReset(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		h := new(tape)
		hub := watch.New(h, 0, watch.Options{})
		w, err := hub.Watch(t.Context(), "/", 0)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			h.recordPuts("/a")
		}
		hub.Reset(3)
		virtual.Wait()
		hub.Publish([]raftstore.Events{h.recordPuts("/a")})
		for want := range raftstore.Revision(4) {
			if ev := <-w.C(); ev.Revision != want+1 {
				t.Fatalf("revision %d, want %d", ev.Revision, want+1)
			}
		}
		w.Stop()
	})
}
