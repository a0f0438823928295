package replica

import (
	"github.com/hashicorp/raft"
)

// Messages of raft that tests send.

// AskForVote requests the vote of another replica, as the target of a leadership transfer does.
func (r *Replica) AskForVote(of *Replica, term uint64) error {
	index, last := r.node.lastLogEntry()
	req := &raft.RequestVoteRequest{RPCHeader: r.net.rpcHeader(), Term: term, Candidate: r.net.rpcHeader().Addr,
		LastLogIndex: index, LastLogTerm: last, LeadershipTransfer: true}
	var resp raft.RequestVoteResponse
	return r.net.trans.RequestVote(raft.ServerID(of.node.cfg.Name), raft.ServerAddress(of.net.address), req, &resp)
}

// SendHeartbeat sends another replica a heartbeat of this one as the leader of a term.
func (r *Replica) SendHeartbeat(to *Replica, term uint64) error {
	req := &raft.AppendEntriesRequest{RPCHeader: r.net.rpcHeader(), Term: term, Leader: r.net.rpcHeader().Addr}
	var resp raft.AppendEntriesResponse
	return r.net.trans.AppendEntries(raft.ServerID(to.node.cfg.Name), raft.ServerAddress(to.net.address), req, &resp)
}

// Demote removes this replica's own vote while it leads.
func (r *Replica) Demote() error {
	return r.node.awaitFuture(r.node.raft.DemoteVoter(raft.ServerID(r.node.cfg.Name), 0, configTimeout))
}

// SendTimeoutNow sends another replica a TimeoutNow, as a leader does that transfers its leadership.
func (r *Replica) SendTimeoutNow(other *Replica) error {
	var resp raft.TimeoutNowResponse
	return r.net.trans.TimeoutNow(raft.ServerID(other.node.cfg.Name), raft.ServerAddress(other.net.address),
		&raft.TimeoutNowRequest{RPCHeader: r.net.rpcHeader()}, &resp)
}

// RaftLeader returns the leader that raft reports, and whether raft is a candidate.
func (r *Replica) RaftLeader() (leader string, candidate bool) {
	candidate = r.node.raft.State() == raft.Candidate
	_, id := r.node.raft.LeaderWithID()
	return string(id), candidate
}
