package storetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"keelson.dev/keelson/raftstore"
)

var watchParts = []part{
	{"Watching", watching},
	{"WatchPrefixes", watchPrefixes},
	{"WatchFromThePast", watchFromThePast},
	{"WatchFromEveryRevision", watchFromEveryRevision},
	{"WatchFromTheFuture", watchFromTheFuture},
	{"WatchOrder", watchOrder},
	{"WatchAgain", watchAgain},
	{"SlowWatcher", slowWatcher},
	{"Compaction", compaction},
	{"Progress", progress},
}

func watching(t *testing.T, s Subject) {
	c := call(t, s)
	c.commit(raftstore.Put("/w/before", nil))
	w := c.watch("/w/", 0)
	r1 := c.commit(raftstore.Put("/w/a", []byte("1")), raftstore.Put("/other", nil), raftstore.Put("/w/b", []byte("2")))
	c.commit(raftstore.Put("/other", nil))
	r3 := c.commit(raftstore.Delete("/w/a"))
	ev := c.next(w)
	if ev.Revision != r1 || len(ev.Events) != 2 || ev.Events[0].Item.Key != "/w/a" || ev.Events[1].Item.Key != "/w/b" || ev.Events[0].Prev != nil {
		t.Errorf("first revision: %+v", ev)
	}
	ev = c.next(w)
	if ev.Revision != r3 || len(ev.Events) != 1 || ev.Events[0].Kind != raftstore.EventDelete ||
		ev.Events[0].Item.Modified != r3 || ev.Events[0].Prev == nil || string(ev.Events[0].Prev.Value) != "1" || ev.Events[0].Item.Value != nil {
		t.Errorf("deletion: %+v", ev)
	}
	w.Stop()
	w.Stop()
	for range w.C() {
	}
	if w.Err() != nil {
		t.Errorf("stopped watch: %v", w.Err())
	}
	ctx, cancel := context.WithCancel(c.ctx)
	w, err := s.Store.Watch(ctx, "/", 0)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	for range w.C() {
	}
	if w.Err() != nil {
		t.Errorf("cancelled watch: %v", w.Err())
	}
}

func watchFromThePast(t *testing.T, s Subject) {
	c := call(t, s)
	for i := range 600 {
		c.commit(raftstore.Put(fmt.Sprintf("/w/%d", i%10), []byte(fmt.Sprint(i))))
	}
	w := c.watch("/w/", 100)
	for i := 600; i < 650; i++ {
		c.commit(raftstore.Put(fmt.Sprintf("/w/%d", i%10), []byte(fmt.Sprint(i))))
	}
	for i := 100; i < 650; i++ {
		ev := c.next(w)
		if ev.Revision != raftstore.Revision(i+1) || string(ev.Events[0].Item.Value) != fmt.Sprint(i) {
			t.Fatalf("event %d: %+v", i, ev)
		}
		if i >= 110 && string(ev.Events[0].Prev.Value) != fmt.Sprint(i-10) {
			t.Fatalf("event %d: previous value %q", i, ev.Events[0].Prev.Value)
		}
	}
}

func watchOrder(t *testing.T, s Subject) {
	c := call(t, s)
	const writers, each = 8, 60
	w := c.watch("/o/", 0)
	var wg sync.WaitGroup
	for n := range writers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range each {
				if _, err := s.Store.Commit(c.ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/o/%d", n), []byte(fmt.Sprint(i)))}}); err != nil {
					t.Errorf("writer %d: %v", n, err)
				}
			}
		}()
	}
	seen := make(map[string]int)
	for last, n := raftstore.Revision(0), 0; n < writers*each; n++ {
		ev := c.next(w)
		if ev.Revision != last+1 {
			t.Fatalf("revision %d after %d", ev.Revision, last)
		}
		last = ev.Revision
		it := ev.Events[0].Item
		if want := fmt.Sprint(seen[it.Key]); string(it.Value) != want {
			t.Fatalf("%s has value %q, want %q", it.Key, it.Value, want)
		}
		seen[it.Key]++
	}
	wg.Wait()
}

// slowWatcher: one that does not read stops nobody and misses nothing.
func slowWatcher(t *testing.T, s Subject) {
	c := call(t, s)
	slow := c.watch("/s/", 0)
	quick := c.watch("/s/", 0)
	const n = 1500
	for i := range n {
		c.commit(raftstore.Put("/s/k", []byte(fmt.Sprint(i))))
		if ev := c.next(quick); string(ev.Events[0].Item.Value) != fmt.Sprint(i) {
			t.Fatalf("quick watcher: %+v", ev)
		}
	}
	for i := range n {
		if ev := c.next(slow); ev.Revision != raftstore.Revision(i+1) || string(ev.Events[0].Item.Value) != fmt.Sprint(i) {
			t.Fatalf("slow watcher, event %d: %+v", i, ev)
		}
	}
}

func compaction(t *testing.T, s Subject) {
	c := call(t, s)
	for i := range 600 {
		c.commit(raftstore.Put(fmt.Sprintf("/c/%d", i%3), []byte(fmt.Sprint(i))))
	}
	slow := c.watch("/c/", 1)
	s.Compact(550)
	if _, err := s.Store.Watch(c.ctx, "/c/", 549); !errors.Is(err, raftstore.ErrCompacted) {
		t.Errorf("watch of the compacted past: %v", err)
	}
	if _, err := s.Store.List(c.ctx, "/c/", raftstore.ListOptions{At: 549}); !errors.Is(err, raftstore.ErrCompacted) {
		t.Errorf("list of the compacted past: %v", err)
	}
	if l := c.list("/c/", raftstore.ListOptions{At: 550}); len(l.Items) != 3 || string(l.Items[0].Value) != "549" {
		t.Errorf("list at the compacted revision: %+v", l)
	}
	if ev := c.next(c.watch("/c/", 550)); ev.Revision != 551 {
		t.Errorf("watch after the compacted revision: %+v", ev)
	}
	// The slow one either got everything before it was cut off or is told so.
	last := raftstore.Revision(1)
	for ev := range slow.C() {
		if ev.Revision != last+1 {
			t.Fatalf("slow watcher: revision %d after %d", ev.Revision, last)
		}
		if last = ev.Revision; last == 600 {
			return
		}
	}
	if !errors.Is(slow.Err(), raftstore.ErrSlowWatcher) {
		t.Errorf("slow watcher ended at %d with %v", last, slow.Err())
	}
}

func progress(t *testing.T, s Subject) {
	c := call(t, s)
	w := c.watch("/mine/", 0)
	rev := c.commit(raftstore.Put("/other", nil))
	p, ok := w.(raftstore.ProgressRequester)
	if !ok {
		t.Fatalf("%T cannot be asked for progress", w)
	}
	p.RequestProgress()
	select {
	case ev := <-w.C():
		if len(ev.Events) != 0 || ev.Revision < rev {
			t.Errorf("progress note %+v, want revision %d", ev, rev)
		}
	case <-c.ctx.Done():
		t.Error("no progress note")
	}
}

// watchPrefixes: each watcher gets the events of its prefix and no others, all
// events of a revision at once and in the order of the ops.
func watchPrefixes(t *testing.T, s Subject) {
	c := call(t, s)
	c.commit(raftstore.Put("/start", nil))
	all, dir, key, none := c.watch("", 0), c.watch("/a/", 0), c.watch("/a/1", 0), c.watch("/none", 0)
	r1 := c.commit(raftstore.Put("/b", nil), raftstore.Put("/a/2", nil), raftstore.Put("/a/1", nil))
	r2 := c.commit(raftstore.Put("/a", nil))
	r3 := c.commit(raftstore.Delete("/a/2"), raftstore.Delete("/none at all"), raftstore.Put("/a/10", nil))
	last := c.commit(raftstore.Put("/none", nil))
	for _, want := range []struct {
		w    raftstore.Watcher
		rev  raftstore.Revision
		keys string
	}{
		{all, r1, "/b /a/2 /a/1"}, {all, r2, "/a"}, {all, r3, "/a/2 /a/10"}, {all, last, "/none"},
		{dir, r1, "/a/2 /a/1"}, {dir, r3, "/a/2 /a/10"}, {key, r1, "/a/1"}, {key, r3, "/a/10"}, {none, last, "/none"},
	} {
		ev := c.next(want.w)
		var got []string
		for _, e := range ev.Events {
			got = append(got, e.Item.Key)
		}
		if ev.Revision != want.rev || strings.Join(got, " ") != want.keys {
			t.Errorf("revision %d: %q, want revision %d: %q", ev.Revision, got, want.rev, want.keys)
		}
	}
}

// watchFromEveryRevision: a watch may begin after any retained revision.
func watchFromEveryRevision(t *testing.T, s Subject) {
	c := call(t, s)
	const revisions, compacted = 60, 20
	for i := range revisions {
		c.commit(raftstore.Put(fmt.Sprintf("/e/%d", i%7), []byte(fmt.Sprint(i+1))), raftstore.Put("/other", nil))
	}
	s.Compact(compacted)
	for after := raftstore.Revision(1); after < revisions; after++ {
		w, err := s.Store.Watch(c.ctx, "/e/", after)
		if after < compacted {
			if !errors.Is(err, raftstore.ErrCompacted) {
				t.Errorf("watch after %d, compacted up to %d: %v", after, compacted, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("watch after %d, compacted up to %d: %v", after, compacted, err)
		}
		for want := after + 1; want <= revisions; want++ {
			if ev := c.next(w); ev.Revision != want || len(ev.Events) != 1 || string(ev.Events[0].Item.Value) != fmt.Sprint(want) {
				t.Fatalf("watch after %d: %+v, want revision %d", after, ev, want)
			}
		}
		w.Stop()
	}
}

// watchFromTheFuture: a revision that no replica has reached is of another
// history, or a mistake. It is refused and not waited for in silence.
func watchFromTheFuture(t *testing.T, s Subject) {
	c := call(t, s)
	now := c.commit(raftstore.Put("/f", nil))
	if _, err := s.Store.Watch(c.ctx, "/f", now+3); !errors.Is(err, raftstore.ErrFutureRevision) {
		t.Errorf("watch after revision %d of a store at %d: %v", now+3, now, err)
	}
	w := c.watch("/f", now)
	next := c.commit(raftstore.Put("/f", nil))
	if ev := c.next(w); ev.Revision != next {
		t.Fatalf("watch after the present: revision %d, want %d", ev.Revision, next)
	}
}

// watchAgain: a watcher that goes away and comes back by revision, while
// others write, misses nothing and sees nothing twice.
func watchAgain(t *testing.T, s Subject) {
	c := call(t, s)
	const n = 300
	at := c.commit(raftstore.Put("/r", []byte("0")))
	seenAll := make(chan struct{})
	var writer sync.WaitGroup
	writer.Add(1)
	go func() {
		defer writer.Done()
		for i := 1; ; i++ {
			if _, err := s.Store.Commit(c.ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/r", []byte(fmt.Sprint(i)))}}); err != nil {
				t.Errorf("commit %d: %v", i, err)
				return
			}
			select {
			case <-seenAll:
				return
			default:
			}
		}
	}()
	defer writer.Wait()
	defer close(seenAll)
	for seen, turn := 0, 0; seen < n; turn++ {
		if turn%3 == 2 { // as a cache that lists and watches from there
			l := c.list("/r", raftstore.ListOptions{})
			if _, err := fmt.Sscan(string(l.Items[0].Value), &seen); err != nil {
				t.Fatal(err)
			}
			at = l.Revision
		}
		w := c.watch("/r", at)
		for range turn%7 + 1 {
			ev := c.next(w)
			if seen++; string(ev.Events[0].Item.Value) != fmt.Sprint(seen) || ev.Revision <= at {
				t.Fatalf("turn %d, after revision %d: revision %d with %q, want value %d", turn, at, ev.Revision, ev.Events[0].Item.Value, seen)
			}
			at = ev.Revision
		}
		w.Stop()
	}
}
