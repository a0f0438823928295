package mvcc

import (
	"fmt"
	"slices"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// While the space alarm is active, a commit may delete keys, and it may replace existing values.
// Many clients delete an object by an update first, and controllers keep rewriting their objects.
// Two limits in the alarm bound the space that such commits use:
//
//   - The state may grow up to StateLimit. Each put adds at most updateGrowth bytes to its value.
//   - State and history together may grow up to TotalLimit. A put counts with its own size,
//     because the replaced value becomes history. A deletion counts as 0 bytes. If a put would
//     exceed the limit, the oldest history is compacted first, in the same step on every replica. A
//     commit that does not grow the state is therefore not refused because of history.

// updateGrowth is how many bytes a put may add to an existing value while the space alarm is
// active. A deletion timestamp takes about a hundred bytes; a status condition or a managedFields
// entry takes a few hundred.
const updateGrowth = 1 << 10

// limitUpdates sets StateLimit and TotalLimit of a space alarm that is being raised. StateLimit is
// the larger of the command's quota and the current size of the state, plus the command's growth
// bytes. TotalLimit is StateLimit plus the command's history bytes. Without a quota, and for
// another kind of alarm, both stay zero.
func (m *Machine) limitUpdates(a *raftstore.Alarm, c *storev1.SetAlarm) {
	if a.Kind == raftstore.AlarmSpace && c.GetQuotaBytes() > 0 {
		a.StateLimit = max(c.GetQuotaBytes(), m.bytes) + c.GetGrowthBytes()
		a.TotalLimit = a.StateLimit + c.GetHistoryBytes()
	}
}

func spaceAlarm(alarms []raftstore.Alarm) (a raftstore.Alarm, up bool) {
	at := slices.IndexFunc(alarms, func(a raftstore.Alarm) bool { return a.Kind == raftstore.AlarmSpace })
	if at < 0 {
		return a, false
	}
	return alarms[at], true
}

// checkSpace returns the reason to refuse a proposal while the space alarm is active, or "" to
// accept it. items and bytes are the state before the proposal. puts is the total size of the keys
// and values that an accepted proposal puts.
func checkSpace(items *tree, bytes int64, alarm raftstore.Alarm, p *storev1.Proposal) (reason string, puts int64) {
	after, first := bytes, ""
	for _, op := range p.GetOps() {
		prev, _ := items.Get(op.GetKey())
		switch raftstore.OpKind(op.GetKind()) {
		case raftstore.OpPut:
			if prev == nil {
				return fmt.Sprintf("put of key %q, which does not exist yet", op.GetKey()), 0
			}
			grown := len(op.GetValue()) - len(prev.Value)
			if grown > updateGrowth {
				return fmt.Sprintf("put of key %q adds %d bytes, and %d may be added", op.GetKey(), grown,
					updateGrowth), 0
			}
			if first == "" {
				first = op.GetKey()
			}
			after += int64(grown)
			puts += int64(len(op.GetKey()) + len(op.GetValue()))
		case raftstore.OpDelete:
			if prev != nil {
				after -= itemBytes(prev)
			}
		}
	}
	switch {
	case first == "":
		return "", 0
	case after > bytes && after > alarm.StateLimit:
		return fmt.Sprintf("put of key %q, which would grow the state to %d bytes, beyond the limit of %d for updates",
			first, after, alarm.StateLimit), 0
	case bytes+puts > alarm.TotalLimit:
		return fmt.Sprintf("put of key %q, for which there is no space beside the state", first), 0
	}
	return "", puts
}

// reserveSpace checks a proposal against the limits of the space alarm. If the alarm is active and
// the proposal would exceed its limits, it returns the outcome NoSpace and true. For an accepted
// proposal it compacts history if state and history would otherwise exceed TotalLimit.
func (m *Machine) reserveSpace(p *storev1.Proposal) (refusal Outcome, refused bool) {
	alarm, full := spaceAlarm(m.alarms)
	if !full {
		return Outcome{}, false
	}
	reason, puts := checkSpace(&m.items, m.bytes, alarm, p)
	if reason != "" {
		return noSpaceOutcome(reason, alarm, m.revision, m.bytes, m.history.bytes), true
	}
	if puts > 0 && m.bytes+m.history.bytes+puts > alarm.TotalLimit {
		// Compact to half of the allowed size, so that the next commits need no compaction.
		m.compactHistory(m.history.revisionToKeep(m.revision, (alarm.TotalLimit-m.bytes-puts)/2))
	}
	return Outcome{}, false
}

// noSpaceOutcome returns the outcome of a proposal that is refused because of the space alarm.
// revision is the current revision; state and history are sizes in bytes.
func noSpaceOutcome(reason string, alarm raftstore.Alarm, revision raftstore.Revision, state, history int64) Outcome {
	return Outcome{Code: NoSpace, Revision: revision, Message: fmt.Sprintf(
		"%s: the state has %d bytes and the history of past revisions %d; %s", reason, state, history, alarm.Message)}
}

// NoSpace reports whether this state would refuse the proposal because of the space alarm. In this
// case it also returns the outcome. It returns false if a precondition does not hold, because the
// outcome is then a conflict.
func (v *View) NoSpace(p *storev1.Proposal) (Outcome, bool) {
	if len(v.alarms) == 0 {
		return Outcome{}, false
	}
	alarm, full := spaceAlarm(v.alarms)
	if !full {
		return Outcome{}, false
	}
	for _, op := range p.GetOps() {
		if checkPrecondition(v.items, v.revision, op) != nil {
			return Outcome{}, false // the caller receives the conflict
		}
	}
	reason, _ := checkSpace(v.items, v.bytes, alarm, p)
	if reason == "" {
		return Outcome{}, false
	}
	return noSpaceOutcome(reason, alarm, v.revision, v.bytes, v.history.bytes), true
}
