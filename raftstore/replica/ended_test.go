package replica_test

import (
	"context"
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
	for _, n := range []int{3, 5} {
		c := storetest.NewCluster(t, n, slowToMiss)
		for range n / 2 {
			old := c.Leader()
			commit(t, c.Other(old), raftstore.Put("/of/"+old, nil))
			c.Kill(old)
			began := time.Now()
			commit(t, c.Other(old), raftstore.Put("/after/"+old, nil))
			t.Logf("of %d replicas, a write after %s had ended took %v", n, old, time.Since(began))
			if now := c.Leader(); now == old {
				t.Fatalf("%s still leads", now)
			}
		}
		if l, err := c.Replica(c.Leader()).List(within(t, patience), "/", raftstore.ListOptions{}); err != nil || len(l.Items) != 2*(n/2) {
			t.Errorf("there are %d keys, error %v", len(l.Items), err)
		}
	}
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
