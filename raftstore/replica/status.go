package replica

import (
	"context"
	"fmt"
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
	// memberTimeout is the timeout of a request for the state of one member.
	memberTimeout = time.Second
	// diskSample is how long a measurement of the disk usage remains valid.
	diskSample = 5 * time.Second
)

// Status returns the state of the raft cluster as this replica knows it. It sends no requests: the
// states of other members are the last known ones. Members requests current states.
func (r *Replica) Status() raftstore.Status {
	v := r.node.fsm.View()
	watchers, _ := r.node.fsm.Hub.Watchers()
	s := raftstore.Status{
		ID: r.node.cfg.Name, Revision: v.Revision(), Compacted: v.Compacted(),
		Keys: v.Keys(), Bytes: v.Bytes(), AppliedIndex: r.node.fsm.Line.CurrentIndex(),
		Quota: max(0, r.node.cfg.Quota), Watchers: watchers, HistoryBytes: v.HistoryBytes(),
		Alarms: slices.Clone(v.Alarms()),
	}
	select {
	case <-r.node.running:
	default:
		return s
	}
	s.Term, s.CommitIndex = r.node.raft.CurrentTerm(), r.node.raft.CommitIndex()
	s.Leaders = r.tasks.lately.CountChanges(time.Now())
	s.DiskBytes = r.snapshots.usage.measureBytes(r.node.cfg.Storage.DataDir)
	_, leader := r.node.raftLeader()
	s.Leader = string(leader)
	s.Members = r.members.listCached(leader)
	return s
}

// listCached returns the members with their last known state. leader is marked as the leader.
func (r *membership) listCached(leader raft.ServerID) []raftstore.Member {
	var out []raftstore.Member
	for _, m := range r.node.raft.GetConfiguration().Configuration().Servers {
		one := raftstore.Member{
			ID: string(m.ID), Address: string(m.Address), Voter: m.Suffrage == raft.Voter, Leader: m.ID == leader,
		}
		if one.ID == r.node.cfg.Name {
			one.Applied, one.Contact = r.node.fsm.Line.CurrentIndex(), r.node.cfg.Now().UnixMilli()
		} else {
			one.Applied, one.Contact = r.heard.cachedState(one.ID)
		}
		out = append(out, one)
	}
	return out
}

// Members requests the state of each member and returns the members. For a member that does not
// respond within a second, or before ctx ends, it returns the last known state. It works on any
// replica, even without a leader.
func (r *Replica) Members(ctx context.Context) ([]raftstore.Member, error) {
	if err := r.node.awaitRunning(ctx); err != nil {
		return nil, err
	}
	ask, cancel := context.WithTimeout(ctx, memberTimeout)
	defer cancel()
	r.members.requestStates(ask)
	_, leader := r.node.raftLeader()
	return r.members.listCached(leader), nil
}

// requestStates requests the state of every other member and returns which members have responded.
func (r *membership) requestStates(ctx context.Context) map[raft.ServerID]bool {
	var (
		asking   sync.WaitGroup
		mu       sync.Mutex
		answered = map[raft.ServerID]bool{raft.ServerID(r.node.cfg.Name): true}
	)
	for _, m := range r.node.raft.GetConfiguration().Configuration().Servers {
		if string(m.ID) == r.node.cfg.Name {
			continue
		}
		asking.Add(1)
		go func() {
			defer asking.Done()
			state, err := r.net.requestState(ctx, m)
			if err != nil {
				return
			}
			r.heard.recordState(string(m.ID), state.GetAppliedIndex(), r.node.cfg.Now())
			mu.Lock()
			answered[m.ID] = true
			mu.Unlock()
		}()
	}
	asking.Wait()
	return answered
}

func (n *network) requestState(ctx context.Context, m raft.Server) (*storev1.StateResponse, error) {
	client, err := n.peers.Client(string(m.Address))
	if err != nil {
		return nil, err
	}
	return client.State(ctx, &storev1.StateRequest{})
}

// stateCache holds the last known state of the other members. It is safe for concurrent use.
type stateCache struct {
	mu      sync.Mutex
	members map[string]cachedMember
}

type cachedMember struct {
	applied uint64
	at      int64
}

func (h *stateCache) cachedState(id string) (applied uint64, at int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := h.members[id]
	return m.applied, m.at
}

func (h *stateCache) recordState(id string, applied uint64, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.members == nil {
		h.members = make(map[string]cachedMember)
	}
	h.members[id] = cachedMember{applied, now.UnixMilli()}
}

func (h *stateCache) dropMember(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.members, id)
}

// usage is the disk usage of the replica, measured at most once per diskSample.
type usage struct {
	mu   sync.Mutex
	at   time.Time
	last int64
}

func (u *usage) measureBytes(folder string) int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.at.IsZero() && time.Since(u.at) < diskSample {
		return u.last
	}
	u.at, u.last = time.Now(), 0
	// files may be removed during the walk: a file that cannot be read does not count
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

// MemberReport is the current state of a member. The fields that the member itself reports are zero
// unless Responded is set.
type MemberReport struct {
	ID        string
	Voter     bool
	Responded bool // the member has responded to this request, or is this replica
	Standby   bool
	Applied   uint64 // last raft index that the member has applied
	Level     uint32 // highest feature level that the member supports
}

// RequestReports requests the state of every member. It also returns the raft index up to which the
// cluster had committed before the requests. It works on the leader only, and returns ErrNotLeader
// on any other replica. Responded is false for a member that does not respond within a second, or
// before ctx ends.
func (r *Replica) RequestReports(ctx context.Context) (found []MemberReport, commit uint64, err error) {
	if err := r.node.awaitRunning(ctx); err != nil {
		return nil, 0, err
	}
	lead := r.node.lead.currentLeadership()
	if lead == nil {
		return nil, 0, raftstore.ErrNotLeader
	}
	ctx, cancel := context.WithTimeout(ctx, memberTimeout)
	defer cancel()
	defer context.AfterFunc(lead.ctx, cancel)()
	commit = r.node.raft.CommitIndex()
	servers := r.node.members()
	found = make([]MemberReport, len(servers))
	var asking sync.WaitGroup
	for i, m := range servers {
		found[i] = MemberReport{ID: string(m.ID), Voter: m.Suffrage == raft.Voter}
		one := &found[i]
		if one.ID == r.node.cfg.Name {
			one.Responded, one.Standby, one.Applied, one.Level = true, r.node.cfg.Program.Standby(),
				r.node.fsm.Line.CurrentIndex(), r.node.cfg.Program.FeatureLevel
			continue
		}
		asking.Go(func() {
			if state, err := r.net.requestState(ctx, m); err == nil && state.GetId() == one.ID {
				one.Responded, one.Standby, one.Applied, one.Level = true, state.GetStandby(), state.GetAppliedIndex(),
					state.GetFeatureLevel()
				r.members.heard.recordState(one.ID, one.Applied, r.node.cfg.Now())
			}
		})
	}
	asking.Wait()
	if lead.ctx.Err() != nil { // the members without a response had less than a second to answer
		return nil, 0, raftstore.ErrNotLeader
	}
	return found, commit, nil
}

// RemoveSilent removes a voter that does not respond. It works on the leader only. Unlike
// RemoveMember, it is never forwarded to another leader, which has not observed that the voter does
// not respond. Errors: ErrNotLeader; ErrInvalid if the voter responds; otherwise those of
// RemoveMember.
func (r *Replica) RemoveSilent(ctx context.Context, id string) error {
	if err := r.node.checkLeading(ctx); err != nil {
		return err
	}
	s, err := r.node.findMember(id)
	if err != nil {
		return err
	}
	ask, cancel := context.WithTimeout(ctx, memberTimeout)
	_, err = r.net.requestState(ask, s)
	cancel()
	if err == nil {
		return fmt.Errorf("%w: replica %s answers", raftstore.ErrInvalid, id)
	}
	if err := r.node.checkLeading(ctx); err != nil {
		return err
	}
	return r.members.removeLocally(ctx, id)
}

// PromoteOnLeader makes a learner a voting member as Promote does. It works on the leader only, and
// is never forwarded to another leader.
func (r *Replica) PromoteOnLeader(ctx context.Context, id string) error {
	if err := r.node.checkLeading(ctx); err != nil {
		return err
	}
	return r.members.promoteLocally(ctx, id)
}

func (n *node) checkLeading(ctx context.Context) error {
	if err := n.awaitRunning(ctx); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if n.lead.currentLeadership() == nil {
		return raftstore.ErrNotLeader
	}
	return nil
}
