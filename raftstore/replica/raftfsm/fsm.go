// Package raftfsm drives the state machine of package mvcc from the log of hashicorp/raft.
package raftfsm

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/watch"
)

// Applied is the result of an applied entry, which raft returns to the proposer of the entry.
type Applied struct {
	Term     uint64
	Outcomes []mvcc.Outcome
}

// FSM is the state machine that raft calls: a raft.BatchingFSM around mvcc.Machine. raft calls it
// on one goroutine only. View and Line are safe for concurrent use.
type FSM struct {
	Cluster  string                       // the identity of the cluster in snapshots
	Machine  atomic.Pointer[mvcc.Machine] // replaced by Restore
	Hub      *watch.Hub
	Line     indexWaiter     // the last applied raft index
	term     uint64          // the term of the last applied entry
	life     context.Context // ends with the replica
	fail     func(error)
	broken   bool
	Observer Observer
	Bytes    atomic.Int64 // bytes applied since the last snapshot
	phase    float64      // delay of the first snapshot, as a fraction of the interval between snapshots
}

// Observer contains functions that the state machine calls. They must not block.
type Observer struct {
	Committed func(index, term uint64)             // called with the last entry of a batch before the batch is applied
	Changed   func(v *mvcc.View)                   // called with every new view
	Applied   func(entries int, started time.Time) // called after every applied batch
}

// New returns a state machine with an empty state. life is a context that ends with the replica.
// fail is called with an error after which the state can no longer be trusted.
func New(life context.Context, fail func(error)) *FSM {
	f := &FSM{life: life, fail: fail, phase: rand.Float64()}
	f.Observer = Observer{Committed: func(uint64, uint64) {}, Changed: func(*mvcc.View) {},
		Applied: func(int, time.Time) {}}
	f.Machine.Store(mvcc.New())
	f.Line.over = life.Done()
	f.Hub = watch.New(f, 0, watch.Options{})
	return f
}

var _ raft.BatchingFSM = (*FSM)(nil)

func (f *FSM) View() *mvcc.View { return f.Machine.Load().View() }

// Read implements watch.History.
func (f *FSM) Read(after raftstore.Revision, limit int) ([]raftstore.Events, error) {
	return f.View().Read(after, limit)
}

// Apply implements raft.FSM.
func (f *FSM) Apply(l *raft.Log) any { return f.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch implements raft.BatchingFSM. After an entry that cannot be decoded it applies nothing
// more, and the replica stops.
func (f *FSM) ApplyBatch(logs []*raft.Log) []any {
	out := make([]any, len(logs))
	if f.broken {
		return out
	}
	last := logs[len(logs)-1]
	f.Observer.Committed(last.Index, last.Term)
	entries := make([]mvcc.Entry, 0, len(logs))
	slots := make([]int, 0, len(logs))
	for i, l := range logs {
		if l.Type != raft.LogCommand {
			continue
		}
		cmd, err := decodeCommand(l.Data)
		if err != nil {
			// going on would let this replica diverge from the others
			f.broken = true
			f.fail(fmt.Errorf("raft entry %d of term %d is not a command: %w", l.Index, l.Term, err))
			return out
		}
		entries = append(entries, mvcc.Entry{Term: l.Term, Command: cmd})
		slots = append(slots, i)
		f.Bytes.Add(int64(len(l.Data)))
	}
	machine := f.Machine.Load()
	began := time.Now()
	res := machine.Apply(entries...)
	f.Observer.Applied(len(logs), began)
	f.term = last.Term
	f.Hub.Publish(res.Events)
	f.Line.raiseIndex(last.Index)
	f.Observer.Changed(machine.View())
	for n, i := range slots {
		out[i] = Applied{Term: logs[i].Term, Outcomes: res.Outcomes[n]}
	}
	return out
}

// SnapshotThreshold returns how many bytes must be applied before the next snapshot. bytes is the
// configured number. For the first snapshot after the start, a random delay is added. All replicas
// apply the same entries. Without the delay, all would write their snapshots at the same time, and
// no majority would be fast.
func (f *FSM) SnapshotThreshold(bytes int64) int64 {
	return bytes + int64(f.phase*float64(bytes))
}

// Snapshot implements raft.FSM.
func (f *FSM) Snapshot() (raft.FSMSnapshot, error) {
	f.phase = 0
	f.Bytes.Store(0)
	return &fsmSnapshot{
		life:  f.life,
		state: f.Machine.Load().Snapshot(),
		meta:  mvcc.Meta{Cluster: f.Cluster, Index: f.Line.CurrentIndex(), Term: f.term},
	}, nil
}

// Restore implements raft.FSM. It replaces the whole state.
func (f *FSM) Restore(r io.ReadCloser) error {
	defer r.Close()
	machine, meta, err := mvcc.Load(r)
	if err != nil {
		return fmt.Errorf("loading snapshot: %w", err)
	}
	f.Machine.Store(machine)
	f.term = meta.Term
	f.Hub.Reset(machine.View().Revision())
	f.Line.raiseIndex(meta.Index)
	f.Observer.Changed(machine.View())
	return nil
}

type fsmSnapshot struct {
	life  context.Context
	state *mvcc.Snapshot
	meta  mvcc.Meta
}

func (s *fsmSnapshot) Persist(sink raft.SnapshotSink) error {
	if err := s.state.Dump(disk.NewThrottledWriter(s.life, sink), s.meta); err != nil {
		sink.Cancel()
		return fmt.Errorf("writing snapshot %s: %w", sink.ID(), err)
	}
	return sink.Close()
}

func (s *fsmSnapshot) Release() {}
