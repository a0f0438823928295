package replica_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

func memberNamed(t testing.TB, c *storetest.Cluster, through, name string) (raftstore.Member, bool) {
	t.Helper()
	all, err := c.Replica(through).Members(within(t, patience))
	if err != nil {
		t.Fatalf("members: %v", err)
	}
	for _, m := range all {
		if m.ID == name {
			return m, true
		}
	}
	return raftstore.Member{}, false
}

// A replica joins as a learner, catches up, is promoted and is removed again,
// while others write; nobody notices.
func TestMembershipChangesUnderLoad(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	w := write(t, c, []string{"r2", "r3"}, 6) // r1 is going to leave
	w.await(c, 200)
	through := c.Replica("r2")
	c.AddHost("r4", false)
	c.Start("r4")
	address := c.Replica("r4").Address()
	if err := through.AddLearner(within(t, patience), "r4", address); err != nil {
		t.Fatal(err)
	}
	if err := through.AddLearner(within(t, patience), "r4", address); err != nil {
		t.Errorf("adding the learner again: %v", err)
	}
	c.AwaitReadyOf("r4")
	if m, _ := memberNamed(t, c, "r4", "r4"); m.Voter {
		t.Error("a learner has a vote")
	}
	for _, name := range []string{"r1", "r3"} {
		if _, err := c.Replica(name).StepDown(within(t, patience), "r4"); !errors.Is(err, raftstore.ErrInvalid) ||
			!strings.Contains(err.Error(), "promote it first") {
			t.Errorf("%s: handing over to a learner: %v", name, err)
		}
	}
	// It counts in no majority: with r4 and one voter gone writes go on.
	c.Stop("r4")
	w.await(c, 100)
	c.Start("r4")
	if err := through.Promote(within(t, patience), "r4"); err != nil {
		t.Fatal(err)
	}
	if err := through.Promote(within(t, patience), "r4"); err != nil {
		t.Errorf("promoting a voter: %v", err)
	}
	c.Await("r4 to have a vote", func() bool {
		m, _ := memberNamed(t, c, "r4", "r4")
		return m.Voter && m.Applied != 0 && m.Contact != 0
	})
	w.await(c, 100)
	// The leader can be removed too, and ask for it itself: it hands over first.
	if _, err := through.StepDown(within(t, patience), "r1"); err != nil {
		t.Fatal(err)
	}
	// On a busy machine a transfer of the leadership may fail: the leader then leads as before, and the removal is requested again.
	c.Await("the leader to be removed", func() bool {
		err := c.Replica("r1").RemoveMember(within(t, patience), "r1")
		if err != nil && !errors.Is(err, raftstore.ErrTransferFailed) {
			t.Fatalf("removing the leader: %v", err)
		}
		return err == nil
	})
	c.Await("r1 to be a member no more", func() bool {
		_, is := memberNamed(t, c, "r4", "r1")
		return !is
	})
	w.await(c, 100)
	close(w.stop)
	w.wg.Wait()
	if got := c.Replica("r4").Status().Leader; got == "r1" {
		t.Errorf("%s leads and is no member", got)
	}
}

// What cannot be done with members is refused at once, with what is wrong.
func TestMembershipRefusals(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	leader, followers := c.Leader(), c.Followers()
	for _, name := range c.Names() { // the same from wherever it is asked
		r := c.Replica(name)
		if err := r.RemoveMember(within(t, patience), "r9"); !errors.Is(err, raftstore.ErrUnknownMember) ||
			!strings.Contains(err.Error(), `"r9" is not among r1, r2, r3`) {
			t.Errorf("%s: removing an unknown member: %v", name, err)
		}
		if err := r.Promote(within(t, patience), "r9"); !errors.Is(err, raftstore.ErrUnknownMember) {
			t.Errorf("%s: promoting an unknown member: %v", name, err)
		}
		if _, err := r.StepDown(within(t, patience), "r9"); !errors.Is(err, raftstore.ErrUnknownMember) {
			t.Errorf("%s: handing over to an unknown member: %v", name, err)
		}
		for _, bad := range [][2]string{
			{"", "127.0.0.1:1"}, {"r4", "nowhere"}, {"r5", c.Replica("r1").Address()}, {"r4\xff", "127.0.0.1:1"},
			{"r4\n", "127.0.0.1:1"},
			{strings.Repeat("r", 257), "127.0.0.1:1"}, {"r4", ":1"}, {"r4", "127.0.0.1:"}, {"r4", "127.0.0.1:0"},
			{"r4", "127.0.0.1:http"}, {"r4", "\xff:1"},
		} {
			if err := r.AddMember(within(t, patience), bad[0], bad[1]); !errors.Is(err, raftstore.ErrInvalid) {
				t.Errorf("%s: adding %q at %q: %v", name, bad[0], bad[1], err)
			}
		}
		// Which cannot even be sent to the leader.
		_, err := r.StepDown(within(t, patience), "\xff")
		for verb, err := range map[string]error{"step down": err, "promote": r.Promote(within(t, patience), "\xff"),
			"remove": r.RemoveMember(within(t, patience), "\xff")} {
			if !errors.Is(err, raftstore.ErrUnknownMember) {
				t.Errorf("%s: %s of a name that is no text: %v", name, verb, err)
			}
		}
	}
	// Where nobody answers: the caller learns that when its time is up.
	for limit := 4 * time.Second; ; limit *= 4 {
		// on a slow machine the leader's answer takes longer than it leaves itself
		err := c.Replica(followers[0]).AddMember(within(t, limit), "r4", "127.0.0.1:1")
		if err != nil && strings.Contains(err.Error(), "waiting for the replica at 127.0.0.1:1") {
			break
		}
		if err == nil || limit > patience {
			t.Fatalf("adding a replica that is not there: %v", err)
		}
	}
	// Where another replica answers than the one that was named.
	c.AddHost("r4", false)
	c.Start("r4")
	if err := c.Replica(leader).AddMember(within(t, patience), "r5",
		c.Replica("r4").Address()); !errors.Is(err, raftstore.ErrInvalid) || !strings.Contains(err.Error(), `"r4"`) {
		t.Errorf("adding r5 where r4 is: %v", err)
	}
	// One of another group.
	other := storetest.NewCluster(t, 1, nil)
	if err := c.Replica(leader).AddMember(within(t, 5*time.Second), "r1", other.Replica("r1").Address()); err == nil {
		t.Error("a replica of another authority was added")
	}
	if n := len(c.Replica(leader).Status().Members); n != 3 {
		t.Errorf("%d members after refusals", n)
	}

	// With one voter gone, another cannot be removed; the one that is gone can.
	gone, alive := followers[0], followers[1]
	c.Stop(gone)
	err := c.Replica(alive).RemoveMember(within(t, patience), alive)
	if !errors.Is(err, raftstore.ErrNoMajority) ||
		!strings.Contains(err.Error(), "start "+gone+" again, or remove it first") {
		t.Errorf("removing a live voter while another is down: %v", err)
	}
	if err := c.Replica(alive).RemoveMember(within(t, patience), gone); err != nil {
		t.Errorf("removing the dead voter: %v", err)
	}
	if err := c.Replica(leader).RemoveMember(within(t, patience), alive); err != nil {
		t.Errorf("removing the next: %v", err)
	}
	c.Stop(alive)
	if err := c.Replica(leader).RemoveMember(within(t, patience), leader); !errors.Is(err, raftstore.ErrNoMajority) ||
		!strings.Contains(err.Error(), "only voter") {
		t.Errorf("removing the last voter: %v", err)
	}
	if _, err := c.Replica(leader).StepDown(within(t, patience), ""); !errors.Is(err, raftstore.ErrInvalid) {
		t.Errorf("the only voter stepping down: %v", err)
	}
	commit(t, c.Replica(leader), raftstore.Put("/still", nil))
}

// Who promoted a replica may lose the leader at once: every voter knows of the
// promotion, also one that hears late, and gives the new one its vote. F53
func TestPromotionIsKnownToAll(t *testing.T) {
	c := storetest.NewCluster(t, 2, func(cfg *replica.Config) {
		// the leader stays until it is killed
		cfg.Timeouts.HeartbeatTimeout, cfg.Timeouts.ElectionTimeout = 2*time.Second, 2*time.Second
	})
	leader, late := c.Leader(), c.Followers()[0]
	c.AddHost("r3", false)
	c.Start("r3")
	if err := c.Replica(leader).AddLearner(within(t, patience), "r3", c.Replica("r3").Address()); err != nil {
		t.Fatal(err)
	}
	c.AwaitReadyOf("r3")
	c.Network.Slow(leader, late, 300*time.Millisecond, 0)
	if err := c.Replica(leader).Promote(within(t, patience), "r3"); err != nil {
		t.Fatal(err)
	}
	c.Network.Cut(leader, late) // nothing of what is on its way arrives
	c.Kill(leader)
	commit(t, c.Replica(late), raftstore.Put("/a", []byte("one")))
}

// Who is away does not hold a promotion up for long.
func TestPromotionBesideADeadVoter(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	c.Kill(c.Followers()[0])
	c.AddHost("r4", false)
	c.Start("r4")
	c.Join("r4")
	commit(t, c.Replica("r4"), raftstore.Put("/a", []byte("one")))
}

// A dead replica is replaced by one with another name.
func TestDeadReplicaIsReplaced(t *testing.T) {
	var restless atomic.Value // the one that would call elections soon
	restless.Store("")
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		if cfg.Name != restless.Load() {
			slowToMiss(cfg) // that the term stays is not for the machine to decide
		}
	})
	w := write(t, c, []string{c.Leader()}, 3)
	dead := c.Followers()[0]
	c.Kill(dead)
	w.await(c, 50)
	r := c.Replica(c.Leader())
	if err := r.RemoveMember(within(t, patience), dead); err != nil {
		t.Fatal(err)
	}
	c.AddHost("r4", false)
	c.Start("r4")
	if err := r.AddMember(within(t, patience), "r4", c.Replica("r4").Address()); err != nil {
		t.Fatal(err)
	}
	close(w.stop)
	w.wg.Wait()
	sameHistory(t, c)

	// The dead one comes back with its old data. It is no member and finds that
	// out only by being ignored: it disturbs nobody.
	term := r.Status().Term
	restless.Store(dead)
	c.Start(dead)
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		commit(t, c.Replica("r4"), raftstore.Put("/k", nil))
	}
	if s := r.Status(); s.Term != term {
		t.Errorf("a removed replica moved the term from %d to %d", term, s.Term)
	}
	if c.Replica(dead).Ready() {
		t.Error("a removed replica says that it is ready")
	}
}

// A voter whose disk was lost has forgotten what it promised. It gets no
// traffic and no vote until it was removed and added again.
func TestWipedVoterMustBeAddedAnew(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	before := commit(t, c.Replica("r1"), raftstore.Put("/k", []byte("v")))
	wiped := c.Followers()[0]
	address := c.Replica(wiped).Address()
	c.Stop(wiped)
	c.Wipe(wiped)
	c.Start(wiped)
	leader := c.Replica(c.Leader())
	var err error
	c.Await("the leader hearing the wiped voter", func() bool { // one that is away is a member as it is
		err = leader.AddMember(within(t, patience), wiped, address)
		return err != nil
	})
	if !errors.Is(err, raftstore.ErrMemberExists) || !strings.Contains(err.Error(), "remove "+wiped+" first") {
		t.Errorf("adding a wiped voter again: %v", err)
	}
	commit(t, leader, raftstore.Put("/k", []byte("w")))
	if s := c.Replica(wiped).Status(); s.Revision != 0 || s.Term != 0 {
		t.Errorf("a wiped voter took part: revision %d, term %d", s.Revision, s.Term)
	}
	// Without its vote the last of the others alone is no majority.
	var other string
	for _, f := range c.Followers() {
		if f != wiped {
			other = f
		}
	}
	c.Stop(other)
	if _, err := leader.Commit(within(t, 2*time.Second),
		raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/k", []byte("x"))}}); err == nil {
		t.Error("a wiped voter was counted in a majority")
	}
	c.Start(other)
	c.Await("a leader", func() bool {
		_, err := c.Replica(other).Sync(within(t, patience))
		return err == nil
	})
	if err := c.Replica(other).RemoveMember(within(t, patience), wiped); err != nil {
		t.Fatal(err)
	}
	if err := c.Replica(other).AddMember(within(t, patience), wiped, address); err != nil {
		t.Fatal(err)
	}
	c.AwaitReady()
	if it, _, err := c.Replica(wiped).Get(within(t, patience), "/k", raftstore.ReadOptions{}); err != nil ||
		it.Created != before {
		t.Errorf("after it was added again: %+v, error %v", it, err)
	}
	sameHistory(t, c)
	// Its admission is remembered: a restart needs no ceremony.
	c.Stop(wiped)
	c.Start(wiped)
	c.AwaitReadyOf(wiped)
}

// Leadership goes where it is asked to, from any replica.
func TestStepDown(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	for range 2 {
		for _, from := range c.Names() {
			to := c.Followers()[0]
			leader, err := c.Replica(from).StepDown(within(t, patience), to)
			if err != nil || leader != to {
				t.Fatalf("%s asks that %s lead: %s leads, error %v", from, to, leader, err)
			}
			if again, err := c.Replica(from).StepDown(within(t, patience), to); err != nil || again != to {
				t.Errorf("asking for the leader there is: %s, error %v", again, err)
			}
		}
		was := c.Leader()
		if leader, err := c.Replica(c.Followers()[1]).StepDown(within(t, patience), ""); err != nil || leader == was {
			t.Errorf("stepping down: %s leads, error %v", leader, err)
		}
	}
}

// A call that is tried again until its time is up tells what the attempt before has met with: the last one only knows that
// time was up.
func TestCallThatIsLateTellsWhy(t *testing.T) {
	c := storetest.NewCluster(t, 1, nil)
	ctx, cancel := context.WithCancel(t.Context())
	attempts := 0
	err := c.Replica("r1").OnLeader(ctx, func() error {
		if attempts++; attempts == 1 {
			return errors.New("nobody answers at the address")
		}
		cancel()
		return ctx.Err()
	})
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "nobody answers at the address") ||
		attempts != 2 {
		t.Errorf("after %d attempts: %v", attempts, err)
	}
}
