package replica

import (
	"context"
	"fmt"
	"sync"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
)

// Found is a member as the leader has just found it. What it says of itself is zero when it was not Heard.
type Found struct {
	ID      string
	Voter   bool
	Heard   bool // it has just answered; this replica itself always has
	Standby bool
	Applied uint64 // its last raft index
	Level   uint32 // the feature level that it understands
}

// LookAround asks every member how it is, and says up to which raft index the group had committed before it asked; on the
// leader only, ErrNotLeader elsewhere. Who does not answer within a second, or ctx, is not Heard.
func (r *Replica) LookAround(ctx context.Context) (found []Found, commit uint64, err error) {
	if err := r.up(ctx); err != nil {
		return nil, 0, err
	}
	lead := r.lead.established()
	if lead == nil {
		return nil, 0, raftstore.ErrNotLeader
	}
	ctx, cancel := context.WithTimeout(ctx, askMember)
	defer cancel()
	defer context.AfterFunc(lead.ctx, cancel)()
	commit = r.raft.CommitIndex()
	servers := r.servers()
	found = make([]Found, len(servers))
	var asking sync.WaitGroup
	for i, m := range servers {
		found[i] = Found{ID: string(m.ID), Voter: m.Suffrage == raft.Voter}
		one := &found[i]
		if one.ID == r.cfg.Name {
			one.Heard, one.Standby, one.Applied, one.Level = true, r.cfg.Standby(), r.fsm.line.get(), r.cfg.FeatureLevel
			continue
		}
		asking.Go(func() {
			if state, err := r.stateOf(ctx, m); err == nil && state.GetId() == one.ID {
				one.Heard, one.Standby, one.Applied, one.Level = true, state.GetStandby(), state.GetAppliedIndex(), state.GetFeatureLevel()
				r.heard.note(one.ID, one.Applied, r.cfg.Now())
			}
		})
	}
	asking.Wait()
	if lead.ctx.Err() != nil { // those who were silent then were not asked for long
		return nil, 0, raftstore.ErrNotLeader
	}
	return found, commit, nil
}

// RemoveSilent takes a voter out that does not answer, on the leader only: unlike RemoveMember it is never handed to another
// leader, who has not seen that it does not. Errors: ErrNotLeader; ErrInvalid when it answers; otherwise those of RemoveMember.
func (r *Replica) RemoveSilent(ctx context.Context, id string) error {
	if err := r.leadingFor(ctx); err != nil {
		return err
	}
	s, err := r.member(id)
	if err != nil {
		return err
	}
	ask, cancel := context.WithTimeout(ctx, askMember)
	_, err = r.stateOf(ask, s)
	cancel()
	if err == nil {
		return fmt.Errorf("%w: replica %s answers", raftstore.ErrInvalid, id)
	}
	if err := r.leadingFor(ctx); err != nil {
		return err
	}
	return r.removeHere(ctx, id)
}

// PromoteHere is Promote on the leader only: it is never handed to another leader.
func (r *Replica) PromoteHere(ctx context.Context, id string) error {
	if err := r.leadingFor(ctx); err != nil {
		return err
	}
	return r.promoteHere(ctx, id)
}

func (r *Replica) leadingFor(ctx context.Context) error {
	if err := r.up(ctx); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if r.lead.established() == nil {
		return raftstore.ErrNotLeader
	}
	return nil
}
