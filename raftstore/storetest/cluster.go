package storetest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest/linear"
)

// patience is the timeout of every wait in a test cluster. A healthy cluster needs far less, even
// on a busy machine.
const patience = time.Minute

// Cluster is a raft cluster with all replicas in one process, on loopback addresses, with disks in
// the test's temporary directory. It is stopped when the test ends.
type Cluster struct {
	Network *Network

	t         testing.TB
	authority *Authority
	dir       string
	adjust    func(*replica.Config)

	mu    sync.Mutex
	hosts map[string]*host
	names []string
}

// host represents the machine of one replica: its address, disk, and clock. They remain when the
// replica is stopped and started again.
type host struct {
	name, address string
	bootstrap     bool
	clock         *Clock
	starts        int
	listener      net.Listener // listens on the reserved address until the first start
	replica       *replica.Replica
	cancel        context.CancelFunc
	done          chan error
}

// NewCluster starts n replicas named r1, r2 and so on, and waits until all are ready. adjust, if
// not nil, may change the configuration of each replica before it starts.
func NewCluster(t testing.TB, n int, adjust func(*replica.Config)) *Cluster {
	t.Helper()
	authority, err := NewAuthority()
	if err != nil {
		t.Fatalf("authority: %v", err)
	}
	c := &Cluster{Network: newNetwork(), t: t, authority: authority, dir: t.TempDir(), adjust: adjust,
		hosts: make(map[string]*host)}
	t.Cleanup(c.StopAll)
	for i := 1; i <= n; i++ {
		c.AddHost(fmt.Sprintf("r%d", i), i == 1)
		c.Start(fmt.Sprintf("r%d", i))
		if i > 1 {
			c.Join(fmt.Sprintf("r%d", i))
		}
	}
	c.AwaitReady()
	return c
}

// AddHost reserves an address for a replica with the given name, without starting the replica. If
// bootstrap is set, the replica creates a new raft cluster when it starts.
func (c *Cluster) AddHost(name string, bootstrap bool) {
	c.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		c.t.Fatalf("listening for %s: %v", name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	h := &host{name: name, address: l.Addr().String(), bootstrap: bootstrap, listener: l, clock: new(Clock)}
	c.hosts[name] = h
	c.names = append(c.names, name)
	c.Network.addHost(h.address, name)
}

// Config returns the configuration with which Start creates the replica with the given name.
func (c *Cluster) Config(name string) replica.Config {
	c.t.Helper()
	h := c.hostOf(name)
	server, client, err := c.authority.Issue(name)
	if err != nil {
		c.t.Fatal(err)
	}
	cfg := replica.Config{
		Name: name, Bootstrap: h.bootstrap, Now: h.clock.Now,
		Storage: replica.Storage{DataDir: filepath.Join(c.dir, name), NoSync: true},
		Network: replica.Network{
			Advertise: h.address, ListenAddr: h.address, ServerTLS: server, ClientTLS: client,
			Dial: c.Network.Dialer(name),
		},
		Logger: slog.New(slog.NewTextHandler(testWriter{c.t}, &slog.HandlerOptions{Level: slog.LevelWarn})).With("host",
			name),
	}
	if c.adjust != nil {
		c.adjust(&cfg)
	}
	return cfg
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	// A replica may still log after the test has ended.
	defer func() { _ = recover() }()
	w.t.Logf("%s", b)
	return len(b), nil
}

// Start starts the replica of a host. A replica that was stopped gets the same address and disk
// again.
func (c *Cluster) Start(name string) *replica.Replica {
	c.t.Helper()
	cfg := c.Config(name)
	h := c.hostOf(name)
	cfg.Network.Listener, h.listener = h.listener, nil
	if cfg.Network.Listener == nil {
		// The kernel may still hold the port for a short time.
		c.Await("port of "+name, func() bool {
			l, err := net.Listen("tcp", h.address)
			cfg.Network.Listener = l
			return err == nil
		})
	}
	cfg.Network.Listener = c.Network.Listener(name, cfg.Network.Listener)
	r, err := replica.New(cfg)
	if err != nil {
		c.t.Fatalf("replica %s: %v", name, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	c.mu.Lock()
	h.replica, h.cancel, h.done = r, cancel, done
	h.starts++
	c.mu.Unlock()
	go func() { done <- r.Run(ctx) }()
	return r
}

// Join adds a replica to the raft cluster, through another running replica.
func (c *Cluster) Join(name string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, other := range c.Names() {
		if r := c.Replica(other); r != nil && other != name {
			if err := r.AddMember(ctx, name, c.hostOf(name).address); err != nil {
				c.t.Fatalf("joining %s through %s: %v", name, other, err)
			}
			return
		}
	}
	c.t.Fatalf("no replica can add %s", name)
}

// Stop stops a replica gracefully.
func (c *Cluster) Stop(name string) {
	c.t.Helper()
	h := c.hostOf(name)
	c.mu.Lock()
	cancel, done := h.cancel, h.done
	h.replica, h.cancel = nil, nil
	c.mu.Unlock()
	if cancel == nil {
		return
	}
	cancel()
	select {
	case err := <-done:
		if err != nil {
			c.t.Errorf("replica %s: %v", name, err)
		}
	case <-time.After(patience):
		stacks := make([]byte, 1<<20)
		c.t.Errorf("replica %s did not stop:\n%s", name, stacks[:runtime.Stack(stacks, true)])
	}
}

// Kill stops a replica as a crash does: without a leadership transfer.
func (c *Cluster) Kill(name string) {
	c.t.Helper()
	if r := c.Replica(name); r != nil {
		r.Abort()
	}
	c.Stop(name)
}

// StopAll stops every replica, followers first.
func (c *Cluster) StopAll() {
	leader := ""
	for _, name := range c.Names() {
		if r := c.Replica(name); r != nil && r.Status().Leader == name {
			leader = name
			continue
		}
		c.Stop(name)
	}
	if leader != "" {
		c.Kill(leader) // no replica is left for a leadership transfer
	}
	for _, name := range c.Names() {
		if h := c.hostOf(name); h.listener != nil {
			h.listener.Close()
		}
	}
}

// Names lists the hosts in the order in which they were added.
func (c *Cluster) Names() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.names...)
}

func (c *Cluster) hostOf(name string) *host {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.hosts[name]
	if h == nil {
		c.t.Fatalf("no host %q", name)
	}
	return h
}

// Replica returns the replica of a host, or nil if it is not running.
func (c *Cluster) Replica(name string) *replica.Replica {
	h := c.hostOf(name)
	c.mu.Lock()
	defer c.mu.Unlock()
	return h.replica
}

// Door returns the running replica of a host as a linear.Door, through which a test of package
// linear accesses the store. The name of the Door is unique for this start of the replica. It
// returns false if the replica is not running.
func (c *Cluster) Door(name string) (linear.Door, bool) {
	h := c.hostOf(name)
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.replica == nil {
		return linear.Door{}, false
	}
	return linear.Door{Name: fmt.Sprintf("%s, start %d", name, h.starts), Store: h.replica}, true
}

// Replicas returns the running replicas.
func (c *Cluster) Replicas() []*replica.Replica {
	var out []*replica.Replica
	for _, name := range c.Names() {
		if r := c.Replica(name); r != nil {
			out = append(out, r)
		}
	}
	return out
}

// Leader waits until a majority of the replicas report the same running replica as the leader, and
// that replica reports itself as the leader. It returns the leader's name.
func (c *Cluster) Leader() string {
	c.t.Helper()
	var leader string
	c.Await("a leader", func() bool {
		votes := make(map[string]int)
		for _, r := range c.Replicas() {
			votes[r.Status().Leader]++
		}
		for name, n := range votes {
			if name != "" && n > len(c.Names())/2 {
				if r := c.Replica(name); r != nil && r.Status().Leader == name {
					leader = name
					return true
				}
			}
		}
		return false
	})
	return leader
}

// Followers returns the names of the running replicas that do not lead.
func (c *Cluster) Followers() []string {
	leader := c.Leader()
	var out []string
	for _, name := range c.Names() {
		if name != leader && c.Replica(name) != nil {
			out = append(out, name)
		}
	}
	return out
}

// AwaitReadyOf waits until the replica with the given name is ready.
func (c *Cluster) AwaitReadyOf(name string) {
	c.t.Helper()
	c.Await(name+" to be ready", func() bool { return c.Replica(name).Ready() })
}

// AwaitReady waits until every running replica is ready.
func (c *Cluster) AwaitReady() {
	c.t.Helper()
	c.Await("all replicas to be ready", func() bool {
		for _, r := range c.Replicas() {
			if !r.Ready() {
				return false
			}
		}
		return true
	})
}

// AwaitRevision waits until every running replica has applied the revision rev.
func (c *Cluster) AwaitRevision(rev raftstore.Revision) {
	c.t.Helper()
	c.Await(fmt.Sprintf("revision %d everywhere", rev), func() bool {
		for _, r := range c.Replicas() {
			if r.Applied() < rev {
				return false
			}
		}
		return true
	})
}

// Compact makes the leader compact history up to and including the revision upTo. It waits until
// every running replica has compacted that history.
func (c *Cluster) Compact(upTo raftstore.Revision) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := c.Replica(c.Leader()).Compact(ctx, upTo); err != nil {
		c.t.Errorf("compact: %v", err)
	}
	c.Await("compaction everywhere", func() bool {
		for _, r := range c.Replicas() {
			if r.Status().Compacted < upTo {
				return false
			}
		}
		return true
	})
}

// Await polls until holds returns true. If this does not happen within the timeout patience, it
// fails the test. what describes the condition in the failure message.
func (c *Cluster) Await(what string, holds func() bool) {
	c.t.Helper()
	await.Until(context.Background(), c.t, patience, 2*time.Millisecond, what, func() error {
		if !holds() {
			return errors.New("the condition does not hold")
		}
		return nil
	})
}

// Other returns a running replica with another name than excluded. It fails the test if no such
// replica exists.
func (c *Cluster) Other(excluded string) *replica.Replica {
	c.t.Helper()
	for _, name := range c.Names() {
		if r := c.Replica(name); r != nil && name != excluded {
			return r
		}
	}
	c.t.Fatalf("no replica other than %s is running", excluded)
	return nil
}
