package replica_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
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

// A hand-over of before, heard late, moves nobody: neither whom it has made leader nor who follows that one now.
func TestHandOverHeardLateDeposesNobody(t *testing.T) {
	c := storetest.NewCluster(t, 3, slowToMiss) // nobody else is elected, however slow the machine is
	before, successor, other := c.Leader(), c.Followers()[0], c.Followers()[1]
	if _, err := c.Replica(before).StepDown(within(t, patience), successor); err != nil {
		t.Fatal(err)
	}
	commit(t, c.Replica(successor), raftstore.Put("/a", nil))
	c.Await("the others to follow "+successor, func() bool {
		return c.Replica(before).Status().Leader == successor && c.Replica(other).Status().Leader == successor
	})
	term := c.Replica(successor).Status().Term
	for _, to := range []string{successor, other} {
		if err := c.Replica(before).TellToStand(c.Replica(to)); err == nil {
			t.Errorf("%s stands for election for %s, which does not lead any more", to, before)
		}
	}
	commit(t, c.Replica(before), raftstore.Put("/b", nil))
	for name, r := range map[string]*replica.Replica{before: c.Replica(before), successor: c.Replica(successor), other: c.Replica(other)} {
		if s := r.Status(); s.Leader != successor || s.Term != term {
			t.Errorf("%s says that %s leads in term %d, it was %s in term %d", name, s.Leader, s.Term, successor, term)
		}
	}
	if err := c.Replica(successor).TellToStand(c.Replica(before)); err != nil {
		t.Errorf("%s does not stand for election for %s, which leads: %v", before, successor, err)
	}
	c.Await(before+" to lead again", func() bool { return c.Replica(before).Status().Leader == before })
}
