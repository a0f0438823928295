package replica_test

import (
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// tolerant keeps the complaints of a cluster about a replica that was made to fail.
type tolerant struct {
	testing.TB
	mu         sync.Mutex
	complaints []string
}

func (t *tolerant) Errorf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.complaints = append(t.complaints, fmt.Sprintf(format, args...))
}

// A replica whose disk takes no vote any more stops with an error that says so.
// The process lives on, and the others serve. F53
func TestReplicaThatCannotVote(t *testing.T) {
	tb := &tolerant{TB: t}
	failing := make(map[string]*replica.FailingVotes)
	c := storetest.NewCluster(tb, 3, func(cfg *replica.Config) {
		failing[cfg.Name] = new(replica.FailingVotes)
		failing[cfg.Name].Put(cfg)
	})
	commit(t, c.Replica("r1"), raftstore.Put("/a", []byte("one")))
	leader := c.Leader()
	broken := c.Followers()[0]
	r := c.Replica(broken)
	failing[broken].Break(syscall.EIO)
	c.Kill(leader) // there must be an election
	select {
	case <-r.Ended():
	case <-time.After(patience):
		t.Fatal("a replica that cannot vote goes on")
	}
	if err := r.Cause(); err == nil || !strings.Contains(err.Error(), "raft.db") ||
		!strings.Contains(err.Error(), "vote") {
		t.Errorf("it stopped with %v", err)
	}
	c.Stop(broken)
	c.Start(leader)
	c.AwaitReadyOf(leader)
	commit(t, c.Replica(leader), raftstore.Put("/a", []byte("two")))
	tb.mu.Lock()
	defer tb.mu.Unlock()
	if len(tb.complaints) != 1 || !strings.Contains(tb.complaints[0], broken) {
		t.Errorf("complaints: %q", tb.complaints)
	}
}
