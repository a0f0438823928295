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

// slowToMiss makes the replicas check a silent leader only after a minute.
func slowToMiss(cfg *replica.Config) { cfg.Timeouts.HeartbeatTimeout = time.Minute }

// A leader whose process has exited is replaced before HeartbeatTimeout, and so is its successor. Acknowledged commits remain.
func TestLeaderWhoseProcessExitsIsReplacedAtOnce(t *testing.T) {
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
			t.Logf("of %d voters and %d standbys, a write after %s had ended took %v", n, group.standbys, old,
				time.Since(began))
			if now := c.Leader(); now == old {
				t.Fatalf("%s still leads", now)
			}
		}
		if l, err := c.Replica(c.Leader()).List(within(t, patience), "/", raftstore.ListOptions{}); err != nil ||
			len(l.Items) != 2*(n/2) {
			t.Errorf("there are %d keys, error %v", len(l.Items), err)
		}
	}
}

// addStandby adds a replica without a vote and waits until it is ready.
func addStandby(t *testing.T, c *storetest.Cluster, name string) {
	t.Helper()
	c.AddHost(name, false)
	c.Start(name)
	if err := c.Replica("r1").AddLearner(within(t, patience), name, c.Replica(name).Address()); err != nil {
		t.Fatal(err)
	}
	c.AwaitReadyOf(name)
}

// A replica without a vote receives no pledge when the leader's process has exited: it requests none, and the voters refuse
// the requests of a previous release. The next voter that requests a pledge receives it at once.
func TestStandbyReceivesNoPledge(t *testing.T) {
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
			return c.Replica(voter).FindsLeaderExited(within(t, patience), old)
		})
	}
	c.Replica("standby").RunCampaign(within(t, patience), old)
	if now := asked.by("standby", c.Replica(first).Address()) + asked.by("standby", c.Replica(second).Address()); now !=
		before {
		t.Errorf("the standby has dialed the voters %d times to ask for their words", now-before)
	}
	if c.Replica(first).GrantsPledge(within(t, patience), old, c.Replica("standby")) {
		t.Errorf("%s gives a replica without a vote its word", first)
	}
	c.Await(first+" to give "+second+" its word", func() bool {
		return c.Replica(first).GrantsPledge(within(t, patience), old, c.Replica(second))
	})
	c.Network.Heal()
	commit(t, c.Replica("standby"), raftstore.Put("/b", nil))
}

// A replica that has the pledges of a majority and has followed another leader since does not become a candidate: it would
// depose the new leader.
func TestLateCandidacyIsRefused(t *testing.T) {
	c := storetest.NewCluster(t, 3, slowToMiss)
	rev := commit(t, c.Replica(c.Leader()), raftstore.Put("/a", nil))
	c.AwaitRevision(rev)
	before := c.Replica(c.Leader()).Status()
	late := c.Followers()[0]
	c.Replica(late).BecomeCandidateFor("r9")
	commit(t, c.Replica(late), raftstore.Put("/b", nil))
	if now := c.Replica(late).Status(); now.Leader != before.Leader || now.Term != before.Term {
		t.Errorf("%s leads in term %d, want %s in term %d", now.Leader, now.Term, before.Leader, before.Term)
	}
}

// dials counts whom the replicas dial.
type dials struct {
	mu sync.Mutex
	of map[[2]string]int // by name and address
}

func (d *dials) count(cfg *replica.Config) {
	dial, name := cfg.Network.Dial, cfg.Name
	cfg.Network.Dial = func(ctx context.Context, address string) (net.Conn, error) {
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

// refusing refuses the dials of some replicas to one address, as a port without a listener does, and closes their connections.
type refusing struct {
	mu      sync.Mutex
	to      string
	of      map[string]bool
	dialed  []net.Conn // to any address, by those in of
	refused atomic.Int64
}

func (f *refusing) put(cfg *replica.Config) {
	dial, name := cfg.Network.Dial, cfg.Name
	cfg.Network.Dial = func(ctx context.Context, address string) (net.Conn, error) {
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

// begin starts to refuse.
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

// A port that refuses connections of one follower, or of all, does not depose a living leader while the leader's own
// connections are open.
func TestRefusedPortDeposesNoLivingLeader(t *testing.T) {
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

// A single follower that has lost all connections to its leader does not depose it: the other follower still receives it.
func TestOneFollowerWithoutLeaderDeposesNobody(t *testing.T) {
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
