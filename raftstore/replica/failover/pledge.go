package failover

import "time"

// Pledge is the promise of one voter to vote for one candidate in place of an exited leader. It
// lasts for a limited time, so that no two candidates divide the votes. The zero value is ready to
// use. A Pledge is not safe for concurrent use.
type Pledge struct {
	leader    string // the exited leader
	candidate string
	expires   time.Time
	replaces  string // the leader that this replica last tried to replace as a candidate
}

// Grant pledges the voter's vote to a candidate, possibly the voter itself, for the duration. It
// returns false if the vote is pledged to another candidate in place of the same leader. A pledge
// that lasts longer is not shortened.
func (p *Pledge) Grant(leader, candidate string, duration time.Duration, now time.Time) bool {
	lasts := p.leader == leader && now.Before(p.expires)
	if lasts && p.candidate != candidate {
		return false
	}
	if expires := now.Add(duration); !lasts || expires.After(p.expires) {
		p.leader, p.candidate, p.expires = leader, candidate, expires
	}
	return true
}

// RecordCandidacy records that this replica becomes a candidate in place of the given leader.
func (p *Pledge) RecordCandidacy(leader string) { p.replaces = leader }

// PledgeRequest is the message of a campaigning replica to another voter.
type PledgeRequest struct {
	Leader string      // the leader that has exited
	From   LogPosition // the end of the campaigning replica's log
	// Confirm means that a majority has pledged its votes already, and that the pledge is requested
	// for the election itself. The voter does not probe the leader again.
	Confirm bool
}

// Answer is the decision of a voter about a PledgeRequest.
type Answer int

// The possible answers of a voter to a PledgeRequest.
const (
	Refuse Answer = iota
	Grant
	// ProbeLeader means that the voter must first run an ExitProbe of the leader. If the leader has
	// exited, AnswerAfterProbe decides; otherwise the voter refuses.
	ProbeLeader
)

// AnswerRequest returns the decision of this voter about a request. v is the current state of raft.
//
// A request about a leader that this voter does not follow is refused, because this voter has
// elected another leader, or will. A request of a replica without a vote is refused. It cannot be
// elected, and the pledge would be withheld from replicas that can.
func (p *Pledge) AnswerRequest(s Settings, v View, req PledgeRequest, now time.Time) Answer {
	if v.Leader != req.Leader || v.Leader == s.Self || !v.isVoter(req.From.ID) {
		return Refuse
	}
	if !req.Confirm {
		return ProbeLeader
	}
	if p.grantTo(v, req, s.ElectionPledge(), now) {
		return Grant
	}
	return Refuse
}

// AnswerAfterProbe reports whether the voter pledges its vote to the requester, after a probe has
// found the leader's process exited. v must be read after the probe.
func (p *Pledge) AnswerAfterProbe(v View, req PledgeRequest, now time.Time) bool {
	return p.grantTo(v, req, PledgeDuration, now)
}

func (p *Pledge) grantTo(v View, req PledgeRequest, duration time.Duration, now time.Time) bool {
	return !req.From.Less(v.Log) && p.Grant(req.Leader, req.From.ID, duration, now)
}
