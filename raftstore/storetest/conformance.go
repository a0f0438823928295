package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
)

// Subject is a store under test. Its history must be compactable on demand.
type Subject struct {
	Store raftstore.Store
	// Compact forgets history up to and including a revision.
	Compact func(raftstore.Revision)
}

// Run checks the contract of raftstore.Store. fresh returns an empty store for
// each part; it cleans up by t.Cleanup.
func Run(t *testing.T, fresh func(t *testing.T) Subject) {
	parts := []struct {
		name string
		run  func(t *testing.T, s Subject)
	}{
		{"Preconditions", preconditions},
		{"Atomicity", atomicity},
		{"Revisions", revisions},
		{"Limits", limits},
		{"Listing", listing},
		{"Past", past},
		{"Watching", watching},
		{"WatchFromThePast", watchFromThePast},
		{"WatchOrder", watchOrder},
		{"SlowWatcher", slowWatcher},
		{"Compaction", compaction},
		{"Expiry", expiry},
		{"Progress", progress},
		{"Contention", contention},
		{"Deadlines", deadlines},
	}
	for _, p := range parts {
		t.Run(p.name, func(t *testing.T) { p.run(t, fresh(t)) })
	}
}

// caller commits and reads, and fails the test on errors it does not expect.
type caller struct {
	t   *testing.T
	ctx context.Context
	s   raftstore.Store
}

func call(t *testing.T, s Subject) caller {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return caller{t, ctx, s.Store}
}

func (c caller) commit(ops ...raftstore.Op) raftstore.Revision {
	c.t.Helper()
	rev, err := c.s.Commit(c.ctx, raftstore.Commit{Ops: ops})
	if err != nil {
		c.t.Fatalf("commit of %v: %v", ops, err)
	}
	return rev
}

func (c caller) refused(want error, ops ...raftstore.Op) {
	c.t.Helper()
	before := c.s.Applied()
	if _, err := c.s.Commit(c.ctx, raftstore.Commit{Ops: ops}); !errors.Is(err, want) {
		c.t.Errorf("commit: error %v, want %v", err, want)
	}
	if after := c.s.Applied(); after != before {
		c.t.Errorf("refused commit moved the revision from %d to %d", before, after)
	}
}

func (c caller) conflict(key string, ops ...raftstore.Op) *raftstore.ConflictError {
	c.t.Helper()
	before := c.s.Applied()
	_, err := c.s.Commit(c.ctx, raftstore.Commit{Ops: ops})
	var conflict *raftstore.ConflictError
	if !errors.As(err, &conflict) {
		c.t.Fatalf("commit of %v: error %v, want a conflict", ops, err)
	}
	if conflict.Key != key || conflict.At == 0 && before != 0 || conflict.Error() == "" {
		c.t.Errorf("conflict %+v, want key %q", conflict, key)
	}
	if after := c.s.Applied(); after != before {
		c.t.Errorf("conflicting commit moved the revision from %d to %d", before, after)
	}
	return conflict
}

func (c caller) value(key, want string) raftstore.Item {
	c.t.Helper()
	it, _, err := c.s.Get(c.ctx, key, raftstore.ReadOptions{})
	if err != nil || string(it.Value) != want || it.Key != key {
		c.t.Fatalf("get of %q: %q %q, error %v, want %q", key, it.Key, it.Value, err, want)
	}
	return it
}

func (c caller) absent(key string) {
	c.t.Helper()
	if _, _, err := c.s.Get(c.ctx, key, raftstore.ReadOptions{}); !errors.Is(err, raftstore.ErrNotFound) {
		c.t.Fatalf("get of %q: error %v, want not found", key, err)
	}
}

func (c caller) list(prefix string, o raftstore.ListOptions) raftstore.List {
	c.t.Helper()
	l, err := c.s.List(c.ctx, prefix, o)
	if err != nil {
		c.t.Fatalf("list of %q with %+v: %v", prefix, o, err)
	}
	return l
}

func (c caller) watch(prefix string, after raftstore.Revision) raftstore.Watcher {
	c.t.Helper()
	w, err := c.s.Watch(c.ctx, prefix, after)
	if err != nil {
		c.t.Fatalf("watch of %q after %d: %v", prefix, after, err)
	}
	c.t.Cleanup(w.Stop)
	return w
}

// next returns the next revision with events, passing over progress notes.
func (c caller) next(w raftstore.Watcher) raftstore.Events {
	c.t.Helper()
	for {
		select {
		case ev, open := <-w.C():
			if !open {
				c.t.Fatalf("watch ended: %v", w.Err())
			}
			if len(ev.Events) > 0 {
				return ev
			}
		case <-c.ctx.Done():
			c.t.Fatal("watch delivers nothing")
		}
	}
}

func keys(l raftstore.List) string {
	var out []string
	for _, it := range l.Items {
		out = append(out, it.Key)
	}
	return strings.Join(out, " ")
}

func preconditions(t *testing.T, s Subject) {
	c := call(t, s)
	r1 := c.commit(raftstore.Create("/a", []byte("1")))
	if got := c.conflict("/a", raftstore.Create("/a", []byte("x"))); got.Have == nil || got.Have.Modified != r1 || string(got.Have.Value) != "1" {
		t.Errorf("conflict shows %+v, want the item at revision %d", got.Have, r1)
	}
	r2 := c.commit(raftstore.Update("/a", []byte("2"), r1))
	c.conflict("/a", raftstore.Update("/a", []byte("x"), r1))
	if got := c.conflict("/none", raftstore.Update("/none", []byte("x"), r1)); got.Have != nil {
		t.Errorf("conflict about an absent key shows %+v", got.Have)
	}
	c.conflict("/a", raftstore.DeleteAt("/a", r1))
	if it := c.value("/a", "2"); it.Created != r1 || it.Modified != r2 {
		t.Errorf("item %+v, want created %d, modified %d", it, r1, r2)
	}
	check := raftstore.Op{Kind: raftstore.OpCheck, Key: "/a", If: raftstore.Precondition{Revision: r2}}
	r3 := c.commit(check, raftstore.Put("/b", []byte("b")))
	c.commit(raftstore.DeleteAt("/a", r2))
	c.absent("/a")
	c.conflict("/a", check, raftstore.Put("/b", []byte("x")))
	if it := c.value("/b", "b"); it.Modified != r3 {
		t.Errorf("item %+v, want modified %d", it, r3)
	}
	r5 := c.commit(raftstore.Create("/a", []byte("again")))
	if it := c.value("/a", "again"); it.Created != r5 {
		t.Errorf("recreated item %+v, want created %d", it, r5)
	}
}

func atomicity(t *testing.T, s Subject) {
	c := call(t, s)
	rev := c.commit(raftstore.Create("/x", []byte("x")), raftstore.Create("/y", []byte("y")))
	for _, key := range []string{"/x", "/y"} {
		if it := c.value(key, key[1:]); it.Modified != rev {
			t.Errorf("%s is at %d, want %d", key, it.Modified, rev)
		}
	}
	c.conflict("/y", raftstore.Put("/x", []byte("no")), raftstore.Create("/z", nil), raftstore.Create("/y", nil))
	c.value("/x", "x")
	c.absent("/z")
}

func revisions(t *testing.T, s Subject) {
	c := call(t, s)
	first := c.commit(raftstore.Put("/a", []byte("1")))
	if first != 1 {
		t.Errorf("first commit is revision %d", first)
	}
	if again := c.commit(raftstore.Put("/a", []byte("1"))); again != 2 {
		t.Errorf("second commit is revision %d", again)
	}
	if rev := c.commit(raftstore.Delete("/none")); rev != 2 {
		t.Errorf("commit without effect moved to revision %d", rev)
	}
	_, rev, err := s.Store.Get(c.ctx, "/none", raftstore.ReadOptions{})
	if !errors.Is(err, raftstore.ErrNotFound) || rev != 2 {
		t.Errorf("get of an absent key: revision %d, error %v", rev, err)
	}
	if rev, err := s.Store.Sync(c.ctx); rev != 2 || err != nil {
		t.Errorf("sync: revision %d, error %v", rev, err)
	}
}

func limits(t *testing.T, s Subject) {
	c := call(t, s)
	c.commit(raftstore.Put("/start", nil))
	big := bytes.Repeat([]byte{1}, raftstore.MaxValueBytes)
	c.refused(raftstore.ErrInvalid)
	c.refused(raftstore.ErrInvalid, raftstore.Put("", []byte("x")))
	c.refused(raftstore.ErrInvalid, raftstore.Put("/\xff", nil))
	c.refused(raftstore.ErrInvalid, raftstore.Put("/a", nil), raftstore.Delete("/a"))
	c.refused(raftstore.ErrInvalid, raftstore.Op{Kind: 9, Key: "/a"})
	c.refused(raftstore.ErrInvalid, raftstore.Op{Kind: raftstore.OpDelete, Key: "/a", TTL: time.Second})
	c.refused(raftstore.ErrInvalid, raftstore.Op{Kind: raftstore.OpPut, Key: "/a", If: raftstore.Precondition{Absent: true, Revision: 1}})
	c.refused(raftstore.ErrTooLarge, raftstore.Put("/"+strings.Repeat("k", raftstore.MaxKeyBytes), nil))
	c.refused(raftstore.ErrTooLarge, raftstore.Put("/a", append(big, 1)))
	var many, heavy []raftstore.Op
	for i := range raftstore.MaxCommitOps + 1 {
		many = append(many, raftstore.Put(fmt.Sprintf("/m/%d", i), nil))
	}
	c.refused(raftstore.ErrTooLarge, many...)
	for i := range 6 {
		heavy = append(heavy, raftstore.Put(fmt.Sprintf("/h/%d", i), big))
	}
	c.refused(raftstore.ErrTooLarge, heavy...)
	c.commit(raftstore.Put("/big", big))
	c.value("/big", string(big))
	c.commit(many[:raftstore.MaxCommitOps]...)
}

func listing(t *testing.T, s Subject) {
	c := call(t, s)
	for _, k := range []string{"/p/a", "/p/b", "/p/c", "/p/d", "/pq", "/o", "/p"} {
		c.commit(raftstore.Put(k, []byte(k)))
	}
	l := c.list("/p/", raftstore.ListOptions{})
	if keys(l) != "/p/a /p/b /p/c /p/d" || l.More || l.Remaining != 0 || l.Revision != 7 {
		t.Errorf("list: %q %+v", keys(l), l)
	}
	if l := c.list("", raftstore.ListOptions{}); len(l.Items) != 7 {
		t.Errorf("list of everything: %q", keys(l))
	}
	if l := c.list("/none/", raftstore.ListOptions{Limit: 3}); len(l.Items) != 0 || l.More {
		t.Errorf("list of nothing: %+v", l)
	}
	page := c.list("/p/", raftstore.ListOptions{Limit: 3})
	if keys(page) != "/p/a /p/b /p/c" || !page.More || page.Remaining != 1 {
		t.Errorf("first page: %q %+v", keys(page), page)
	}
	// What happens between two pages does not show in the second.
	c.commit(raftstore.Delete("/p/d"))
	c.commit(raftstore.Put("/p/cc", nil))
	rest := c.list("/p/", raftstore.ListOptions{Limit: 3, After: "/p/c", At: page.Revision})
	if keys(rest) != "/p/d" || rest.More || rest.Revision != page.Revision {
		t.Errorf("second page: %q %+v", keys(rest), rest)
	}
	if l := c.list("/p/", raftstore.ListOptions{After: "/p/b"}); keys(l) != "/p/c /p/cc" {
		t.Errorf("list after a key: %q", keys(l))
	}
	if l := c.list("/p/", raftstore.ListOptions{After: "/z"}); len(l.Items) != 0 {
		t.Errorf("list after the end: %q", keys(l))
	}
}

func past(t *testing.T, s Subject) {
	c := call(t, s)
	var states []string
	for i := range 700 {
		k := fmt.Sprintf("/k/%d", i*7%31)
		if i%5 == 4 {
			c.commit(raftstore.Put(k, nil))
			c.commit(raftstore.Delete(k))
		} else {
			c.commit(raftstore.Put(k, []byte(fmt.Sprint(i))))
		}
		if i%50 == 0 {
			l := c.list("/k/", raftstore.ListOptions{})
			states = append(states, fmt.Sprintf("%d %v", l.Revision, l.Items))
		}
	}
	for _, want := range states {
		var at raftstore.Revision
		fmt.Sscan(want, &at)
		l := c.list("/k/", raftstore.ListOptions{At: at})
		if got := fmt.Sprintf("%d %v", l.Revision, l.Items); got != want {
			t.Fatalf("state at %d:\n got %s\nwant %s", at, got, want)
		}
	}
	_, err := s.Store.List(c.ctx, "/", raftstore.ListOptions{At: s.Store.Applied() + 100})
	if !errors.Is(err, raftstore.ErrFutureRevision) {
		t.Errorf("list in the future: %v", err)
	}
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

func expiry(t *testing.T, s Subject) {
	c := call(t, s)
	w := c.watch("/t/", 0)
	put := raftstore.Put("/t/short", []byte("x"))
	put.TTL = 60 * time.Millisecond
	kept := raftstore.Put("/t/kept", []byte("x"))
	kept.TTL = 60 * time.Millisecond
	c.commit(put, kept)
	c.commit(raftstore.Put("/t/kept", []byte("y"))) // without TTL: stays
	c.next(w)
	c.next(w)
	ev := c.next(w)
	if len(ev.Events) != 1 || ev.Events[0].Kind != raftstore.EventDelete || ev.Events[0].Item.Key != "/t/short" {
		t.Errorf("expiry: %+v", ev)
	}
	c.absent("/t/short")
	c.value("/t/kept", "y")
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

// contention: counters raised by compare-and-swap lose no increment.
func contention(t *testing.T, s Subject) {
	c := call(t, s)
	const workers, each = 6, 25
	c.commit(raftstore.Put("/counter", []byte("0")))
	var wg sync.WaitGroup
	for range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for done := 0; done < each; {
				it, _, err := s.Store.Get(c.ctx, "/counter", raftstore.ReadOptions{})
				if err != nil {
					t.Error(err)
					return
				}
				var n int
				fmt.Sscan(string(it.Value), &n)
				_, err = s.Store.Commit(c.ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Update("/counter", []byte(fmt.Sprint(n+1)), it.Modified)}})
				var conflict *raftstore.ConflictError
				switch {
				case err == nil:
					done++
				case !errors.As(err, &conflict):
					t.Error(err)
					return
				}
			}
		}()
	}
	wg.Wait()
	c.value("/counter", fmt.Sprint(workers*each))
}

func deadlines(t *testing.T, s Subject) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := s.Store.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", nil)}}); !errors.Is(err, context.Canceled) {
		t.Errorf("commit with a cancelled context: %v", err)
	}
	if _, _, err := s.Store.Get(ctx, "/a", raftstore.ReadOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("get with a cancelled context: %v", err)
	}
	if _, err := s.Store.Sync(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("sync with a cancelled context: %v", err)
	}
	if _, err := s.Store.Watch(ctx, "/a", 0); !errors.Is(err, context.Canceled) {
		t.Errorf("watch with a cancelled context: %v", err)
	}
}
