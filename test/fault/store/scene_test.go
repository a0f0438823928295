package store

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest/nemesis"
	"keelson.dev/keelson/test/testenv/storeproc"
)

// patience bounds what must succeed once faults have passed, far beyond what
// it needs on a busy machine.
const patience = 2 * time.Minute

// scene is a group of replica processes as a nemesis sees it. Several nemeses
// may be at work on it at once: what one breaks another may find broken.
type scene struct {
	t *testing.T
	g *storeproc.Group

	base raftstore.Revision // history after it is never compacted

	changing sync.Mutex // of membership, one change at a time

	mu     sync.Mutex
	lines  []string // what was done, when
	from   time.Time
	coming string // is being added, and left alone by the plans until it is a member
}

var _ nemesis.Group = (*scene)(nil)

// note writes into the diary, which a failure shows.
func (s *scene) note(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, fmt.Sprintf("%9.3fs ", time.Since(s.from).Seconds())+fmt.Sprintf(format, args...))
}

func (s *scene) diary() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.lines, "\n")
}

// must fails the test when the harness could not do something that no fault excuses.
func (s *scene) must(what string, err error) {
	if err != nil {
		s.note("%s: see the error", what)
		s.t.Errorf("%s: %v", what, err)
	}
}

// may is for what fails when leadership moves, or somebody was killed or cut off meanwhile.
func (s *scene) may(what string, err error) {
	if err != nil {
		s.note("%s: %v", what, err)
	}
}

func bounded(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// do does something to a member. Nothing is wrong when it ceases to be one meanwhile.
func (s *scene) do(name, what string, act func(ctx context.Context, m *storeproc.Member) error, judge func(string, error)) {
	ctx, cancel := bounded(patience)
	defer cancel()
	m := s.member(name)
	if m == nil {
		return
	}
	if err := act(ctx, m); s.member(name) != nil {
		judge(what+" "+name, err)
	}
}

func (s *scene) member(name string) *storeproc.Member {
	for _, m := range s.g.Members() {
		if m.Name == name {
			return m
		}
	}
	return nil
}

// Names implements nemesis.Group.
func (s *scene) Names() []string {
	s.mu.Lock()
	coming := s.coming
	s.mu.Unlock()
	var out []string
	for _, m := range s.g.Members() {
		if m.Name != coming {
			out = append(out, m.Name)
		}
	}
	return out
}

// Leader implements nemesis.Group. While other faults leave no leader, anyone
// is as good.
func (s *scene) Leader() string {
	ctx, cancel := bounded(3 * time.Second)
	defer cancel()
	m, err := s.g.Leader(ctx)
	if err != nil {
		s.note("no leader: %v", err)
		return s.Names()[0]
	}
	return m.Name
}

// Kill implements nemesis.Group.
func (s *scene) Kill(name string) {
	s.do(name, "killing", func(_ context.Context, m *storeproc.Member) error { return m.Kill() }, s.must)
}

// Stop implements nemesis.Group.
func (s *scene) Stop(name string) {
	s.do(name, "stopping", func(_ context.Context, m *storeproc.Member) error { return m.Stop() }, s.must)
}

// Start implements nemesis.Group.
func (s *scene) Start(name string) {
	s.do(name, "starting", func(ctx context.Context, m *storeproc.Member) error { return m.Start(ctx) }, s.must)
}

// Pause implements nemesis.Group.
func (s *scene) Pause(name string) {
	s.do(name, "pausing", func(_ context.Context, m *storeproc.Member) error { return m.Pause() }, s.must)
}

// Resume implements nemesis.Group.
func (s *scene) Resume(name string) {
	s.do(name, "resuming", func(ctx context.Context, m *storeproc.Member) error { return m.Resume(ctx) }, s.must)
}

// Cut implements nemesis.Group.
func (s *scene) Cut(from, to string) {
	s.do(from, "cutting off", func(ctx context.Context, a *storeproc.Member) error {
		if b := s.member(to); b != nil {
			return s.g.CutOneWay(ctx, a, b)
		}
		return nil
	}, s.must)
}

// Slow implements nemesis.Group.
func (s *scene) Slow(delay, jitter time.Duration) {
	ctx, cancel := bounded(patience)
	defer cancel()
	s.must("slowing down", s.g.SlowAll(ctx, delay, jitter))
}

// Heal implements nemesis.Group.
func (s *scene) Heal() {
	ctx, cancel := bounded(patience)
	defer cancel()
	s.must("mending", s.g.MendAll(ctx))
}

// Jump implements nemesis.Group.
func (s *scene) Jump(name string, by time.Duration) {
	s.do(name, "setting the clock of", func(ctx context.Context, m *storeproc.Member) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return m.ClockOffset(ctx, by)
	}, s.may) // one that is killed or paused under the call has it from its next start on
}

// Transfer implements nemesis.Group.
func (s *scene) Transfer(from string) {
	s.do(from, "transfer from", briefly((*storeproc.Member).Transfer), s.may)
}

// Snapshot implements nemesis.Group.
func (s *scene) Snapshot(name string) {
	s.do(name, "snapshot on", briefly((*storeproc.Member).Snapshot), s.may)
}

func briefly(act func(*storeproc.Member, context.Context) error) func(context.Context, *storeproc.Member) error {
	return func(ctx context.Context, m *storeproc.Member) error {
		if !m.Up() {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		return act(m, ctx)
	}
}

// Compact implements nemesis.Group. It leaves what is still to be compared.
func (s *scene) Compact() {
	s.do(s.Leader(), "compaction on", briefly(func(m *storeproc.Member, ctx context.Context) error { return m.Compact(ctx, s.base) }), s.may)
}

// Remove implements nemesis.Group.
func (s *scene) Remove(name string) {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.do(name, "removing", func(ctx context.Context, m *storeproc.Member) error { return s.g.Leave(ctx, m) }, s.must)
}

// Add implements nemesis.Group.
func (s *scene) Add(name string) {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.do(name, "adding", func(ctx context.Context, m *storeproc.Member) error {
		return s.g.Join(ctx, m)
	}, s.must)
}

// Wipe implements nemesis.Group.
func (s *scene) Wipe(name string) {
	s.do(name, "wiping", func(_ context.Context, m *storeproc.Member) error { return m.Wipe() }, s.must)
}

// whole undoes everything and waits until all members are ready.
func (s *scene) whole() {
	ctx, cancel := bounded(patience)
	defer cancel()
	for _, name := range s.Names() {
		s.Resume(name)
		s.Start(name)
		s.Jump(name, 0)
	}
	s.Heal()
	for _, name := range s.Names() {
		s.Add(name)
	}
	s.must("all faults are undone, but", s.g.AwaitReady(ctx))
	_, err := s.g.Leader(ctx)
	s.must("all faults are undone, but", err)
}

// agree waits until all replicas are at one revision and says what differs then.
func (s *scene) agree() error {
	ctx, cancel := bounded(patience)
	defer cancel()
	for {
		revisions, hashes := make(map[raftstore.Revision]bool), make(map[string][]string)
		for _, m := range s.g.Members() {
			if _, err := m.Store().Sync(ctx); err != nil {
				return fmt.Errorf("replica %s: %w", m.Name, err)
			}
			rev, hash, err := m.Hash(ctx)
			if err != nil {
				return err
			}
			st, _, err := m.Status(ctx)
			if err != nil {
				return err
			}
			if len(st.Alarms) > 0 {
				return fmt.Errorf("alarms are up at %s: %+v", m.Name, st.Alarms)
			}
			revisions[rev] = true
			hashes[hash] = append(hashes[hash], m.Name)
		}
		switch {
		case len(revisions) > 1:
			continue // something expired meanwhile
		case len(hashes) > 1:
			return fmt.Errorf("states differ at one revision: %v", hashes)
		}
		return nil
	}
}

// tell lists the group as each of its replicas sees it.
func (s *scene) tell() string {
	var b strings.Builder
	for _, m := range s.g.Members() {
		ctx, cancel := bounded(time.Second)
		st, ready, err := m.Status(ctx)
		cancel()
		var members []string
		for _, o := range st.Members {
			members = append(members, fmt.Sprintf("%s voter=%v", o.ID, o.Voter))
		}
		slices.Sort(members)
		fmt.Fprintf(&b, "%s: running=%v ready=%v leader=%q term=%d revision=%d applied=%d commit=%d members=%v error=%v\n",
			m.Name, m.Running(), ready, st.Leader, st.Term, st.Revision, st.AppliedIndex, st.CommitIndex, members, err)
	}
	return b.String()
}
