package replica

import (
	"github.com/hashicorp/raft"
)

// What a raft would say to another one, said by a test.

// AskForVote asks another replica for its vote, as one to whom its leader hands over.
func (r *Replica) AskForVote(of *Replica, term uint64) error {
	index, last := r.lastEntry()
	req := &raft.RequestVoteRequest{RPCHeader: r.header(), Term: term, Candidate: r.header().Addr, LastLogIndex: index, LastLogTerm: last, LeadershipTransfer: true}
	var resp raft.RequestVoteResponse
	return r.trans.RequestVote(raft.ServerID(of.cfg.Name), raft.ServerAddress(of.address), req, &resp)
}

// SpeakAsLeader tells another replica that this one leads in a term.
func (r *Replica) SpeakAsLeader(to *Replica, term uint64) error {
	req := &raft.AppendEntriesRequest{RPCHeader: r.header(), Term: term, Leader: r.header().Addr}
	var resp raft.AppendEntriesResponse
	return r.trans.AppendEntries(raft.ServerID(to.cfg.Name), raft.ServerAddress(to.address), req, &resp)
}

// Demote takes this replica's own vote away while it leads.
func (r *Replica) Demote() error {
	return r.outcome(r.raft.DemoteVoter(raft.ServerID(r.cfg.Name), 0, configTimeout))
}

// TellToStand tells another replica to stand for election at once, as a leader does that hands over.
func (r *Replica) TellToStand(other *Replica) error {
	var resp raft.TimeoutNowResponse
	return r.trans.TimeoutNow(raft.ServerID(other.cfg.Name), raft.ServerAddress(other.address), &raft.TimeoutNowRequest{RPCHeader: r.header()}, &resp)
}

// Follows returns the leader that raft takes for its own, and whether raft is a candidate.
func (r *Replica) Follows() (leader string, candidate bool) {
	candidate = r.raft.State() == raft.Candidate
	_, id := r.raft.LeaderWithID()
	return string(id), candidate
}
