package replica_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// Leadership is transferred at the first attempt to a voter that answers, although the log of a silent voter is as long.
func TestTransferSkipsSilentVoters(t *testing.T) {
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

// A transfer to an absent voter waits without blocking commits: the leader continues in its term.
func TestTransferToASilentVoterBlocksNobody(t *testing.T) {
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
		if _, err := r.Commit(within(t, patience),
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", nil)}, Fence: raftstore.Fence(term)}); err != nil {
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

// A TimeoutNow that arrives late deposes neither the leader that it has created nor a later one.
func TestLateTimeoutNowDeposesNobody(t *testing.T) {
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
		if err := c.Replica(before).SendTimeoutNow(c.Replica(to)); err == nil {
			t.Errorf("%s stands for election for %s, which does not lead any more", to, before)
		}
	}
	commit(t, c.Replica(before), raftstore.Put("/b", nil))
	for name, r := range map[string]*replica.Replica{before: c.Replica(before), successor: c.Replica(successor),
		other: c.Replica(other)} {
		if s := r.Status(); s.Leader != successor || s.Term != term {
			t.Errorf("%s says that %s leads in term %d, it was %s in term %d", name, s.Leader, s.Term, successor, term)
		}
	}
	if err := c.Replica(successor).SendTimeoutNow(c.Replica(before)); err != nil {
		t.Errorf("%s does not stand for election for %s, which leads: %v", before, successor, err)
	}
	c.Await(before+" to lead again", func() bool { return c.Replica(before).Status().Leader == before })
}

// A leadership transfer that fails, because the successor's disk does not let it vote for itself, leaves the leader in its term.
// Fenced commits wait meanwhile: ErrFenced would say that the leadership has ended. // F53
func TestCommitsWaitForAFailedTransfer(t *testing.T) {
	disks := make(map[string]*replica.PowerCut)
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Timeouts.DiskPatience = 30 * time.Second
		disks[cfg.Name] = replica.NewPowerCut(1)
		disks[cfg.Name].Put(cfg)
	})
	old, to := c.Leader(), c.Followers()[0]
	l := c.Replica(old)
	fences, ended := make(chan raftstore.Fence, 8), make(chan struct{}, 8)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go l.Lead(ctx, func(ctx context.Context, f raftstore.Fence) error {
		fences <- f
		<-ctx.Done()
		ended <- struct{}{}
		return nil
	})
	fence := <-fences
	_, goOn := disks[to].Hold()
	defer goOn()
	term := l.Status().Term
	go func() {
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		_, err := l.StepDown(ctx, to)
		t.Logf("stepping down: %v", err)
	}()
	fenced := 0
	for until := time.Now().Add(4 * time.Second); time.Now().Before(until); {
		one, cancel := context.WithTimeout(ctx, time.Second)
		_, err := l.Commit(one, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/x", nil)}, Fence: fence})
		cancel()
		if errors.Is(err, raftstore.ErrFenced) {
			fenced++
		}
	}
	if s := l.Status(); s.Term == term && s.Leader == old && fenced > 0 && len(ended) == 0 {
		t.Errorf("%d commits were fenced, and %s leads in term %d as before: its leadership has not ended",
			fenced, old, term)
	}
}

// A request makes one attempt to transfer leadership. When the successor cannot write its vote the attempt fails, the leader continues
// in its term, and the next request skips a voter whose disk write has been pending for too long. // F53
func TestTransferIsAttemptedOnce(t *testing.T) {
	votes := make(map[string]*replica.HeldVotes)
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Timeouts.DiskPatience = patience
		votes[cfg.Name] = new(replica.HeldVotes)
		votes[cfg.Name].Put(cfg)
	})
	old, to, other := c.Leader(), c.Followers()[0], c.Followers()[1]
	before := c.Replica(old).Status().Term
	release := votes[to].Hold()
	defer release()
	leader, err := c.Replica(other).StepDown(within(t, patience), to)
	if !errors.Is(err, raftstore.ErrTransferFailed) {
		t.Fatalf("stepping down for %s, whose disk hangs: leader %q, error %v", to, leader, err)
	}
	if s := c.Replica(old).Status(); s.Leader != old || s.Term != before {
		t.Errorf("%s leads in term %d after a failed transfer, want %s in term %d", s.Leader, s.Term, old, before)
	}
	short, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	_, err = c.Replica(old).StepDown(short, to)
	if !errors.Is(err, raftstore.ErrUnavailable) || !strings.Contains(err.Error(), "a disk write of "+to) {
		t.Errorf("stepping down for %s, whose write is pending: %v", to, err)
	}
	if leader, err = c.Replica(old).StepDown(within(t, patience), ""); err != nil || leader != other {
		t.Errorf("stepping down for any voter: %q leads, error %v, want %s", leader, err, other)
	}
	release()
	c.AwaitReady()
}

// A heartbeat that arrives between a TimeoutNow and the candidate's new term does not make the previous leader the candidate's
// leader: it would refuse its vote to all others if it lost.
func TestCandidateHasNoLeader(t *testing.T) {
	votes := make(map[string]*replica.HeldVotes)
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		slowToMiss(cfg)
		votes[cfg.Name] = new(replica.HeldVotes)
		votes[cfg.Name].Put(cfg)
	})
	c.AwaitRevision(commit(t, c.Replica(c.Leader()), raftstore.Put("/a", nil)))
	old, next := c.Leader(), c.Followers()[0]
	term := c.Replica(old).Status().Term
	release := votes[next].Hold()
	defer release()
	if err := c.Replica(old).SendTimeoutNow(c.Replica(next)); err != nil {
		t.Fatal(err)
	}
	c.Await(next+" to become a candidate", func() bool {
		_, candidate := c.Replica(next).RaftLeader()
		return candidate
	})
	handled := make(chan error, 1)
	go func() { handled <- c.Replica(old).SendHeartbeat(c.Replica(next), term) }()
	select {
	case <-handled:
	case <-time.After(100 * time.Millisecond): // the heartbeat waits, or is late and has no effect
		release()
		<-handled
	}
	if leader, candidate := c.Replica(next).RaftLeader(); candidate && leader != "" {
		t.Errorf("%s is a candidate and follows %s", next, leader)
	}
	release()
	commit(t, c.Replica(next), raftstore.Put("/b", nil))
}
