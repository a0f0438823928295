// Package mvcc is the pure state machine of the store: it applies commands and returns outcomes and
// events. It has no clock, goroutine, lock or I/O. Every replica that applies the same commands in
// the same order therefore has the same state, byte for byte.
//
// One goroutine applies commands to a Machine. All other goroutines read through a View, an
// immutable snapshot of the state that is replaced after each call of Apply. Reads never wait for
// writes, and writes never wait for reads.
package mvcc

import (
	"math"
	"sync/atomic"

	"github.com/tidwall/btree"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// tree maps keys to items. Items in a tree are never modified.
type tree = btree.Map[string, *raftstore.Item]

// treeDegree is the degree of the B-tree: half of a node's maximum width. A write copies the nodes
// on its path, and checkpoints of history retain the old nodes. A degree below the library's
// default of 32 reduces both costs, and scans are only slightly slower.
const treeDegree = 16

// deadline is the expiry time of one key. Deadlines are ordered by time, and with equal times by
// key.
type deadline struct {
	expiresAt int64
	key       string
}

func expiresEarlier(a, b deadline) bool {
	if a.expiresAt != b.expiresAt {
		return a.expiresAt < b.expiresAt
	}
	return a.key < b.key
}

// maxExpirations is the largest number of keys that one Expire command removes. It bounds the size
// of the revision that watchers receive.
const maxExpirations = 1024

// Machine is the state machine of the store. Methods that change it, and Snapshot, must be called
// by one goroutine. View may be called by any goroutine.
type Machine struct {
	items          tree
	deadlines      *btree.BTreeG[deadline]
	recentOutcomes recentOutcomes
	history        history
	revision       raftstore.Revision
	bytes          int64
	clock          int64             // latest time in any command, unix milliseconds
	alarms         []raftstore.Alarm // sorted; replaced as a whole, never modified
	view           atomic.Pointer[View]

	newEvents     []raftstore.Events // revisions of the current call of Apply, up to and including collectedUpTo
	collectedUpTo raftstore.Revision
}

// New returns an empty machine at revision 0.
func New() *Machine {
	m := &Machine{recentOutcomes: newRecent(), items: *btree.NewMap[string, *raftstore.Item](treeDegree)}
	m.deadlines = btree.NewBTreeGOptions(expiresEarlier, btree.Options{NoLocks: true})
	m.publishView()
	return m
}

// View returns the state after the last call of Apply.
func (m *Machine) View() *View { return m.view.Load() }

// Entry is one command with the raft term in which it was proposed. A proposal in the command that
// is fenced to another term is refused.
type Entry struct {
	Term    uint64
	Command *storev1.Command
}

// Result is the result of applying a sequence of entries.
type Result struct {
	// Outcomes has one slice per entry, with one outcome per proposal of a batch.
	Outcomes [][]Outcome
	// Events has one element per new revision, in order.
	Events []raftstore.Events
}

// Apply applies the entries in order, publishes the resulting view once and returns the outcomes of
// the proposals and the events of the new revisions.
func (m *Machine) Apply(entries ...Entry) Result {
	res := Result{Outcomes: make([][]Outcome, len(entries))}
	m.newEvents, m.collectedUpTo = nil, m.revision
	for i, e := range entries {
		switch c := e.Command.GetKind().(type) {
		case *storev1.Command_Batch:
			out := make([]Outcome, len(c.Batch.GetProposals()))
			for j, p := range c.Batch.GetProposals() {
				out[j] = m.applyProposal(e.Term, p)
			}
			res.Outcomes[i] = out
		case *storev1.Command_Expire:
			m.advanceClock(c.Expire.GetUntilUnixMs())
			m.removeExpired()
		case *storev1.Command_Alarm:
			m.setAlarm(c.Alarm)
		case *storev1.Command_Compact:
			m.compactHistory(raftstore.Revision(c.Compact.GetRevision()))
		}
	}
	m.publishView()
	m.collectEvents()
	res.Events, m.newEvents = m.newEvents, nil
	return res
}

// collectEvents copies the revisions after collectedUpTo from history to newEvents, the events that
// the current call of Apply returns. It then sets collectedUpTo to the current revision.
func (m *Machine) collectEvents() {
	if more := m.history.readAllSince(m.collectedUpTo, m.revision); m.newEvents == nil {
		m.newEvents = more
	} else {
		m.newEvents = append(m.newEvents, more...)
	}
	m.collectedUpTo = m.revision
}

// advanceClock sets the clock to the time in a command. The clock never goes backwards, even if the
// clocks of successive leaders differ.
func (m *Machine) advanceClock(unixMs int64) { m.clock = max(m.clock, unixMs) }

// applyProposal applies one proposal and returns its outcome. term is the raft term in which it was
// proposed. If the outcome of a proposal with the same ID is stored, that outcome is returned and
// the proposal is not applied again.
func (m *Machine) applyProposal(term uint64, p *storev1.Proposal) Outcome {
	m.advanceClock(max(p.GetProposedUnixMs(), p.GetId().GetIssuedUnixMs()))
	if out, known := m.recentOutcomes.lookUpOutcome(p.GetId()); known {
		return out
	}
	out := m.evaluateProposal(term, p)
	m.recentOutcomes.recordOutcome(p.GetId(), out, m.clock)
	return out
}

func (m *Machine) evaluateProposal(term uint64, p *storev1.Proposal) Outcome {
	if p.GetFence() != 0 && p.GetFence() != term {
		return Outcome{Code: Fenced, Revision: m.revision}
	}
	if err := checkProposal(p); err != nil {
		return refusedOutcome(err, m.revision)
	}
	for _, op := range p.GetOps() {
		if conflict := checkPrecondition(&m.items, m.revision, op); conflict != nil {
			return Outcome{Code: Conflict, Revision: m.revision, Conflict: conflict}
		}
	}
	if refusal, refused := m.reserveSpace(p); refused {
		return refusal
	}
	events := make([]raftstore.Event, 0, len(p.GetOps()))
	for _, op := range p.GetOps() {
		if ev, changed := m.applyOp(op); changed {
			events = append(events, ev)
		}
	}
	m.appendRevision(events)
	return Outcome{Code: OK, Revision: m.revision}
}

// checkPrecondition returns nil if the precondition of the op holds in the given items, and
// otherwise the conflict. revision is the revision of the items.
func checkPrecondition(items *tree, revision raftstore.Revision, op *storev1.Op) *raftstore.ConflictError {
	want := precondition(op.GetIf())
	if want == (raftstore.Precondition{}) {
		return nil
	}
	have, _ := items.Get(op.GetKey())
	if want.Absent && have == nil {
		return nil
	}
	if !want.Absent && have != nil && have.Modified == want.Revision {
		return nil
	}
	return &raftstore.ConflictError{Key: op.GetKey(), Want: want, Have: have, At: revision}
}

// applyOp applies one op to the tree. Changed items get the revision that is being built. It
// returns the event, or false if the op changed nothing.
func (m *Machine) applyOp(op *storev1.Op) (raftstore.Event, bool) {
	switch raftstore.OpKind(op.GetKind()) {
	case raftstore.OpPut:
		item := &raftstore.Item{Key: op.GetKey(), Value: op.GetValue(), Created: m.revision + 1,
			Modified: m.revision + 1}
		if op.GetTtlMs() > 0 {
			item.Expires = m.clock + min(op.GetTtlMs(), math.MaxInt64-m.clock)
		}
		prev := m.putItem(item)
		return raftstore.Event{Kind: raftstore.EventPut, Item: *item, Prev: prev}, true
	case raftstore.OpDelete:
		return m.removeItem(op.GetKey())
	}
	return raftstore.Event{}, false
}

// putItem stores an item and returns the previous item of the key, or nil. An existing key keeps
// its creation revision.
func (m *Machine) putItem(item *raftstore.Item) *raftstore.Item {
	prev, _ := m.items.Get(item.Key)
	if prev != nil {
		item.Created = prev.Created
		item.Key = prev.Key // all versions of a key share one string
		m.bytes -= itemBytes(prev)
		m.removeDeadline(prev)
	}
	m.items.Set(item.Key, item)
	m.bytes += itemBytes(item)
	if item.Expires != 0 {
		m.deadlines.Set(deadline{item.Expires, item.Key})
	}
	return prev
}

func (m *Machine) removeItem(key string) (raftstore.Event, bool) {
	prev, ok := m.items.Delete(key)
	if !ok {
		return raftstore.Event{}, false
	}
	m.bytes -= itemBytes(prev)
	m.removeDeadline(prev)
	return raftstore.Event{
		Kind: raftstore.EventDelete,
		Item: raftstore.Item{Key: key, Created: prev.Created, Modified: m.revision + 1},
		Prev: prev,
	}, true
}

func (m *Machine) removeDeadline(it *raftstore.Item) {
	if it.Expires != 0 {
		m.deadlines.Delete(deadline{it.Expires, it.Key})
	}
}

// removeExpired removes the keys with an expiry time that is not after the store's clock, at most
// maxExpirations of them, in one revision.
func (m *Machine) removeExpired() {
	var events []raftstore.Event
	for len(events) < maxExpirations {
		first, ok := m.deadlines.Min()
		if !ok || first.expiresAt > m.clock {
			break
		}
		if ev, changed := m.removeItem(first.key); changed {
			events = append(events, ev)
		}
	}
	m.appendRevision(events)
}

// appendRevision increments the revision and appends it with the given events to history. Without
// events it does nothing.
func (m *Machine) appendRevision(events []raftstore.Event) {
	if len(events) == 0 {
		return
	}
	m.revision++
	m.history.appendRevision(raftstore.Events{Revision: m.revision, Events: events}, &m.items)
}

func (m *Machine) compactHistory(upTo raftstore.Revision) {
	// Revisions that are compacted in the call that commits them must still reach the watchers.
	m.collectEvents()
	if upTo > m.revision {
		upTo = m.revision
	}
	m.history.compactTo(upTo)
}

func (m *Machine) publishView() {
	v := &View{
		revision: m.revision,
		items:    m.items.Copy(),
		history:  m.history,
		bytes:    m.bytes,
		clock:    m.clock,
		alarms:   m.alarms,
	}
	if first, ok := m.deadlines.Min(); ok {
		v.nextExpiry = first.expiresAt
	}
	m.view.Store(v)
}

func itemBytes(it *raftstore.Item) int64 { return int64(len(it.Key) + len(it.Value)) }
