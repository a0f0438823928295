package watch_test

import (
	"errors"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/watch"
)

// recordLargePut records a put with a value of one size that replaces a value of another size.
func (h *tape) recordLargePut(bytes, over int) raftstore.Events {
	h.mu.Lock()
	defer h.mu.Unlock()
	ev := raftstore.Events{Revision: raftstore.Revision(len(h.all) + 1)}
	e := raftstore.Event{Kind: raftstore.EventPut,
		Item: raftstore.Item{Key: "/h", Modified: ev.Revision, Value: make([]byte, bytes)}}
	if over > 0 {
		e.Prev = &raftstore.Item{Key: "/h", Value: make([]byte, over)}
	}
	ev.Events = append(ev.Events, e)
	h.all = append(h.all, ev)
	return ev
}

// The bytes that a watcher holds for a reader that has stopped are bounded, synced and while
// catching up. When the reader continues, it receives everything soon.
func TestUnreadBytesAreBounded(t *testing.T) {
	const mib = 1 << 20
	for name, x := range map[string]struct{ bytes, over, revisions, most int }{
		"values":                       {mib, 0, 40, 15}, // the key adds to each size
		"values that replace others":   {mib, mib, 40, 7},
		"only replaced values":         {0, mib, 40, 15},
		"each larger than the limit":   {9 * mib, 9 * mib, 6, 1},
		"many small values":            {100, 100, 300, 128},
		"a value of exactly the limit": {16*mib - 2, 0, 6, 1},
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
					time.Sleep(time.Minute) // virtual time: the bound still holds
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
						t.Errorf("a reader that continues waits for %s", took)
					}
					if _, behind := hub.Watchers(); behind != 0 {
						t.Error("the watcher is still behind")
					}
					hub.Close()
				})
			})
		}
	}
}

// A catching-up watcher that waits for space ends when its history is compacted, and when it is
// stopped.
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
