package watch_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/watch"
)

// tape is a history in a slice.
type tape struct {
	mu        sync.Mutex
	compacted raftstore.Revision
	all       []raftstore.Events
}

func (h *tape) Read(after raftstore.Revision, limit int) ([]raftstore.Events, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if after < h.compacted {
		return nil, raftstore.ErrCompacted
	}
	rest := h.all[min(int(after), len(h.all)):]
	return rest[:min(limit, len(rest))], nil
}

func (h *tape) recordPuts(keys ...string) raftstore.Events {
	h.mu.Lock()
	defer h.mu.Unlock()
	ev := raftstore.Events{Revision: raftstore.Revision(len(h.all) + 1)}
	for _, k := range keys {
		ev.Events = append(ev.Events, raftstore.Event{Kind: raftstore.EventPut,
			Item: raftstore.Item{Key: k, Modified: ev.Revision}})
	}
	h.all = append(h.all, ev)
	return ev
}

func (h *tape) compactTo(to raftstore.Revision) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.compacted = to
}

// Each watcher receives exactly the matching part of history, in order and once, whatever the pace
// of its reader and its first revision.
func TestEveryWatcherSeesExactlyItsHistory(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := new(tape)
		hub := watch.New(h, 0, watch.Options{})
		total := rapid.IntRange(1, 600).Draw(rt, "revisions")
		prefixes := []string{"", "/a/", "/a", "/b/", "/a/1", "/none/"}
		var readers sync.WaitGroup
		type seen struct {
			prefix string
			after  raftstore.Revision
			got    []string
		}
		var all []*seen
		begin := func() {
			s := &seen{prefix: rapid.SampledFrom(prefixes).Draw(rt, "prefix"),
				after: raftstore.Revision(rapid.IntRange(0, len(h.all)).Draw(rt, "after"))}
			slow := rapid.IntRange(0, 3).Draw(rt, "slow") == 0
			w, err := hub.Watch(context.Background(), s.prefix, s.after)
			if err != nil {
				rt.Fatal(err)
			}
			if s.after == 0 {
				s.after = raftstore.Revision(len(h.all))
			}
			all = append(all, s)
			readers.Add(1)
			go func() {
				defer readers.Done()
				defer w.Stop()
				for ev := range w.C() {
					if len(ev.Events) > 0 {
						s.got = append(s.got, formatRevision(ev))
					}
					if slow {
						for range 100 {
							_, _ = h.Read(0, 1) // some work
						}
					}
					if ev.Revision >= raftstore.Revision(total+1) {
						return
					}
				}
			}()
		}
		for range total {
			if rapid.IntRange(0, 60).Draw(rt, "begin") == 0 {
				begin()
			}
			var keys []string
			for _, k := range []string{"/a/1", "/a/2", "/b/1"} {
				if rapid.Bool().Draw(rt, "touch") {
					keys = append(keys, k)
				}
			}
			if len(keys) == 0 {
				keys = []string{"/c/1"}
			}
			hub.Publish([]raftstore.Events{h.recordPuts(keys...)})
		}
		begin()
		// The last revision matches every prefix, so that all readers stop.
		hub.Publish([]raftstore.Events{h.recordPuts("/a/1", "/b/1", "/none/1")})
		readers.Wait()
		for _, s := range all {
			var want []string
			for _, ev := range h.all[s.after:] {
				if d := formatRevision(filterByPrefix(ev, s.prefix)); d != "" {
					want = append(want, d)
				}
			}
			if fmt.Sprint(s.got) != fmt.Sprint(want) {
				rt.Fatalf("watcher of %q after %d:\n got %v\nwant %v", s.prefix, s.after, s.got, want)
			}
		}
		hub.Close()
	})
}

func filterByPrefix(ev raftstore.Events, prefix string) raftstore.Events {
	out := raftstore.Events{Revision: ev.Revision}
	for _, e := range ev.Events {
		if strings.HasPrefix(e.Item.Key, prefix) {
			out.Events = append(out.Events, e)
		}
	}
	return out
}

func formatRevision(ev raftstore.Events) string {
	if len(ev.Events) == 0 {
		return ""
	}
	s := fmt.Sprint(ev.Revision)
	for _, e := range ev.Events {
		s += e.Item.Key
	}
	return s
}

// A watcher whose reader has stopped does not block others, and ends when its history is compacted.
func TestStuckReaderIsCutOff(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		h := new(tape)
		hub := watch.New(h, 0, watch.Options{})
		w, err := hub.Watch(context.Background(), "/", 0)
		if err != nil {
			t.Fatal(err)
		}
		for range 1000 {
			hub.Publish([]raftstore.Events{h.recordPuts("/a")})
		}
		virtual.Wait()
		if running, behind := hub.Watchers(); running != 1 || behind != 1 {
			t.Errorf("%d watchers, %d behind", running, behind)
		}
		h.compactTo(900)
		time.Sleep(time.Minute) // virtual
		if running, _ := hub.Watchers(); running != 0 {
			t.Error("a watcher whose reader has stopped still runs")
		}
		n := 0
		for range w.C() {
			n++
		}
		if !errors.Is(w.Err(), raftstore.ErrSlowWatcher) || n > 256 {
			t.Errorf("ended after %d revisions with %v", n, w.Err())
		}
		hub.Close()
	})
}

// Progress notes are sent in time to synced watchers, and not if nothing has happened.
func TestProgressNotes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		h := new(tape)
		hub := watch.New(h, 0, watch.Options{ProgressEvery: time.Second})
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- hub.Run(ctx) }()
		w, err := hub.Watch(ctx, "/mine/", 0)
		if err != nil {
			t.Fatal(err)
		}
		hub.Publish([]raftstore.Events{h.recordPuts("/other")})
		if ev := <-w.C(); len(ev.Events) != 0 || ev.Revision != 1 {
			t.Errorf("note: %+v", ev)
		}
		time.Sleep(10 * time.Second) // virtual
		select {
		case ev := <-w.C():
			t.Errorf("note about nothing: %+v", ev)
		default:
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
		for range w.C() {
		}
	})
}

// After the state was replaced, watchers continue from the history of the new state, or end if it
// is compacted.
func TestReset(t *testing.T) {
	h := new(tape)
	hub := watch.New(h, 0, watch.Options{})
	defer hub.Close()
	w, err := hub.Watch(context.Background(), "/", 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		h.recordPuts("/a")
	}
	hub.Reset(5)
	for i := range 5 {
		if ev := <-w.C(); ev.Revision != raftstore.Revision(i+1) {
			t.Errorf("revision %d, want %d", ev.Revision, i+1)
		}
	}
	lost, err := hub.Watch(context.Background(), "/", 5)
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		h.recordPuts("/a")
	}
	h.compactTo(8)
	hub.Reset(10)
	for range lost.C() {
		t.Error("a watcher with a gap before it got something")
	}
	if !errors.Is(lost.Err(), raftstore.ErrSlowWatcher) || !errors.Is(lost.Err(), raftstore.ErrCompacted) {
		t.Errorf("ended with %v", lost.Err())
	}
}

func TestClosedHub(t *testing.T) {
	hub := watch.New(new(tape), 0, watch.Options{})
	w, err := hub.Watch(context.Background(), "/", 0)
	if err != nil {
		t.Fatal(err)
	}
	hub.Close()
	for range w.C() {
	}
	if !errors.Is(w.Err(), raftstore.ErrClosed) {
		t.Errorf("ended with %v", w.Err())
	}
	if _, err := hub.Watch(context.Background(), "/", 0); !errors.Is(err, raftstore.ErrClosed) {
		t.Errorf("watch on a closed hub: %v", err)
	}
}

// A watch must not start at a future revision: it would silently wait for revisions of another
// history.
func TestWatchOfTheFuture(t *testing.T) {
	h := new(tape)
	hub := watch.New(h, 0, watch.Options{})
	defer hub.Close()
	hub.Publish([]raftstore.Events{h.recordPuts("/a")})
	_, err := hub.Watch(context.Background(), "/", 2)
	if !errors.Is(err, raftstore.ErrFutureRevision) || !strings.Contains(err.Error(), "after revision 2") ||
		!strings.Contains(err.Error(), "store is at 1") {
		t.Errorf("watch after a future revision: %v", err)
	}
	if _, err := hub.Watch(context.Background(), "/", 1); err != nil {
		t.Errorf("watch after the present revision: %v", err)
	}
}

// A watcher that ended because it was slow is counted; one that was stopped is not.
func TestCutWatchersAreCounted(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		h := new(tape)
		hub := watch.New(h, 0, watch.Options{})
		for range 2 {
			if _, err := hub.Watch(context.Background(), "/", 0); err != nil {
				t.Fatal(err)
			}
		}
		done, err := hub.Watch(context.Background(), "/", 0)
		if err != nil {
			t.Fatal(err)
		}
		for range 500 {
			hub.Publish([]raftstore.Events{h.recordPuts("/a")})
		}
		virtual.Wait()
		done.Stop()
		h.compactTo(450)
		time.Sleep(time.Minute) // virtual
		if n := hub.SlowWatchers(); n != 2 {
			t.Errorf("%d watchers cut", n)
		}
		hub.Close()
	})
}

func BenchmarkPublish(b *testing.B) {
	for _, watchers := range []int{1, 1000} {
		b.Run(fmt.Sprint(watchers), func(b *testing.B) {
			h := new(tape)
			hub := watch.New(h, 0, watch.Options{})
			defer hub.Close()
			for i := range watchers {
				w, err := hub.Watch(context.Background(), fmt.Sprintf("/p%d/", i%50), 0)
				if err != nil {
					b.Fatal(err)
				}
				go func() {
					for range w.C() {
					}
				}()
			}
			for b.Loop() {
				hub.Publish([]raftstore.Events{h.recordPuts("/p7/key")})
			}
		})
	}
}
