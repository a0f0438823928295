package mvcc

import (
	"cmp"
	"fmt"
	"slices"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// Bounds of what alarms may hold, so that no leader can fill the state with them.
const (
	maxAlarms       = 64
	maxAlarmMember  = 256
	maxAlarmMessage = 1024
)

func alarmFrom(p *storev1.Alarm) raftstore.Alarm {
	text := p.GetMessage()
	return raftstore.Alarm{
		Kind: raftstore.AlarmKind(p.GetKind()), Member: p.GetMember(), Since: p.GetSinceUnixMs(), Message: text[:min(len(text), maxAlarmMessage)],
	}
}

func alarmProto(a raftstore.Alarm) *storev1.Alarm {
	return &storev1.Alarm{Kind: uint32(a.Kind), Member: a.Member, SinceUnixMs: a.Since, Message: a.Message}
}

func alarmOrder(a, b raftstore.Alarm) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Member, b.Member))
}

// setAlarm raises an alarm or clears it. One that is up already keeps its time
// and gets the new message. An alarm changes no revision: it is no event.
func (m *Machine) setAlarm(c *storev1.SetAlarm) {
	a := alarmFrom(c.GetAlarm())
	m.tick(a.Since)
	if a.Kind != raftstore.AlarmSpace && a.Kind != raftstore.AlarmDiverged || len(a.Member) > maxAlarmMember {
		return
	}
	at, up := slices.BinarySearchFunc(m.alarms, a, alarmOrder)
	switch next := slices.Clone(m.alarms); {
	case c.GetClear() && up:
		m.hold(slices.Delete(next, at, at+1))
	case c.GetClear():
	case up:
		next[at].Message = a.Message
		m.hold(next)
	case len(next) < maxAlarms:
		m.hold(slices.Insert(next, at, a))
	}
}

// hold replaces the alarms.
func (m *Machine) hold(alarms []raftstore.Alarm) {
	m.alarms = alarms
	m.full = slices.ContainsFunc(alarms, isSpace)
}

func isSpace(a raftstore.Alarm) bool { return a.Kind == raftstore.AlarmSpace }

func firstPut(p *storev1.Proposal) (key string, puts bool) {
	for _, op := range p.GetOps() {
		if raftstore.OpKind(op.GetKind()) == raftstore.OpPut {
			return op.GetKey(), true
		}
	}
	return "", false
}

// noSpace is the outcome of a put while the space alarm, which is among the
// alarms, is up.
func noSpace(key string, alarms []raftstore.Alarm, at raftstore.Revision, state, history int64) Outcome {
	why := alarms[slices.IndexFunc(alarms, isSpace)].Message
	return Outcome{Code: NoSpace, Revision: at, Message: fmt.Sprintf(
		"put of key %q: the state is %d bytes now and the history of past revisions %d; %s", key, state, history, why)}
}

// NoSpace returns the outcome of a proposal that this state would refuse for
// want of space.
func (v *View) NoSpace(p *storev1.Proposal) (Outcome, bool) {
	if len(v.alarms) == 0 || !slices.ContainsFunc(v.alarms, isSpace) {
		return Outcome{}, false
	}
	key, puts := firstPut(p)
	if !puts {
		return Outcome{}, false
	}
	return noSpace(key, v.alarms, v.revision, v.bytes, v.history.bytes), true
}
