package replica_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// onDisks is a group of three whose disks can hang, fail and lose.
func onDisks(t *testing.T, tb testing.TB, kind disk.LogStoreKind) (*storetest.Cluster, map[string]*replica.PowerCut) {
	disks := make(map[string]*replica.PowerCut)
	for i, name := range []string{"r1", "r2", "r3"} {
		disks[name] = replica.NewPowerCut(uint64(i))
	}
	t.Cleanup(func() {
		for _, d := range disks {
			if _, err := d.Cut(); err != nil {
				t.Error(err)
			}
		}
	})
	c := storetest.NewCluster(tb, 3, func(cfg *replica.Config) {
		cfg.Storage.LogStore = kind
		// who leads goes on while its disk hangs, also on a machine that stalls
		cfg.Timeouts.HeartbeatTimeout = 3 * time.Second
		cfg.Timeouts.DiskPatience = patience
		disks[cfg.Name].Put(cfg)
		replica.SmallFiles(cfg)
	})
	commit(t, c.Replica("r1"), raftstore.Put("/before", nil))
	return c, disks
}

// committing is a commit that creates a key, under way.
type committing struct {
	rev raftstore.Revision
	err error
	end chan struct{}
}

func create(t *testing.T, s raftstore.Store, key string) *committing {
	w := &committing{end: make(chan struct{})}
	ctx := within(t, patience)
	go func() {
		defer close(w.end)
		w.rev, w.err = s.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Create(key, []byte("value"))}})
	}()
	return w
}

func (w *committing) over() bool {
	select {
	case <-w.end:
		return true
	default:
		return false
	}
}

// hung makes the leader's disk hang in the middle of a commit through a replica,
// and returns when the followers hold the entry.
func hung(t *testing.T, c *storetest.Cluster, hang func() <-chan struct{}, through, key string) *committing {
	t.Helper()
	leader := c.Leader()
	var before uint64
	for range 3 { // then all followers are in step
		commit(t, c.Replica(leader), raftstore.Put("/before", nil))
		before = c.Replica(leader).LastIndex()
		for _, f := range c.Followers() {
			c.Await(f+" to be level", func() bool { return c.Replica(f).LastIndex() == before })
		}
	}
	hangs := hang()
	w := create(t, c.Replica(through), key)
	<-hangs
	for _, f := range c.Followers() {
		c.Await(f+" to hold the entry", func() bool { return c.Replica(f).LastIndex() > before })
	}
	return w
}

// The followers write an entry while the leader does, and the leader counts
// itself only when it has: though both others hold the entry, it is committed
// when the leader's disk has it. F52
func TestFollowersWriteWhileTheLeaderDoes(t *testing.T) {
	for _, kind := range []disk.LogStoreKind{disk.LogBolt, disk.LogWAL} {
		t.Run(string(kind), func(t *testing.T) {
			c, disks := onDisks(t, t, kind)
			leader := c.Leader()
			var goOn func()
			w := hung(t, c, func() (hangs <-chan struct{}) {
				hangs, goOn = disks[leader].Hold()
				return hangs
			}, leader, "/key")
			defer goOn()
			// Each read asks the followers once more, and their answers to the
			// entry have come before.
			for range 30 {
				if it, _, err := c.Replica(leader).Get(within(t, patience), "/key",
					raftstore.ReadOptions{}); !errors.Is(err, raftstore.ErrNotFound) {
					t.Fatalf("before the leader has written it: %q, error %v", it.Value, err)
				}
			}
			if w.over() {
				t.Fatalf("acknowledged before the leader has written it: revision %d, error %v", w.rev, w.err)
			}
			goOn()
			if <-w.end; w.err != nil {
				t.Fatal(w.err)
			}
			m := scrape(t, c.Replica(leader))
			if m["replications_total{sent=early}"] < 2 {
				t.Errorf("%v early, %v late", m["replications_total{sent=early}"], m["replications_total{sent=late}"])
			}
			sameHistory(t, c)
		})
	}
}

// The disk of a leader fails when the followers hold the entry already. Who
// committed through the leader is not told that nothing has happened; who did
// through a follower gets the outcome of the one commit that there was. F52
func TestLeaderWhoseDiskFailsAfterTheOthersWrote(t *testing.T) {
	for _, kind := range []disk.LogStoreKind{disk.LogBolt, disk.LogWAL} {
		for _, way := range []string{"leader", "follower"} {
			t.Run(fmt.Sprintf("%s/through the %s", kind, way), func(t *testing.T) {
				tb := &tolerant{TB: t}
				c, disks := onDisks(t, tb, kind)
				leader := c.Leader()
				through := leader
				if way == "follower" {
					through = c.Followers()[0]
				}
				failed := c.Replica(leader)
				w := hung(t, c, disks[leader].Fade, through, "/key")
				before := failed.Applied()
				disks[leader].Fail()
				<-failed.Ended()
				<-w.end
				switch {
				case way == "follower" && (w.err != nil || w.rev != before+1):
					t.Errorf("revision %d after %d, error %v", w.rev, before, w.err)
				case way == "leader" && !errors.Is(w.err, raftstore.ErrOutcomeUnknown):
					t.Errorf("outcome: %v", w.err)
				}
				c.Stop(leader)
				if _, err := disks[leader].Cut(); err != nil {
					t.Fatal(err)
				}
				c.Start(leader)
				for _, name := range c.Names() {
					c.AwaitReadyOf(name)
					it, _, err := c.Replica(name).Get(within(t, patience), "/key", raftstore.ReadOptions{})
					if err != nil || it.Modified != before+1 {
						t.Errorf("%s: made at revision %d, want %d; error %v", name, it.Modified, before+1, err)
					}
				}
				if rev := commit(t, c.Replica(leader), raftstore.Put("/after", nil)); rev != before+2 {
					t.Errorf("the commit has made %d revisions", rev-before-1)
				}
				sameHistory(t, c)
			})
		}
	}
}

// A leader loses its power when only one follower holds what it was writing.
// The others go on without that, and the follower gives it up. F52
func TestEntryThatNobodyElseGot(t *testing.T) {
	for _, kind := range []disk.LogStoreKind{disk.LogBolt, disk.LogWAL} {
		t.Run(string(kind), func(t *testing.T) {
			tb := &tolerant{TB: t}
			c, disks := onDisks(t, tb, kind)
			leader, away := c.Leader(), c.Followers()[1]
			c.Stop(away)
			w := hung(t, c, disks[leader].Fade, leader, "/key")
			holder := c.Followers()[0]
			c.Replica(leader).Abort()
			disks[leader].Fail()
			c.Kill(leader)
			<-w.end
			if !errors.Is(w.err, raftstore.ErrOutcomeUnknown) {
				t.Errorf("outcome: %v", w.err)
			}
			if lost, err := disks[leader].Cut(); err != nil || !lost {
				t.Fatalf("the power cut lost something: %t, error %v", lost, err)
			}
			c.Stop(holder)
			c.Start(leader)
			c.Start(away)
			c.AwaitReady()
			rev := commit(t, c.Replica(away), raftstore.Create("/key", []byte("another")))
			c.Start(holder)
			c.AwaitReady()
			c.AwaitRevision(rev)
			for _, name := range c.Names() {
				it, _, err := c.Replica(name).Get(within(t, patience), "/key", raftstore.ReadOptions{})
				if err != nil || string(it.Value) != "another" {
					t.Errorf("%s: %q, error %v", name, it.Value, err)
				}
			}
			sameHistory(t, c)
		})
	}
}

// tap lets what is written to connections pass, or hang.
type tap struct {
	mu   sync.Mutex
	shut chan struct{} // nil = open; closed when it opens
}

func (p *tap) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shut = make(chan struct{})
}

func (p *tap) open() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shut != nil {
		close(p.shut)
		p.shut = nil
	}
}

type tappedConn struct {
	net.Conn
	tap *tap
}

func (c *tappedConn) Write(b []byte) (int, error) {
	c.tap.mu.Lock()
	shut := c.tap.shut
	c.tap.mu.Unlock()
	if shut != nil {
		<-shut
	}
	return c.Conn.Write(b)
}

// A follower that takes nothing off its connections, so that every write to it
// hangs, holds up neither the leader nor its commits, and gets everything later.
func TestFollowerThatTakesNothing(t *testing.T) {
	var taps sync.Map // by address
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		slowToMiss(cfg) // that the term stays is not for the machine to decide
		dial := cfg.Network.Dial
		cfg.Network.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			conn, err := dial(ctx, address)
			if err != nil {
				return nil, err
			}
			p, _ := taps.LoadOrStore(address, new(tap))
			return &tappedConn{Conn: conn, tap: p.(*tap)}, nil
		}
	})
	leader, stuck := c.Leader(), c.Followers()[0]
	commit(t, c.Replica(leader), raftstore.Put("/before", nil))
	p, _ := taps.Load(c.Replica(stuck).Address())
	p.(*tap).close()
	defer p.(*tap).open()
	term := c.Replica(leader).Status().Term
	var rev raftstore.Revision
	for i := range 300 {
		rev = commit(t, c.Replica(leader), raftstore.Put(fmt.Sprintf("/k/%d", i%10), make([]byte, 16<<10)))
	}
	if s := c.Replica(leader).Status(); s.Leader != leader || s.Term != term {
		t.Errorf("%s led in term %d, and now %s in term %d", leader, term, s.Leader, s.Term)
	}
	p.(*tap).open()
	c.AwaitRevision(rev)
	sameHistory(t, c)
}
