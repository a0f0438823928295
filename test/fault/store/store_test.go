// Package store injects every fault of a nemesis into a group of replica processes, for the time of
// -fault.for, and checks the results of clients and watchers against the contract of the store. The
// replicas run with fsync and over mTLS, as in a cluster; clients reach them over sockets without
// faults.
//
//	go test ./test/fault/store -fault.for=10m -fault.seed=7 -v
package store

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest/linear"
	"keelson.dev/keelson/raftstore/storetest/nemesis"
	"keelson.dev/keelson/test/testenv/storeproc"
)

var (
	faultFor  = flag.Duration("fault.for", 30*time.Second, "how long each group of replica processes is disturbed")
	faultSeed = flag.Uint64("fault.seed", 1, "seed of the first round; each next round has the next one")
	faultOne  = flag.Duration("fault.round", 10*time.Second,
		"how long a round is: what is recorded in one is checked at its end")
)

func TestMain(m *testing.M) {
	storeproc.Main()
	os.Exit(m.Run())
}

// Faults of processes and faults of cables come at the same time, from plans of their own.
var (
	ofProcesses = []nemesis.Fault{
		nemesis.KillLeader, nemesis.KillFollower, nemesis.KillFollowers, nemesis.KillAll, nemesis.StopLeader,
		nemesis.PauseLeader, nemesis.PauseFollower, nemesis.PauseLeader, nemesis.PauseFollower,
		nemesis.Transfer, nemesis.SnapshotAll, nemesis.Compact, nemesis.ClockAhead, nemesis.ClockBehind,
		nemesis.RemoveFollower, nemesis.RemoveLeader, nemesis.Replace,
	}
	ofCables = []nemesis.Fault{
		nemesis.IsolateLeader, nemesis.IsolateAny, nemesis.LeaderMinority, nemesis.MuteLeader, nemesis.DeafLeader,
		nemesis.MuteFollower, nemesis.DeafFollower, nemesis.BridgeLeader, nemesis.BridgeFollower,
		nemesis.SlowLines, nemesis.JumbledLines, nemesis.FlappingLine, nemesis.Install,
	}
)

// Random clients on all replicas see one linear history and watchers see
// exactly that history, while replica processes are killed, paused, cut off,
// slowed down, added and removed. F53
func TestLinearizable(t *testing.T) {
	runRounds(t, storeproc.Settings{}, *faultFor)
}

// The same on the other log store. F53
func TestLinearizableOnWAL(t *testing.T) {
	runRounds(t, storeproc.Settings{LogStore: "wal"}, *faultFor/2)
}

func runRounds(t *testing.T, settings storeproc.Settings, d time.Duration) {
	// Snapshots are frequent, and a replica that was away gets one.
	settings.SnapshotBytes, settings.TrailingBytes = 256<<10, 1
	settings.HistoryRevisions = 100_000
	// The comparison of states in the background has nothing to find, whatever happens.
	settings.CompareEvery = 300 * time.Millisecond
	dir := t.TempDir()
	ctx, cancel := withTimeout(patience)
	defer cancel()
	g, err := storeproc.Start(ctx, storeproc.Options{Dir: dir, Settings: settings})
	if err != nil {
		t.Fatal(err)
	}
	s := &faultyGroup{t: t, g: g, from: time.Now()}
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		s.saveFiles(dir)
	})
	rounds := max(1, uint64(d / *faultOne))
	for n := uint64(0); n < rounds && !t.Failed(); n++ {
		s.runRound(*faultSeed+n, d/time.Duration(rounds))
	}
}

// runRound runs clients and watchers under faults for a time, then heals the group and checks the
// recorded history.
func (s *faultyGroup) runRound(seed uint64, d time.Duration) {
	ctx, cancel := withTimeout(d + 2*patience)
	defer cancel()
	prefix := fmt.Sprintf("/round/%d/", seed)
	var err error
	s.base, err = s.g.Members()[0].Store().Commit(ctx,
		raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/round", []byte(prefix))}})
	if err != nil {
		s.t.Fatal(err)
	}
	var places []linear.Place
	for n := range 5 {
		places = append(places, memberPlace(s.g, n))
	}
	w, err := linear.Start(ctx, linear.Options{Prefix: prefix, Seed: seed, Clients: 2, Pace: 8 * time.Millisecond},
		places...)
	if err != nil {
		s.t.Fatal(err)
	}
	s.recordAction("round of seed %d", seed)
	ahead := s.clockDrift(ctx)
	enough := readImpatiently(w, prefix, places)
	s.runPlans(seed, d)
	enough()
	w.Stop()
	s.recordAction("over")
	healing := time.Now()
	s.healAll()
	healed := time.Since(healing).Round(time.Millisecond)
	at, up := memberPlace(s.g, 0)()
	if !up {
		s.t.Fatalf("no replica is running:\n%s", s.describeGroup())
	}
	settled := w.Settle(ctx, at)
	ahead = max(ahead, s.clockDrift(ctx))
	rep := w.Check(linear.CheckOptions{Skew: ahead + 2*nemesis.Skew, Dir: s.t.ArtifactDir()})
	rep.Violations = append(rep.Violations, settled.Violations...)
	s.t.Logf("seed %d: %d replicas, whole again %s after the last fault: %v", seed, len(s.g.Members()), healed, rep)
	s.requireNoError(fmt.Sprintf("seed %d", seed), rep.Err())
	s.requireNoError(fmt.Sprintf("seed %d", seed), s.compareReplicas())
	s.requireNoError(fmt.Sprintf("seed %d", seed), s.checkWatches(ctx, prefix))
	if rep.Acknowledged < 20 || rep.Deliveries < 20 {
		s.t.Errorf("seed %d: hardly anything was checked: %v", seed, rep)
	}
}

// clockDrift returns the difference between the store's time and the machine's time. The store sums
// up the elapsed time of its clocks, so a jump forward stays counted.
func (s *faultyGroup) clockDrift(ctx context.Context) time.Duration {
	st := s.g.Members()[0].Store()
	op := raftstore.Put("/drift", nil)
	op.TTL = time.Minute
	before := time.Now()
	_, err := st.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{op}})
	var it raftstore.Item
	if err == nil {
		it, _, err = st.Get(ctx, op.Key, raftstore.ReadOptions{})
	}
	s.requireNoError("asking for the store's time", err)
	return time.UnixMilli(it.Expires).Sub(before.Add(op.TTL)).Abs()
}

// runPlans executes two fault plans and membership changes concurrently.
func (s *faultyGroup) runPlans(seed uint64, d time.Duration) {
	ctx, cancel := withTimeout(d)
	defer cancel()
	plans := []nemesis.Plan{nemesis.New(2*seed, d, ofProcesses), nemesis.New(2*seed+1, d, ofCables)}
	// A short pause is slept through by the group. During every second one another leader is elected.
	pauses := make(map[nemesis.Fault]int)
	for i := range plans[0] {
		a := &plans[0][i]
		if pauses[a.Fault]++; (a.Fault == nemesis.PauseLeader || a.Fault == nemesis.PauseFollower) &&
			pauses[a.Fault]%2 == 0 {
			a.Hold = 2*a.Hold + time.Second
		}
	}
	var wg sync.WaitGroup
	for n, p := range plans {
		s.recordAction("plan %d:\n%v", n, p)
		wg.Go(func() { p.Run(ctx, s, s.recordAction) })
	}
	wg.Go(func() { s.replaceMembers(ctx, seed) })
	wg.Wait()
}

// checkWatches compares each replica's content with the events of its watch since the start of the
// round.
func (s *faultyGroup) checkWatches(ctx context.Context, prefix string) error {
	var first map[string]raftstore.Item
	for _, m := range s.g.Members() {
		l, err := m.Store().List(ctx, prefix, raftstore.ListOptions{})
		if err != nil {
			return err
		}
		listed := make(map[string]raftstore.Item)
		for _, it := range l.Items {
			listed[it.Key] = it
		}
		told, err := replayWatch(ctx, m.Store(), prefix, s.base, l.Revision)
		if err != nil {
			return fmt.Errorf("watch at %s from revision %d: %w", m.Name, s.base, err)
		}
		if !reflect.DeepEqual(listed, told) {
			return fmt.Errorf("replica %s lists %d items, its watch delivers %d, or other ones:\n%v\n%v", m.Name,
				len(listed), len(told), listed, told)
		}
		if first == nil {
			first = listed
		}
		if !reflect.DeepEqual(listed, first) {
			return fmt.Errorf("replica %s lists other items than %s:\n%v\n%v", m.Name, s.Names()[0], listed, first)
		}
	}
	return nil
}

// replayWatch builds the state of a prefix, which is empty at first, from a watch.
func replayWatch(ctx context.Context, st raftstore.Store, prefix string, after, upTo raftstore.Revision) (
	map[string]raftstore.Item, error,
) {
	w, err := st.Watch(ctx, prefix, after)
	if err != nil {
		return nil, err
	}
	defer w.Stop()
	if p, ok := w.(raftstore.ProgressRequester); ok {
		p.RequestProgress()
	}
	out := make(map[string]raftstore.Item)
	for last := after; last < upTo; {
		ev, open := <-w.C()
		if !open {
			return nil, fmt.Errorf("ended at revision %d: %w", last, w.Err())
		}
		if ev.Revision <= last && len(ev.Events) > 0 {
			return nil, fmt.Errorf("revision %d after %d", ev.Revision, last)
		}
		last = ev.Revision
		for _, e := range ev.Events {
			if e.Kind == raftstore.EventDelete {
				delete(out, e.Item.Key)
			} else {
				out[e.Item.Key] = e.Item
			}
		}
	}
	return out, nil
}

// saveFiles saves the data that explains a failure beyond the end of the test.
func (s *faultyGroup) saveFiles(dir string) {
	if !s.t.Failed() {
		return
	}
	to, err := os.MkdirTemp("", "keelson-fault-store-")
	if err != nil {
		s.t.Error(err)
		return
	}
	logs, _ := filepath.Glob(filepath.Join(dir, "*.log"))
	drawn, _ := filepath.Glob(filepath.Join(s.t.ArtifactDir(), "*.html"))
	for _, path := range append(logs, drawn...) {
		b, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(to, filepath.Base(path)), b, 0o644)
		}
		if err != nil {
			s.t.Error(err)
		}
	}
	if err := os.WriteFile(filepath.Join(to, "nemesis.txt"), []byte(s.diary()), 0o644); err != nil {
		s.t.Error(err)
	}
	s.t.Logf("what was done to the replicas:\n%s", s.diary())
	s.t.Logf("their logs, and calls drawn that fit in no order, if any: %s", to)
}
