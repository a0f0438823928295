package mvcc

import (
	"cmp"
	"slices"
	"strings"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// Limits of alarms, so that a leader cannot fill the state with alarms.
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
		Kind: uint32(a.Kind), Member: a.Member, SinceUnixMs: a.Since, Message: a.Message, StateLimit: a.StateLimit, TotalLimit: a.TotalLimit,
	}
}

func compareAlarms(a, b raftstore.Alarm) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Member, b.Member))
}

// setAlarm raises or clears an alarm. An alarm that is active already keeps its time and its
// limits, which could otherwise grow without bound, and gets the new message. An alarm does not
// change the revision and causes no event.
func (m *Machine) setAlarm(c *storev1.SetAlarm) {
	a := alarmFrom(c.GetAlarm())
	a.StateLimit, a.TotalLimit = 0, 0
	m.limitUpdates(&a, c)
	m.applyAlarm(a, c.GetClear())
}

// applyAlarm raises or clears an alarm with the limits that it contains.
func (m *Machine) applyAlarm(a raftstore.Alarm, clear bool) {
	m.advanceClock(a.Since)
	if a.Kind != raftstore.AlarmSpace && a.Kind != raftstore.AlarmDiverged || len(a.Member) > maxAlarmMember {
		return
	}
	at, up := slices.BinarySearchFunc(m.alarms, a, compareAlarms)
	switch next := slices.Clone(m.alarms); {
	case clear && up:
		m.alarms = slices.Delete(next, at, at+1)
	case clear:
	case up:
		next[at].Message = a.Message
		m.alarms = next
	case len(next) < maxAlarms:
		m.alarms = slices.Insert(next, at, a)
	}
}
