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
	{"Preconditions", checkPreconditions},
	{"Conflicts", checkConflicts},
	{"LargeConflicts", largeConflicts},
	{"Atomicity", checkAtomicity},
	{"Snapshots", checkSnapshots},
	{"Revisions", checkRevisions},
	{"NoEffect", noEffect},
	{"Buffers", checkBuffers},
	{"Fences", checkFences},
	{"Contention", checkContention},
	{"Deadlines", checkDeadlines},
}

func checkPreconditions(t *testing.T, s Subject) {
	c := newCaller(t, s)
	r1 := c.mustCommit(raftstore.Create("/a", []byte("1")))
	if got := c.mustConflict("/a", raftstore.Create("/a", []byte("x"))); got.Have == nil || got.Have.Modified != r1 ||
		string(got.Have.Value) != "1" {
		t.Errorf("conflict shows %+v, want the item at revision %d", got.Have, r1)
	}
	r2 := c.mustCommit(raftstore.Update("/a", []byte("2"), r1))
	c.mustConflict("/a", raftstore.Update("/a", []byte("x"), r1))
	if got := c.mustConflict("/none", raftstore.Update("/none", []byte("x"), r1)); got.Have != nil {
		t.Errorf("conflict about an absent key shows %+v", got.Have)
	}
	c.mustConflict("/a", raftstore.DeleteAt("/a", r1))
	if it := c.mustHaveValue("/a", "2"); it.Created != r1 || it.Modified != r2 {
		t.Errorf("item %+v, want created %d, modified %d", it, r1, r2)
	}
	check := raftstore.Op{Kind: raftstore.OpCheck, Key: "/a", If: raftstore.Precondition{Revision: r2}}
	r3 := c.mustCommit(check, raftstore.Put("/b", []byte("b")))
	c.mustCommit(raftstore.DeleteAt("/a", r2))
	c.mustBeAbsent("/a")
	c.mustConflict("/a", check, raftstore.Put("/b", []byte("x")))
	if it := c.mustHaveValue("/b", "b"); it.Modified != r3 {
		t.Errorf("item %+v, want modified %d", it, r3)
	}
	r5 := c.mustCommit(raftstore.Create("/a", []byte("again")))
	if it := c.mustHaveValue("/a", "again"); it.Created != r5 {
		t.Errorf("recreated item %+v, want created %d", it, r5)
	}
}

// largeConflicts checks that each of many concurrent ConflictErrors contains the current value of
// its key, however large, and that conflicts do not delay other commits.
func largeConflicts(t *testing.T, s Subject) {
	c := newCaller(t, s)
	big := bytes.Repeat([]byte("large"), raftstore.MaxValueBytes/5)
	c.mustCommit(raftstore.Put("/start", nil))
	rev := c.mustCommit(raftstore.Create("/big", big))
	var wg sync.WaitGroup
	for i := range 96 {
		wg.Go(func() {
			_, err := c.s.Commit(c.ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Create("/big", nil)}})
			var got *raftstore.ConflictError
			if !errors.As(err, &got) || got.Have == nil {
				t.Errorf("commit: error %v, want a conflict", err)
				return
			}
			if got.At < rev || got.NoValue || got.Have.Modified != rev || got.Have.Created != rev ||
				!bytes.Equal(got.Have.Value, big) {
				t.Errorf("conflict at %d shows revision %d and %d bytes, no value %t; want revision %d and %d bytes",
					got.At, got.Have.Modified, len(got.Have.Value), got.NoValue, rev, len(big))
			}
		})
		if i%8 == 0 {
			wg.Go(func() {
				if _, err := c.s.Commit(c.ctx,
					raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/small/%d", i), nil)}}); err !=
					nil {
					t.Errorf("commit beside large conflicts: %v", err)
				}
			})
		}
	}
	wg.Wait()
}

func checkAtomicity(t *testing.T, s Subject) {
	c := newCaller(t, s)
	rev := c.mustCommit(raftstore.Create("/x", []byte("x")), raftstore.Create("/y", []byte("y")))
	for _, key := range []string{"/x", "/y"} {
		if it := c.mustHaveValue(key, key[1:]); it.Modified != rev {
			t.Errorf("%s is at %d, want %d", key, it.Modified, rev)
		}
	}
	c.mustConflict("/y", raftstore.Put("/x", []byte("no")), raftstore.Create("/z", nil), raftstore.Create("/y", nil))
	c.mustHaveValue("/x", "x")
	c.mustBeAbsent("/z")
}

func checkRevisions(t *testing.T, s Subject) {
	c := newCaller(t, s)
	first := c.mustCommit(raftstore.Put("/a", []byte("1")))
	if first != 1 {
		t.Errorf("first commit is revision %d", first)
	}
	if again := c.mustCommit(raftstore.Put("/a", []byte("1"))); again != 2 {
		t.Errorf("second commit is revision %d", again)
	}
	if rev := c.mustCommit(raftstore.Delete("/none")); rev != 2 {
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

// checkContention checks that counters which are incremented by compare-and-swap lose no increment.
func checkContention(t *testing.T, s Subject) {
	c := newCaller(t, s)
	const workers, each = 6, 25
	c.mustCommit(raftstore.Put("/counter", []byte("0")))
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
				_, err = s.Store.Commit(c.ctx,
					raftstore.Commit{Ops: []raftstore.Op{raftstore.Update("/counter", []byte(fmt.Sprint(n+1)),
						it.Modified)}})
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
	c.mustHaveValue("/counter", fmt.Sprint(workers*each))
}

func checkDeadlines(t *testing.T, s Subject) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	late, end := context.WithTimeout(context.Background(), -1)
	defer end()
	for _, over := range []context.Context{ctx, late} {
		_, err := s.Store.Commit(over, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", nil)}})
		if !errors.Is(err, over.Err()) || errors.Is(err, raftstore.ErrUnavailable) ||
			errors.Is(err, raftstore.ErrOutcomeUnknown) {
			t.Errorf("commit with a context that has ended (%v): %v", over.Err(), err)
		}
	}
	newCaller(t, s).mustBeAbsent("/a")
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

// checkConflicts checks that a ConflictError contains the first op with a failed precondition, and
// the existing item.
func checkConflicts(t *testing.T, s Subject) {
	c := newCaller(t, s)
	a := c.mustCommit(raftstore.Put("/a", []byte("1")))
	b := c.mustCommit(raftstore.Put("/b", []byte("2")))
	got := c.mustConflict("/b", raftstore.Update("/a", []byte("x"), a), raftstore.Create("/b", nil),
		raftstore.DeleteAt("/none", 1))
	if got.Have == nil || got.Have.Key != "/b" || got.Have.Modified != b || string(got.Have.Value) != "2" ||
		!got.Want.Absent || got.At != b {
		t.Errorf("conflict %+v, have %+v", got, got.Have)
	}
	got = c.mustConflict("/none", raftstore.DeleteAt("/none", b), raftstore.Create("/b", nil))
	if got.Have != nil || got.Want.Revision != b || got.At != b {
		t.Errorf("conflict %+v", got)
	}
	c.mustConflict("/a", raftstore.Update("/a", nil, b+100))
	check := func(p raftstore.Precondition) raftstore.Op {
		return raftstore.Op{Kind: raftstore.OpCheck, Key: "/a", If: p}
	}
	c.mustConflict("/a", check(raftstore.Precondition{Absent: true}))
	c.mustConflict("/a", check(raftstore.Precondition{Revision: b}), raftstore.Put("/b", nil))
	// Expired, deleted and never created keys are equally absent.
	c.mustCommit(raftstore.DeleteAt("/a", a))
	if got := c.mustConflict("/a", raftstore.DeleteAt("/a", a)); got.Have != nil {
		t.Errorf("conflict about a deleted key shows %+v", got.Have)
	}
	c.mustCommit(raftstore.Create("/a", nil))
	// A commit's own changes do not affect its preconditions.
	rev := c.mustHaveValue("/a", "").Modified
	c.mustCommit(raftstore.Update("/a", []byte("3"), rev),
		raftstore.Op{Kind: raftstore.OpCheck, Key: "/b", If: raftstore.Precondition{Revision: b}})
}

// checkSnapshots checks that a read returns the state of one revision. Two keys always change in
// the same commit, and no read may show the change of only one key.
func checkSnapshots(t *testing.T, s Subject) {
	c := newCaller(t, s)
	const rounds, readBurst = 150, 8
	both := func(n int) []raftstore.Op {
		v := []byte(fmt.Sprint(n))
		return []raftstore.Op{raftstore.Put("/s/left", v), raftstore.Put("/s/right", v)}
	}
	c.mustCommit(both(0)...)
	w := c.mustWatch("/s/", 0)
	done := make(chan struct{})
	var readers sync.WaitGroup
	for _, local := range []bool{false, true} {
		readers.Add(1)
		go func() {
			defer readers.Done()
			last := raftstore.Revision(0)
			// Pause between bursts: continuous reads would starve the commits.
			pause := time.NewTicker(2 * time.Millisecond)
			defer pause.Stop()
			for n := 1; ; n++ {
				l, err := s.Store.List(c.ctx, "/s/",
					raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Local: local}})
				if err != nil {
					t.Errorf("list: %v", err)
					return
				}
				apart := len(l.Items) == 1 || len(l.Items) == 2 &&
					(string(l.Items[0].Value) != string(l.Items[1].Value) || l.Items[0].Modified != l.Items[1].Modified)
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
			c.mustCommit(raftstore.Delete("/s/left"), raftstore.Delete("/s/right"))
		} else {
			c.mustCommit(both(n)...)
		}
		if ev := c.nextEvents(w); len(ev.Events) != 2 {
			t.Errorf("revision %d shows %d of 2 changes", ev.Revision, len(ev.Events))
		}
	}
	close(done)
	readers.Wait()
}

// noEffect checks that ops which change nothing cause no revision and no event. The preconditions
// of such ops must still be checked.
func noEffect(t *testing.T, s Subject) {
	c := newCaller(t, s)
	a := c.mustCommit(raftstore.Put("/a", []byte("1")))
	w := c.mustWatch("/", 0)
	check := raftstore.Op{Kind: raftstore.OpCheck, Key: "/a", If: raftstore.Precondition{Revision: a}}
	for _, ops := range [][]raftstore.Op{
		{check},
		{raftstore.Delete("/none")},
		{check, raftstore.Delete("/none"), {Kind: raftstore.OpCheck, Key: "/nor",
			If: raftstore.Precondition{Absent: true}}},
	} {
		if rev := c.mustCommit(ops...); rev != a {
			t.Errorf("commit of %v moved to revision %d", ops, rev)
		}
	}
	rev := c.mustCommit(check, raftstore.Delete("/none"), raftstore.Put("/b", nil))
	if ev := c.nextEvents(w); ev.Revision != rev || len(ev.Events) != 1 || ev.Events[0].Item.Key != "/b" {
		t.Errorf("after commits without effect: %+v", ev)
	}
}

// checkBuffers checks that the caller may modify the byte slices of a commit after the call.
func checkBuffers(t *testing.T, s Subject) {
	c := newCaller(t, s)
	value := []byte("before")
	c.mustCommit(raftstore.Put("/a", value))
	copy(value, "behind")
	c.mustHaveValue("/a", "before")
	c.mustCommit(raftstore.Put("/empty", nil), raftstore.Put("/zero", []byte{}))
	for _, key := range []string{"/empty", "/zero"} {
		if it := c.mustHaveValue(key, ""); len(it.Value) != 0 {
			t.Errorf("%s is %q", key, it.Value)
		}
	}
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	c.mustCommit(raftstore.Put("/bytes", all))
	c.mustHaveValue("/bytes", string(all))
}

// checkFences checks that a commit with the fence of another raft term changes nothing.
func checkFences(t *testing.T, s Subject) {
	c := newCaller(t, s)
	c.mustCommit(raftstore.Put("/a", []byte("1")))
	before := s.Store.Applied()
	_, err := s.Store.Commit(c.ctx, raftstore.Commit{Fence: 1 << 60,
		Ops: []raftstore.Op{raftstore.Put("/a", []byte("2"))}})
	if !errors.Is(err, raftstore.ErrFenced) {
		t.Errorf("commit with the fence of a leadership that does not exist: %v", err)
	}
	c.mustHaveValue("/a", "1")
	if after := s.Store.Applied(); after != before {
		t.Errorf("fenced commit moved the revision from %d to %d", before, after)
	}
}
