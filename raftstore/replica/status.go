package replica

import (
	"context"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

const (
	// askMember bounds how long one member is asked how far it is.
	askMember = time.Second
	// diskSample is how long a measurement of the disk is good for.
	diskSample = 5 * time.Second
)

// Status is this replica's view of the group. It asks nobody: what it says of
// the other members is what was last heard. Members asks.
func (r *Replica) Status() raftstore.Status {
	v := r.fsm.view()
	watchers, _ := r.fsm.hub.Watchers()
	s := raftstore.Status{
		ID: r.cfg.Name, Revision: v.Revision(), Compacted: v.Compacted(),
		Keys: v.Keys(), Bytes: v.Bytes(), AppliedIndex: r.fsm.line.get(),
		Quota: max(0, r.cfg.Quota), Watchers: watchers, HistoryBytes: v.HistoryBytes(), Alarms: slices.Clone(v.Alarms()),
	}
	select {
	case <-r.running:
	default:
		return s
	}
	s.Term, s.CommitIndex = r.raft.CurrentTerm(), r.raft.CommitIndex()
	s.Leaders = r.lately.count(time.Now())
	s.DiskBytes = r.usage.bytes(r.cfg.DataDir)
	_, leader := r.leads()
	s.Leader = string(leader)
	s.Members = r.known(leader)
	return s
}

// known lists the members with what was last heard of them.
func (r *Replica) known(leader raft.ServerID) []raftstore.Member {
	var out []raftstore.Member
	for _, m := range r.raft.GetConfiguration().Configuration().Servers {
		one := raftstore.Member{
			ID: string(m.ID), Address: string(m.Address), Voter: m.Suffrage == raft.Voter, Leader: m.ID == leader,
		}
		if one.ID == r.cfg.Name {
			one.Applied, one.Contact = r.fsm.line.get(), r.cfg.Now().UnixMilli()
		} else {
			one.Applied, one.Contact = r.heard.of(one.ID)
		}
		out = append(out, one)
	}
	return out
}

// Members lists the members, having asked each of them how far it is. Who does
// not answer within a second, or ctx, is listed with what was last heard of it.
// It works on any replica, also without a leader.
func (r *Replica) Members(ctx context.Context) ([]raftstore.Member, error) {
	if err := r.up(ctx); err != nil {
		return nil, err
	}
	ask, cancel := context.WithTimeout(ctx, askMember)
	defer cancel()
	r.askMembers(ask)
	_, leader := r.leads()
	return r.known(leader), nil
}

// askMembers asks every other member how far it is and reports who answered.
func (r *Replica) askMembers(ctx context.Context) map[raft.ServerID]bool {
	var (
		asking   sync.WaitGroup
		mu       sync.Mutex
		answered = map[raft.ServerID]bool{raft.ServerID(r.cfg.Name): true}
	)
	for _, m := range r.raft.GetConfiguration().Configuration().Servers {
		if string(m.ID) == r.cfg.Name {
			continue
		}
		asking.Add(1)
		go func() {
			defer asking.Done()
			state, err := r.stateOf(ctx, m)
			if err != nil {
				return
			}
			r.heard.note(string(m.ID), state.GetAppliedIndex(), r.cfg.Now())
			mu.Lock()
			answered[m.ID] = true
			mu.Unlock()
		}()
	}
	asking.Wait()
	return answered
}

func (r *Replica) stateOf(ctx context.Context, m raft.Server) (*storev1.StateResponse, error) {
	client, err := r.peers.client(string(m.Address))
	if err != nil {
		return nil, err
	}
	return client.State(ctx, &storev1.StateRequest{})
}

// hearsay is what the other members last said of themselves.
type hearsay struct {
	mu      sync.Mutex
	members map[string]heardOf
}

type heardOf struct {
	applied uint64
	at      int64
}

func (h *hearsay) of(id string) (applied uint64, at int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.members[id]
	return m.applied, m.at
}

func (h *hearsay) note(id string, applied uint64, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.members == nil {
		h.members = make(map[string]heardOf)
	}
	h.members[id] = heardOf{applied, now.UnixMilli()}
}

func (h *hearsay) forget(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.members, id)
}

// usage is how much of the disk the replica uses, measured now and then.
type usage struct {
	mu   sync.Mutex
	at   time.Time
	last int64
}

func (u *usage) bytes(folder string) int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.at.IsZero() && time.Since(u.at) < diskSample {
		return u.last
	}
	u.at, u.last = time.Now(), 0
	// Files come and go while this looks: what cannot be read is not counted.
	_ = filepath.WalkDir(folder, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil
		}
		if info, err := d.Info(); err == nil {
			u.last += info.Size()
		}
		return nil
	})
	return u.last
}
