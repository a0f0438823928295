package replica

import (
	"context"
	"fmt"
	"sync"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
)

// A level numbers the stored forms that the program around the replicas writes. What it means is that program's
// business: here replicas tell each other which they understand, and nobody is taken in who understands less than is
// stored. Which level is stored is raised under HoldMembers, so that raising it and taking somebody in exclude each
// other; both happen on the leader alone, and a change of leader fences what the one before was about to commit.

// MemberLevel is which level a member understands, and whether it has said so just now.
type MemberLevel struct {
	ID    string
	Level uint32
	Heard bool
}

// HoldMembers asks every member, voter or learner, which level it understands, and has decide act on that, on the leader
// only. Until decide returns, nobody is added or promoted: it must heed its context.
func (r *Replica) HoldMembers(ctx context.Context, decide func(context.Context, []MemberLevel) error) error {
	if err := r.up(ctx); err != nil {
		return err
	}
	r.levels.Lock()
	defer r.levels.Unlock()
	lead := r.lead.established()
	if lead == nil {
		return raftstore.ErrNotLeader
	}
	ctx, cancel := context.WithTimeout(ctx, configTimeout)
	defer cancel()
	defer context.AfterFunc(lead.ctx, cancel)()
	return decide(ctx, r.askLevels(ctx))
}

func (r *Replica) askLevels(ctx context.Context) []MemberLevel {
	ctx, cancel := context.WithTimeout(ctx, askMember)
	defer cancel()
	servers := r.servers()
	out := make([]MemberLevel, len(servers))
	var asking sync.WaitGroup
	for i, m := range servers {
		out[i] = MemberLevel{ID: string(m.ID)}
		if out[i].ID == r.cfg.Name {
			out[i].Level, out[i].Heard = r.cfg.FeatureLevel, true
			continue
		}
		asking.Go(func() {
			if state, err := r.stateOf(ctx, m); err == nil && state.GetId() == out[i].ID {
				out[i].Level, out[i].Heard = state.GetFeatureLevel(), true
			}
		})
	}
	asking.Wait()
	return out
}

// understands refuses a replica that understands less than is stored.
func (r *Replica) understands(ctx context.Context, id string, level uint32) error {
	stored, err := r.cfg.StoredLevel(ctx)
	if err != nil {
		return fmt.Errorf("which feature level is stored: %w", err)
	}
	if level >= stored {
		return nil
	}
	return fmt.Errorf("%w: the cluster stores forms of feature level %d and %s understands levels up to %d: "+
		"install the release of the other replicas on its machine, then start it again", raftstore.ErrTooOld, stored, id, level)
}

// addLearner adds a replica that has said which level it understands.
func (r *Replica) addLearner(ctx context.Context, id, address string, level uint32) error {
	r.levels.Lock()
	defer r.levels.Unlock()
	if err := r.understands(ctx, id, level); err != nil { // it may have risen since
		return err
	}
	err := configError(r.outcome(r.raft.AddNonvoter(raft.ServerID(id), raft.ServerAddress(address), 0, configTimeout)))
	if err == nil {
		r.log.Info("member added", "member", id, "address", address)
	}
	return err
}
