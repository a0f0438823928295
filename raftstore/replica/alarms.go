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

// The space quota counts the state and the old versions that history retains.
// History gives way first. When that is not enough the leader raises the space
// alarm, and the state machines of all replicas refuse what is new until the leader
// clears it: which it does below nine tenths of the quota, so that the store does
// not go to and fro. Deletes pass meanwhile, and puts in place of other values, which
// deletions of objects need; a reserve beyond the quota bounds what those take
// (mvcc/space.go). What else is on the disk is bounded by these.

// space says what is to be done about the space that a view takes.
type space int

const (
	spaceFine space = iota
	spaceCompact
	spaceRaise
	spaceClear
)

// The reserve: by updateRoom the state may grow, and history has the size of the
// largest commit, so that no commit that does not grow the state lacks room for
// what it replaces. Both together are 64 MiB at most.
const updateHistory = raftstore.MaxCommitBytes

func updateRoom(quota int64) int64 { return min(max(quota/50, 1<<20), 56<<20) }

// spaceLine is the usage below which the alarm ends.
func spaceLine(quota int64) int64 {
	if quota <= 0 {
		return math.MaxInt64 // no quota
	}
	return quota - quota/10
}

func judgeSpace(v *mvcc.View, quota int64) space {
	state, used, line := v.Bytes(), v.Bytes()+v.HistoryBytes(), spaceLine(quota)
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

// keepSpace does what is to be done about space, on the leader.
func (r *Replica) keepSpace() {
	v, quota := r.fsm.view(), r.cfg.Quota
	switch judgeSpace(v, quota) {
	case spaceCompact:
		// Down to the middle between what must stay and the line, so that it is
		// not due again at once.
		upTo := v.CompactTarget((spaceLine(quota) - v.Bytes()) / 2)
		r.log.Warn("space quota is used up: history gives way", "quota", quota, "state", v.Bytes(), "history", v.HistoryBytes(), "compacting", upTo)
		r.compactTo(upTo)
	case spaceRaise:
		r.setAlarm(false, raftstore.Alarm{Kind: raftstore.AlarmSpace, Message: fmt.Sprintf(
			"the quota of %d bytes was reached with %d of state and %d of history: delete what is not needed until the state is below %d, or raise the quota; "+
				"until then nothing new is taken, and no value grows by more than 1 KiB",
			quota, v.Bytes(), v.HistoryBytes(), spaceLine(quota))})
	case spaceClear:
		r.setAlarm(true, raftstore.Alarm{Kind: raftstore.AlarmSpace})
	}
}

// roomFor refuses a proposal that the state machine would refuse for want of
// space, before it has been proposed: what is refused by the thousand must not
// fill the log. A state that may be old is not believed.
func (r *Replica) roomFor(ctx context.Context, p *storev1.Proposal) error {
	if _, full := r.fsm.view().NoSpace(p); !full {
		return nil
	}
	if _, err := r.syncIndex(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	out, full := r.fsm.view().NoSpace(p)
	if !full {
		return nil
	}
	r.meters.refusedPuts.Add(1)
	return out.Err()
}

// setAlarm proposes to raise an alarm or to clear it.
func (r *Replica) setAlarm(clear bool, a raftstore.Alarm) {
	what := "raising an alarm"
	if clear {
		what = "clearing an alarm"
	}
	set := &storev1.SetAlarm{Clear: clear, Alarm: &storev1.Alarm{
		Kind: uint32(a.Kind), Member: a.Member, SinceUnixMs: r.clock.read(), Message: a.Message,
	}}
	if a.Kind == raftstore.AlarmSpace && !clear {
		set.QuotaBytes, set.GrowthBytes, set.HistoryBytes = r.cfg.Quota, updateRoom(r.cfg.Quota), updateHistory
	}
	r.housekeep(what, &storev1.Command{Kind: &storev1.Command_Alarm{Alarm: set}})
}

// noteState is told by the state machine of every new view: it takes over the
// store's time, says when alarms change, and wakes the leader when space is to be
// looked at. It runs on the goroutine that applies.
func (r *Replica) noteState(v *mvcc.View) {
	r.clock.heard(v.Clock())
	if judgeSpace(v, r.cfg.Quota) != spaceFine {
		nudge(r.spaceMoved)
	}
	before, now := r.alarms, v.Alarms()
	if len(before) == len(now) && (len(now) == 0 || &before[0] == &now[0]) {
		return
	}
	r.alarms = now
	for _, a := range now {
		if !slices.ContainsFunc(before, same(a)) {
			r.log.Error("alarm is up", "alarm", a.Kind.String(), "about", a.Member, "what", a.Message)
		}
	}
	for _, a := range before {
		if !slices.ContainsFunc(now, same(a)) {
			r.log.Warn("alarm is over", "alarm", a.Kind.String(), "about", a.Member)
		}
	}
}

func same(a raftstore.Alarm) func(raftstore.Alarm) bool {
	return func(b raftstore.Alarm) bool { return a.Kind == b.Kind && a.Member == b.Member }
}
