package replica

import (
	"context"
	"fmt"
	"math"
	"slices"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// The space quota counts the state and the previous versions in history. History is compacted
// first. If that is not enough, the leader raises the space alarm. While the alarm is active, the
// state machines of all replicas refuse new data. The leader clears the alarm below nine tenths of
// the quota, so that it is not raised again immediately. Deletions remain possible, and so do puts
// that replace other values, which the deletion of objects needs. A reserve beyond the quota bounds
// the growth by such puts (mvcc/space.go). Because the size of the state is bounded, the sizes of
// the log and of the snapshots are bounded too.

// space is the action that the leader must take because of the size of the state and of history: no
// action, a compaction of history, or raising or clearing the space alarm.
type space int

const (
	spaceFine space = iota
	spaceCompact
	spaceRaise
	spaceClear
)

// updateHistory and growthLimit are the reserve beyond the quota, in bytes: history may grow by
// updateHistory, the size of the largest commit, and the state by growthLimit. A commit that does
// not grow the state therefore always has space for the versions that it replaces. Both together
// are at most 64 MiB.
const updateHistory = raftstore.MaxCommitBytes

func growthLimit(quota int64) int64 { return min(max(quota/50, 1<<20), 56<<20) }

// clearThreshold returns the size of state and history, in bytes, below which the space alarm is
// cleared: nine tenths of the quota.
func clearThreshold(quota int64) int64 {
	if quota <= 0 {
		return math.MaxInt64 // no quota
	}
	return quota - quota/10
}

func assessSpace(v *mvcc.View, quota int64) space {
	state, used, line := v.Bytes(), v.Bytes()+v.HistoryBytes(), clearThreshold(quota)
	up := slices.ContainsFunc(v.Alarms(), func(a raftstore.Alarm) bool { return a.Kind == raftstore.AlarmSpace })
	switch over := quota > 0 && used >= quota; {
	case up && used < line:
		return spaceClear
	case (up || over) && state < line:
		return spaceCompact
	case over && !up:
		return spaceRaise
	default:
		return spaceFine
	}
}

// enforceQuota compares the size of the state and of history with the quota. If necessary, it
// compacts history, or raises or clears the space alarm. It has an effect on the leader only.
func (t *leaderTasks) enforceQuota() {
	v, quota := t.node.fsm.View(), t.node.cfg.Quota
	switch assessSpace(v, quota) {
	case spaceCompact:
		// down to the middle between the size of the state and the threshold, so that the next
		// compaction is not due at once
		upTo := v.CompactTarget((clearThreshold(quota) - v.Bytes()) / 2)
		t.node.log.Warn("space quota exhausted: compacting history", "quota", quota, "state", v.Bytes(),
			"history", v.HistoryBytes(), "compacting", upTo)
		t.compactTo(upTo)
	case spaceRaise:
		t.node.setAlarm(false, raftstore.Alarm{Kind: raftstore.AlarmSpace, Message: fmt.Sprintf(
			"the quota of %d bytes was reached with %d of state and %d of history: "+
				"delete what is not needed until the state is below %d, or raise the quota; "+
				"until then no new data is accepted, and no value grows by more than 1 KiB",
			quota, v.Bytes(), v.HistoryBytes(), clearThreshold(quota))})
	case spaceClear:
		t.node.setAlarm(true, raftstore.Alarm{Kind: raftstore.AlarmSpace})
	}
}

// checkSpace returns an error for a proposal that the state machine would refuse for lack of space.
// Such proposals must not fill the log. The local view may be out of date: before checkSpace
// refuses, it waits for a current view and checks the proposal again.
func (c *committer) checkSpace(ctx context.Context, proposal *storev1.Proposal) error {
	if _, full := c.node.fsm.View().NoSpace(proposal); !full {
		return nil
	}
	if _, err := c.reads.syncIndex(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	out, full := c.node.fsm.View().NoSpace(proposal)
	if !full {
		return nil
	}
	c.node.meters.refusedPuts.Add(1)
	return out.Err()
}

// setAlarm proposes to raise an alarm, or to clear it if cleared is true.
func (n *node) setAlarm(cleared bool, a raftstore.Alarm) {
	what := "raising an alarm"
	if cleared {
		what = "clearing an alarm"
	}
	set := &storev1.SetAlarm{Clear: cleared, Alarm: &storev1.Alarm{
		Kind: uint32(a.Kind), Member: a.Member, SinceUnixMs: n.clock.CurrentTime(), Message: a.Message,
	}}
	if a.Kind == raftstore.AlarmSpace && !cleared {
		set.QuotaBytes, set.GrowthBytes, set.HistoryBytes = n.cfg.Quota, growthLimit(n.cfg.Quota), updateHistory
	}
	n.proposeTask(what, &storev1.Command{Kind: &storev1.Command_Alarm{Alarm: set}})
}

// observeState handles a new view of the state machine. It adopts the store time, logs changed
// alarms, and wakes the leader's tasks if the size requires an action. It runs on the goroutine
// that applies entries.
func (t *leaderTasks) observeState(v *mvcc.View) {
	t.node.clock.ObserveTime(v.Clock())
	if assessSpace(v, t.node.cfg.Quota) != spaceFine {
		t.spaceMoved.Send()
	}
	before, now := t.alarms, v.Alarms()
	if len(before) == len(now) && (len(now) == 0 || &before[0] == &now[0]) {
		return
	}
	t.alarms = now
	for _, a := range now {
		if !slices.ContainsFunc(before, sameAlarm(a)) {
			t.node.log.Error("alarm raised", "alarm", a.Kind.String(), "about", a.Member, "what", a.Message)
		}
	}
	for _, a := range before {
		if !slices.ContainsFunc(now, sameAlarm(a)) {
			t.node.log.Warn("alarm cleared", "alarm", a.Kind.String(), "about", a.Member)
		}
	}
}

func sameAlarm(a raftstore.Alarm) func(raftstore.Alarm) bool {
	return func(b raftstore.Alarm) bool { return a.Kind == b.Kind && a.Member == b.Member }
}
