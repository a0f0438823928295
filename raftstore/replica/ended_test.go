package replica_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// slowToMiss are replicas that miss a silent leader within a minute only.
func slowToMiss(cfg *replica.Config) { cfg.HeartbeatTimeout = time.Minute }

// A leader whose process has ended has a successor although nobody has missed it yet, and again when that one ends; what was
// acknowledged is there.
func TestLeaderWhoseProcessEndsIsReplacedAtOnce(t *testing.T) {
	for _, group := range []struct{ voters, standbys int }{{3, 0}, {5, 0}, {3, 1}, {5, 2}} {
		n := group.voters
		c := storetest.NewCluster(t, n, slowToMiss)
		for i := range group.standbys {
			addStandby(t, c, fmt.Sprintf("standby%d", i+1))
		}
		for range n / 2 {
			old := c.Leader()
			commit(t, c.Other(old), raftstore.Put("/of/"+old, nil))
			c.Kill(old)
			began := time.Now()
			commit(t, c.Other(old), raftstore.Put("/after/"+old, nil))
			t.Logf("of %d voters and %d standbys, a write after %s had ended took %v", n, group.standbys, old, time.Since(began))
			if now := c.Leader(); now == old {
				t.Fatalf("%s still leads", now)
			}
		}
		if l, err := c.Replica(c.Leader()).List(within(t, patience), "/", raftstore.ListOptions{}); err != nil || len(l.Items) != 2*(n/2) {
			t.Errorf("there are %d keys, error %v", len(l.Items), err)
		}
	}
}

// addStandby adds a replica that has no vote, and waits until it has what the others have.
func addStandby(t *testing.T, c *storetest.Cluster, name string) {
	t.Helper()
	c.AddHost(name, false)
	c.Start(name)
	if err := c.Replica("r1").AddLearner(within(t, patience), name, c.Replica(name).Address()); err != nil {
		t.Fatal(err)
	}
	c.AwaitReadyOf(name)
}

// A replica without a vote takes no voter's word when the leader's process has ended, whatever release it is of: it does not ask, and
// where it asks it is refused. The next voter has the word at once.
func TestStandbyTakesNobodysWord(t *testing.T) {
	var asked dials
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { slowToMiss(cfg); asked.count(cfg) })
	addStandby(t, c, "standby")
	c.AwaitRevision(commit(t, c.Replica("r1"), raftstore.Put("/a", nil)))
	old := c.Leader()
	first, second := c.Followers()[0], c.Followers()[1]
	before := asked.by("standby", c.Replica(first).Address()) + asked.by("standby", c.Replica(second).Address())
	c.Network.Cut(first, second) // so that neither stands for election meanwhile
	c.Kill(old)

	for _, voter := range []string{first, second} {
		c.Await(voter+" to see that the leader's process has ended", func() bool {
			return c.Replica(voter).LooksEnded(within(t, patience), old)
		})
	}
	c.Replica("standby").StandFor(within(t, patience), old)
	if now := asked.by("standby", c.Replica(first).Address()) + asked.by("standby", c.Replica(second).Address()); now != before {
		t.Errorf("the standby has dialed the voters %d times to ask for their words", now-before)
	}
	if c.Replica(first).GivesWord(within(t, patience), old, c.Replica("standby")) {
		t.Errorf("%s gives a replica without a vote its word", first)
	}
	c.Await(first+" to give "+second+" its word", func() bool {
		return c.Replica(first).GivesWord(within(t, patience), old, c.Replica(second))
	})
	c.Network.Heal()
	commit(t, c.Replica("standby"), raftstore.Put("/b", nil))
}

// A replica that got the words of a majority and has followed another leader since does not stand for election: its candidacy
// would depose the new leader.
func TestLateCandidacyIsRefused(t *testing.T) {
	c := storetest.NewCluster(t, 3, slowToMiss)
	rev := commit(t, c.Replica(c.Leader()), raftstore.Put("/a", nil))
	c.AwaitRevision(rev)
	before := c.Replica(c.Leader()).Status()
	late := c.Followers()[0]
	c.Replica(late).StandInPlaceOf("r9")
	commit(t, c.Replica(late), raftstore.Put("/b", nil))
	if now := c.Replica(late).Status(); now.Leader != before.Leader || now.Term != before.Term {
		t.Errorf("%s leads in term %d, want %s in term %d", now.Leader, now.Term, before.Leader, before.Term)
	}
}

// The answers of a majority are enough: nobody waits for a voter whose process is frozen.
func TestFrozenVoterIsNotWaitedFor(t *testing.T) {
	agrees, ahead := replica.Saying{Ended: true}, replica.Saying{Better: true}
	for name, of := range map[string]struct {
		answers       []replica.Saying
		agree, better int
	}{
		"a majority agrees":          {[]replica.Saying{agrees, agrees}, 3, 0},
		"a majority, and one better": {[]replica.Saying{ahead, agrees, agrees}, 3, 1},
		"all have answered":          {[]replica.Saying{agrees, {}, ahead, {}}, 2, 1},
	} {
		t.Run(name, func(t *testing.T) {
			if agree, better := replica.Tally(of.answers, 4, 3); agree != of.agree || better != of.better {
				t.Errorf("%d agree and %d have better logs, want %d and %d", agree, better, of.agree, of.better)
			}
		})
	}
}

// dials counts whom the replicas dial.
type dials struct {
	mu sync.Mutex
	of map[[2]string]int // by name and address
}

func (d *dials) count(cfg *replica.Config) {
	dial, name := cfg.Dial, cfg.Name
	cfg.Dial = func(ctx context.Context, address string) (net.Conn, error) {
		d.mu.Lock()
		if d.of == nil {
			d.of = make(map[[2]string]int)
		}
		d.of[[2]string{name, address}]++
		d.mu.Unlock()
		return dial(ctx, address)
	}
}

func (d *dials) by(name, address string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.of[[2]string{name, address}]
}

// refusing makes the dials of some replicas to one address fail as those to a port at which nobody listens, and ends what
// they had dialed.
type refusing struct {
	mu      sync.Mutex
	to      string
	of      map[string]bool
	dialed  []net.Conn // to any address, by those in of
	refused atomic.Int64
}

func (f *refusing) put(cfg *replica.Config) {
	dial, name := cfg.Dial, cfg.Name
	cfg.Dial = func(ctx context.Context, address string) (net.Conn, error) {
		f.mu.Lock()
		refuse := f.of[name] && address == f.to
		f.mu.Unlock()
		if refuse {
			f.refused.Add(1)
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
		}
		conn, err := dial(ctx, address)
		if err != nil {
			return nil, err
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.dialed = append(f.dialed, &dialedBy{Conn: conn, name: name, address: address})
		return conn, nil
	}
}

type dialedBy struct {
	net.Conn
	name, address string
}

// begin refuses from now on.
func (f *refusing) begin(to string, of ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.to, f.of = to, map[string]bool{}
	for _, name := range of {
		f.of[name] = true
	}
	for _, c := range f.dialed {
		if d := c.(*dialedBy); d.address == to && f.of[d.name] {
			d.Close()
		}
	}
}

// A port that refuses does not depose a leader that lives: of all followers, or of one, for as long as the leader's own
// connections are open.
func TestRefusalsThatLie(t *testing.T) {
	for name, followers := range map[string]int{"of one follower": 1, "of both followers": 2} {
		t.Run(name, func(t *testing.T) {
			f := &refusing{}
			c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { slowToMiss(cfg); f.put(cfg) })
			commit(t, c.Other(c.Leader()), raftstore.Put("/a", nil))
			before := c.Replica(c.Leader()).Status()
			f.begin(c.Replica(before.Leader).Address(), c.Followers()[:followers]...)
			c.Await("the followers to look and look again", func() bool { return f.refused.Load() > 5 })
			commit(t, c.Replica(before.Leader), raftstore.Put("/b", nil)) // it can still
			if now := c.Replica(before.Leader).Status(); now.Leader != before.Leader || now.Term != before.Term {
				t.Errorf("%s leads in term %d, it was %s in term %d", now.Leader, now.Term, before.Leader, before.Term)
			}
		})
	}
}

// A follower alone that has lost its leader in every way does not depose it: the other one hears it.
func TestOneFollowersLoss(t *testing.T) {
	f := &refusing{}
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { slowToMiss(cfg); f.put(cfg) })
	before := c.Replica(c.Leader()).Status()
	lost := c.Followers()[0]
	c.Network.CutOneWay(before.Leader, lost)
	f.begin(c.Replica(before.Leader).Address(), lost)
	c.Await("the follower to look and look again", func() bool { return f.refused.Load() > 5 })
	commit(t, c.Replica(before.Leader), raftstore.Put("/b", nil))
	if now := c.Replica(before.Leader).Status(); now.Leader != before.Leader || now.Term != before.Term {
		t.Errorf("%s leads in term %d, it was %s in term %d", now.Leader, now.Term, before.Leader, before.Term)
	}
}
