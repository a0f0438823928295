package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
)

var commitParts = []part{
	{"Preconditions", preconditions},
	{"Conflicts", conflicts},
	{"LargeConflicts", largeConflicts},
	{"Atomicity", atomicity},
	{"Snapshots", snapshots},
	{"Revisions", revisions},
	{"NoEffect", noEffect},
	{"Buffers", buffers},
	{"Fences", fences},
	{"Contention", contention},
	{"Deadlines", deadlines},
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

// largeConflicts: each of many at once is told of the value that was in its way,
// however large, and none of them is in the way of other commits.
func largeConflicts(t *testing.T, s Subject) {
	c := call(t, s)
	big := bytes.Repeat([]byte("large"), raftstore.MaxValueBytes/5)
	c.commit(raftstore.Put("/start", nil))
	rev := c.commit(raftstore.Create("/big", big))
	var wg sync.WaitGroup
	for i := range 96 {
		wg.Go(func() {
			_, err := c.s.Commit(c.ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Create("/big", nil)}})
			var got *raftstore.ConflictError
			if !errors.As(err, &got) || got.Have == nil {
				t.Errorf("commit: error %v, want a conflict", err)
				return
			}
			if got.At < rev || got.NoValue || got.Have.Modified != rev || got.Have.Created != rev || !bytes.Equal(got.Have.Value, big) {
				t.Errorf("conflict at %d shows revision %d and %d bytes, no value %t; want revision %d and %d bytes",
					got.At, got.Have.Modified, len(got.Have.Value), got.NoValue, rev, len(big))
			}
		})
		if i%8 == 0 {
			wg.Go(func() {
				if _, err := c.s.Commit(c.ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/small/%d", i), nil)}}); err != nil {
					t.Errorf("commit beside large conflicts: %v", err)
				}
			})
		}
	}
	wg.Wait()
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
	late, end := context.WithTimeout(context.Background(), -1)
	defer end()
	for _, over := range []context.Context{ctx, late} {
		_, err := s.Store.Commit(over, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", nil)}})
		if !errors.Is(err, over.Err()) || errors.Is(err, raftstore.ErrUnavailable) || errors.Is(err, raftstore.ErrOutcomeUnknown) {
			t.Errorf("commit with a context that has ended (%v): %v", over.Err(), err)
		}
	}
	call(t, s).absent("/a")
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

// conflicts: the first op whose precondition fails is named, with what is there.
func conflicts(t *testing.T, s Subject) {
	c := call(t, s)
	a := c.commit(raftstore.Put("/a", []byte("1")))
	b := c.commit(raftstore.Put("/b", []byte("2")))
	got := c.conflict("/b", raftstore.Update("/a", []byte("x"), a), raftstore.Create("/b", nil), raftstore.DeleteAt("/none", 1))
	if got.Have == nil || got.Have.Key != "/b" || got.Have.Modified != b || string(got.Have.Value) != "2" || !got.Want.Absent || got.At != b {
		t.Errorf("conflict %+v, have %+v", got, got.Have)
	}
	got = c.conflict("/none", raftstore.DeleteAt("/none", b), raftstore.Create("/b", nil))
	if got.Have != nil || got.Want.Revision != b || got.At != b {
		t.Errorf("conflict %+v", got)
	}
	c.conflict("/a", raftstore.Update("/a", nil, b+100))
	check := func(p raftstore.Precondition) raftstore.Op {
		return raftstore.Op{Kind: raftstore.OpCheck, Key: "/a", If: p}
	}
	c.conflict("/a", check(raftstore.Precondition{Absent: true}))
	c.conflict("/a", check(raftstore.Precondition{Revision: b}), raftstore.Put("/b", nil))
	// A key that expired, was deleted, or never was is absent alike.
	c.commit(raftstore.DeleteAt("/a", a))
	if got := c.conflict("/a", raftstore.DeleteAt("/a", a)); got.Have != nil {
		t.Errorf("conflict about a deleted key shows %+v", got.Have)
	}
	c.commit(raftstore.Create("/a", nil))
	// What a commit does to one key its other preconditions do not see.
	rev := c.value("/a", "").Modified
	c.commit(raftstore.Update("/a", []byte("3"), rev), raftstore.Op{Kind: raftstore.OpCheck, Key: "/b", If: raftstore.Precondition{Revision: b}})
}

// snapshots: two keys that always change together are never seen apart.
func snapshots(t *testing.T, s Subject) {
	c := call(t, s)
	const rounds, readBurst = 150, 8
	both := func(n int) []raftstore.Op {
		v := []byte(fmt.Sprint(n))
		return []raftstore.Op{raftstore.Put("/s/left", v), raftstore.Put("/s/right", v)}
	}
	c.commit(both(0)...)
	w := c.watch("/s/", 0)
	done := make(chan struct{})
	var readers sync.WaitGroup
	for _, local := range []bool{false, true} {
		readers.Add(1)
		go func() {
			defer readers.Done()
			last := raftstore.Revision(0)
			// Bursts with a pause between them: reads that never cease keep a processor from the commits that they are to meet.
			pause := time.NewTicker(2 * time.Millisecond)
			defer pause.Stop()
			for n := 1; ; n++ {
				l, err := s.Store.List(c.ctx, "/s/", raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Local: local}})
				if err != nil {
					t.Errorf("list: %v", err)
					return
				}
				apart := len(l.Items) == 1 || len(l.Items) == 2 && (string(l.Items[0].Value) != string(l.Items[1].Value) || l.Items[0].Modified != l.Items[1].Modified)
				if apart || l.Revision < last {
					t.Errorf("list at revision %d after %d: %+v", l.Revision, last, l.Items)
					return
				}
				last = l.Revision
				if n%readBurst != 0 {
					continue
				}
				select {
				case <-done:
					return
				case <-pause.C:
				}
			}
		}()
	}
	for n := 1; n <= rounds; n++ {
		if n%4 == 0 {
			c.commit(raftstore.Delete("/s/left"), raftstore.Delete("/s/right"))
		} else {
			c.commit(both(n)...)
		}
		if ev := c.next(w); len(ev.Events) != 2 {
			t.Errorf("revision %d shows %d of 2 changes", ev.Revision, len(ev.Events))
		}
	}
	close(done)
	readers.Wait()
}

// noEffect: what changes nothing makes no revision and no event, but its
// preconditions count.
func noEffect(t *testing.T, s Subject) {
	c := call(t, s)
	a := c.commit(raftstore.Put("/a", []byte("1")))
	w := c.watch("/", 0)
	check := raftstore.Op{Kind: raftstore.OpCheck, Key: "/a", If: raftstore.Precondition{Revision: a}}
	for _, ops := range [][]raftstore.Op{
		{check},
		{raftstore.Delete("/none")},
		{check, raftstore.Delete("/none"), {Kind: raftstore.OpCheck, Key: "/nor", If: raftstore.Precondition{Absent: true}}},
	} {
		if rev := c.commit(ops...); rev != a {
			t.Errorf("commit of %v moved to revision %d", ops, rev)
		}
	}
	rev := c.commit(check, raftstore.Delete("/none"), raftstore.Put("/b", nil))
	if ev := c.next(w); ev.Revision != rev || len(ev.Events) != 1 || ev.Events[0].Item.Key != "/b" {
		t.Errorf("after commits without effect: %+v", ev)
	}
}

// buffers: what the caller does with its bytes after the call is its own business.
func buffers(t *testing.T, s Subject) {
	c := call(t, s)
	value := []byte("before")
	c.commit(raftstore.Put("/a", value))
	copy(value, "behind")
	c.value("/a", "before")
	c.commit(raftstore.Put("/empty", nil), raftstore.Put("/zero", []byte{}))
	for _, key := range []string{"/empty", "/zero"} {
		if it := c.value(key, ""); len(it.Value) != 0 {
			t.Errorf("%s is %q", key, it.Value)
		}
	}
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	c.commit(raftstore.Put("/bytes", all))
	c.value("/bytes", string(all))
}

// fences: a commit of another leadership than the present one changes nothing.
func fences(t *testing.T, s Subject) {
	c := call(t, s)
	c.commit(raftstore.Put("/a", []byte("1")))
	before := s.Store.Applied()
	_, err := s.Store.Commit(c.ctx, raftstore.Commit{Fence: 1 << 60, Ops: []raftstore.Op{raftstore.Put("/a", []byte("2"))}})
	if !errors.Is(err, raftstore.ErrFenced) {
		t.Errorf("commit under the fence of a leadership that never was: %v", err)
	}
	c.value("/a", "1")
	if after := s.Store.Applied(); after != before {
		t.Errorf("fenced commit moved the revision from %d to %d", before, after)
	}
}
