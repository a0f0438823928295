package replica_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// The leader sees who answers, who waits for a vote and how far it is, and takes out nobody that answers; nobody else does
// either. What is left goes on, and the one that waited gets a vote.
func TestLookingAround(t *testing.T) {
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Program.FeatureLevel = 7
		cfg.Program.Standby = func() bool { return cfg.Name == "r4" }
	})
	if _, err := c.Replica("r2").StepDown(within(t, patience), "r1"); err != nil {
		t.Fatal(err)
	}
	c.AddHost("r4", false)
	c.Start("r4")
	r1 := c.Replica("r1")
	if err := r1.AddLearner(within(t, patience), "r4", c.Replica("r4").Address()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Replica("r4").Sync(within(t, patience)); err != nil { // it has applied what there is
		t.Fatal(err)
	}
	if _, _, err := c.Replica("r3").RequestReports(within(t, patience)); !errors.Is(err, raftstore.ErrNotLeader) {
		t.Errorf("a follower looks around: %v", err)
	}
	if err := c.Replica("r3").RemoveSilent(within(t, patience), "r2"); !errors.Is(err, raftstore.ErrNotLeader) {
		t.Errorf("a follower takes r2 out: %v", err)
	}
	if err := c.Replica("r3").PromoteOnLeader(within(t, patience), "r4"); !errors.Is(err, raftstore.ErrNotLeader) {
		t.Errorf("a follower gives r4 a vote: %v", err)
	}
	if err := r1.RemoveSilent(within(t, patience), "r2"); !errors.Is(err, raftstore.ErrInvalid) {
		t.Errorf("r2 answers and is taken out: %v", err)
	}
	over, cancel := context.WithCancel(context.Background())
	cancel()
	c.Stop("r2")
	if err := r1.RemoveSilent(over, "r2"); !errors.Is(err, context.Canceled) {
		t.Errorf("a leadership that has ended takes r2 out: %v", err)
	}
	found, commit, err := r1.RequestReports(within(t, patience))
	if err != nil || commit == 0 {
		t.Fatalf("committed up to %d, %v", commit, err)
	}
	got := map[string]string{}
	for _, f := range found {
		got[f.ID] = fmt.Sprintf("voter %v heard %v standby %v level %d applied %v", f.Voter, f.Responded, f.Standby,
			f.Level, f.Applied > 0)
	}
	for name, want := range map[string]string{
		"r1": "voter true heard true standby false level 7 applied true",
		"r2": "voter true heard false standby false level 0 applied false",
		"r3": "voter true heard true standby false level 7 applied true",
		"r4": "voter false heard true standby true level 7 applied true",
	} {
		if got[name] != want {
			t.Errorf("%s: %s, want %s", name, got[name], want)
		}
	}
	if err := r1.RemoveSilent(within(t, patience), "r2"); err != nil {
		t.Fatal(err)
	}
	if err := r1.PromoteOnLeader(within(t, patience), "r4"); err != nil {
		t.Fatal(err)
	}
	voters := 0
	for _, m := range r1.Status().Members {
		if m.Voter {
			voters++
		}
		if m.ID == "r2" {
			t.Error("r2 is a member still")
		}
	}
	if voters != 3 {
		t.Errorf("%d voters", voters)
	}
}
