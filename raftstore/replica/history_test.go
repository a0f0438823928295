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

// History is bounded by number, and what is beyond is refused by name.
func TestHistoryIsCompactedByNumber(t *testing.T) {
	const keep = 80
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.HistoryRevisions, cfg.MinHistory, cfg.HistoryAge = keep, 10, time.Hour
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
		if !errors.Is(err, raftstore.ErrCompacted) || !strings.Contains(err.Error(), fmt.Sprintf("compacted up to %d", compacted)) {
			t.Errorf("%s at a compacted revision: %v", what, err)
		}
	}
	for what, err := range map[string]error{
		"list":       second(c.Replica("r2").List(within(t, patience), "/", raftstore.ListOptions{At: last + 9})),
		"watch":      second(c.Replica("r2").Watch(within(t, patience), "/", last+9)),
		"compaction": c.Replica(c.Leader()).Compact(within(t, patience), last+9),
	} {
		if !errors.Is(err, raftstore.ErrFutureRevision) || !strings.Contains(err.Error(), fmt.Sprint(last+9)) || !strings.Contains(err.Error(), fmt.Sprintf("store is at %d", last)) {
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
		cfg.HistoryAge, cfg.MinHistory = 400*time.Millisecond, keep
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
