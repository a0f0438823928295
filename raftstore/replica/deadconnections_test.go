package replica_test

import (
	"testing"

	"keelson.dev/keelson/raftstore/storetest"
)

// A candidate is elected at the first attempt although each of its kept connections leads to a previous process.
func TestElectedOverDeadConnections(t *testing.T) {
	c := storetest.NewCluster(t, 3, slowToMiss) // nobody else calls an election, however slow the machine is
	hand := func(to string) {
		t.Helper()
		from := c.Replica(c.Leader())
		term := from.Status().Term
		if now, err := from.StepDown(within(t, patience), to); err != nil || now != to {
			t.Fatalf("%s leads, want %s; %v", now, to, err)
		}
		c.AwaitReady()
		if s := c.Replica(to).Status(); s.Leader != to || s.Term != term+1 {
			t.Fatalf("%s leads in term %d, want %s in term %d", s.Leader, s.Term, to, term+1)
		}
	}
	a := c.Leader()
	b, other := c.Followers()[0], c.Followers()[1]
	hand(b) // from now on it has connections to both
	hand(a)
	c.Kill(other)
	c.Start(other)
	c.AwaitReady()
	hand(other)
	c.Kill(a)
	c.Start(a)
	c.AwaitReady()
	hand(b)
}
