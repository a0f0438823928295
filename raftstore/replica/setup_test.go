package replica_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// patience is long enough for anything on a busy machine.
const patience = time.Minute // what takes longer on a busy machine has failed

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func commit(t testing.TB, s raftstore.Store, ops ...raftstore.Op) raftstore.Revision {
	t.Helper()
	rev, err := s.Commit(within(t, patience), raftstore.Commit{Ops: ops})
	if err != nil {
		t.Fatalf("commit: %v", err)
	}
	return rev
}

// writers keep counters going up by one, each through one replica, with
// compare-and-swap: a lost or doubled commit shows as a conflict.
type writers struct {
	stop chan struct{}
	wg   sync.WaitGroup
	done atomic.Int64
}

func write(t *testing.T, c *storetest.Cluster, through []string, n int) *writers {
	w := &writers{stop: make(chan struct{})}
	for i := range n {
		s := c.Replica(through[i%len(through)])
		w.wg.Add(1)
		go func() {
			defer w.wg.Done()
			key := fmt.Sprintf("/writer/%d", i)
			var last raftstore.Revision
			for count := 1; ; count++ {
				select {
				case <-w.stop:
					return
				default:
				}
				op := raftstore.Create(key, []byte(fmt.Sprint(count)))
				if last != 0 {
					op = raftstore.Update(key, []byte(fmt.Sprint(count)), last)
				}
				rev, err := s.Commit(within(t, patience), raftstore.Commit{Ops: []raftstore.Op{op}})
				if err != nil {
					t.Errorf("writer %d, commit %d: %v", i, count, err)
					return
				}
				last = rev
				w.done.Add(1)
			}
		}()
	}
	return w
}

func (w *writers) await(c *storetest.Cluster, more int64) {
	goal := w.done.Load() + more
	c.Await("writes", func() bool { return w.done.Load() >= goal })
}

// history checks that every replica tells the same whole story.
func sameHistory(t *testing.T, c *storetest.Cluster) {
	t.Helper()
	c.AwaitReady()
	ctx := within(t, patience)
	var top raftstore.Revision
	for _, r := range c.Replicas() {
		rev, err := r.Sync(ctx)
		if err != nil {
			t.Fatalf("sync: %v", err)
		}
		top = max(top, rev)
	}
	c.AwaitRevision(top)
	var first string
	for _, r := range c.Replicas() {
		l, err := r.List(ctx, "/", raftstore.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(l); first == "" {
			first = got
		} else if got != first {
			t.Errorf("replicas differ:\n%s\n%s", first, got)
		}
	}
}

// inOrder drains a watcher up to a revision: no gap, no duplicate.
func inOrder(t *testing.T, w raftstore.Watcher, upTo raftstore.Revision) {
	t.Helper()
	defer w.Stop()
	last := raftstore.Revision(0)
	for last < upTo {
		select {
		case ev, open := <-w.C():
			if !open {
				t.Fatalf("watch ended at %d: %v", last, w.Err())
			}
			if len(ev.Events) == 0 {
				continue
			}
			if last != 0 && ev.Revision != last+1 {
				t.Fatalf("watch: revision %d after %d", ev.Revision, last)
			}
			last = ev.Revision
		case <-time.After(patience):
			t.Fatalf("watch stuck at %d, want %d", last, upTo)
		}
	}
}
