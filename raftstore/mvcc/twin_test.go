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

// twin is the state machine written as plainly as can be: a whole map kept for
// every revision, and a list of everything that ever happened.
type twin struct {
	revision  raftstore.Revision
	compacted raftstore.Revision
	states    []map[string]raftstore.Item // by revision
	events    []raftstore.Events          // by revision, from 1
	answers   map[[2]uint64]mvcc.Outcome
	floors    map[uint64]uint64
}

func newTwin() *twin {
	return &twin{states: []map[string]raftstore.Item{{}}, events: []raftstore.Events{{}},
		answers: make(map[[2]uint64]mvcc.Outcome), floors: make(map[uint64]uint64)}
}

func (w *twin) now() map[string]raftstore.Item { return w.states[w.revision] }

func (w *twin) propose(term uint64, p *storev1.Proposal) mvcc.Outcome {
	id := [2]uint64{p.Id.Incarnation, p.Id.Sequence}
	if p.Id.Sequence <= w.floors[p.Id.Incarnation] {
		return mvcc.Outcome{Code: mvcc.Unknown}
	}
	if out, known := w.answers[id]; known {
		return out
	}
	out := w.decide(term, p)
	w.answers[id] = out
	w.floors[p.Id.Incarnation] = max(w.floors[p.Id.Incarnation], min(p.Id.Settled, p.Id.Sequence-1))
	return out
}

func (w *twin) decide(term uint64, p *storev1.Proposal) mvcc.Outcome {
	if p.Fence != 0 && p.Fence != term {
		return mvcc.Outcome{Code: mvcc.Fenced, Revision: w.revision}
	}
	for _, op := range p.Ops {
		want := raftstore.Precondition{Absent: op.GetIf().GetAbsent(), Revision: raftstore.Revision(op.GetIf().GetRevision())}
		have, exists := w.now()[op.Key]
		if want.Absent && exists || want.Revision != 0 && (!exists || have.Modified != want.Revision) {
			conflict := &raftstore.ConflictError{Key: op.Key, Want: want, At: w.revision}
			if exists {
				conflict.Have = &have
			}
			return mvcc.Outcome{Code: mvcc.Conflict, Revision: w.revision, Conflict: conflict}
		}
	}
	next, events := maps.Clone(w.now()), []raftstore.Event(nil)
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
				ev.Item.Expires = p.ProposedUnixMs + op.TtlMs
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
	w.advance(next, events)
	return mvcc.Outcome{Code: mvcc.OK, Revision: w.revision}
}

func (w *twin) advance(next map[string]raftstore.Item, events []raftstore.Event) {
	if len(events) == 0 {
		return
	}
	w.revision++
	w.states = append(w.states, next)
	w.events = append(w.events, raftstore.Events{Revision: w.revision, Events: events})
}

func (w *twin) expire(until int64) {
	next, due := maps.Clone(w.now()), []raftstore.Item(nil)
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
	w.advance(next, events)
}

func (w *twin) list(prefix string, o raftstore.ListOptions) raftstore.List {
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

// Draws.

func drawKey(t *rapid.T) string {
	return rapid.SampledFrom([]string{"/a/", "/b/", "/b"}).Draw(t, "dir") + fmt.Sprint(rapid.IntRange(0, 6).Draw(t, "name"))
}

func drawProposal(t *rapid.T, w *twin) *storev1.Proposal {
	p := &storev1.Proposal{ProposedUnixMs: int64(rapid.IntRange(1000, 1100).Draw(t, "now"))}
	if rapid.IntRange(0, 9).Draw(t, "fenced") == 0 {
		p.Fence = uint64(rapid.IntRange(1, 3).Draw(t, "fence"))
	}
	p.Id = &storev1.ProposalID{
		Incarnation: uint64(rapid.IntRange(1, 3).Draw(t, "incarnation")),
		Sequence:    uint64(rapid.IntRange(1, 400).Draw(t, "sequence")),
		Settled:     uint64(rapid.IntRange(0, 40).Draw(t, "settled")),
	}
	used := map[string]bool{}
	for range rapid.IntRange(1, 3).Draw(t, "ops") {
		op := &storev1.Op{Key: drawKey(t), Kind: uint32(rapid.IntRange(1, 3).Draw(t, "kind"))}
		if used[op.Key] {
			continue
		}
		used[op.Key] = true
		if op.Kind == uint32(raftstore.OpPut) {
			op.Value = []byte(fmt.Sprint(rapid.IntRange(0, 99).Draw(t, "value")))
			op.TtlMs = int64(rapid.SampledFrom([]int{0, 0, 0, 5, 50}).Draw(t, "ttl"))
		}
		switch rapid.IntRange(0, 3).Draw(t, "if") {
		case 0:
			op.If = &storev1.Precondition{Absent: true}
		case 1:
			// Mostly one that holds.
			if it, ok := w.now()[op.Key]; ok {
				op.If = &storev1.Precondition{Revision: uint64(it.Modified)}
			} else {
				op.If = &storev1.Precondition{Revision: 1}
			}
		}
		p.Ops = append(p.Ops, op)
	}
	return p
}

func batch(p ...*storev1.Proposal) *storev1.Command {
	return &storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: p}}}
}

// The state machine agrees with its plain twin about outcomes, events, lists at
// every retained revision, history, and after a snapshot.
func TestAgreesWithTwin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, w := mvcc.New(), newTwin()
		for range rapid.IntRange(1, 500).Draw(t, "steps") {
			switch rapid.IntRange(0, 40).Draw(t, "step") {
			case 0:
				upTo := raftstore.Revision(rapid.IntRange(0, int(w.revision)+1).Draw(t, "compact"))
				m.Apply(mvcc.Entry{Command: &storev1.Command{Kind: &storev1.Command_Compact{Compact: &storev1.Compact{Revision: uint64(upTo)}}}})
				w.compacted = max(w.compacted, min(upTo, w.revision))
			case 1:
				until := int64(rapid.IntRange(1000, 1150).Draw(t, "until"))
				before := w.revision
				res := m.Apply(mvcc.Entry{Command: &storev1.Command{Kind: &storev1.Command_Expire{Expire: &storev1.Expire{UntilUnixMs: until}}}})
				w.expire(until)
				same(t, "events of expiry", res.Events, w.events[before+1:])
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
			default:
				term := uint64(rapid.IntRange(1, 3).Draw(t, "term"))
				p := drawProposal(t, w)
				before := w.revision
				want := w.propose(term, p)
				res := m.Apply(mvcc.Entry{Term: term, Command: batch(p)})
				same(t, "outcome", res.Outcomes[0][0], want)
				same(t, "events", res.Events, w.events[before+1:])
			}
			compareLists(t, m.View(), w)
		}
		compareHistory(t, m.View(), w)
	})
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
	same(t, fmt.Sprintf("list of %q with %+v", prefix, o), got, w.list(prefix, o))
	keys, size := len(w.now()), int64(0)
	for _, it := range w.now() {
		size += int64(len(it.Key) + len(it.Value))
	}
	if v.Keys() != keys || v.Bytes() != size || v.Revision() != w.revision || v.Compacted() != w.compacted {
		t.Fatalf("%d keys, %d bytes, revision %d, compacted %d; twin has %d, %d, %d, %d",
			v.Keys(), v.Bytes(), v.Revision(), v.Compacted(), keys, size, w.revision, w.compacted)
	}
}

func compareHistory(t *rapid.T, v *mvcc.View, w *twin) {
	at := w.compacted
	for at < w.revision {
		part, err := v.Read(at, rapid.IntRange(0, 50).Draw(t, "max"))
		if err != nil || len(part) == 0 {
			t.Fatalf("history after %d: %d revisions, error %v", at, len(part), err)
		}
		same(t, "history", part, w.events[at+1:int(at)+1+len(part)])
		at += raftstore.Revision(len(part))
	}
	if w.compacted > 0 {
		if _, err := v.Read(w.compacted-1, 1); err == nil {
			t.Fatal("compacted history can be read")
		}
	}
}

func same(t *rapid.T, what string, got, want any) {
	t.Helper()
	if g, w := reflect.ValueOf(got), reflect.ValueOf(want); g.Kind() == reflect.Slice && g.Len() == 0 && w.Len() == 0 {
		return
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%s:\n got %+v\nwant %+v", what, got, want)
	}
}
