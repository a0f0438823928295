package watch_test

import (
	"context"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/watch"
)

// watchQuietPrefix returns a watcher of a prefix without recent events; it has skipped revisions of
// other keys.
func watchQuietPrefix(t *testing.T, h *tape, hub *watch.Hub) *watch.Watcher {
	hub.Publish([]raftstore.Events{h.recordPuts("/mine/a"), h.recordPuts("/mine/b"), h.recordPuts("/other"),
		h.recordPuts("/other")})
	w, err := hub.Watch(t.Context(), "/mine/", 1)
	if err != nil {
		t.Fatal(err)
	}
	virtual.Wait() // wait until it has caught up
	if ev := <-w.C(); ev.Revision != 2 {
		t.Fatalf("first delivery: %+v", ev)
	}
	return w
}

// A requested progress note is sent even if nothing has happened since the watcher caught up.
func TestProgressIsToldWhenAskedFor(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		h := new(tape)
		w := watchQuietPrefix(t, h, watch.New(h, 0, watch.Options{}))
		for range 2 {
			w.RequestProgress()
			virtual.Wait()
			select {
			case ev := <-w.C():
				if len(ev.Events) != 0 || ev.Revision != 4 {
					t.Errorf("note %+v, want revision 4", ev)
				}
			default:
				t.Error("no note")
			}
		}
		w.Stop()
	})
}

// A request is not lost if the channel is full: the note follows the unread revisions.
func TestProgressFollowsWhatIsUnread(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		h := new(tape)
		hub := watch.New(h, 0, watch.Options{})
		w, err := hub.Watch(t.Context(), "/mine/", 0)
		if err != nil {
			t.Fatal(err)
		}
		const unread = 300
		for n := range unread {
			hub.Publish([]raftstore.Events{h.recordPuts("/mine/a")})
			if n == 127 { // exactly the capacity of the channel
				w.RequestProgress()
			}
		}
		hub.Publish([]raftstore.Events{h.recordPuts("/other")})
		w.RequestProgress()
		last := raftstore.Revision(0)
		for last < unread+1 {
			virtual.Wait()
			select {
			case ev := <-w.C():
				if len(ev.Events) > 0 && ev.Revision != last+1 || ev.Revision < last {
					t.Fatalf("revision %d after %d", ev.Revision, last)
				}
				last = ev.Revision
			default:
				t.Fatalf("no progress beyond revision %d", last)
			}
		}
		w.Stop()
	})
}

// Periodic notes also reach a watcher that caught up without receiving events.
func TestProgressAfterCatchingUp(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		h := new(tape)
		hub := watch.New(h, 0, watch.Options{ProgressEvery: time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- hub.Run(ctx) }()
		w := watchQuietPrefix(t, h, hub)
		time.Sleep(1500 * time.Millisecond) // virtual
		select {
		case ev := <-w.C():
			if len(ev.Events) != 0 || ev.Revision != 4 {
				t.Errorf("note %+v, want revision 4", ev)
			}
		default:
			t.Error("no note")
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
		for range w.C() {
		}
	})
}
