package storeproc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials/insecure"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/remote"
)

// Options configures a Group of replica processes.
type Options struct {
	Dir      string // for data and logs; must exist
	Replicas int    // at the start; 0 = 3
	// DataDir returns the data folder of a replica; nil = Dir/NAME.
	DataDir  func(name string) string
	Settings Settings
	Env      []string // for the processes, in addition to this process's environment
}

// Group is a raft cluster of replica processes, and the simulated network links between them.
type Group struct {
	options   Options
	authority []byte
	sockets   string // a folder with a short path, because the length of a socket's path is limited

	mu      sync.Mutex
	members []*Member
	made    int
	cables  map[[2]string]Link // by sender and receiver; HoldReceived is not used
}

// Start starts the replicas r1, r2 and so on as one raft cluster, and waits until all are ready. If
// the error is nil, the caller must call Close.
func Start(ctx context.Context, o Options) (*Group, error) {
	if o.Replicas == 0 {
		o.Replicas = 3
	}
	if o.DataDir == nil {
		o.DataDir = func(name string) string { return filepath.Join(o.Dir, name) }
	}
	authority, err := storetest.NewAuthority()
	if err != nil {
		return nil, err
	}
	g := &Group{options: o, cables: make(map[[2]string]Link)}
	if g.authority, err = authority.Marshal(); err != nil {
		return nil, err
	}
	if g.sockets, err = os.MkdirTemp("", "replicas"); err != nil {
		return nil, err
	}
	for range o.Replicas {
		if _, err := g.Add(ctx); err != nil {
			return nil, errors.Join(err, g.Close())
		}
	}
	if err := g.AwaitReady(ctx); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// Add starts one more replica and joins it to the cluster. The first replica bootstraps the
// cluster.
func (g *Group) Add(ctx context.Context) (*Member, error) {
	others := g.Members()
	name := g.Next()
	g.mu.Lock()
	g.made++
	g.mu.Unlock()
	hold, address, err := reservePort()
	if err != nil {
		return nil, fmt.Errorf("port of replica %s: %w", name, err)
	}
	m := &Member{
		Name: name, Address: address, DataDir: g.options.DataDir(name),
		LogFile: filepath.Join(g.options.Dir, name+".log"),
		group:   g, hold: hold,
	}
	m.setup = setup{
		Name: name, DataDir: m.DataDir, Address: address, Socket: filepath.Join(g.sockets, name),
		Bootstrap: len(others) == 0, Authority: g.authority, Settings: g.options.Settings,
	}
	if m.store, err = remote.New("unix:"+m.setup.Socket, insecure.NewCredentials()); err != nil {
		return nil, errors.Join(err, hold.Close())
	}
	g.mu.Lock()
	g.members = append(g.members, m)
	g.mu.Unlock()
	if err := m.Start(ctx); err != nil {
		return nil, err
	}
	if len(others) == 0 {
		return m, nil
	}
	return m, g.Join(ctx, m)
}

// Next returns the name of the replica that the next Add creates. Calls of Add must not run
// concurrently.
func (g *Group) Next() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return fmt.Sprintf("r%d", g.made+1)
}

// Join adds a running replica to the cluster's members, through any other replica. It is
// idempotent.
func (g *Group) Join(ctx context.Context, m *Member) error {
	return g.callOthers(ctx, m, func(ctx context.Context, o *Member) error { return o.AddMember(ctx, m) })
}

// Leave removes a replica from the cluster's members, through any other replica. Its process stays.
// It is idempotent.
func (g *Group) Leave(ctx context.Context, m *Member) error {
	return g.callOthers(ctx, m, func(ctx context.Context, o *Member) error {
		if err := o.RemoveMember(ctx, m); !errors.Is(err, raftstore.ErrUnknownMember) {
			return err
		}
		return nil
	})
}

// attemptTimeout is the time limit for a membership change through one replica, before the next
// replica is tried.
const attemptTimeout = 5 * time.Second

// callOthers calls do for replicas other than m, one after the other, until do succeeds or ctx
// ends.
func (g *Group) callOthers(ctx context.Context, m *Member, do func(ctx context.Context, o *Member) error) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	err := errors.New("no other replica is running")
	for {
		for _, o := range g.Members() {
			if o == m || !o.Up() {
				continue
			}
			once, cancel := context.WithTimeout(ctx, attemptTimeout)
			err = do(once, o)
			cancel()
			if err == nil {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("changing the membership of %s: %w: %w", m.Name, ctx.Err(), err)
		}
	}
}

// reservePort binds a port of the loopback address without listening. Connections to it are
// refused, and only a process that sets SO_REUSEPORT can listen on it.
func reservePort() (*os.File, string, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, "", err
	}
	f := os.NewFile(uintptr(fd), "port")
	if err := errors.Join(setReusePort(fd), syscall.Bind(fd,
		&syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})); err !=
		nil {
		return nil, "", errors.Join(err, f.Close())
	}
	at, err := syscall.Getsockname(fd)
	if err != nil {
		return nil, "", errors.Join(err, f.Close())
	}
	in4, ok := at.(*syscall.SockaddrInet4)
	if !ok {
		return nil, "", errors.Join(fmt.Errorf("bound to %T", at), f.Close())
	}
	return f, net.JoinHostPort("127.0.0.1", fmt.Sprint(in4.Port)), nil
}

// Remove removes a replica from the cluster and kills its process. Its name is not used again.
func (g *Group) Remove(ctx context.Context, m *Member) error {
	if err := g.Leave(ctx, m); err != nil {
		return err
	}
	g.mu.Lock()
	g.members = slices.DeleteFunc(g.members, func(x *Member) bool { return x == m })
	g.mu.Unlock()
	return m.discardProcess()
}

// discardProcess kills a member's process and releases its resources. The member cannot be started
// again.
func (m *Member) discardProcess() error {
	m.mu.Lock()
	gone := m.gone
	m.gone = true
	m.mu.Unlock()
	if gone {
		return nil
	}
	return errors.Join(m.Kill(), m.hold.Close(), m.store.Close(), m.Err())
}

// Members returns the members that were added and not removed, in the order of their addition.
func (g *Group) Members() []*Member {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.members)
}

// Close kills every process and removes all files except Dir. It returns the errors of Err. It may
// be called twice.
func (g *Group) Close() error {
	var errs []error
	for _, m := range g.Members() {
		errs = append(errs, m.discardProcess())
	}
	return errors.Join(append(errs, os.RemoveAll(g.sockets))...)
}

// Err returns the errors of processes that exited unexpectedly.
func (g *Group) Err() error {
	var errs []error
	for _, m := range g.Members() {
		errs = append(errs, m.Err())
	}
	return errors.Join(errs...)
}

// pollEvery is the interval at which a condition of the group is checked.
const pollEvery = 10 * time.Millisecond

// awaitCondition polls until holds returns nil. It returns the last error of holds when ctx ends,
// or an error when a process has exited unexpectedly.
func (g *Group) awaitCondition(ctx context.Context, what string, holds func() error) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		why := holds()
		if why == nil {
			return nil
		}
		if err := g.Err(); err != nil {
			return fmt.Errorf("waiting for %s: %w", what, err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w: %w", what, ctx.Err(), why)
		}
	}
}

// AwaitReady waits until every running member is ready.
func (g *Group) AwaitReady(ctx context.Context) error {
	return g.awaitCondition(ctx, "all replicas to be ready", func() error {
		for _, m := range g.Members() {
			if !m.Up() {
				continue
			}
			if s, ready, err := g.memberStatus(ctx, m); err != nil || !ready {
				return fmt.Errorf("%s is not ready (leader %q): %w", m.Name, s.Leader, err)
			}
		}
		return nil
	})
}

// Leader waits until a running replica reports itself as the leader and a majority of the voters
// agrees.
func (g *Group) Leader(ctx context.Context) (*Member, error) {
	var leader *Member
	err := g.awaitCondition(ctx, "a leader", func() error {
		votes := make(map[string]int)
		var claim *Member
		voters := 0
		for _, m := range g.Members() {
			if !m.Up() {
				continue
			}
			s, _, err := g.memberStatus(ctx, m)
			if err != nil {
				continue
			}
			votes[s.Leader]++
			if s.Leader == m.Name {
				claim, voters = m, 0
				for _, v := range s.Members {
					if v.Voter {
						voters++
					}
				}
			}
		}
		if claim == nil || votes[claim.Name] <= voters/2 {
			return fmt.Errorf("views of the leader: %v", votes)
		}
		leader = claim
		return nil
	})
	return leader, err
}
