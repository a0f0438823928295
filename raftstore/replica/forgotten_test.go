package replica_test

import (
	"errors"
	"testing"
	"time"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/storetest"
)

// A commit that has waited for longer than anything is remembered, because its
// replica was cut off, applies all the same, and once: its id is too old to be
// believed, so it gets a new one, which it may because it was never proposed.
func TestCommitThatWaitedTooLongGetsANewID(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	for range 10 {
		err := waitTooLong(t, c)
		if err == nil {
			return
		}
		// It may have been sent into a cable that was just mended, and then it is
		// not known whether it was proposed.
		if !errors.Is(err, raftstore.ErrOutcomeUnknown) {
			t.Fatalf("the commit that waited: %v", err)
		}
	}
	t.Error("no commit that waited for too long was done")
}

func waitTooLong(t *testing.T, c *storetest.Cluster) error {
	leader, away := c.Leader(), c.Followers()[0]
	commit(t, c.Replica(away), raftstore.Put("/k", []byte("first"))) // the group knows this proposer
	c.Isolate(away)
	c.Await("the replica to miss its leader", func() bool { return c.Replica(away).Status().Leader == "" })
	done := make(chan error, 1)
	var at raftstore.Revision
	go func() {
		var err error
		at, err = c.Replica(away).Commit(within(t, patience),
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/k", []byte("second"))}})
		done <- err
	}()
	issued := c.Replica(away).StoreTime()
	c.Await("a moment to pass", func() bool { return c.Replica(away).StoreTime() > issued+20 })
	// Two others propose, the second so much later that the first, and the
	// replica that is away, are forgotten.
	r := c.Replica(leader)
	now := r.StoreTime()
	err := r.Inject(
		&storev1.Proposal{Id: &storev1.ProposalID{Incarnation: 2, Sequence: uint64(now), IssuedUnixMs: now},
			Ops: []*storev1.Op{{Kind: 1, Key: "/a"}}, ProposedUnixMs: now},
		&storev1.Proposal{Id: &storev1.ProposalID{Incarnation: 4, Sequence: uint64(now),
			IssuedUnixMs: now + mvcc.RememberMs + 1}, Ops: []*storev1.Op{{Kind: 1, Key: "/b"}}})
	if err != nil {
		t.Fatal(err)
	}
	c.Rejoin(away)
	select {
	case err := <-done:
		if err != nil {
			return err
		}
	case <-time.After(patience):
		t.Fatal("the commit still waits")
	}
	it, _, err := r.Get(within(t, patience), "/k", raftstore.ReadOptions{})
	if err != nil || string(it.Value) != "second" || it.Modified != at {
		t.Errorf("key is %q of revision %d, error %v; the commit was told %d", it.Value, it.Modified, err, at)
	}
	if rev := r.Applied(); rev != at {
		t.Errorf("store is at revision %d, the last commit at %d", rev, at)
	}
	return nil
}
