package replica_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// Leadership goes to a voter that answers, at the first attempt, though the log
// of one that does not is as long.
func TestTransferPassesOverTheSilent(t *testing.T) {
	c := storetest.NewCluster(t, 3, slowToMiss) // nobody else is elected, however slow the machine is
	leader, followers := c.Leader(), c.Followers()
	silent, good := followers[0], followers[1]
	c.Isolate(silent)
	if err := c.Replica(leader).TransferLeadership(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	if now := c.Leader(); now != good {
		t.Errorf("%s leads, want %s", now, good)
	}
	c.Rejoin(silent)
	c.AwaitReady()
}

// Who is not there is waited for without holding up anybody: the leader goes on
// in its term.
func TestTransferToTheSilentHoldsUpNobody(t *testing.T) {
	c := storetest.NewCluster(t, 3, slowToMiss) // nobody else is elected, however slow the machine is
	leader, silent := c.Leader(), c.Followers()[0]
	r := c.Replica(leader)
	term := r.Status().Term
	c.Isolate(silent)
	ctx, cancel := context.WithCancel(context.Background())
	failed := make(chan error, 1)
	go func() {
		_, err := r.StepDown(ctx, silent)
		failed <- err
	}()
	for range 20 {
		if _, err := r.Commit(within(t, patience), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", nil)}, Fence: raftstore.Fence(term)}); err != nil {
			t.Fatalf("commit while another is waited for: %v", err)
		}
	}
	cancel()
	select {
	case err := <-failed:
		if err == nil || !errors.Is(err, context.Canceled) {
			t.Errorf("stepping down for one who is away: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("stepping down does not end with its context")
	}
	if s := r.Status(); s.Leader != leader || s.Term != term {
		t.Errorf("%s leads in term %d, was %s in term %d", s.Leader, s.Term, leader, term)
	}
	c.Rejoin(silent)
	c.AwaitReady()
}
