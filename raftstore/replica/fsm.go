package replica

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

// applied is what raft gives back to whoever proposed an entry.
type applied struct {
	term     uint64
	outcomes []mvcc.Outcome
}

// fsm is the state machine as raft drives it. Its methods run on raft's FSM
// goroutine, one at a time.
type fsm struct {
	cluster   string                       // identity that snapshots carry
	machine   atomic.Pointer[mvcc.Machine] // replaced by Restore
	hub       *watch.Hub
	line      waterline       // the last raft index applied
	term      uint64          // and its term
	life      context.Context // ends with the replica
	fail      func(error)
	broken    bool
	committed func(index, term uint64) // told of a batch before it is applied
	changed   func(v *mvcc.View)       // told of every new view
	applied   func(entries int, began time.Time)
	bytes     atomic.Int64 // applied since the last snapshot
	phase     float64      // by how much the first snapshot is put off, in parts of what is between two
}

func newFSM(life context.Context, fail func(error)) *fsm {
	f := &fsm{life: life, fail: fail, phase: rand.Float64(), applied: func(int, time.Time) {}}
	f.machine.Store(mvcc.New())
	f.line.over = life.Done()
	f.hub = watch.New(f, 0, watch.Options{})
	return f
}

var _ raft.BatchingFSM = (*fsm)(nil)

func (f *fsm) view() *mvcc.View { return f.machine.Load().View() }

// Read implements watch.History.
func (f *fsm) Read(after raftstore.Revision, max int) ([]raftstore.Events, error) {
	return f.view().Read(after, max)
}

// Apply implements raft.FSM.
func (f *fsm) Apply(l *raft.Log) any { return f.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch implements raft.BatchingFSM.
func (f *fsm) ApplyBatch(logs []*raft.Log) []any {
	out := make([]any, len(logs))
	if f.broken {
		return out
	}
	last := logs[len(logs)-1]
	f.committed(last.Index, last.Term)
	entries := make([]mvcc.Entry, 0, len(logs))
	slots := make([]int, 0, len(logs))
	for i, l := range logs {
		if l.Type != raft.LogCommand {
			continue
		}
		cmd, err := decodeCommand(l.Data)
		if err != nil {
			// Going on would let this replica differ from the others.
			f.broken = true
			f.fail(fmt.Errorf("raft entry %d of term %d is not a command: %w", l.Index, l.Term, err))
			return out
		}
		entries = append(entries, mvcc.Entry{Term: l.Term, Command: cmd})
		slots = append(slots, i)
		f.bytes.Add(int64(len(l.Data)))
	}
	machine := f.machine.Load()
	began := time.Now()
	res := machine.Apply(entries...)
	f.applied(len(logs), began)
	f.term = last.Term
	f.hub.Publish(res.Events)
	f.line.rise(last.Index)
	f.changed(machine.View())
	for n, i := range slots {
		out[i] = applied{term: logs[i].Term, outcomes: res.Outcomes[n]}
	}
	return out
}

// delayed is what must be applied before the next snapshot, where usually that
// many bytes must. All replicas apply the same: without a phase of its own each
// would write its snapshots when all others do, and no majority would be quick.
func (f *fsm) delayed(bytes int64) int64 {
	return bytes + int64(f.phase*float64(bytes))
}

// Snapshot implements raft.FSM.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	f.phase = 0
	f.bytes.Store(0)
	return &fsmSnapshot{
		life:  f.life,
		state: f.machine.Load().Snapshot(),
		meta:  mvcc.Meta{Cluster: f.cluster, Index: f.line.get(), Term: f.term},
	}, nil
}

// Restore implements raft.FSM: the state is replaced as a whole.
func (f *fsm) Restore(r io.ReadCloser) error {
	defer r.Close()
	machine, meta, err := mvcc.Load(r)
	if err != nil {
		return fmt.Errorf("loading snapshot: %w", err)
	}
	f.machine.Store(machine)
	f.term = meta.Term
	f.hub.Reset(machine.View().Revision())
	f.line.rise(meta.Index)
	f.changed(machine.View())
	return nil
}

type fsmSnapshot struct {
	life  context.Context
	state *mvcc.Snapshot
	meta  mvcc.Meta
}

func (s *fsmSnapshot) Persist(sink raft.SnapshotSink) error {
	if err := s.state.Dump(disk.NewResting(s.life, sink), s.meta); err != nil {
		sink.Cancel()
		return fmt.Errorf("writing snapshot %s: %w", sink.ID(), err)
	}
	return sink.Close()
}

func (s *fsmSnapshot) Release() {}
