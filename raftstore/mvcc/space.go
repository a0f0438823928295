package mvcc

import (
	"fmt"
	"slices"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// While the space alarm is up a commit may delete, and it may put a value in the
// place of another one: a full store is emptied by users who first mark what is to
// be deleted, and is kept alive by others that write what they wrote before. What
// such commits can use up is bounded by two limits, which the alarm carries:
//
//   - the state grows to the state limit at most, a value by updateGrowth at a time;
//   - state and history together grow to the total limit at most. A put adds just
//     its own size to the two, since what it replaces becomes history; a deletion
//     adds nothing. When a put would go beyond, the oldest history gives way first,
//     here and in the same step on every replica, so that a commit which does not
//     grow the state is not refused for the sake of the past.

// updateGrowth is by how many bytes a put may grow a value while the space alarm
// is up: a mark of deletion and its time are a hundred, a condition in a status
// or a note of who manages which fields a few hundred.
const updateGrowth = 1 << 10

// limitUpdates sets what commits may use up while the space alarm, which is being
// raised, is up.
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

// checkSpace says why a proposal is refused while the space alarm is up; "" when it
// is not. puts is the size of all that it puts.
func checkSpace(items *tree, bytes int64, alarm raftstore.Alarm, p *storev1.Proposal) (reason string, puts int64) {
	after, first := bytes, ""
	for _, op := range p.GetOps() {
		prev, _ := items.Get(op.GetKey())
		switch raftstore.OpKind(op.GetKind()) {
		case raftstore.OpPut:
			if prev == nil {
				return fmt.Sprintf("put of key %q, which is new", op.GetKey()), 0
			}
			grown := len(op.GetValue()) - len(prev.Value)
			if grown > updateGrowth {
				return fmt.Sprintf("put of key %q with %d bytes more than before, where %d may be added", op.GetKey(), grown, updateGrowth), 0
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
		return fmt.Sprintf("put of key %q, which would grow the state to %d bytes, beyond the %d that updates may grow it to", first, after, alarm.StateLimit), 0
	case bytes+puts > alarm.TotalLimit:
		return fmt.Sprintf("put of key %q, for which there is no room beside the state", first), 0
	}
	return "", puts
}

// reserveSpace refuses a proposal for which there is no space. Of history it lets go
// what must give way for one that passes.
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
		// Down to the half of what may stay, so that it is not due again at once.
		m.compactHistory(m.history.revisionToKeep(m.revision, (alarm.TotalLimit-m.bytes-puts)/2))
	}
	return Outcome{}, false
}

// noSpaceOutcome is the outcome of a proposal that the space alarm refuses.
func noSpaceOutcome(reason string, alarm raftstore.Alarm, at raftstore.Revision, state, history int64) Outcome {
	return Outcome{Code: NoSpace, Revision: at, Message: fmt.Sprintf(
		"%s: the state is %d bytes now and the history of past revisions %d; %s", reason, state, history, alarm.Message)}
}

// NoSpace returns the outcome of a proposal that this state would refuse for
// want of space.
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
			return Outcome{}, false // that is what its caller is to hear
		}
	}
	reason, _ := checkSpace(v.items, v.bytes, alarm, p)
	if reason == "" {
		return Outcome{}, false
	}
	return noSpaceOutcome(reason, alarm, v.revision, v.bytes, v.history.bytes), true
}
