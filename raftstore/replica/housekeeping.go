package replica

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/wakeup"
	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica/rolelog"
)

const (
	// ageSample is the shortest interval between two samples of the age of history.
	ageSample = 15 * time.Second
	// lagSample is how often the leader requests the state of the members, from which their lag is
	// computed.
	lagSample = 3 * time.Second
)

// historySlack returns how many revisions history may have beyond its limit before it is compacted.
// It makes compactions rare.
func historySlack(revisions int) int { return min(1024, 64+revisions/8) }

// leaderTasks starts and ends this replica's leaderships, and does the recurring work of the
// leader: expiry, compaction of history, the space quota, and comparisons of the replicas.
type leaderTasks struct {
	node      *node
	net       *network
	commits   *committer
	members   *membership
	comparer  *comparer
	snapshots *snapshotter

	lately       rolelog.LeaderChanges
	alarms       []raftstore.Alarm // the alarms in the last observed view
	expiryMoved  wakeup.Signal
	historyGrown wakeup.Signal
	spaceMoved   wakeup.Signal
}

func newLeaderTasks(n *node, net *network, commits *committer, members *membership, comparer *comparer,
	snapshots *snapshotter) *leaderTasks {
	return &leaderTasks{
		node: n, net: net, commits: commits, members: members, comparer: comparer, snapshots: snapshots,
		expiryMoved: wakeup.New(), historyGrown: wakeup.New(), spaceMoved: wakeup.New(),
	}
}

// runTasks does the recurring work of the leader, each task only when it is due: an idle cluster
// writes nothing. It returns when the leadership ends.
func (t *leaderTasks) runTasks(l *leadership) {
	due := time.NewTimer(t.timeUntilExpiry())
	defer due.Stop()
	sample := time.NewTicker(min(ageSample, max(t.node.cfg.History.HistoryAge/8, 10*time.Millisecond)))
	defer sample.Stop()
	lag := time.NewTicker(lagSample)
	defer lag.Stop()
	t.node.meters.leaderships.Add(1)
	t.node.lead.establishes.Add(1)
	go func() {
		defer t.node.lead.establishes.Done()
		t.comparer.compareStates(l)
	}()
	t.spaceMoved.Send()
	var ages ages
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-t.expiryMoved:
		case <-due.C:
			t.expireKeys()
		case <-t.historyGrown:
			t.compactBySize()
		case <-sample.C:
			if upTo := ages.addSample(time.UnixMilli(t.node.clock.CurrentTime()), t.node.fsm.View().Revision(),
				t.node.cfg.History.HistoryAge); upTo > 0 {
				t.compactByAge(upTo)
			}
		case <-t.spaceMoved:
			t.enforceQuota()
		case <-lag.C:
			t.requestLag(l)
		}
		due.Reset(t.timeUntilExpiry())
	}
}

// timeUntilExpiry returns the time until the next key expires, or 24 hours if no key expires.
func (t *leaderTasks) timeUntilExpiry() time.Duration {
	next := t.node.fsm.View().NextExpiry()
	if next == 0 {
		return 24 * time.Hour
	}
	return max(time.Millisecond, time.Duration(next-t.node.clock.CurrentTime())*time.Millisecond)
}

func (t *leaderTasks) expireKeys() {
	now := t.node.clock.CurrentTime()
	if next := t.node.fsm.View().NextExpiry(); next == 0 || next > now {
		return
	}
	t.node.proposeTask("expiring keys", &storev1.Command{
		Kind: &storev1.Command_Expire{Expire: &storev1.Expire{UntilUnixMs: now}}})
}

// compactBySize compacts history if it exceeds its limits in revisions or bytes.
func (t *leaderTasks) compactBySize() {
	v := t.node.fsm.View()
	var upTo raftstore.Revision
	if most := raftstore.Revision(t.node.cfg.History.HistoryRevisions); v.Revision() > most {
		upTo = v.Revision() - most
	}
	if v.HistoryBytes() > t.node.cfg.History.HistoryBytes {
		upTo = max(upTo, v.CompactTarget(t.node.cfg.History.HistoryBytes/2))
	}
	t.compactTo(upTo)
}

func (t *leaderTasks) compactByAge(upTo raftstore.Revision) {
	if keep := raftstore.Revision(t.node.cfg.History.MinHistory); t.node.fsm.View().Revision() > keep {
		t.compactTo(min(upTo, t.node.fsm.View().Revision()-keep))
	}
}

func (t *leaderTasks) compactTo(upTo raftstore.Revision) {
	if upTo <= t.node.fsm.View().Compacted() {
		return
	}
	t.node.proposeTask("compacting", &storev1.Command{
		Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: uint64(upTo)}}})
}

func (n *node) proposeTask(task string, cmd *storev1.Command) {
	future, err := n.proposeCommand(cmd)
	if err == nil {
		err = n.awaitFuture(future)
	}
	if err != nil {
		n.log.Debug("housekeeping failed", "what", task, "error", err)
	}
}

// requestLag requests the current state of the members in the background. Status uses the
// responses.
func (t *leaderTasks) requestLag(l *leadership) {
	t.node.lead.establishes.Add(1)
	go func() {
		defer t.node.lead.establishes.Done()
		ctx, cancel := context.WithTimeout(l.ctx, memberTimeout)
		defer cancel()
		t.members.requestStates(ctx)
	}()
}

// ages records which revision was current at which time.
type ages []struct {
	at       time.Time
	revision raftstore.Revision
}

// addSample records that newest is the newest revision at the time sampledAt. It returns the newest
// recorded revision that is at least age old, or 0 if no record is that old. It drops the records
// up to the returned revision.
func (a *ages) addSample(sampledAt time.Time, newest raftstore.Revision, age time.Duration) raftstore.Revision {
	if n := len(*a); n == 0 || (*a)[n-1].revision != newest {
		*a = append(*a, struct {
			at       time.Time
			revision raftstore.Revision
		}{sampledAt, newest})
	}
	var upTo raftstore.Revision
	old := 0
	for old < len(*a) && sampledAt.Sub((*a)[old].at) >= age {
		upTo = (*a)[old].revision
		old++
	}
	*a = (*a)[old:]
	return upTo
}

// snapshotter takes snapshots and limits how much of the log is retained.
type snapshotter struct {
	node *node

	snapshotNow wakeup.Signal
	removals    chan sealedRemoval
	usage       usage
}

func newSnapshotter(n *node) *snapshotter {
	return &snapshotter{node: n, snapshotNow: wakeup.New(), removals: make(chan sealedRemoval)}
}

// runSnapshots takes a snapshot each time snapshotNow is signaled, which means that enough bytes
// have been applied since the last snapshot. It also performs the removals that Rewrite requests.
// raft itself takes snapshots by number of entries. runSnapshots returns nil when ctx ends.
func (s *snapshotter) runSnapshots(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case q := <-s.removals:
			q.done <- s.node.disk.RemoveSealedBefore(q.since)
			continue
		case <-s.snapshotNow:
		}
		s.trimTrailing()
		err := s.node.awaitFuture(s.node.raft.Snapshot())
		if err != nil && !errors.Is(err, raft.ErrNothingNewToSnapshot) && ctx.Err() == nil {
			s.node.log.Warn("snapshot failed", "error", err)
		}
	}
}

// maxFewTrailing is the maximum size in bytes of the up to 64 newest entries that are retained
// regardless of TrailingBytes.
const maxFewTrailing = 64 << 20

// trimTrailing sets how many entries raft retains in the log when it takes a snapshot. Their total
// size is at most TrailingBytes, or half the size of the state if that is more. Up to 64 entries
// are retained even if they are larger, up to maxFewTrailing. A follower may take so long to
// install a snapshot of a large state that the leader takes its next snapshot meanwhile. The
// entries that the follower needs after the installation must still exist.
func (s *snapshotter) trimTrailing() {
	s.node.tuning.Lock()
	defer s.node.tuning.Unlock()
	conf := s.node.raft.ReloadableConfig()
	few := min(64, s.node.disk.Log.EntriesWithin(maxFewTrailing))
	conf.TrailingLogs = min(10_240, max(few, s.node.disk.Log.EntriesWithin(
		max(s.node.cfg.Snapshots.TrailingBytes, s.node.fsm.View().Bytes()/2))))
	if err := s.node.raft.ReloadConfig(conf); err != nil {
		s.node.log.Warn("bounding the trailing log", "error", err)
	}
}

// Snapshot takes a snapshot immediately. It also returns nil if nothing has been applied since the
// last snapshot.
func (r *Replica) Snapshot(ctx context.Context) error {
	if err := r.node.awaitRunning(ctx); err != nil {
		return err
	}
	for {
		err := r.node.runUntil(ctx, func() error { return r.node.awaitFuture(r.node.raft.Snapshot()) })
		switch {
		case errors.Is(err, raft.ErrNothingNewToSnapshot):
			return nil
		case !errors.Is(err, raft.ErrLeadershipTransferInProgress):
			return err
		}
		if err := r.node.waitForRetry(ctx); err != nil {
			return err
		}
	}
}

// Compact removes history up to and including the revision upTo. It works on the leader only.
// Compacting history that is compacted already is a no-op. It returns ErrFutureRevision if the
// store has not reached that revision.
func (r *Replica) Compact(ctx context.Context, upTo raftstore.Revision) error {
	if err := r.node.awaitRunning(ctx); err != nil {
		return err
	}
	if r.node.lead.currentLeadership() == nil {
		return raftstore.ErrNotLeader
	}
	if upTo > r.Applied() { // another replica may have applied more
		if _, err := r.reads.syncIndex(ctx); err != nil {
			return fmt.Errorf("compacting up to revision %d: %w", upTo, err)
		}
		if now := r.Applied(); upTo > now {
			return fmt.Errorf("compacting up to revision %d: store is at %d: %w", upTo,
				now, raftstore.ErrFutureRevision)
		}
	}
	return classifyConfigError(r.node.runUntil(ctx, func() error {
		future, err := r.node.proposeCommand(&storev1.Command{
			Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: uint64(upTo)}}})
		if err != nil {
			return err
		}
		return r.node.awaitFuture(future)
	}))
}

// runUntil calls do and returns its error. If ctx ends first, it returns the error of ctx, and do
// continues in the background.
func (n *node) runUntil(ctx context.Context, do func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
