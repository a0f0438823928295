package failover

import "time"

const (
	// RequestTimeout is how long the other voters have to respond to a PledgeRequest: each may
	// probe the leader first.
	RequestTimeout = 2 * ProbeTimeout
	// PledgeDuration is how long a pledge lasts while its candidate still requests the pledges of
	// other voters. It is also the time that a candidate waits before its next round, for each
	// voter with a more up-to-date log.
	PledgeDuration = 50 * time.Millisecond
)

// Settings are the ID and the timeouts of this replica.
type Settings struct {
	Self string // ID of this replica
	// HeartbeatTimeout is how long a leader may be silent before its followers call an election.
	HeartbeatTimeout time.Duration
}

// ElectionPledge is how long a pledge lasts that confirms a candidate of whom a majority is in
// favor. On a busy machine the votes may take hundreds of milliseconds. If a second replica became
// a candidate during that time, the votes could be divided. The next election would then start only
// after an election timeout.
func (s Settings) ElectionPledge() time.Duration { return s.HeartbeatTimeout / 2 }

// Tally counts the responses to the pledge requests of one round. The requester itself counts as
// the first pledge.
type Tally struct {
	Pledged int // number of voters that have pledged their vote, including the requester
	Better  int // number of voters that have responded and have a more up-to-date log than the requester

	majority, outstanding int
}

// PledgeResponse is the response of a voter to a PledgeRequest. If the voter does not respond, it
// is zero.
type PledgeResponse struct {
	Pledged   bool
	BetterLog bool // the voter's log is more up to date than the requester's
}

// NewTally returns a Tally for the given number of requests. majority is the number of pledges that
// the requester needs, including its own.
func NewTally(requests, majority int) Tally {
	return Tally{Pledged: 1, majority: majority, outstanding: requests}
}

// Add counts the response to one request. If the voter has not responded, r must be zero.
func (t *Tally) Add(r PledgeResponse) {
	t.outstanding--
	if r.Pledged {
		t.Pledged++
	}
	if r.BetterLog {
		t.Better++
	}
}

// IsDone reports whether a majority has pledged its votes or all requests have been answered. A
// voter on a slow machine does not delay the campaign once a majority has pledged.
func (t *Tally) IsDone() bool { return t.Pledged >= t.majority || t.outstanding <= 0 }

// Step is the next step of a campaign.
type Step int

// The possible steps of a campaign.
const (
	// Stop ends the campaign.
	Stop Step = iota
	// Request sends a PledgeRequest to all other voters except the exited leader, counts the
	// responses in a Tally until it is done, and calls FinishRound.
	Request
	// Stand makes this replica a candidate.
	Stand
	// Wait pauses and then calls StartRound.
	Wait
)

// Action is the next step of a campaign, with the arguments of the step.
type Action struct {
	Step     Step
	Confirm  bool          // for Request: the request confirms pledges of the previous round
	Majority int           // for Request: the number of pledges needed, including this replica's own
	Voters   int           // for Stand: the number of voters
	Pause    time.Duration // for Wait: how long to wait
}

// Campaign is the attempt of one follower to replace a leader after it has found the leader's
// process exited. It is not safe for concurrent use.
type Campaign struct {
	settings Settings
	leader   string
	contact  time.Time // when raft had last received a message of a leader before the campaign started
	voters   int
	majority int
	confirms bool // the current round confirms pledges
}

// NewCampaign returns a campaign in which this replica tries to replace a leader. contact is the
// time at which raft last received a message of a leader.
func NewCampaign(s Settings, leader string, contact time.Time) *Campaign {
	return &Campaign{settings: s, leader: leader, contact: contact}
}

// StartRound starts a round of requests. It returns Request, or Stop if this replica has no vote or
// its disk is stalled. v is the current state of raft.
func (c *Campaign) StartRound(v View) Action {
	if !v.isVoter(c.settings.Self) || v.Log.isStalled() {
		return Action{Step: Stop} // it would not be elected, or could not vote for itself
	}
	c.voters, c.majority, c.confirms = len(v.Voters), v.majoritySize(), false
	return Action{Step: Request, Majority: c.majority}
}

// FinishRound returns the next step after a round of requests. t is the result of the round. p is
// this replica's own pledge, and v is the current state of raft. jitter is a random duration below
// PledgeDuration, by which the pauses of several campaigns differ.
//
// If one of three voters has exited, only the one of the other two with the more up-to-date log
// receives a pledge. With more voters, two candidates can each receive the pledges of a majority,
// if the pledges to the first expire before its election. A second round therefore confirms the
// pledges.
func (c *Campaign) FinishRound(p *Pledge, v View, t Tally, now time.Time, jitter time.Duration) Action {
	self := c.settings.Self
	won := t.Pledged >= c.majority
	if won && !c.confirms && c.majority > 2 && p.Grant(c.leader, self, PledgeDuration, now) {
		c.confirms = true
		return Action{Step: Request, Confirm: true, Majority: c.majority}
	}
	silence := now.Sub(c.contact)
	if v.Role != Follower || !v.LastContact.Equal(c.contact) || silence > c.settings.HeartbeatTimeout*3/4 {
		return Action{Step: Stop} // the leader is alive, or the check of a silent leader is due
	}
	if won && p.Grant(c.leader, self, c.settings.ElectionPledge(), now) {
		return Action{Step: Stand, Voters: c.voters}
	}
	return Action{Step: Wait, Pause: time.Duration(t.Better)*PledgeDuration + jitter}
}
