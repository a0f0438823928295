package replica

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// raft tells when its role changes, by an observation, and not why. roleLog finds
// the reason in what raft could know at that moment: who led and when it was heard,
// what was asked of this replica, and what the peers have answered to raft, which
// overheard listens to. So it does not depend on the words of raft's log. raft calls
// observe on the goroutine that changes the role, before it goes on.
type roleLog struct {
	self      string
	heartbeat time.Duration // silence of a leader after which a follower looks for another
	lease     time.Duration // silence of a majority after which a leader steps down
	changed   func(from, to, reason string)
	campaigns func() // told of each election that this replica begins

	mu       sync.Mutex
	role     string
	leader   string               // whom raft follows; "" when nobody
	before   string               // whom it followed last, if it has not changed its role since
	intends  string               // what this replica does that is to end its leadership
	vote     voteAsked            // the last vote that it was asked for
	later    laterTerm            // the latest term that a peer has answered with
	answered map[string]time.Time // when the peers answered the leader last
	ballot   map[string]string    // what the voters have said in this election
	asked    bool                 // for votes in this election, beyond those in advance
	refused  string               // what was logged last of a ballot that elected nobody
	waiting  func(reason string)  // logs a change whose reason is yet to be heard
	stopped  bool                 // a raft that is told to end may change its role once more
}

type voteAsked struct {
	by       string
	term     uint64
	handOver bool // a leader wants it so: who follows one votes all the same
	at       time.Time
}

type laterTerm struct {
	from string
	term uint64
}

// situation is what raft knows when it changes its role.
type situation struct {
	term   uint64
	silent time.Duration // since it heard from its leader
	voters []string
}

const (
	// voteFresh is for how long a vote that was asked for may explain a change:
	// raft acts on it at once.
	voteFresh = 200 * time.Millisecond
	// reasonPatience is how long a reason may come after the change that it
	// explains: raft writes its term in between, then it names its leader.
	reasonPatience = time.Second
)

func (l *roleLog) init(r *Replica, conf *raft.Config) {
	l.self, l.heartbeat, l.lease = r.cfg.Name, r.cfg.HeartbeatTimeout-time.Microsecond, conf.LeaderLeaseTimeout
	l.answered, l.ballot = make(map[string]time.Time), make(map[string]string)
	l.campaigns = func() { r.meters.elections.Add(1) }
	l.changed = func(from, to, reason string) { r.log.Info("role changed", "from", from, "to", to, "reason", reason) }
}

// watch follows a raft that has just come up.
func (l *roleLog) watch(up *raft.Raft) {
	up.RegisterObserver(raft.NewObserver(nil, false, l.observe))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begin(up.State())
}

// begin notes the first role; l.mu is held.
func (l *roleLog) begin(s raft.RaftState) {
	if l.role == "" {
		l.role = roleName(s)
		l.changed("none", l.role, "started")
	}
}

// observe is a filter of observations, which lets none through.
func (l *roleLog) observe(o *raft.Observation) bool {
	switch d := o.Data.(type) {
	case raft.RaftState:
		if d != raft.Shutdown {
			s := situation{term: o.Raft.CurrentTerm(), silent: time.Since(o.Raft.LastContact())}
			for _, v := range o.Raft.GetConfiguration().Configuration().Servers {
				if v.Suffrage == raft.Voter {
					s.voters = append(s.voters, string(v.ID))
				}
			}
			l.moved(d, s)
		}
	case raft.LeaderObservation:
		l.led(string(d.LeaderID))
	case raft.RequestVoteRequest:
		l.mu.Lock()
		l.vote = voteAsked{by: string(d.ID), term: d.Term, handOver: d.LeadershipTransfer, at: time.Now()}
		l.mu.Unlock()
	}
	return false
}

// moved logs a change of role.
func (l *roleLog) moved(state raft.RaftState, s situation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped {
		return
	}
	l.begin(raft.Follower) // as every raft does
	l.explain("raft gave none")
	from, to := l.role, roleName(state)
	if from == to {
		return
	}
	l.role = to
	switch state {
	case raft.Candidate:
		l.campaign()
		l.changed(from, to, l.whyCandidate(s))
	case raft.Leader:
		l.changed(from, to, fmt.Sprintf("elected in term %d", s.term))
		clear(l.answered)
		for _, v := range s.voters {
			l.answered[v] = time.Now()
		}
	default:
		l.waiting = func(reason string) { l.changed(from, to, reason) }
		if reason := l.whyFollower(from, s); reason != "" {
			l.explain(reason)
		} else {
			time.AfterFunc(reasonPatience, l.giveUp)
		}
	}
	l.leader, l.before, l.intends, l.vote = "", "", "", voteAsked{}
}

func (l *roleLog) whyCandidate(s situation) string {
	switch {
	case l.intends != "":
		return l.intends
	case s.silent < l.heartbeat && l.before != "":
		return "leader " + l.before + " hands over"
	case s.silent < l.heartbeat:
		return "the leader hands over"
	case l.before != "" && l.before != l.self:
		return "leader " + l.before + " is silent"
	default:
		return "no leader is known"
	}
}

// whyFollower is why a leader or candidate is none any more, as far as is known;
// "" when it will be heard: a leader has spoken, who is named next.
func (l *roleLog) whyFollower(from string, s situation) string {
	leads := from == roleName(raft.Leader)
	switch v := l.vote; {
	case leads && l.intends != "":
		return l.intends
	case v.term > s.term && (v.handOver || !leads) && time.Since(v.at) < voteFresh:
		return fmt.Sprintf("%s asks for votes in term %d, this replica was in term %d", v.by, v.term, s.term)
	case l.later.term > s.term:
		return fmt.Sprintf("%s is in term %d, this replica was in term %d", l.later.from, l.later.term, s.term)
	case leads && !slices.Contains(s.voters, l.self):
		return "removed from the voters"
	}
	if silent := l.silentVoters(s); leads && len(s.voters)-len(silent) <= len(s.voters)/2 {
		return "lease lost: no answer in time from " + strings.Join(silent, ", ")
	}
	return ""
}

// silentVoters are those that have not answered this leader for a lease.
func (l *roleLog) silentVoters(s situation) []string {
	var silent []string
	for _, v := range s.voters {
		if at, known := l.answered[v]; v != l.self && known && time.Since(at) > l.lease {
			silent = append(silent, v)
		}
	}
	slices.Sort(silent)
	return silent
}

// led notes whom raft follows, which explains a change that waits for its reason.
func (l *roleLog) led(leader string) {
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
	l.explain(leader + " leads")
}

// explain logs the change that waits for its reason, if any; l.mu is held.
func (l *roleLog) explain(reason string) {
	if l.waiting != nil {
		l.waiting(reason)
		l.waiting = nil
	}
}

func (l *roleLog) giveUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.explain("raft gave none")
}

// intend says what this replica is about to do that ends its leadership, or why it stands for election; done
// takes that back when it has come to nothing.
func (l *roleLog) intend(what string) (done func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.intends = what
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.intends = ""
	}
}

// stop tells of the end of the last role.
func (l *roleLog) stop(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.explain("raft gave none")
	if l.role == "" {
		return // raft never came up
	}
	reason := "asked to stop"
	if cause != nil {
		reason = cause.Error()
	}
	l.changed(l.role, "none", reason)
	l.role, l.stopped = "", true
}

// Elections.

// campaign begins a ballot; l.mu is held.
func (l *roleLog) campaign() {
	clear(l.ballot)
	l.asked = false
	l.campaigns()
}

// ask notes that a candidate asks a voter, in advance or for its vote. Asking in
// advance again is what raft does when nobody was elected in time.
func (l *roleLog) ask(voter string, advance bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, again := l.ballot[voter]; l.role == roleName(raft.Candidate) && advance && (again || l.asked) {
		result := l.result()
		l.campaign()
		if result != l.refused { // a minority may go on for hours
			l.changed(l.role, l.role, "nobody was elected in time: "+result)
		}
		l.refused = result
	}
	l.asked = l.asked || !advance
	l.ballot[voter] = "no answer from"
}

// result tells what the voters have said in an election.
func (l *roleLog) result() string {
	said := make(map[string][]string)
	for voter, what := range l.ballot {
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

// voted notes the answer of a voter.
func (l *roleLog) voted(voter string, term uint64, granted bool, err error) {
	if err != nil {
		return
	}
	l.heard(voter, term)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ballot[voter] = "refused by"
	if granted {
		l.ballot[voter] = "elected by"
	}
}

// heard notes that a peer has answered, in a term of its own.
func (l *roleLog) heard(peer string, term uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered[peer] = time.Now()
	if term > l.later.term {
		l.later = laterTerm{peer, term}
	}
}

func roleName(s raft.RaftState) string {
	switch s {
	case raft.Leader:
		return "leader"
	case raft.Candidate:
		return "candidate"
	default:
		return "follower"
	}
}

// overheard is a transport that lets roleLog hear what the peers answer.
type overheard struct {
	*patientTransport
	roles *roleLog
}

// AppendEntries implements raft.Transport.
func (o *overheard) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	err := o.patientTransport.AppendEntries(id, target, args, resp)
	if err == nil {
		o.roles.heard(string(id), resp.Term)
	}
	return err
}

// InstallSnapshot implements raft.Transport.
func (o *overheard) InstallSnapshot(id raft.ServerID, target raft.ServerAddress, args *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, data io.Reader) error {
	err := o.patientTransport.InstallSnapshot(id, target, args, resp, data)
	if err == nil {
		o.roles.heard(string(id), resp.Term)
	}
	return err
}

// RequestVote implements raft.Transport.
func (o *overheard) RequestVote(id raft.ServerID, target raft.ServerAddress, args *raft.RequestVoteRequest, resp *raft.RequestVoteResponse) error {
	o.roles.ask(string(id), false)
	err := o.patientTransport.RequestVote(id, target, args, resp)
	o.roles.voted(string(id), resp.Term, resp.Granted, err)
	return err
}

// RequestPreVote implements raft.WithPreVote.
func (o *overheard) RequestPreVote(id raft.ServerID, target raft.ServerAddress, args *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse) error {
	o.roles.ask(string(id), true)
	err := o.patientTransport.RequestPreVote(id, target, args, resp)
	o.roles.voted(string(id), resp.Term, resp.Granted, err)
	return err
}
