package storetest

import (
	"context"
	"errors"
	"strings"
	"testing"

	"keelson.dev/keelson/raftstore"
)

// Subject is a store under test. Compact must be able to compact the history of the store at any
// time.
type Subject struct {
	Store raftstore.Store
	// Compact compacts history up to and including the given revision.
	Compact func(raftstore.Revision)
	// Quota is the space quota of the store in bytes, from 6 MiB to 36 MiB; 0 = no quota.
	Quota int64
}

// Run checks the contract of raftstore.Store, in one subtest per section. fresh must return a new
// empty store for each section and register its cleanup with t.Cleanup.
func Run(t *testing.T, fresh func(t *testing.T) Subject) {
	for _, parts := range [][]part{commitParts, limitParts, readParts, watchParts, expiryParts} {
		for _, p := range parts {
			t.Run(p.name, func(t *testing.T) { p.run(t, fresh(t)) })
		}
	}
}

// RunQuota checks only the section of the contract that concerns the space quota.
func RunQuota(t *testing.T, fresh func(t *testing.T) Subject) {
	s := fresh(t)
	if s.Quota == 0 {
		t.Fatal("the store has no quota")
	}
	checkQuota(t, s)
}

// part is one section of the contract of raftstore.Store: its name and its test.
type part struct {
	name string
	run  func(t *testing.T, s Subject)
}

// caller makes calls to the store under test. It fails the test if a call does not have the
// expected result.
type caller struct {
	t   *testing.T
	ctx context.Context
	s   raftstore.Store
}

func newCaller(t *testing.T, s Subject) caller {
	// A section makes thousands of sequential calls, possibly over two networks and with the race
	// detector.
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	t.Cleanup(cancel)
	return caller{t, ctx, s.Store}
}

func (c caller) mustCommit(ops ...raftstore.Op) raftstore.Revision {
	c.t.Helper()
	rev, err := c.s.Commit(c.ctx, raftstore.Commit{Ops: ops})
	if err != nil {
		c.t.Fatalf("commit of %v: %v", ops, err)
	}
	return rev
}

func (c caller) mustFail(want error, ops ...raftstore.Op) {
	c.t.Helper()
	before := c.s.Applied()
	if _, err := c.s.Commit(c.ctx, raftstore.Commit{Ops: ops}); !errors.Is(err, want) {
		c.t.Errorf("commit: error %v, want %v", err, want)
	}
	if after := c.s.Applied(); after != before {
		c.t.Errorf("refused commit moved the revision from %d to %d", before, after)
	}
}

func (c caller) mustConflict(key string, ops ...raftstore.Op) *raftstore.ConflictError {
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

func (c caller) mustHaveValue(key, want string) raftstore.Item {
	c.t.Helper()
	it, _, err := c.s.Get(c.ctx, key, raftstore.ReadOptions{})
	if err != nil || string(it.Value) != want || it.Key != key {
		c.t.Fatalf("get of %q: %q %q, error %v, want %q", key, it.Key, it.Value, err, want)
	}
	return it
}

func (c caller) mustBeAbsent(key string) {
	c.t.Helper()
	if _, _, err := c.s.Get(c.ctx, key, raftstore.ReadOptions{}); !errors.Is(err, raftstore.ErrNotFound) {
		c.t.Fatalf("get of %q: error %v, want not found", key, err)
	}
}

func (c caller) mustList(prefix string, o raftstore.ListOptions) raftstore.List {
	c.t.Helper()
	l, err := c.s.List(c.ctx, prefix, o)
	if err != nil {
		c.t.Fatalf("list of %q with %+v: %v", prefix, o, err)
	}
	return l
}

func (c caller) mustWatch(prefix string, after raftstore.Revision) raftstore.Watcher {
	c.t.Helper()
	w, err := c.s.Watch(c.ctx, prefix, after)
	if err != nil {
		c.t.Fatalf("watch of %q after %d: %v", prefix, after, err)
	}
	c.t.Cleanup(w.Stop)
	return w
}

// nextEvents returns the events of the next revision that has any. It skips progress notes.
func (c caller) nextEvents(w raftstore.Watcher) raftstore.Events {
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
			c.t.Fatal("the watch delivers nothing")
		}
	}
}

func joinedKeys(l raftstore.List) string {
	var out []string
	for _, it := range l.Items {
		out = append(out, it.Key)
	}
	return strings.Join(out, " ")
}
