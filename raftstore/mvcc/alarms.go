package mvcc

import (
	"cmp"
	"slices"
	"strings"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// The maximum number of active alarms, and the maximum lengths in bytes of an alarm's member name
// and message. Without them, a leader could fill the replicated state with alarms.
const (
	maxAlarms       = 64
	maxAlarmMember  = 256
	maxAlarmMessage = 1024
)

func alarmFrom(p *storev1.Alarm) raftstore.Alarm {
	text := p.GetMessage()
	if len(text) > maxAlarmMessage { // do not cut a rune: a snapshot cannot contain invalid UTF-8
		text = strings.ToValidUTF8(text[:maxAlarmMessage], "")
	}
	return raftstore.Alarm{
		Kind: raftstore.AlarmKind(p.GetKind()), Member: p.GetMember(), Since: p.GetSinceUnixMs(), Message: text,
		StateLimit: p.GetStateLimit(), TotalLimit: p.GetTotalLimit(),
	}
}

func alarmProto(a raftstore.Alarm) *storev1.Alarm {
	return &storev1.Alarm{
		Kind: uint32(a.Kind), Member: a.Member, SinceUnixMs: a.Since, Message: a.Message, StateLimit: a.StateLimit,
		TotalLimit: a.TotalLimit,
	}
}

func compareAlarms(a, b raftstore.Alarm) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Member, b.Member))
}

// setAlarm executes a SetAlarm command, which raises or clears an alarm. For a space alarm that is
// raised, it computes StateLimit and TotalLimit from the current state. An alarm that is already
// active keeps its time and these limits, because repeated raising could otherwise increase the
// limits without bound. Only its message is replaced. An alarm does not change the revision and
// causes no event.
func (m *Machine) setAlarm(c *storev1.SetAlarm) {
	a := alarmFrom(c.GetAlarm())
	a.StateLimit, a.TotalLimit = 0, 0
	m.limitUpdates(&a, c)
	m.applyAlarm(a, c.GetClear())
}

// applyAlarm raises the alarm a, or clears the alarm of the same kind and member if lower is set.
// StateLimit and TotalLimit of a new alarm are stored as given. If the alarm is already active,
// only its message is replaced. An alarm of an unknown kind, with too long a member name, or beyond
// maxAlarms is ignored.
func (m *Machine) applyAlarm(a raftstore.Alarm, lower bool) {
	m.advanceClock(a.Since)
	if a.Kind != raftstore.AlarmSpace && a.Kind != raftstore.AlarmDiverged || len(a.Member) > maxAlarmMember {
		return
	}
	at, up := slices.BinarySearchFunc(m.alarms, a, compareAlarms)
	switch next := slices.Clone(m.alarms); {
	case lower && up:
		m.alarms = slices.Delete(next, at, at+1)
	case lower:
	case up:
		next[at].Message = a.Message
		m.alarms = next
	case len(next) < maxAlarms:
		m.alarms = slices.Insert(next, at, a)
	}
}
