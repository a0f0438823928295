// Package rolelog logs each change of a replica's raft role with its reason, and counts changes of
// the leader.
package rolelog

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// Log logs each change of this replica's raft role with its reason. raft reports a change by an
// observation, without a reason. Log derives the reason from the state of raft at that time: the
// leader and its last contact, the requests that this replica has received, and the responses of
// the peers. It does not depend on the messages in raft's log. raft calls observeRaft on the
// goroutine that changes the role, before that goroutine continues.
type Log struct {
	settings settings

	mu     sync.Mutex
	role   string
	leader string // the leader that raft follows; "" = none
	// the leader that raft followed last, if the role of this replica has not changed since
	before   string
	intends  string               // the announced action that ends the leadership or starts an election
	vote     voteAsked            // the last request for this replica's vote
	later    laterTerm            // the latest term in a response of a peer
	answered map[string]time.Time // when each peer last answered the leader
	ballot   ballot               // the responses in the current election
	waiting  func(reason string)  // logs a change of the role that waits for its reason; nil if no change waits
	stopped  bool                 // raft may change its role once more while it shuts down
}

// settings are the arguments of Initialize.
type settings struct {
	self      string
	heartbeat time.Duration // time without a message of the leader after which a follower starts an election
	lease     time.Duration // time without contact to a majority after which a leader steps down
	changed   func(from, to, reason string)
	campaigns func() // called for each election that this replica starts
}

// ballot holds the responses of the voters in an election.
type ballot struct {
	votes   map[string]string // response of each voter, by the ID of the voter
	asked   bool              // votes are requested, not only pre-votes
	refused string            // the last logged result that elected no replica
}

type voteAsked struct {
	by       string
	term     uint64
	handOver bool // the leader transfers its leadership: a follower votes although it has a leader
	at       time.Time
}

type laterTerm struct {
	from string
	term uint64
}

// situation is the state of raft when it changes its role.
type situation struct {
	term   uint64
	silent time.Duration // time since the last contact with the leader
	voters []string
}

const (
	// voteFresh is how long a request for a vote may be the reason of a role change. raft acts on
	// such a request immediately.
	voteFresh = 200 * time.Millisecond
	// reasonPatience is how long after a role change its reason may arrive: raft writes its term
	// first and reports its leader afterwards.
	reasonPatience = time.Second
)

// Initialize sets the replica's name, the time without a leader after which a follower starts an
// election, and the lease of a leader. campaigns is called for each election that this replica
// starts, and changed for each change of the role.
func (l *Log) Initialize(self string, heartbeat, lease time.Duration, campaigns func(),
	changed func(from, to, reason string)) {
	l.settings = settings{self: self, heartbeat: heartbeat, lease: lease, changed: changed, campaigns: campaigns}
	l.answered, l.ballot.votes = make(map[string]time.Time), make(map[string]string)
}

// WatchRaft registers the Log as an observer of raft, which has just started.
func (l *Log) WatchRaft(up *raft.Raft) {
	up.RegisterObserver(raft.NewObserver(nil, false, l.observeRaft))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.startRole(up.State())
}

// startRole records the first role of this replica. The caller holds l.mu.
func (l *Log) startRole(s raft.RaftState) {
	if l.role == "" {
		l.role = RoleName(s)
		l.settings.changed("none", l.role, "started")
	}
}

// observeRaft handles an observation of raft. It is registered as a filter, because raft calls
// filters synchronously. It returns false, so that raft does not deliver the observation to a
// channel.
func (l *Log) observeRaft(o *raft.Observation) bool {
	switch d := o.Data.(type) {
	case raft.RaftState:
		if d != raft.Shutdown {
			s := situation{term: o.Raft.CurrentTerm(), silent: time.Since(o.Raft.LastContact())}
			for _, v := range o.Raft.GetConfiguration().Configuration().Servers {
				if v.Suffrage == raft.Voter {
					s.voters = append(s.voters, string(v.ID))
				}
			}
			l.changeRole(d, s)
		}
	case raft.LeaderObservation:
		l.observeLeader(string(d.LeaderID))
	case raft.RequestVoteRequest:
		l.mu.Lock()
		l.vote = voteAsked{by: string(d.ID), term: d.Term, handOver: d.LeadershipTransfer, at: time.Now()}
		l.mu.Unlock()
	}
	return false
}

// changeRole logs a change of the role. If the reason is not known yet, it waits for the reason up
// to reasonPatience.
func (l *Log) changeRole(state raft.RaftState, s situation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped {
		return
	}
	l.startRole(raft.Follower) // every raft starts as a follower
	l.explainChange("unknown")
	from, to := l.role, RoleName(state)
	if from == to {
		return
	}
	l.role = to
	switch state {
	case raft.Candidate:
		l.startBallot()
		l.settings.changed(from, to, l.whyCandidate(s))
	case raft.Leader:
		l.settings.changed(from, to, fmt.Sprintf("elected in term %d", s.term))
		clear(l.answered)
		for _, v := range s.voters {
			l.answered[v] = time.Now()
		}
	default:
		l.waiting = func(reason string) { l.settings.changed(from, to, reason) }
		if reason := l.whyFollower(from, s); reason != "" {
			l.explainChange(reason)
		} else {
			time.AfterFunc(reasonPatience, l.explainUnknown)
		}
	}
	l.leader, l.before, l.intends, l.vote = "", "", "", voteAsked{}
}

func (l *Log) whyCandidate(s situation) string {
	switch {
	case l.intends != "":
		return l.intends
	case s.silent < l.settings.heartbeat && l.before != "":
		return "leader " + l.before + " transfers its leadership"
	case s.silent < l.settings.heartbeat:
		return "the leader transfers its leadership"
	case l.before != "" && l.before != l.settings.self:
		return "leader " + l.before + " is silent"
	default:
		return "no leader is known"
	}
}

// whyFollower returns the known reason why this replica becomes a follower. from is its previous
// role. It returns "" if the reason is still to come: a message of a leader, which raft reports
// next.
func (l *Log) whyFollower(from string, s situation) string {
	leads := from == RoleName(raft.Leader)
	switch v := l.vote; {
	case leads && l.intends != "":
		return l.intends
	case v.term > s.term && (v.handOver || !leads) && time.Since(v.at) < voteFresh:
		return fmt.Sprintf("%s asks for votes in term %d, this replica was in term %d", v.by, v.term, s.term)
	case l.later.term > s.term:
		return fmt.Sprintf("%s is in term %d, this replica was in term %d", l.later.from, l.later.term, s.term)
	case leads && !slices.Contains(s.voters, l.settings.self):
		return "removed from the voters"
	}
	if silent := l.silentVoters(s); leads && len(s.voters)-len(silent) <= len(s.voters)/2 {
		return "lease lost: no answer in time from " + strings.Join(silent, ", ")
	}
	return ""
}

// silentVoters returns the voters that have not responded to this leader for longer than its lease,
// sorted.
func (l *Log) silentVoters(s situation) []string {
	var silent []string
	for _, v := range s.voters {
		if at, known := l.answered[v]; v != l.settings.self && known && time.Since(at) > l.settings.lease {
			silent = append(silent, v)
		}
	}
	slices.Sort(silent)
	return silent
}

// observeLeader records the leader that raft follows. If a role change waits for its reason, the
// leader is the reason.
func (l *Log) observeLeader(leader string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if leader == "" {
		if l.leader != "" {
			l.before = l.leader
		}
		l.leader = ""
		return
	}
	l.leader, l.before = leader, ""
	l.explainChange(leader + " leads")
}

// explainChange logs the role change that waits for its reason, if there is one. The caller holds
// l.mu.
func (l *Log) explainChange(reason string) {
	if l.waiting != nil {
		l.waiting(reason)
		l.waiting = nil
	}
}

func (l *Log) explainUnknown() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.explainChange("unknown")
}

// AnnounceIntent records an action of this replica that ends its leadership or starts an election.
// The action is then logged as the reason of the role change. The caller calls the returned
// function if the action has failed or is over; it removes the record.
func (l *Log) AnnounceIntent(action string) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.intends = action
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.intends = ""
	}
}

// EndRole logs the end of the last role when this replica stops. cause is the error that stops the
// replica; nil means that it was requested to stop.
func (l *Log) EndRole(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.explainChange("unknown")
	if l.role == "" {
		return // raft has not started
	}
	reason := "asked to stop"
	if cause != nil {
		reason = cause.Error()
	}
	l.settings.changed(l.role, "none", reason)
	l.role, l.stopped = "", true
}

// Elections.

// startBallot starts the record of an election of this replica, without the responses of the
// previous election. The caller holds l.mu.
func (l *Log) startBallot() {
	clear(l.ballot.votes)
	l.ballot.asked = false
	l.settings.campaigns()
}

// RecordVoteRequest records that this candidate requests a vote from a voter, or a pre-vote if
// preVote is set. A second pre-vote request to the same voter means that no replica was elected in
// time, which is logged.
func (l *Log) RecordVoteRequest(voter string, preVote bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, again := l.ballot.votes[voter]; l.role == RoleName(raft.Candidate) && preVote && (again || l.ballot.asked) {
		result := l.ballotResult()
		l.startBallot()
		if result != l.ballot.refused { // a replica in a minority may repeat this for hours
			l.settings.changed(l.role, l.role, "no replica was elected in time: "+result)
		}
		l.ballot.refused = result
	}
	l.ballot.asked = l.ballot.asked || !preVote
	l.ballot.votes[voter] = "no answer from"
}

// ballotResult returns the responses of the voters in an election as a text.
func (l *Log) ballotResult() string {
	said := make(map[string][]string)
	for voter, what := range l.ballot.votes {
		said[what] = append(said[what], voter)
	}
	var out []string
	for _, what := range []string{"elected by", "refused by", "no answer from"} {
		if voters := said[what]; len(voters) > 0 {
			slices.Sort(voters)
			out = append(out, what+" "+strings.Join(voters, ", "))
		}
	}
	return strings.Join(out, "; ")
}

// RecordVote records a voter's response to a request for its vote or pre-vote. If err is not nil,
// the request has failed and is ignored.
func (l *Log) RecordVote(voter string, term uint64, granted bool, err error) {
	if err != nil {
		return
	}
	l.RecordResponse(voter, term)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ballot.votes[voter] = "refused by"
	if granted {
		l.ballot.votes[voter] = "elected by"
	}
}

// RecordResponse records that a peer has just responded, and the term in its response.
func (l *Log) RecordResponse(peer string, term uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered[peer] = time.Now()
	if term > l.later.term {
		l.later = laterTerm{peer, term}
	}
}

// RoleName returns the name of a role as it is logged.
func RoleName(s raft.RaftState) string {
	switch s {
	case raft.Leader:
		return "leader"
	case raft.Candidate:
		return "candidate"
	default:
		return "follower"
	}
}
