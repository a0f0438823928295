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
	{"Watching", checkWatching},
	{"WatchPrefixes", watchPrefixes},
	{"WatchFromThePast", watchFromThePast},
	{"WatchFromEveryRevision", watchFromEveryRevision},
	{"WatchFromTheFuture", watchFromTheFuture},
	{"WatchOrder", watchOrder},
	{"WatchAgain", watchAgain},
	{"SlowWatcher", slowWatcher},
	{"Compaction", checkCompaction},
	{"Progress", checkProgress},
}

func checkWatching(t *testing.T, s Subject) {
	c := newCaller(t, s)
	c.mustCommit(raftstore.Put("/w/before", nil))
	w := c.mustWatch("/w/", 0)
	r1 := c.mustCommit(raftstore.Put("/w/a", []byte("1")), raftstore.Put("/other", nil),
		raftstore.Put("/w/b", []byte("2")))
	c.mustCommit(raftstore.Put("/other", nil))
	r3 := c.mustCommit(raftstore.Delete("/w/a"))
	ev := c.nextEvents(w)
	if ev.Revision != r1 || len(ev.Events) != 2 || ev.Events[0].Item.Key != "/w/a" || ev.Events[1].Item.Key != "/w/b" ||
		ev.Events[0].Prev != nil {
		t.Errorf("first revision: %+v", ev)
	}
	ev = c.nextEvents(w)
	if ev.Revision != r3 || len(ev.Events) != 1 || ev.Events[0].Kind != raftstore.EventDelete ||
		ev.Events[0].Item.Modified != r3 || ev.Events[0].Prev == nil || string(ev.Events[0].Prev.Value) != "1" ||
		ev.Events[0].Item.Value != nil {
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
	c := newCaller(t, s)
	for i := range 600 {
		c.mustCommit(raftstore.Put(fmt.Sprintf("/w/%d", i%10), []byte(fmt.Sprint(i))))
	}
	w := c.mustWatch("/w/", 100)
	for i := 600; i < 650; i++ {
		c.mustCommit(raftstore.Put(fmt.Sprintf("/w/%d", i%10), []byte(fmt.Sprint(i))))
	}
	for i := 100; i < 650; i++ {
		ev := c.nextEvents(w)
		if ev.Revision != raftstore.Revision(i+1) || string(ev.Events[0].Item.Value) != fmt.Sprint(i) {
			t.Fatalf("event %d: %+v", i, ev)
		}
		if i >= 110 && string(ev.Events[0].Prev.Value) != fmt.Sprint(i-10) {
			t.Fatalf("event %d: previous value %q", i, ev.Events[0].Prev.Value)
		}
	}
}

func watchOrder(t *testing.T, s Subject) {
	c := newCaller(t, s)
	const writers, each = 8, 60
	w := c.mustWatch("/o/", 0)
	var wg sync.WaitGroup
	for n := range writers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range each {
				if _, err := s.Store.Commit(c.ctx,
					raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/o/%d", n),
						[]byte(fmt.Sprint(i)))}}); err != nil {
					t.Errorf("writer %d: %v", n, err)
				}
			}
		}()
	}
	seen := make(map[string]int)
	for last, n := raftstore.Revision(0), 0; n < writers*each; n++ {
		ev := c.nextEvents(w)
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

// slowWatcher checks that a watcher without a reader blocks no commit, and that it misses no event
// when it is read later.
func slowWatcher(t *testing.T, s Subject) {
	c := newCaller(t, s)
	slow := c.mustWatch("/s/", 0)
	quick := c.mustWatch("/s/", 0)
	const n = 1500
	for i := range n {
		c.mustCommit(raftstore.Put("/s/k", []byte(fmt.Sprint(i))))
		if ev := c.nextEvents(quick); string(ev.Events[0].Item.Value) != fmt.Sprint(i) {
			t.Fatalf("quick watcher: %+v", ev)
		}
	}
	for i := range n {
		if ev := c.nextEvents(slow); ev.Revision != raftstore.Revision(i+1) ||
			string(ev.Events[0].Item.Value) != fmt.Sprint(i) {
			t.Fatalf("slow watcher, event %d: %+v", i, ev)
		}
	}
}

func checkCompaction(t *testing.T, s Subject) {
	c := newCaller(t, s)
	for i := range 600 {
		c.mustCommit(raftstore.Put(fmt.Sprintf("/c/%d", i%3), []byte(fmt.Sprint(i))))
	}
	slow := c.mustWatch("/c/", 1)
	s.Compact(550)
	if _, err := s.Store.Watch(c.ctx, "/c/", 549); !errors.Is(err, raftstore.ErrCompacted) {
		t.Errorf("watch of the compacted past: %v", err)
	}
	if _, err := s.Store.List(c.ctx, "/c/", raftstore.ListOptions{At: 549}); !errors.Is(err, raftstore.ErrCompacted) {
		t.Errorf("list of the compacted past: %v", err)
	}
	if l := c.mustList("/c/", raftstore.ListOptions{At: 550}); len(l.Items) != 3 || string(l.Items[0].Value) != "549" {
		t.Errorf("list at the compacted revision: %+v", l)
	}
	if ev := c.nextEvents(c.mustWatch("/c/", 550)); ev.Revision != 551 {
		t.Errorf("watch after the compacted revision: %+v", ev)
	}
	// The slow watcher receives everything before it is ended, or ends with an error.
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

func checkProgress(t *testing.T, s Subject) {
	c := newCaller(t, s)
	w := c.mustWatch("/mine/", 0)
	rev := c.mustCommit(raftstore.Put("/other", nil))
	p, ok := w.(raftstore.ProgressRequester)
	if !ok {
		t.Fatalf("%T does not support progress requests", w)
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

// watchPrefixes checks that each watcher receives only the events of its prefix, with all events of
// a revision in one delivery and in op order.
func watchPrefixes(t *testing.T, s Subject) {
	c := newCaller(t, s)
	c.mustCommit(raftstore.Put("/start", nil))
	all, dir, key, none := c.mustWatch("", 0), c.mustWatch("/a/", 0), c.mustWatch("/a/1", 0), c.mustWatch("/none", 0)
	r1 := c.mustCommit(raftstore.Put("/b", nil), raftstore.Put("/a/2", nil), raftstore.Put("/a/1", nil))
	r2 := c.mustCommit(raftstore.Put("/a", nil))
	r3 := c.mustCommit(raftstore.Delete("/a/2"), raftstore.Delete("/none at all"), raftstore.Put("/a/10", nil))
	last := c.mustCommit(raftstore.Put("/none", nil))
	for _, want := range []struct {
		w    raftstore.Watcher
		rev  raftstore.Revision
		keys string
	}{
		{all, r1, "/b /a/2 /a/1"}, {all, r2, "/a"}, {all, r3, "/a/2 /a/10"}, {all, last, "/none"},
		{dir, r1, "/a/2 /a/1"}, {dir, r3, "/a/2 /a/10"}, {key, r1, "/a/1"}, {key, r3, "/a/10"}, {none, last, "/none"},
	} {
		ev := c.nextEvents(want.w)
		var got []string
		for _, e := range ev.Events {
			got = append(got, e.Item.Key)
		}
		if ev.Revision != want.rev || strings.Join(got, " ") != want.keys {
			t.Errorf("revision %d: %q, want revision %d: %q", ev.Revision, got, want.rev, want.keys)
		}
	}
}

// watchFromEveryRevision checks that a watch may start after any retained revision.
func watchFromEveryRevision(t *testing.T, s Subject) {
	c := newCaller(t, s)
	const revisions, compacted = 60, 20
	for i := range revisions {
		c.mustCommit(raftstore.Put(fmt.Sprintf("/e/%d", i%7), []byte(fmt.Sprint(i+1))), raftstore.Put("/other", nil))
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
			if ev := c.nextEvents(w); ev.Revision != want || len(ev.Events) != 1 ||
				string(ev.Events[0].Item.Value) != fmt.Sprint(want) {
				t.Fatalf("watch after %d: %+v, want revision %d", after, ev, want)
			}
		}
		w.Stop()
	}
}

// watchFromTheFuture checks that a watch after a revision which no replica has reached is refused
// at once. Such a revision belongs to another history or is a mistake.
func watchFromTheFuture(t *testing.T, s Subject) {
	c := newCaller(t, s)
	now := c.mustCommit(raftstore.Put("/f", nil))
	if _, err := s.Store.Watch(c.ctx, "/f", now+3); !errors.Is(err, raftstore.ErrFutureRevision) {
		t.Errorf("watch after revision %d of a store at %d: %v", now+3, now, err)
	}
	w := c.mustWatch("/f", now)
	next := c.mustCommit(raftstore.Put("/f", nil))
	if ev := c.nextEvents(w); ev.Revision != next {
		t.Fatalf("watch after the present: revision %d, want %d", ev.Revision, next)
	}
}

// watchAgain checks that a client which resumes a watch at the last received revision misses no
// event and receives no event twice, while other clients write.
func watchAgain(t *testing.T, s Subject) {
	c := newCaller(t, s)
	const n = 300
	at := c.mustCommit(raftstore.Put("/r", []byte("0")))
	seenAll := make(chan struct{})
	var writer sync.WaitGroup
	writer.Add(1)
	go func() {
		defer writer.Done()
		for i := 1; ; i++ {
			if _, err := s.Store.Commit(c.ctx,
				raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/r", []byte(fmt.Sprint(i)))}}); err != nil {
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
		if turn%3 == 2 { // as a cache does, which lists and then watches from the revision of the list
			l := c.mustList("/r", raftstore.ListOptions{})
			if _, err := fmt.Sscan(string(l.Items[0].Value), &seen); err != nil {
				t.Fatal(err)
			}
			at = l.Revision
		}
		w := c.mustWatch("/r", at)
		for range turn%7 + 1 {
			ev := c.nextEvents(w)
			if seen++; string(ev.Events[0].Item.Value) != fmt.Sprint(seen) || ev.Revision <= at {
				t.Fatalf("turn %d, after revision %d: revision %d with %q, want value %d", turn, at, ev.Revision,
					ev.Events[0].Item.Value, seen)
			}
			at = ev.Revision
		}
		w.Stop()
	}
}
