package mvcc_test

import (
	"bytes"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// twin is a simple reference implementation of the state machine: a map for every revision and a
// list of all events.
type twin struct {
	revision  raftstore.Revision
	compacted raftstore.Revision
	states    []map[string]raftstore.Item // by revision
	events    []raftstore.Events          // by revision, from 1
	hashes    [][32]byte                  // by revision, as the machine returned them
	clock     int64
	answers   map[[2]uint64]answer
	issued    map[[2]uint64]int64
	floors    map[uint64]uint64
	alarms    map[string]raftstore.Alarm
}

type answer struct {
	outcome mvcc.Outcome
	at      int64
}

func newTwin() *twin {
	return &twin{states: []map[string]raftstore.Item{{}}, events: []raftstore.Events{{}},
		hashes:  [][32]byte{mvcc.New().View().Hash()},
		answers: make(map[[2]uint64]answer), issued: make(map[[2]uint64]int64), floors: make(map[uint64]uint64),
		alarms: make(map[string]raftstore.Alarm)}
}

func (w *twin) currentState() map[string]raftstore.Item { return w.states[w.revision] }

// applyProposal stores every outcome forever. The machine may drop outcomes: got is the machine's
// outcome, and may be Unknown where the limits allow it.
func (w *twin) applyProposal(term uint64, p *storev1.Proposal, got mvcc.Outcome) mvcc.Outcome {
	w.clock = max(w.clock, p.ProposedUnixMs, p.Id.IssuedUnixMs)
	id := [2]uint64{p.Id.Incarnation, p.Id.Sequence}
	unknown := mvcc.Outcome{Code: mvcc.Unknown}
	settled := p.Id.Sequence <= w.floors[p.Id.Incarnation]
	switch before, seen := w.answers[id]; {
	case seen && got.Code == mvcc.Unknown && (settled || w.clock-before.at > mvcc.RememberMs):
		return unknown
	case seen:
		return withoutValue(before.outcome)
	case got.Code == mvcc.Unknown && (settled || w.clock-p.Id.IssuedUnixMs > mvcc.RememberMs):
		return unknown
	}
	out := w.evaluateProposal(term, p)
	w.answers[id] = answer{out, w.clock}
	w.floors[p.Id.Incarnation] = max(w.floors[p.Id.Incarnation], min(p.Id.Settled, p.Id.Sequence-1))
	return out
}

// withoutValue returns an outcome without the value of the conflicting item.
func withoutValue(o mvcc.Outcome) mvcc.Outcome {
	if o.Conflict != nil && o.Conflict.Have != nil {
		c, have := *o.Conflict, *o.Conflict.Have
		have.Value = nil
		c.Have, c.NoValue = &have, true
		o.Conflict = &c
	}
	return o
}

// withValue returns the outcome with the value, if the twin retains it.
func (w *twin) withValue(o mvcc.Outcome) mvcc.Outcome {
	if o.Conflict == nil || o.Conflict.Have == nil || !o.Conflict.NoValue {
		return o
	}
	was := w.states[o.Conflict.At][o.Conflict.Key]
	if is := w.currentState()[was.Key]; o.Conflict.At < w.compacted && is.Modified != was.Modified {
		return o
	}
	c := *o.Conflict
	c.Have, c.NoValue = &was, false
	o.Conflict = &c
	return o
}

func (w *twin) evaluateProposal(term uint64, p *storev1.Proposal) mvcc.Outcome {
	if p.Fence != 0 && p.Fence != term {
		return mvcc.Outcome{Code: mvcc.Fenced, Revision: w.revision}
	}
	for _, op := range p.Ops {
		want := raftstore.Precondition{Absent: op.GetIf().GetAbsent(),
			Revision: raftstore.Revision(op.GetIf().GetRevision())}
		have, exists := w.currentState()[op.Key]
		if want.Absent && exists || want.Revision != 0 && (!exists || have.Modified != want.Revision) {
			conflict := &raftstore.ConflictError{Key: op.Key, Want: want, At: w.revision}
			if exists {
				conflict.Have = &have
			}
			return mvcc.Outcome{Code: mvcc.Conflict, Revision: w.revision, Conflict: conflict}
		}
	}
	next, events := maps.Clone(w.currentState()), []raftstore.Event(nil)
	for _, op := range p.Ops {
		prev, exists := next[op.Key]
		ev := raftstore.Event{Item: raftstore.Item{Key: op.Key, Created: w.revision + 1, Modified: w.revision + 1}}
		if exists {
			ev.Prev, ev.Item.Created = &prev, prev.Created
		}
		switch raftstore.OpKind(op.Kind) {
		case raftstore.OpPut:
			ev.Kind, ev.Item.Value = raftstore.EventPut, op.Value
			if op.TtlMs > 0 {
				ev.Item.Expires = w.clock + op.TtlMs
			}
			next[op.Key] = ev.Item
		case raftstore.OpDelete:
			if !exists {
				continue
			}
			ev.Kind = raftstore.EventDelete
			delete(next, op.Key)
		default:
			continue
		}
		events = append(events, ev)
	}
	if refusal := w.checkSpace(p, next); refusal != "" {
		return mvcc.Outcome{Code: mvcc.NoSpace, Revision: w.revision, Message: fmt.Sprintf(
			"%s: the state has %d bytes and the history of past revisions %d; full", refusal,
			stateBytes(w.currentState()), w.historyBytes(w.compacted))}
	}
	w.appendRevision(next, events)
	return mvcc.Outcome{Code: mvcc.OK, Revision: w.revision}
}

// checkSpace returns the reason to refuse a proposal that results in the state next, and compacts
// history if that is sufficient.
func (w *twin) checkSpace(p *storev1.Proposal, next map[string]raftstore.Item) string {
	alarm, full := w.alarms["1"]
	var puts []*storev1.Op
	for _, op := range p.Ops {
		if op.Kind == uint32(raftstore.OpPut) {
			puts = append(puts, op)
		}
	}
	if !full || len(puts) == 0 {
		return ""
	}
	var added int64
	for _, op := range puts {
		before, exists := w.currentState()[op.Key]
		if !exists {
			return fmt.Sprintf("put of key %q, which does not exist yet", op.Key)
		}
		if more := len(op.Value) - len(before.Value); more > 1024 {
			return fmt.Sprintf("put of key %q adds %d bytes, and 1024 may be added", op.Key, more)
		}
		added += int64(len(op.Key) + len(op.Value))
	}
	if n := stateBytes(next); n > stateBytes(w.currentState()) && n > alarm.StateLimit {
		return fmt.Sprintf("put of key %q, which would grow the state to %d bytes, beyond the limit of %d for updates",
			puts[0].Key, n, alarm.StateLimit)
	}
	left := alarm.TotalLimit - stateBytes(w.currentState()) - added
	if left < 0 {
		return fmt.Sprintf("put of key %q, for which there is no space beside the state", puts[0].Key)
	}
	if w.historyBytes(w.compacted) > left {
		for w.historyBytes(w.compacted) > left/2 {
			w.compacted++
		}
	}
	return ""
}

func (w *twin) appendRevision(next map[string]raftstore.Item, events []raftstore.Event) {
	if len(events) == 0 {
		return
	}
	w.revision++
	w.states = append(w.states, next)
	w.events = append(w.events, raftstore.Events{Revision: w.revision, Events: events})
}

func stateBytes(state map[string]raftstore.Item) int64 {
	var n int64
	for _, it := range state {
		n += int64(len(it.Key) + len(it.Value))
	}
	return n
}

// historyBytes returns the size of the items that the events after a revision replaced.
func (w *twin) historyBytes(after raftstore.Revision) int64 {
	var n int64
	for _, r := range w.events[after+1:] {
		for _, e := range r.Events {
			if e.Prev != nil {
				n += int64(len(e.Prev.Key) + len(e.Prev.Value))
			}
		}
	}
	return n
}

func (w *twin) setAlarm(s *storev1.SetAlarm) {
	w.clock = max(w.clock, s.Alarm.SinceUnixMs)
	key := fmt.Sprint(s.Alarm.Kind, s.Alarm.Member)
	before, up := w.alarms[key]
	switch {
	case s.Clear:
		delete(w.alarms, key)
	case up:
		before.Message = s.Alarm.Message
		w.alarms[key] = before
	default:
		a := raftstore.Alarm{Kind: raftstore.AlarmKind(s.Alarm.Kind), Member: s.Alarm.Member,
			Since: s.Alarm.SinceUnixMs, Message: s.Alarm.Message}
		if a.Kind == raftstore.AlarmSpace && s.QuotaBytes > 0 {
			a.StateLimit = max(s.QuotaBytes, stateBytes(w.currentState())) + s.GrowthBytes
			a.TotalLimit = a.StateLimit + s.HistoryBytes
		}
		w.alarms[key] = a
	}
}

func (w *twin) removeExpired(until int64) {
	w.clock = max(w.clock, until)
	until = w.clock
	next, due := maps.Clone(w.currentState()), []raftstore.Item(nil)
	for _, it := range next {
		if it.Expires != 0 && it.Expires <= until {
			due = append(due, it)
		}
	}
	slices.SortFunc(due, func(a, b raftstore.Item) int {
		if a.Expires != b.Expires {
			return int(a.Expires - b.Expires)
		}
		return strings.Compare(a.Key, b.Key)
	})
	var events []raftstore.Event
	for _, it := range due {
		delete(next, it.Key)
		events = append(events, raftstore.Event{Kind: raftstore.EventDelete, Prev: &it,
			Item: raftstore.Item{Key: it.Key, Created: it.Created, Modified: w.revision + 1}})
	}
	w.appendRevision(next, events)
}

func (w *twin) listItems(prefix string, o raftstore.ListOptions) raftstore.List {
	at := o.At
	if at == 0 {
		at = w.revision
	}
	var items []raftstore.Item
	for _, key := range slices.Sorted(maps.Keys(w.states[at])) {
		if strings.HasPrefix(key, prefix) && key > o.After {
			items = append(items, w.states[at][key])
		}
	}
	l := raftstore.List{Revision: at, Items: items}
	if o.Limit > 0 && len(items) > o.Limit {
		l.Items, l.More, l.Remaining = items[:o.Limit], true, int64(len(items)-o.Limit)
	}
	return l
}

// Generators.

func drawKey(t *rapid.T) string {
	return rapid.SampledFrom([]string{"/a/", "/b/", "/b"}).Draw(t, "dir") +
		fmt.Sprint(rapid.IntRange(0, 6).Draw(t, "name"))
}

func drawProposal(t *rapid.T, w *twin) *storev1.Proposal {
	p := &storev1.Proposal{ProposedUnixMs: drawTime(t, w)}
	if rapid.IntRange(0, 9).Draw(t, "fenced") == 0 {
		p.Fence = uint64(rapid.IntRange(1, 3).Draw(t, "fence"))
	}
	p.Id = &storev1.ProposalID{
		Incarnation: uint64(rapid.IntRange(1, 3).Draw(t, "incarnation")),
		Sequence:    uint64(rapid.IntRange(1, 400).Draw(t, "sequence")),
		Settled:     uint64(rapid.IntRange(0, 40).Draw(t, "settled")),
	}
	id := [2]uint64{p.Id.Incarnation, p.Id.Sequence}
	if w.issued[id] == 0 {
		// Its issuer's clock is nearly correct.
		w.issued[id] = max(1, w.clock+int64(rapid.IntRange(-20, 20).Draw(t, "issued")))
		for other, at := range w.issued { // ids are issued in order
			if other[0] == id[0] && other[1] > id[1] {
				w.issued[id] = min(w.issued[id], at)
			}
		}
	}
	p.Id.IssuedUnixMs = w.issued[id]
	used := map[string]bool{}
	for range rapid.IntRange(1, 3).Draw(t, "ops") {
		op := &storev1.Op{Key: drawKey(t), Kind: uint32(rapid.IntRange(1, 3).Draw(t, "kind"))}
		if used[op.Key] {
			continue
		}
		used[op.Key] = true
		if op.Kind == uint32(raftstore.OpPut) {
			op.Value = []byte(fmt.Sprint(rapid.IntRange(0, 99).Draw(t, "value")))
			if rapid.IntRange(0, 5).Draw(t, "large") == 0 {
				op.Value = bytes.Repeat(op.Value, rapid.IntRange(1, 1100).Draw(t, "times"))
			}
			op.TtlMs = int64(rapid.SampledFrom([]int{0, 0, 0, 5, 50}).Draw(t, "ttl"))
		}
		switch rapid.IntRange(0, 3).Draw(t, "if") {
		case 0:
			op.If = &storev1.Precondition{Absent: true}
		case 1:
			// Usually a precondition that holds.
			if it, ok := w.currentState()[op.Key]; ok {
				op.If = &storev1.Precondition{Revision: uint64(it.Modified)}
			} else {
				op.If = &storev1.Precondition{Revision: 1}
			}
		}
		p.Ops = append(p.Ops, op)
	}
	return p
}

// drawTime usually returns a slightly later time, sometimes an earlier one, and rarely one so late
// that stored outcomes are dropped.
func drawTime(t *rapid.T, w *twin) int64 {
	step := rapid.SampledFrom([]int{0, 1, 3, 7, -5, -1000}).Draw(t, "step of time")
	if rapid.IntRange(0, 60).Draw(t, "jump") == 0 {
		step = mvcc.RememberMs / 3 * rapid.IntRange(1, 4).Draw(t, "by")
	}
	return max(1000, w.clock+int64(step))
}

func batchCommand(p ...*storev1.Proposal) *storev1.Command {
	return &storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: p}}}
}

// The state machine agrees with its twin about outcomes, events, lists, hashes at every retained
// revision, history, alarms and sizes, also after a snapshot.
func TestAgreesWithTwin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, w := mvcc.New(), newTwin()
		for range rapid.IntRange(1, 500).Draw(t, "steps") {
			switch rapid.IntRange(0, 40).Draw(t, "step") {
			case 0:
				upTo := raftstore.Revision(rapid.IntRange(0, int(w.revision)+1).Draw(t, "compact"))
				m.Apply(
					mvcc.Entry{Command: &storev1.Command{
						Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: uint64(upTo)}}}})
				w.compacted = max(w.compacted, min(upTo, w.revision))
			case 1:
				until := drawTime(t, w)
				before := w.revision
				res :=
					m.Apply(
						mvcc.Entry{Command: &storev1.Command{
							Kind: &storev1.Command_Expire{Expire: &storev1.Expire{UntilUnixMs: until}}}})
				w.removeExpired(until)
				checkEqual(t, "events of expiry", res.Events, w.events[before+1:])
			case 2:
				var b bytes.Buffer
				if err := m.Snapshot().Dump(&b, mvcc.Meta{Index: 7, Term: 3, Cluster: "c"}); err != nil {
					t.Fatal(err)
				}
				loaded, meta, err := mvcc.Load(&b)
				if err != nil || meta != (mvcc.Meta{Index: 7, Term: 3, Cluster: "c"}) {
					t.Fatalf("load: %+v, error %v", meta, err)
				}
				if loaded.View().Hash() != m.View().Hash() {
					t.Fatal("hash changed over a snapshot")
				}
				m = loaded
			case 3, 4:
				set := &storev1.SetAlarm{Clear: rapid.IntRange(0, 2).Draw(t, "clear") == 0,
					Alarm: &storev1.Alarm{Kind: 1, SinceUnixMs: drawTime(t, w), Message: "full"}}
				if set.QuotaBytes = int64(rapid.SampledFrom([]int{0, 1, 100, 5000}).Draw(t, "quota")); set.QuotaBytes >
					0 {
					set.GrowthBytes = int64(rapid.IntRange(0, 3000).Draw(t, "growth"))
					set.HistoryBytes = int64(rapid.SampledFrom([]int{0, 50, 5000, 20_000}).Draw(t, "room for history"))
				}
				if rapid.IntRange(0, 2).Draw(t, "diverged") == 0 {
					set.Alarm.Kind, set.Alarm.Member = 2, rapid.SampledFrom([]string{"r1", "r2"}).Draw(t, "about")
				}
				m.Apply(mvcc.Entry{Command: &storev1.Command{Kind: &storev1.Command_Alarm{Alarm: set}}})
				w.setAlarm(set)
			case 5:
				keep := int64(rapid.IntRange(0, 60).Draw(t, "keep"))
				upTo := m.View().CompactTarget(keep)
				if n := w.historyBytes(upTo); n > keep || upTo > w.compacted && w.historyBytes(upTo-1) <= keep {
					t.Fatalf("to keep %d bytes of history it would compact to %d, which keeps %d", keep, upTo, n)
				}
			default:
				term := uint64(rapid.IntRange(1, 3).Draw(t, "term"))
				p := drawProposal(t, w)
				before := m.View()
				res := m.Apply(mvcc.Entry{Term: term, Command: batchCommand(p)})
				_, again := w.answers[[2]uint64{p.Id.Incarnation, p.Id.Sequence}]
				want := w.applyProposal(term, p, res.Outcomes[0][0])
				checkEqual(t, "outcome", res.Outcomes[0][0], want)
				checkEqual(t, "outcome with the value", want.WithValue(m.View()), w.withValue(want))
				checkEqual(t, "outcome that crossed a wire", mvcc.OutcomeFrom(want.Proto()).WithValue(m.View()),
					w.withValue(withoutValue(want)))
				checkEqual(t, "events", res.Events, w.events[before.Revision()+1:])
				if !again {
					compareSpace(t, before, m.View(), p, want)
				}
			}
			for len(w.hashes) <= int(w.revision) {
				w.hashes = append(w.hashes, m.View().Hash())
			}
			compareLists(t, m.View(), w)
			compareState(t, m.View(), w)
		}
		compareHistory(t, m.View(), w)
	})
}

// compareSpace checks that a view predicts which proposals are refused for lack of space, and that
// accepted ones stay within the alarm's limits.
func compareSpace(t *rapid.T, before, after *mvcc.View, p *storev1.Proposal, got mvcc.Outcome) {
	foretold, full := before.NoSpace(p)
	if full != (got.Code == mvcc.NoSpace) && got.Code != mvcc.Fenced && got.Code != mvcc.Unknown {
		t.Fatalf("a view says of a proposal: no space %t; it gets %+v", full, got)
	}
	if got.Code == mvcc.NoSpace {
		checkEqual(t, "what a view says of a proposal", foretold, got)
	}
	for _, a := range after.Alarms() {
		if total := after.Bytes() + after.HistoryBytes(); a.Kind == raftstore.AlarmSpace &&
			total > max(a.TotalLimit, before.Bytes()+before.HistoryBytes()) {
			t.Fatalf("%d bytes of state and history, were %d, limit %d", total,
				before.Bytes()+before.HistoryBytes(), a.TotalLimit)
		}
	}
}

func compareLists(t *rapid.T, v *mvcc.View, w *twin) {
	o := raftstore.ListOptions{Limit: rapid.IntRange(0, 4).Draw(t, "limit")}
	if w.compacted < w.revision && rapid.Bool().Draw(t, "in the past") {
		o.At = raftstore.Revision(rapid.IntRange(int(max(1, w.compacted)), int(w.revision)).Draw(t, "at"))
	}
	if rapid.Bool().Draw(t, "continued") {
		o.After = drawKey(t)
	}
	prefix := rapid.SampledFrom([]string{"", "/", "/a/", "/b", "/b/", "/b/3", "/c/"}).Draw(t, "prefix")
	got, err := v.List(prefix, o)
	if err != nil {
		t.Fatalf("list of %q with %+v: %v", prefix, o, err)
	}
	checkEqual(t, fmt.Sprintf("list of %q with %+v", prefix, o), got, w.listItems(prefix, o))
}

func compareState(t *rapid.T, v *mvcc.View, w *twin) {
	if v.Keys() != len(w.currentState()) || v.Bytes() != stateBytes(w.currentState()) || v.Revision() != w.revision ||
		v.Compacted() != w.compacted {
		t.Fatalf("%d keys, %d bytes, revision %d, compacted %d; twin has %d, %d, %d, %d",
			v.Keys(), v.Bytes(), v.Revision(), v.Compacted(), len(w.currentState()), stateBytes(w.currentState()),
			w.revision, w.compacted)
	}
	if a, full := w.alarms["1"]; full && a.StateLimit > 0 && v.Bytes() > a.StateLimit {
		t.Fatalf("updates have grown the state to %d bytes, limit %d", v.Bytes(), a.StateLimit)
	}
	if v.HistoryBytes() != w.historyBytes(w.compacted) || v.Clock() != w.clock {
		t.Fatalf("%d bytes of history, clock %d; twin has %d, %d", v.HistoryBytes(), v.Clock(),
			w.historyBytes(w.compacted), w.clock)
	}
	var alarms []raftstore.Alarm
	for _, key := range slices.Sorted(maps.Keys(w.alarms)) {
		alarms = append(alarms, w.alarms[key])
	}
	checkEqual(t, "alarms", v.Alarms(), alarms)
	at := raftstore.Revision(rapid.IntRange(int(w.compacted), int(w.revision)).Draw(t, "hash at"))
	if h, err := v.HashAt(at, func(int) error { return nil }); at != 0 && (err != nil || h != w.hashes[at]) {
		t.Fatalf("hash of revision %d is %x, was %x: %v", at, h, w.hashes[at], err)
	}
}

func compareHistory(t *rapid.T, v *mvcc.View, w *twin) {
	at := w.compacted
	for at < w.revision {
		part, err := v.Read(at, rapid.IntRange(0, 50).Draw(t, "max"))
		if err != nil || len(part) == 0 {
			t.Fatalf("history after %d: %d revisions, error %v", at, len(part), err)
		}
		checkEqual(t, "history", part, w.events[at+1:int(at)+1+len(part)])
		at += raftstore.Revision(len(part))
	}
	if w.compacted > 0 {
		if _, err := v.Read(w.compacted-1, 1); err == nil {
			t.Fatal("compacted history can be read")
		}
	}
}

func checkEqual(t *rapid.T, what string, got, want any) {
	t.Helper()
	if g, w := reflect.ValueOf(got), reflect.ValueOf(want); g.Kind() == reflect.Slice && g.Len() == 0 && w.Len() == 0 {
		return
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%s:\n got %+v\nwant %+v", what, got, want)
	}
}
