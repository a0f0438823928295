package watch_test

import (
	"errors"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/watch"
)

// recordLargePut records a put of a value of so many bytes over one of so many.
func (h *tape) recordLargePut(bytes, over int) raftstore.Events {
	h.mu.Lock()
	defer h.mu.Unlock()
	ev := raftstore.Events{Revision: raftstore.Revision(len(h.all) + 1)}
	e := raftstore.Event{Kind: raftstore.EventPut, Item: raftstore.Item{Key: "/h", Modified: ev.Revision, Value: make([]byte, bytes)}}
	if over > 0 {
		e.Prev = &raftstore.Item{Key: "/h", Value: make([]byte, over)}
	}
	ev.Events = append(ev.Events, e)
	h.all = append(h.all, ev)
	return ev
}

// What a watcher holds for a reader that does not read is bounded in bytes, live
// and while it catches up. When the reader goes on it gets everything, soon.
func TestUnreadBytesAreBounded(t *testing.T) {
	const mib = 1 << 20
	for name, x := range map[string]struct{ bytes, over, revisions, most int }{
		"values":                  {mib, 0, 40, 15}, // a key comes on top of each
		"values over others":      {mib, mib, 40, 7},
		"only what was replaced":  {0, mib, 40, 15},
		"each more than is held":  {9 * mib, 9 * mib, 6, 1},
		"many small ones":         {100, 100, 300, 128},
		"one that fills the room": {16*mib - 2, 0, 6, 1},
	} {
		for began, after := range map[string]raftstore.Revision{"live": 0, "in the past": 1} {
			t.Run(name+", "+began, func(t *testing.T) {
				virtual.Test(t, func(t *testing.T) {
					h := new(tape)
					hub := watch.New(h, 0, watch.Options{})
					hub.Publish([]raftstore.Events{h.recordPuts("/first"), h.recordPuts("/other")})
					first := max(2, after)
					watching := func() *watch.Watcher {
						w, err := hub.Watch(t.Context(), "/h", after)
						if err != nil {
							t.Fatal(err)
						}
						return w
					}
					var w *watch.Watcher
					if after == 0 {
						w = watching()
					}
					for range x.revisions {
						hub.Publish([]raftstore.Events{h.recordLargePut(x.bytes, x.over)})
					}
					if after != 0 {
						w = watching()
					}
					virtual.Wait()
					time.Sleep(time.Minute) // virtual: it does not give in
					if n := len(w.C()); n != x.most {
						t.Errorf("%d revisions unread, want %d", n, x.most)
					}
					began := time.Now()
					for i := range raftstore.Revision(x.revisions) {
						if ev := <-w.C(); ev.Revision != first+i+1 {
							t.Fatalf("revision %d, want %d", ev.Revision, first+i+1)
						}
						virtual.Wait()
						if n := len(w.C()); n > x.most {
							t.Fatalf("%d revisions unread", n)
						}
					}
					if took := time.Since(began); took > time.Second { // virtual
						t.Errorf("a reader that goes on waits for %s", took)
					}
					if _, behind := hub.Watchers(); behind != 0 {
						t.Error("the watcher is behind still")
					}
					hub.Close()
				})
			})
		}
	}
}

// A watcher that waits for room for many bytes ends when history is gone, and
// when it is stopped.
func TestHeavyWatcherEnds(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		h := new(tape)
		hub := watch.New(h, 0, watch.Options{})
		var all []*watch.Watcher
		for range 2 {
			w, err := hub.Watch(t.Context(), "/", 0)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, w)
		}
		for range 5 {
			hub.Publish([]raftstore.Events{h.recordLargePut(9<<20, 0)})
		}
		virtual.Wait()
		all[0].Stop()
		virtual.Wait()
		if running, behind := hub.Watchers(); running != 1 || behind != 1 {
			t.Errorf("%d watchers, %d behind", running, behind)
		}
		h.compactTo(4)
		time.Sleep(time.Minute) // virtual
		for i, want := range []error{nil, raftstore.ErrSlowWatcher} {
			n := 0
			for range all[i].C() {
				n++
			}
			if err := all[i].Err(); n != 1 || !errors.Is(err, want) {
				t.Errorf("watcher %d ended after %d revisions with %v, want %v", i, n, err, want)
			}
		}
		hub.Close()
	})
}
