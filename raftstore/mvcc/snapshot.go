package mvcc

import (
	"fmt"
	"io"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// snapshotFormat is the version of the snapshot format. It is incremented when older releases would
// misread a snapshot.
const snapshotFormat = 1

// Meta is the cluster ID of a snapshot and its position in the raft log: the index and the term of
// the last entry that it includes.
type Meta struct {
	Cluster string
	Index   uint64
	Term    uint64
}

// Snapshot is an immutable copy of a whole machine: items, retained history, alarms and stored
// outcomes. It can be written while the machine applies more commands.
type Snapshot struct {
	view   *View
	recent recentOutcomes
}

// Snapshot returns the current state of the machine as a snapshot. It must be called by the
// goroutine that calls Apply. Any goroutine may use the result.
func (m *Machine) Snapshot() *Snapshot {
	return &Snapshot{view: m.view.Load(), recent: m.recentOutcomes.copyOutcomes()}
}

// Snapshot returns the view as a snapshot for a backup. It contains the state of the store, but no
// stored outcomes of proposals. It may be called by any goroutine.
func (v *View) Snapshot() *Snapshot { return &Snapshot{view: v, recent: newRecent()} }

// Dump writes the snapshot as a sequence of frames: the items as of the compacted revision, the
// history since, the stored outcomes, the alarms and a trailer. Load computes the later states from
// the items and the history.
func (s *Snapshot) Dump(w io.Writer, meta Meta) error {
	fw := newFrameWriter(w)
	v := s.view
	err := fw.writeMessage(&storev1.SnapshotFrame{Kind: &storev1.SnapshotFrame_Header{Header: &storev1.SnapshotHeader{
		Format: snapshotFormat, Revision: uint64(v.revision), Compacted: uint64(v.history.compacted),
		Cluster: meta.Cluster, Index: meta.Index, Term: meta.Term,
		ClockUnixMs: v.clock, ForgottenUnixMs: s.recent.horizon,
	}}})
	if err != nil {
		return err
	}
	trailer := &storev1.SnapshotTrailer{Revisions: uint64(v.revision - v.history.compacted)}
	if trailer.Items, err = s.dumpItems(fw); err != nil {
		return err
	}
	if err := s.dumpHistory(fw); err != nil {
		return err
	}
	if trailer.Recent, err = s.dumpRecent(fw); err != nil {
		return err
	}
	if err := s.dumpAlarms(fw); err != nil {
		return err
	}
	if err := fw.writeMessage(&storev1.SnapshotFrame{Kind: &storev1.SnapshotFrame_Trailer{Trailer: trailer}}); err !=
		nil {
		return err
	}
	return fw.flush()
}

func (s *Snapshot) dumpItems(fw *frameWriter) (uint64, error) {
	var (
		total uint64
		chunk []byte
		err   error
	)
	s.view.stateAt(s.view.history.compacted, "").ascendItems("", "", func(it *raftstore.Item) bool {
		chunk = appendItem(chunk, fieldChunkEntry, it)
		total++
		if len(chunk) >= frameChunk {
			err = fw.writeChunk(fieldFrameItems, chunk)
			chunk = chunk[:0]
		}
		return err == nil
	})
	if err == nil && len(chunk) > 0 {
		err = fw.writeChunk(fieldFrameItems, chunk)
	}
	return total, err
}

func (s *Snapshot) dumpHistory(fw *frameWriter) error {
	var chunk []byte
	for at := s.view.history.compacted; at < s.view.revision; {
		revisions := s.view.history.readRevisions(at, s.view.revision, 0)
		at += raftstore.Revision(len(revisions))
		for i := range revisions {
			chunk = appendHistory(chunk, &revisions[i])
			if len(chunk) < frameChunk {
				continue
			}
			if err := fw.writeChunk(fieldFrameHistory, chunk); err != nil {
				return err
			}
			chunk = chunk[:0]
		}
	}
	if len(chunk) == 0 {
		return nil
	}
	return fw.writeChunk(fieldFrameHistory, chunk)
}

func (s *Snapshot) dumpRecent(fw *frameWriter) (uint64, error) {
	var total uint64
	for e := s.recent.uses.Front(); e != nil; e = e.Next() {
		inc := e.Value.(*incarnation)
		chunk := &storev1.RecentChunk{Incarnations: []*storev1.Incarnation{{Incarnation: inc.id, Floor: inc.settledUpTo,
			Used: uint64(inc.lastUsed)}}}
		frame := &storev1.SnapshotFrame{Kind: &storev1.SnapshotFrame_Recent{Recent: chunk}}
		pending := 0
		for i := range inc.outcomes {
			o := &inc.outcomes[i]
			out := o.outcome.Proto()
			chunk.Recent = append(chunk.Recent, &storev1.Recent{Incarnation: inc.id, Sequence: o.sequence,
				AtUnixMs: o.decidedAt, Outcome: out})
			total++
			if pending += 64 + 2*len(out.GetKey()) + len(out.GetMessage()); pending >= frameChunk {
				if err := fw.writeMessage(frame); err != nil {
					return 0, err
				}
				chunk.Recent, pending = chunk.Recent[:0], 0
			}
		}
		if err := fw.writeMessage(frame); err != nil {
			return 0, err
		}
	}
	return total, nil
}

func (s *Snapshot) dumpAlarms(fw *frameWriter) error {
	if len(s.view.alarms) == 0 {
		return nil
	}
	chunk := &storev1.AlarmChunk{}
	for _, a := range s.view.alarms {
		chunk.Alarms = append(chunk.Alarms, alarmProto(a))
	}
	return fw.writeMessage(&storev1.SnapshotFrame{Kind: &storev1.SnapshotFrame_Alarms{Alarms: chunk}})
}

// Load reads a snapshot into a new machine. It returns an error that wraps ErrCorrupt if the
// snapshot is damaged or incomplete.
func Load(r io.Reader) (*Machine, Meta, error) {
	l := &loader{fr: newFrameReader(r), m: New()}
	if err := l.loadHeader(); err != nil {
		return nil, Meta{}, err
	}
	for l.trailer == nil {
		if err := l.loadFrame(); err != nil {
			return nil, Meta{}, err
		}
	}
	if err := l.checkTrailer(); err != nil {
		return nil, Meta{}, err
	}
	l.m.publishView()
	return l.m, l.meta, nil
}

type loader struct {
	fr            *frameReader
	m             *Machine
	meta          Meta
	target        raftstore.Revision
	last          string // key of the last item, to check their order
	items, recent uint64
	trailer       *storev1.SnapshotTrailer
}

func (l *loader) loadHeader() error {
	f, err := l.fr.readFrame()
	if err != nil {
		return err
	}
	h := f.GetHeader()
	if h == nil {
		return l.fr.corruptError("not a header")
	}
	if h.GetFormat() != snapshotFormat {
		return fmt.Errorf("snapshot has format %d, this version reads format %d", h.GetFormat(), snapshotFormat)
	}
	if h.GetCompacted() > h.GetRevision() {
		return l.fr.corruptError("compacted %d beyond revision %d", h.GetCompacted(), h.GetRevision())
	}
	l.meta = Meta{Cluster: h.GetCluster(), Index: h.GetIndex(), Term: h.GetTerm()}
	l.target = raftstore.Revision(h.GetRevision())
	l.m.revision = raftstore.Revision(h.GetCompacted())
	l.m.history.compacted = l.m.revision
	l.m.clock, l.m.recentOutcomes.horizon = h.GetClockUnixMs(), h.GetForgottenUnixMs()
	return nil
}

func (l *loader) loadFrame() error {
	f, err := l.fr.readFrame()
	if err != nil {
		return err
	}
	switch k := f.GetKind().(type) {
	case *storev1.SnapshotFrame_Items:
		return l.loadItems(k.Items.GetItems())
	case *storev1.SnapshotFrame_History:
		return l.loadHistory(k.History.GetHistory())
	case *storev1.SnapshotFrame_Recent:
		return l.loadRecent(k.Recent)
	case *storev1.SnapshotFrame_Alarms:
		return l.loadAlarms(k.Alarms.GetAlarms())
	case *storev1.SnapshotFrame_Trailer:
		l.trailer = k.Trailer
		return nil
	default:
		return l.fr.corruptError("unexpected kind %T", k)
	}
}

func (l *loader) loadItems(items []*storev1.Item) error {
	if l.m.history.segments != nil {
		return l.fr.corruptError("items after history")
	}
	for _, p := range items {
		it := itemFrom(p)
		if it.Key == "" || l.items > 0 && it.Key <= l.last {
			return l.fr.corruptError("key %q after %q", it.Key, l.last)
		}
		l.last = it.Key
		l.items++
		l.m.items.Load(it.Key, it)
		l.m.bytes += itemBytes(it)
		if it.Expires != 0 {
			l.m.deadlines.Set(deadline{it.Expires, it.Key})
		}
	}
	return nil
}

// loadHistory applies revisions to the loaded items, in order, and appends them to history. The
// snapshot does not contain the item that a change replaced; loadHistory takes it from the items.
func (l *loader) loadHistory(revisions []*storev1.History) error {
	for _, h := range revisions {
		next := l.m.revision + 1
		if raftstore.Revision(h.GetRevision()) != next || next > l.target || len(h.GetChanges()) == 0 {
			return l.fr.corruptError("history of revision %d, want %d", h.GetRevision(), next)
		}
		events := make([]raftstore.Event, 0, len(h.GetChanges()))
		for _, c := range h.GetChanges() {
			it := itemFrom(c.GetItem())
			switch raftstore.EventKind(c.GetKind()) {
			case raftstore.EventPut:
				prev := l.m.putItem(it)
				events = append(events, raftstore.Event{Kind: raftstore.EventPut, Item: *it, Prev: prev})
			case raftstore.EventDelete:
				ev, ok := l.m.removeItem(it.Key)
				if !ok {
					return l.fr.corruptError("revision %d deletes key %q, which is absent", next, it.Key)
				}
				events = append(events, ev)
			default:
				return l.fr.corruptError("revision %d: change of kind %d", next, c.GetKind())
			}
		}
		l.m.appendRevision(events)
	}
	return nil
}

func (l *loader) loadRecent(chunk *storev1.RecentChunk) error {
	r := &l.m.recentOutcomes
	for _, p := range chunk.GetIncarnations() {
		if p.GetIncarnation() == 0 {
			return l.fr.corruptError("incarnation 0")
		}
		inc := r.incarnations[p.GetIncarnation()]
		if inc == nil {
			inc = r.addIncarnation(p.GetIncarnation())
		}
		inc.settledUpTo, inc.lastUsed = p.GetFloor(), int64(p.GetUsed())
	}
	for _, p := range chunk.GetRecent() {
		inc := r.incarnations[p.GetIncarnation()]
		if inc == nil {
			return l.fr.corruptError("outcome of unknown incarnation %d", p.GetIncarnation())
		}
		// Older releases wrote the values of conflicts too.
		inc.insertOutcome(remembered{p.GetSequence(), p.GetAtUnixMs(), OutcomeFrom(p.GetOutcome()).withoutValue()})
		l.recent++
	}
	return nil
}

func (l *loader) loadAlarms(alarms []*storev1.Alarm) error {
	for _, p := range alarms {
		n := len(l.m.alarms)
		if l.m.applyAlarm(alarmFrom(p), false); len(l.m.alarms) != n+1 {
			return l.fr.corruptError("alarm of kind %d about %q", p.GetKind(), p.GetMember())
		}
	}
	return nil
}

func (l *loader) checkTrailer() error {
	switch t := l.trailer; {
	case t.GetItems() != l.items:
		return l.fr.corruptError("%d items, the trailer has %d", l.items, t.GetItems())
	case t.GetRecent() != l.recent:
		return l.fr.corruptError("%d outcomes, the trailer has %d", l.recent, t.GetRecent())
	case l.m.revision != l.target:
		return l.fr.corruptError("history ends at revision %d, the header has %d", l.m.revision, l.target)
	}
	return nil
}

// Amend applies ops as one revision, without checking preconditions and limits. It is used before
// Rebase when a backup is restored. The machine must not be in use yet.
func (m *Machine) Amend(ops ...raftstore.Op) {
	var events []raftstore.Event
	for _, op := range ops {
		if ev, changed := m.applyOp(&storev1.Op{Kind: uint32(op.Kind), Key: op.Key, Value: op.Value}); changed {
			events = append(events, ev)
		}
	}
	m.appendRevision(events)
	m.publishView()
}

// Rebase sets the machine's revision to a greater revision, without changing the items. It marks
// all earlier revisions as compacted and clears the alarms. It is called when a backup is restored.
// The new revision must be greater than any that clients may have observed. Otherwise a client
// could observe the same revision twice with different content. Rebase returns an error if the new
// revision is not greater than the current one.
func (m *Machine) Rebase(revision raftstore.Revision) error {
	if revision <= m.revision {
		return fmt.Errorf("rebasing to revision %d: the store is already at %d", revision, m.revision)
	}
	m.revision = revision
	m.history = history{compacted: revision}
	m.alarms = nil // they belong to another set of replicas
	m.publishView()
	return nil
}
