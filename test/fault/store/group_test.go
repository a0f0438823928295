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

// patience is the limit for actions that must succeed once faults have ended, far longer than
// needed on a busy machine.
const patience = 2 * time.Minute

// faultyGroup is a group of replica processes as the target of fault plans. Several plans may run
// at once: one plan may find a replica that another plan has broken.
type faultyGroup struct {
	t *testing.T
	g *storeproc.Group

	base raftstore.Revision // history after it is never compacted

	changing sync.Mutex // of membership, one change at a time

	mu     sync.Mutex
	lines  []string // actions with their times
	from   time.Time
	coming string // is being added, and left alone by the plans until it is a member
}

var _ nemesis.Group = (*faultyGroup)(nil)

// recordAction adds a line to the diary, which is logged when the test fails.
func (s *faultyGroup) recordAction(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, fmt.Sprintf("%9.3fs ", time.Since(s.from).Seconds())+fmt.Sprintf(format, args...))
}

func (s *faultyGroup) diary() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.lines, "\n")
}

// requireNoError fails the test if the harness could not do an action for a reason that no fault
// explains.
func (s *faultyGroup) requireNoError(what string, err error) {
	if err != nil {
		s.recordAction("%s: see the error", what)
		s.t.Errorf("%s: %v", what, err)
	}
}

// recordExpectedError records the error of an action that may fail when leadership moves or a
// replica is killed or cut off meanwhile.
func (s *faultyGroup) recordExpectedError(what string, err error) {
	if err != nil {
		s.recordAction("%s: %v", what, err)
	}
}

func withTimeout(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// actOn does an action on a member. An error is ignored if the replica is not a member any more.
func (s *faultyGroup) actOn(
	name, what string, act func(ctx context.Context, m *storeproc.Member) error, judge func(string, error),
) {
	ctx, cancel := withTimeout(patience)
	defer cancel()
	m := s.memberByName(name)
	if m == nil {
		return
	}
	if err := act(ctx, m); s.memberByName(name) != nil {
		judge(what+" "+name, err)
	}
}

func (s *faultyGroup) memberByName(name string) *storeproc.Member {
	for _, m := range s.g.Members() {
		if m.Name == name {
			return m
		}
	}
	return nil
}

// Names implements nemesis.Group.
func (s *faultyGroup) Names() []string {
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
func (s *faultyGroup) Leader() string {
	ctx, cancel := withTimeout(3 * time.Second)
	defer cancel()
	m, err := s.g.Leader(ctx)
	if err != nil {
		s.recordAction("no leader: %v", err)
		return s.Names()[0]
	}
	return m.Name
}

// Kill implements nemesis.Group.
func (s *faultyGroup) Kill(name string) {
	s.actOn(name, "killing", func(_ context.Context, m *storeproc.Member) error { return m.Kill() }, s.requireNoError)
}

// Stop implements nemesis.Group.
func (s *faultyGroup) Stop(name string) {
	s.actOn(name, "stopping", func(_ context.Context, m *storeproc.Member) error { return m.Stop() }, s.requireNoError)
}

// Start implements nemesis.Group.
func (s *faultyGroup) Start(name string) {
	s.actOn(name, "starting", func(ctx context.Context, m *storeproc.Member) error {
		return m.Start(ctx)
	}, s.requireNoError)
}

// Pause implements nemesis.Group.
func (s *faultyGroup) Pause(name string) {
	s.actOn(name, "pausing", func(_ context.Context, m *storeproc.Member) error { return m.Pause() }, s.requireNoError)
}

// Resume implements nemesis.Group.
func (s *faultyGroup) Resume(name string) {
	s.actOn(name, "resuming", func(ctx context.Context, m *storeproc.Member) error {
		return m.Resume(ctx)
	}, s.requireNoError)
}

// Cut implements nemesis.Group.
func (s *faultyGroup) Cut(from, to string) {
	s.actOn(from, "cutting off", func(ctx context.Context, a *storeproc.Member) error {
		if b := s.memberByName(to); b != nil {
			return s.g.CutOneWay(ctx, a, b)
		}
		return nil
	}, s.requireNoError)
}

// Slow implements nemesis.Group.
func (s *faultyGroup) Slow(delay, jitter time.Duration) {
	ctx, cancel := withTimeout(patience)
	defer cancel()
	s.requireNoError("slowing down", s.g.SlowAll(ctx, delay, jitter))
}

// Heal implements nemesis.Group.
func (s *faultyGroup) Heal() {
	ctx, cancel := withTimeout(patience)
	defer cancel()
	s.requireNoError("mending", s.g.MendAll(ctx))
}

// Jump implements nemesis.Group.
func (s *faultyGroup) Jump(name string, by time.Duration) {
	s.actOn(name, "setting the clock of", func(ctx context.Context, m *storeproc.Member) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return m.ClockOffset(ctx, by)
	}, s.recordExpectedError) // a replica that is killed or paused during the call applies it after its next start
}

// Transfer implements nemesis.Group.
func (s *faultyGroup) Transfer(from string) {
	s.actOn(from, "transfer from", ifUp((*storeproc.Member).Transfer), s.recordExpectedError)
}

// Snapshot implements nemesis.Group.
func (s *faultyGroup) Snapshot(name string) {
	s.actOn(name, "snapshot on", ifUp((*storeproc.Member).Snapshot), s.recordExpectedError)
}

func ifUp(act func(*storeproc.Member, context.Context) error) func(context.Context, *storeproc.Member) error {
	return func(ctx context.Context, m *storeproc.Member) error {
		if !m.Up() {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		return act(m, ctx)
	}
}

// Compact implements nemesis.Group. It keeps the history that is still to be compared.
func (s *faultyGroup) Compact() {
	s.actOn(s.Leader(), "compaction on", ifUp(func(m *storeproc.Member, ctx context.Context) error {
		return m.Compact(ctx, s.base)
	}), s.recordExpectedError)
}

// Remove implements nemesis.Group.
func (s *faultyGroup) Remove(name string) {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.actOn(name, "removing", func(ctx context.Context, m *storeproc.Member) error {
		return s.g.Leave(ctx, m)
	}, s.requireNoError)
}

// Add implements nemesis.Group.
func (s *faultyGroup) Add(name string) {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.actOn(name, "adding", func(ctx context.Context, m *storeproc.Member) error {
		return s.g.Join(ctx, m)
	}, s.requireNoError)
}

// Wipe implements nemesis.Group.
func (s *faultyGroup) Wipe(name string) {
	s.actOn(name, "wiping", func(_ context.Context, m *storeproc.Member) error { return m.Wipe() }, s.requireNoError)
}

// healAll undoes all faults and waits until all members are ready.
func (s *faultyGroup) healAll() {
	ctx, cancel := withTimeout(patience)
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
	s.requireNoError("all faults are undone, but", s.g.AwaitReady(ctx))
	_, err := s.g.Leader(ctx)
	s.requireNoError("all faults are undone, but", err)
}

// compareReplicas waits until all replicas are at one revision and returns the differences between
// them.
func (s *faultyGroup) compareReplicas() error {
	ctx, cancel := withTimeout(patience)
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

// describeGroup returns the status of the group as reported by each of its replicas.
func (s *faultyGroup) describeGroup() string {
	var b strings.Builder
	for _, m := range s.g.Members() {
		ctx, cancel := withTimeout(time.Second)
		st, ready, err := m.Status(ctx)
		cancel()
		var members []string
		for _, o := range st.Members {
			members = append(members, fmt.Sprintf("%s voter=%v", o.ID, o.Voter))
		}
		slices.Sort(members)
		fmt.Fprintf(&b, "%s: running=%v ready=%v leader=%q term=%d revision=%d applied=%d commit=%d "+
			"members=%v error=%v\n",
			m.Name, m.Running(), ready, st.Leader, st.Term, st.Revision, st.AppliedIndex, st.CommitIndex, members, err)
	}
	return b.String()
}
