package replica_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// History is bounded in bytes too: large values that are written over and over do not stay in memory.
func TestHistoryIsCompactedByBytes(t *testing.T) {
	const keep = 64 << 10
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.History.HistoryBytes, cfg.History.HistoryAge = keep, time.Hour
	})
	value := make([]byte, 1<<10)
	var last raftstore.Revision
	for i := range 400 {
		last = commit(t, c.Replica("r1"), raftstore.Put(fmt.Sprintf("/k/%d", i%7), value))
	}
	c.Await("compaction everywhere", func() bool {
		for _, r := range c.Replicas() {
			// At least a quarter of the bound stays: who is a moment behind finds it.
			if s := r.Status(); s.Revision != last || s.HistoryBytes > keep || s.HistoryBytes < keep/4 {
				return false
			}
		}
		return true
	})
}

// History is bounded by number, and what is beyond is refused by name.
func TestHistoryIsCompactedByNumber(t *testing.T) {
	const keep = 80
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.History.HistoryRevisions, cfg.History.MinHistory, cfg.History.HistoryAge = keep, 10, time.Hour
	})
	var last raftstore.Revision
	for i := range 400 {
		last = commit(t, c.Replica("r1"), raftstore.Put(fmt.Sprintf("/k/%d", i%7), nil))
	}
	c.Await("compaction everywhere", func() bool {
		for _, r := range c.Replicas() {
			if s := r.Status(); s.Revision != last || s.Revision-s.Compacted > 2*keep || s.Revision-s.Compacted < 10 {
				return false
			}
		}
		return true
	})
	compacted := c.Replica("r2").Status().Compacted
	for what, err := range map[string]error{
		"list":  second(c.Replica("r2").List(within(t, patience), "/", raftstore.ListOptions{At: compacted - 1})),
		"watch": second(c.Replica("r2").Watch(within(t, patience), "/", compacted-1)),
	} {
		if !errors.Is(err, raftstore.ErrCompacted) ||
			!strings.Contains(err.Error(), fmt.Sprintf("compacted up to %d", compacted)) {
			t.Errorf("%s at a compacted revision: %v", what, err)
		}
	}
	for what, err := range map[string]error{
		"list":       second(c.Replica("r2").List(within(t, patience), "/", raftstore.ListOptions{At: last + 9})),
		"watch":      second(c.Replica("r2").Watch(within(t, patience), "/", last+9)),
		"compaction": c.Replica(c.Leader()).Compact(within(t, patience), last+9),
	} {
		if !errors.Is(err, raftstore.ErrFutureRevision) || !strings.Contains(err.Error(), fmt.Sprint(last+9)) ||
			!strings.Contains(err.Error(), fmt.Sprintf("store is at %d", last)) {
			t.Errorf("%s at a future revision: %v", what, err)
		}
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Replica(c.Leader()).Compact(over, last); !errors.Is(err, context.Canceled) {
		t.Errorf("compaction for nobody: %v", err)
	}
	if now := c.Replica(c.Leader()).Status().Compacted; now != compacted {
		t.Errorf("compactions that were refused moved the compacted revision from %d to %d", compacted, now)
	}
}

func second[T any](_ T, err error) error { return err }

// History is bounded by age, down to the number that is always kept.
func TestHistoryIsCompactedByAge(t *testing.T) {
	const keep = 5
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.History.HistoryAge, cfg.History.MinHistory = 400*time.Millisecond, keep
	})
	var last raftstore.Revision
	for range 50 {
		last = commit(t, c.Replica("r1"), raftstore.Put("/k", nil))
	}
	c.Await("compaction everywhere", func() bool {
		for _, r := range c.Replicas() {
			if s := r.Status(); s.Revision-s.Compacted != keep {
				return false
			}
		}
		return true
	})
	if _, err := c.Replica("r3").List(within(t, patience), "/", raftstore.ListOptions{At: last - keep}); err != nil {
		t.Errorf("list at the oldest revision that is kept: %v", err)
	}
}

// Pages of one revision may be read each at another replica, while keys come and
// go and history before the revision is forgotten: together they are one list.
// Once the revision itself is forgotten every replica says so.
func TestPagesFromReplicaToReplica(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	for i := range 30 {
		commit(t, c.Replica("r1"), raftstore.Put(fmt.Sprintf("/p/%02d", i), []byte("old")))
	}
	ctx := within(t, patience)
	whole, err := c.Replica("r2").List(ctx, "/p/", raftstore.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var got []raftstore.Item
	for page := (raftstore.List{More: true}); page.More; {
		n := len(got)
		o := raftstore.ListOptions{Limit: 4, At: whole.Revision}
		if n > 0 {
			o.After = got[n-1].Key
			commit(t, c.Replica("r3"), raftstore.Delete(fmt.Sprintf("/p/%02d", 30-n)),
				raftstore.Put(fmt.Sprintf("/p/%02d+", n), nil))
			if err := c.Replica(c.Leader()).Compact(ctx, whole.Revision); err != nil {
				t.Fatal(err)
			}
		}
		if page, err = c.Replica(c.Names()[n/4%3]).List(ctx, "/p/", o); err != nil {
			t.Fatalf("page after %d keys: %v", n, err)
		}
		got = append(got, page.Items...)
	}
	if fmt.Sprint(got) != fmt.Sprint(whole.Items) {
		t.Errorf("pages together:\n%v\nwant\n%v", got, whole.Items)
	}
	if err := c.Replica(c.Leader()).Compact(ctx, whole.Revision+1); err != nil {
		t.Fatal(err)
	}
	for _, name := range c.Names() {
		if _, err := c.Replica(name).List(ctx, "/p/",
			raftstore.ListOptions{At: whole.Revision, After: "/p/03"}); !errors.Is(err, raftstore.ErrCompacted) {
			t.Errorf("%s: page of a forgotten revision: %v", name, err)
		}
	}
}
