package replica

import (
	"context"
	"fmt"
	"sync"

	"github.com/hashicorp/raft"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica/peernet"
)

// admitMember returns the highest feature level of the replica at address, and admits the replica
// to this raft cluster if it has no data. It waits until the replica responds. It returns an error
// if the replica at the address is not named id, or belongs to another raft cluster. entry is the
// replica's current entry in the configuration, or zero. If settled is true, the replica need not
// respond, and the level is then 0.
func (m *membership) admitMember(ctx context.Context, id, address string, entry raft.Server,
	settled bool) (level uint32, err error) {
	client, err := m.net.peers.Client(address)
	if err != nil {
		return 0, err
	}
	for {
		ask, cancel := context.WithTimeout(ctx, memberTimeout)
		state, err := client.State(ask, &storev1.StateRequest{})
		cancel()
		if err == nil && !settled && state.GetId() == id {
			if err := m.checkLevel(ctx, id, state.GetFeatureLevel()); err != nil {
				return 0, err
			}
		}
		switch {
		case err != nil:
			if settled {
				return 0, nil
			}
		case state.GetId() != id:
			return 0, fmt.Errorf("%w: the replica at %s is %q and not %q", raftstore.ErrInvalid,
				address, state.GetId(), id)
		case state.GetGroup() == m.net.group.ID():
			return state.GetFeatureLevel(), nil
		case state.GetGroup() != "":
			return 0, fmt.Errorf(
				"%w: the replica at %s has the data of another raft cluster: move its data directory away first",
				raftstore.ErrInvalid, address)
		case entry.ID != "" && entry.Suffrage == raft.Voter:
			return 0, fmt.Errorf(
				"%w: %s is a voter, and the replica at %s has lost its disk: remove %s first, then add it",
				raftstore.ErrMemberExists, id, address, id)
		default:
			_, err := client.Admit(ctx, &storev1.AdmitRequest{Id: id, Group: m.net.group.ID()})
			return state.GetFeatureLevel(), statusToError(err)
		}
		if m.node.lead.currentLeadership() == nil {
			return 0, raftstore.ErrNotLeader
		}
		if stop := m.node.waitForRetry(ctx); stop != nil {
			return 0, fmt.Errorf("waiting for the replica at %s: %w (last attempt: %w)", address, stop, err)
		}
	}
}

// acceptAdmission makes this replica, which must be named id, a member of the raft cluster with the
// ID groupID. It returns an error if this replica belongs to another raft cluster. It has no effect
// if this replica is a member already.
func (n *network) acceptAdmission(id, groupID string) error {
	switch mine := n.group.ID(); {
	case id != n.node.cfg.Name:
		return fmt.Errorf("%w: this replica is %q and not %q", raftstore.ErrInvalid, n.node.cfg.Name, id)
	case groupID == "" || len(groupID) > peernet.PrefixBytes-8:
		return fmt.Errorf("%w: the identity of a raft cluster has %d bytes", raftstore.ErrInvalid, len(groupID))
	case mine == groupID:
		return nil
	case mine != "":
		return fmt.Errorf("%w: replica %s belongs to another raft cluster", raftstore.ErrInvalid, id)
	}
	if err := n.group.JoinCluster(groupID); err != nil {
		return err
	}
	n.node.log.Info("admitted to a raft cluster", "group", groupID)
	return nil
}

// A feature level is the version number of the formats that the program around the replicas stores.
// The program defines its meaning. Replicas report the highest level that they support. A replica
// that does not support the stored level cannot join. The stored level is raised under HoldMembers,
// so that no member is added meanwhile. Both changes are made on the leader only. After a change of
// the leader, commits of the previous leader are fenced.

// MemberLevel is the highest feature level that a member supports. Responded reports whether the
// member has responded to the request for its level; otherwise Level is 0.
type MemberLevel struct {
	ID        string
	Level     uint32
	Responded bool
}

// HoldMembers requests the feature level of every member, voter or learner, and calls decide with
// the levels. It returns the error of decide, or ErrNotLeader on a replica that does not lead. No
// member is added or promoted until decide returns. The context of decide ends with the leadership,
// and after configTimeout at the latest; decide must return when its context ends.
func (r *Replica) HoldMembers(ctx context.Context, decide func(context.Context, []MemberLevel) error) error {
	if err := r.node.awaitRunning(ctx); err != nil {
		return err
	}
	r.members.levels.Lock()
	defer r.members.levels.Unlock()
	lead := r.node.lead.currentLeadership()
	if lead == nil {
		return raftstore.ErrNotLeader
	}
	ctx, cancel := context.WithTimeout(ctx, configTimeout)
	defer cancel()
	defer context.AfterFunc(lead.ctx, cancel)()
	return decide(ctx, r.members.requestLevels(ctx))
}

func (r *membership) requestLevels(ctx context.Context) []MemberLevel {
	ctx, cancel := context.WithTimeout(ctx, memberTimeout)
	defer cancel()
	servers := r.node.members()
	out := make([]MemberLevel, len(servers))
	var asking sync.WaitGroup
	for i, m := range servers {
		out[i] = MemberLevel{ID: string(m.ID)}
		if out[i].ID == r.node.cfg.Name {
			out[i].Level, out[i].Responded = r.node.cfg.Program.FeatureLevel, true
			continue
		}
		asking.Go(func() {
			if state, err := r.net.requestState(ctx, m); err == nil && state.GetId() == out[i].ID {
				out[i].Level, out[i].Responded = state.GetFeatureLevel(), true
			}
		})
	}
	asking.Wait()
	return out
}

// checkLevel returns an error if the stored feature level exceeds level, which is the highest level
// that the replica id supports.
func (m *membership) checkLevel(ctx context.Context, id string, level uint32) error {
	stored, err := m.node.cfg.Program.StoredLevel(ctx)
	if err != nil {
		return fmt.Errorf("reading the stored feature level: %w", err)
	}
	if level >= stored {
		return nil
	}
	return fmt.Errorf("%w: the cluster stores forms of feature level %d and %s understands levels up to %d: "+
		"install the release of the other replicas on its machine, then start it again", raftstore.ErrTooOld,
		stored, id, level)
}

// addLearner adds the replica with the given ID and address to the raft cluster as a learner. level
// is the highest feature level that the replica supports.
func (m *membership) addLearner(ctx context.Context, id, address string, level uint32) error {
	m.levels.Lock()
	defer m.levels.Unlock()
	if err := m.checkLevel(ctx, id, level); err != nil { // the stored level may have risen since admitMember checked it
		return err
	}
	err := classifyConfigError(m.node.awaitFuture(m.node.raft.AddNonvoter(raft.ServerID(id),
		raft.ServerAddress(address), 0, configTimeout)))
	if err == nil {
		m.node.log.Info("member added", "member", id, "address", address)
	}
	return err
}
