package replica_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// Who understands less than is stored is taken in neither as a learner nor as a voter; who is a learner already stays one.
func TestWhoUnderstandsTooLittleIsNotTakenIn(t *testing.T) {
	var stored atomic.Uint32
	understands := map[string]uint32{"r1": 2, "r2": 2, "r3": 1, "r4": 0}
	c := storetest.NewCluster(t, 2, func(cfg *replica.Config) {
		cfg.Program.FeatureLevel = understands[cfg.Name]
		cfg.Program.StoredLevel = func(context.Context) (uint32, error) { return stored.Load(), nil }
	})
	for _, name := range []string{"r3", "r4"} {
		c.AddHost(name, false)
		c.Start(name)
	}
	through := c.Replica("r2")
	if err := through.AddLearner(within(t, patience), "r3", c.Replica("r3").Address()); err != nil {
		t.Fatal(err)
	}
	stored.Store(2)
	if err := through.AddMember(within(t, patience), "r4",
		c.Replica("r4").Address()); !errors.Is(err, raftstore.ErrTooOld) ||
		!strings.Contains(err.Error(), "forms of feature level 2 and r4 understands levels up to 0") {
		t.Errorf("adding: %v", err)
	}
	if err := through.AddLearner(within(t, patience), "r4", c.Replica("r4").Address()); !errors.Is(err,
		raftstore.ErrTooOld) {
		t.Errorf("adding as a learner: %v", err)
	}
	if err := through.Promote(within(t, patience), "r3"); !errors.Is(err, raftstore.ErrTooOld) {
		t.Errorf("promoting: %v", err)
	}
	if m, _ := memberNamed(t, c, "r1", "r3"); m.Voter {
		t.Error("r3 has a vote")
	}
	if _, is := memberNamed(t, c, "r1", "r4"); is {
		t.Error("r4 is a member")
	}
	stored.Store(0)
	for _, name := range []string{"r3", "r4"} {
		if err := through.AddMember(within(t, patience), name, c.Replica(name).Address()); err != nil {
			t.Errorf("%s, once it understands what is stored: %v", name, err)
		}
	}
}

// The leader hears from every member what it understands, also from learners, and of one that is silent that it is;
// while it decides, nobody is taken in.
func TestMembersAreHeldWhileTheLevelIsDecided(t *testing.T) {
	understands := map[string]uint32{"r1": 3, "r2": 2, "r3": 1, "r4": 3, "r5": 3}
	var stored atomic.Uint32
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Program.FeatureLevel = understands[cfg.Name]
		cfg.Program.StoredLevel = func(context.Context) (uint32, error) { return stored.Load(), nil }
	})
	if _, err := c.Replica("r2").StepDown(within(t, patience), "r1"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"r4", "r5"} {
		c.AddHost(name, false)
		c.Start(name)
	}
	if err := c.Replica("r1").AddLearner(within(t, patience), "r4", c.Replica("r4").Address()); err != nil {
		t.Fatal(err)
	}
	c.Stop("r2")
	understands["r5"] = 0
	c.Stop("r5")
	c.Start("r5")
	added := make(chan error, 1)
	err := c.Replica("r1").HoldMembers(within(t, patience),
		func(_ context.Context, members []replica.MemberLevel) error {
			got := map[string]replica.MemberLevel{}
			for _, m := range members {
				got[m.ID] = m
			}
			for name, want := range map[string]replica.MemberLevel{
				"r1": {ID: "r1", Level: 3, Responded: true}, "r2": {ID: "r2"},
				"r3": {ID: "r3", Level: 1, Responded: true},
				"r4": {ID: "r4", Level: 3, Responded: true},
			} {
				if got[name] != want || len(got) != 4 {
					t.Errorf("%s: %+v among %+v", name, got[name], members)
				}
			}
			// r5 asks while it is decided; by the time that it is its turn, too much is stored.
			go func() { added <- c.Replica("r1").AddMember(within(t, patience), "r5", c.Replica("r5").Address()) }()
			stored.Store(1)
			return nil
		})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-added; !errors.Is(err, raftstore.ErrTooOld) {
		t.Errorf("a replica was taken in that does not understand what was decided meanwhile: %v", err)
	}
	if err := c.Replica("r3").HoldMembers(within(t, patience), func(context.Context, []replica.MemberLevel) error {
		return nil
	}); !errors.Is(err, raftstore.ErrNotLeader) {
		t.Errorf("on a follower: %v", err)
	}
}
