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

// Options choose a group.
type Options struct {
	Dir      string // for data and logs; must exist
	Replicas int    // at the start; 3 when 0
	// DataDir says where a replica keeps its data; Dir/NAME when nil.
	DataDir  func(name string) string
	Settings Settings
	Env      []string // for the processes, in addition
}

// Group is some replicas, which know each other, and the cables between them.
type Group struct {
	options   Options
	authority []byte
	sockets   string // a folder with a short path: those of sockets are limited

	mu      sync.Mutex
	members []*Member
	made    int
	cables  map[[2]string]Link // by who sends and who receives; HoldSent and delays are used
}

// Start starts replicas r1, r2 ... as one group and waits until all are ready.
// Close it in any case, if the error is nil.
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

// Add starts one more replica and makes it a member; the first founds the group.
func (g *Group) Add(ctx context.Context) (*Member, error) {
	others := g.Members()
	name := g.Next()
	g.mu.Lock()
	g.made++
	g.mu.Unlock()
	hold, address, err := reserve()
	if err != nil {
		return nil, fmt.Errorf("port of replica %s: %w", name, err)
	}
	m := &Member{
		Name: name, Address: address, DataDir: g.options.DataDir(name), LogFile: filepath.Join(g.options.Dir, name+".log"),
		group: g, hold: hold,
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

// Next is the name of the replica that Add will add. Two calls of Add must not
// run at once.
func (g *Group) Next() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return fmt.Sprintf("r%d", g.made+1)
}

// Join makes a running replica a member of the group, through any other. Doing
// it again does nothing.
func (g *Group) Join(ctx context.Context, m *Member) error {
	return g.through(ctx, m, func(ctx context.Context, o *Member) error { return o.AddMember(ctx, m) })
}

// Leave takes a replica out of the group, through any other. Its process runs
// on. Doing it again does nothing.
func (g *Group) Leave(ctx context.Context, m *Member) error {
	return g.through(ctx, m, func(ctx context.Context, o *Member) error {
		if err := o.RemoveMember(ctx, m); !errors.Is(err, raftstore.ErrUnknownMember) {
			return err
		}
		return nil
	})
}

// attempt is how long one replica may take to change the group before another is asked.
const attempt = 5 * time.Second

// through does something by way of a replica other than m, and tries others
// until it is done or ctx ends.
func (g *Group) through(ctx context.Context, m *Member, do func(ctx context.Context, o *Member) error) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	err := errors.New("no other replica is up")
	for {
		for _, o := range g.Members() {
			if o == m || !o.Up() {
				continue
			}
			once, cancel := context.WithTimeout(ctx, attempt)
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

// reserve takes a port of the loopback address without listening: others are
// refused there, and only a process that shares it on purpose can listen.
func reserve() (*os.File, string, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, "", err
	}
	f := os.NewFile(uintptr(fd), "port")
	if err := errors.Join(share(fd), syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})); err != nil {
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

// Remove takes a replica out of the group and ends its process. Its name is not
// used again.
func (g *Group) Remove(ctx context.Context, m *Member) error {
	if err := g.Leave(ctx, m); err != nil {
		return err
	}
	g.mu.Lock()
	g.members = slices.DeleteFunc(g.members, func(x *Member) bool { return x == m })
	g.mu.Unlock()
	return m.discard()
}

// discard ends a member for good.
func (m *Member) discard() error {
	m.mu.Lock()
	gone := m.gone
	m.gone = true
	m.mu.Unlock()
	if gone {
		return nil
	}
	return errors.Join(m.Kill(), m.hold.Close(), m.store.Close(), m.Err())
}

// Members are those that were added and not removed, in that order.
func (g *Group) Members() []*Member {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.members)
}

// Close ends every process, at once, and removes all but Dir. It returns what
// Err would. Closing again does nothing.
func (g *Group) Close() error {
	var errs []error
	for _, m := range g.Members() {
		errs = append(errs, m.discard())
	}
	return errors.Join(append(errs, os.RemoveAll(g.sockets))...)
}

// Err tells of processes that ended when nobody had asked them to.
func (g *Group) Err() error {
	var errs []error
	for _, m := range g.Members() {
		errs = append(errs, m.Err())
	}
	return errors.Join(errs...)
}

// pollEvery is how often a condition of the group is looked at.
const pollEvery = 10 * time.Millisecond

// await polls until the condition holds. The last reason why not is told when
// ctx ends, or when a process has ended by itself.
func (g *Group) await(ctx context.Context, what string, holds func() error) error {
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

// AwaitReady waits until every member that is up is ready.
func (g *Group) AwaitReady(ctx context.Context) error {
	return g.await(ctx, "all replicas to be ready", func() error {
		for _, m := range g.Members() {
			if !m.Up() {
				continue
			}
			if s, ready, err := g.look(ctx, m); err != nil || !ready {
				return fmt.Errorf("%s is not ready (leader %q): %w", m.Name, s.Leader, err)
			}
		}
		return nil
	})
}

// Leader waits until a replica that is up says that it leads and a majority of
// the voters agrees.
func (g *Group) Leader(ctx context.Context) (*Member, error) {
	var leader *Member
	err := g.await(ctx, "a leader", func() error {
		votes := make(map[string]int)
		var claim *Member
		voters := 0
		for _, m := range g.Members() {
			if !m.Up() {
				continue
			}
			s, _, err := g.look(ctx, m)
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
