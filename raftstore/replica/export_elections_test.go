package replica

import (
	"context"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// The functions of elections that tests call.

// FindsLeaderExited reports whether this replica still follows the leader and finds its process exited.
func (r *Replica) FindsLeaderExited(ctx context.Context, leader string) bool {
	id, address, _ := r.node.role.currentLeader()
	return id == leader && r.elections.probeExited(ctx, id, address)
}

// RunCampaign runs the campaign of a replica that has found its leader exited.
func (r *Replica) RunCampaign(ctx context.Context, leader string) {
	r.elections.runCampaign(ctx, leader)
}

// BecomeCandidateFor makes this replica a candidate, as after the pledges of a majority.
func (r *Replica) BecomeCandidateFor(leader string) { r.elections.becomeCandidate(leader, 2, 3) }

// GrantsPledge reports whether this replica pledges itself to another one in the place of a leader.
func (r *Replica) GrantsPledge(ctx context.Context, leader string, to *Replica) bool {
	req := &storev1.StateRequest{EndedLeader: leader, From: to.node.cfg.Name}
	req.LastIndex, req.LastTerm = to.node.lastLogEntry()
	resp, err := (&peerServer{r: r}).State(ctx, req)
	return err == nil && resp.GetEnded()
}
