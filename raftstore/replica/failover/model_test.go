package failover

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// The model runs the decisions of this package in a simulated raft cluster: messages with latencies, processes, connections,
// disks, votes and terms. A run takes the events in order of time. Before each event it may deviate: the message is lost or
// delayed, or a fault happens.

const (
	modelHeartbeat = 600 * time.Millisecond // HeartbeatTimeout
	modelLatency   = 2 * time.Millisecond
	modelEnd       = 1200 * time.Millisecond
)

// modelReplica is one replica of the model. Log, term and vote outlive its process.
type modelReplica struct {
	Settings
	up, listens, stalled bool
	log                  LogPosition
	term, votedIn        uint64 // votedIn is the last term in which it voted
	role                 Role
	leader               string
	contact              time.Time
	starts               int // of the process: timers and responses of earlier processes are ignored

	pledge    Pledge
	campaign  *Campaign
	campaigns time.Time // when the campaign started
	tally     Tally
	round     int
	ranking   Ranking
	reported  time.Time // the latest contact that a voter has reported
	awaited   int       // responses to the ranking
	rankRound int
	votes     map[string]bool
}

type modelEvent struct {
	at      time.Time
	message bool // it may be lost or delayed
	local   bool // it is a message to itself, which may be delayed only
	from    string
	name    string
	choice  int // the deviation, in a trace
	run     func()
}

// model is a cluster in one run.
type model struct {
	now      time.Time
	events   []modelEvent
	replicas map[string]*modelReplica
	ids      []string
	voters   []string
	closed   map[[2]string]time.Time // when the connection of the first to the second was last not open
	cut      map[[2]string]bool      // connections that are cut although both processes run
	gone     map[string]bool         // machines that have vanished: their ports do not respond
	choose   func(options int) int
	jitter   *rand.Rand
	faults   []modelFault
	order    map[string]int // of ids
	trace    []modelEvent
	broken   string // the first violated invariant

	candidacies []modelCandidacy
	checked     time.Time // the first check of a silent leader
	admitted    int       // TimeoutNow requests that were obeyed
}

type modelCandidacy struct {
	leader, candidate string
	term              uint64
	at                time.Time
}

// modelFault is a fault that may happen once at any moment of a run.
type modelFault struct {
	name string
	do   func(m *model)
}

func newModel(voters, learners int, choose func(int) int, seed uint64) *model {
	m := &model{now: time.Unix(1000, 0), replicas: map[string]*modelReplica{}, choose: choose,
		jitter: rand.New(rand.NewPCG(seed, 1)),
		closed: map[[2]string]time.Time{}, cut: map[[2]string]bool{}, gone: map[string]bool{}, order: map[string]int{}}
	for i := range voters + learners {
		id := fmt.Sprintf("r%d", i+1)
		m.ids = append(m.ids, id)
		m.order[id] = i
		if i < voters {
			m.voters = append(m.voters, id)
		}
		m.replicas[id] = &modelReplica{Settings: Settings{Self: id, HeartbeatTimeout: modelHeartbeat},
			up: true, listens: true,
			log: LogPosition{Term: 1, Index: uint64(10 - i%2), ID: id}, term: 1, votedIn: 1, leader: "r1",
			contact: m.now}
	}
	m.replicas["r1"].role = Leader
	m.replicas["r1"].log.Index = 10
	m.heartbeats(m.replicas["r1"], 1)
	for _, id := range m.ids {
		m.watch(m.replicas[id], modelHeartbeat/2)
		m.watchProcess(m.replicas[id])
	}
	return m
}

func (m *model) fail(format string, args ...any) {
	if m.broken == "" {
		m.broken = fmt.Sprintf(format, args...)
	}
}

// after runs f later, unless the process of the replica has been started again.
func (m *model) after(r *modelReplica, d time.Duration, name string, f func()) {
	starts := r.starts
	m.events = append(m.events, modelEvent{at: m.now.Add(d), from: r.Self, name: name, run: func() {
		if r.up && r.starts == starts {
			f()
		}
	}})
}

// send delivers a message to a replica. A connection that is cut loses it.
func (m *model) send(from *modelReplica, to, name string, f func(to *modelReplica)) {
	m.events = append(m.events, modelEvent{at: m.now.Add(modelLatency), message: true, local: from.Self == to,
		from: from.Self, name: name, run: func() {
			if r := m.replicas[to]; r.up && !m.gone[from.Self] && !m.gone[to] && !m.cut[[2]string{from.Self, to}] {
				f(r)
			}
		}})
}

// run takes events until the end, or until an invariant is violated.
func (m *model) run() {
	start := m.now
	for len(m.events) > 0 && m.broken == "" {
		next := 0
		for i, e := range m.events {
			if e.at.Before(m.events[next].at) {
				next = i
			}
		}
		e := m.events[next]
		if e.at.Sub(start) > modelEnd {
			return
		}
		m.events = slices.Delete(m.events, next, next+1)
		m.now = e.at
		m.take(e)
	}
}

// take runs an event, or deviates. Only messages are points of deviation.
func (m *model) take(e modelEvent) {
	var before [8]Pledge
	for i, id := range m.ids {
		before[i] = m.replicas[id].pledge
	}
	choice := 0
	if e.message {
		// Choices: take its latency, delay it by 60 or 700 ms, lose it, or have a fault happen before.
		choice = m.choose(4 + len(m.faults))
	}
	m.trace = append(m.trace, modelEvent{at: m.now, from: e.from, name: e.name, choice: choice})
	switch {
	case choice == 0:
		e.run()
	case choice == 1:
		m.events = append(m.events, modelEvent{at: m.now.Add(60 * time.Millisecond), from: e.from,
			name: e.name, run: e.run})
	case choice == 2:
		m.events = append(m.events, modelEvent{at: m.now.Add(700 * time.Millisecond), from: e.from,
			name: e.name, run: e.run})
	case choice == 3 && e.local:
		e.run()
	case choice == 3:
	default:
		f := m.faults[choice-4]
		m.faults = slices.Delete(slices.Clone(m.faults), choice-4, choice-3)
		m.trace = append(m.trace, modelEvent{at: m.now, name: f.name})
		f.do(m)
		m.events = append(m.events, e)
	}
	for i, id := range m.ids {
		m.checkPledge(id, before[i])
	}
}

// checkPledge checks invariants 1, 3, 6 and 7 for the pledge of a replica that may have changed.
func (m *model) checkPledge(id string, old Pledge) {
	r := m.replicas[id]
	pledge := r.pledge
	if old == pledge || pledge.candidate == "" {
		return
	}
	lasts := old.leader == pledge.leader && m.now.Before(old.expires)
	if lasts && old.candidate != pledge.candidate {
		m.fail("1: %s pledges itself to %s while its pledge to %s for %s lasts", id, pledge.candidate,
			old.candidate, pledge.leader)
	}
	if lasts && pledge.expires.Before(old.expires) {
		m.fail("1: %s shortens its pledge to %s", id, pledge.candidate)
	}
	if m.replicas[pledge.candidate].log.Less(r.log) {
		m.fail("3: %s pledges itself to %s, whose log is worse", id, pledge.candidate)
	}
	if pledge.candidate != id && r.leader != pledge.leader {
		m.fail("6: %s, whose leader is %q, pledges itself to %s in the place of %s", id, r.leader,
			pledge.candidate, pledge.leader)
	}
	if !slices.Contains(m.voters, pledge.candidate) {
		m.fail("7: %s pledges itself to %s, which has no vote", id, pledge.candidate)
	}
}

func (m *model) view(r *modelReplica) View {
	v := View{Role: r.role, Leader: r.leader, LastContact: r.contact, Voters: m.voters, Log: r.log}
	if r.stalled {
		v.Log.WritePending = time.Second
	}
	return v
}

// connected reports whether a connection of a leader to a replica is open.
func (m *model) connected(leader, to string) bool {
	return m.replicas[leader].up && !m.gone[leader] && !m.cut[[2]string{leader, to}]
}

func (m *model) dial(leader string) DialResult {
	switch r := m.replicas[leader]; {
	case m.gone[leader]:
		return DialFailed
	case r.up && r.listens:
		return DialAccepted
	default:
		return DialRefused
	}
}

// probe runs an ExitProbe without the time that it takes.
func (m *model) probe(r *modelReplica, leader string) bool {
	var p ExitProbe
	for range int(ProbeTimeout / ProbeInterval) {
		switch p.Observe(m.dial(leader), m.connected(leader, r.Self)) {
		case Exited:
			if m.connected(leader, r.Self) {
				m.fail("4: %s finds %s exited, whose connection is open", r.Self, leader)
			}
			return true
		case Running:
			return false
		}
	}
	return false
}

// watchProcess starts a campaign when the leader has exited.
func (m *model) watchProcess(r *modelReplica) {
	m.after(r, 60*time.Millisecond, "watches the process", func() {
		leader := r.leader
		if leader != "" && leader != r.Self && r.campaign == nil && !m.connected(leader, r.Self) && m.probe(r, leader) {
			r.campaign, r.campaigns = NewCampaign(r.Settings, leader, r.contact), m.now
			m.act(r, r.campaign.StartRound(m.view(r)))
		}
		m.watchProcess(r)
	})
}

// act takes a step of a campaign.
func (m *model) act(r *modelReplica, a Action) {
	switch a.Step {
	case Request:
		m.requestPledges(r, a)
	case Stand:
		m.checkCandidacy(r)
		r.pledge.RecordCandidacy(r.campaign.leader)
		r.campaign = nil
		m.send(r, r.Self, "TimeoutNow", func(to *modelReplica) { m.timeoutNow(to, to.Self) })
	case Wait:
		m.after(r, a.Pause, "waits", func() {
			if r.campaign != nil {
				m.act(r, r.campaign.StartRound(m.view(r)))
			}
		})
	default:
		r.campaign = nil
	}
}

func (m *model) requestPledges(r *modelReplica, a Action) {
	r.round++
	if r.stalled && !a.Confirm {
		m.fail("8: %s starts a round with a stalled disk", r.Self)
	}
	round, starts := r.round, r.starts
	req := PledgeRequest{Leader: r.campaign.leader, From: r.log, Confirm: a.Confirm}
	requests := 0
	for _, id := range m.voters {
		if id == r.Self || id == req.Leader {
			continue
		}
		requests++
		m.send(r, id, "pledge?", func(to *modelReplica) {
			pledged := to.pledge.AnswerRequest(to.Settings, m.view(to), req, m.now)
			response := PledgeResponse{Pledged: pledged == Grant, BetterLog: req.From.Less(to.log)}
			if pledged == ProbeLeader && m.probe(to, req.Leader) {
				response.Pledged = to.pledge.AnswerAfterProbe(m.view(to), req, m.now)
			}
			m.send(to, r.Self, "pledge response", func(r *modelReplica) {
				if r.starts == starts && r.round == round && r.campaign != nil && !r.tally.IsDone() {
					r.tally.Add(response)
					m.finishRound(r)
				}
			})
		})
	}
	r.tally = NewTally(requests, a.Majority)
	m.after(r, RequestTimeout, "request timeout", func() {
		for r.round == round && r.campaign != nil && !r.tally.IsDone() {
			r.tally.Add(PledgeResponse{})
			m.finishRound(r)
		}
	})
	m.finishRound(r) // a tally without requests is done
}

func (m *model) finishRound(r *modelReplica) {
	if r.tally.IsDone() {
		r.round++
		m.act(r, r.campaign.FinishRound(&r.pledge, m.view(r), r.tally, m.now,
			time.Duration(m.jitter.Int64N(int64(PledgeDuration)))))
	}
}

// checkCandidacy checks invariants 2, 5 and 7 for a confirmed candidate.
func (m *model) checkCandidacy(r *modelReplica) {
	leader := r.campaign.leader
	if !slices.Contains(m.voters, r.Self) {
		m.fail("7: %s stands without a vote", r.Self)
	}
	for _, c := range m.candidacies {
		if c.leader == leader && c.term == r.term && c.candidate != r.Self &&
			m.now.Sub(c.at) < r.ElectionPledge()-RequestTimeout {
			m.fail("2: %s is confirmed for %s %v after %s", r.Self, leader, m.now.Sub(c.at), c.candidate)
		}
	}
	m.candidacies = append(m.candidacies, modelCandidacy{leader, r.Self, r.term, m.now})
	lost := 0
	for _, v := range m.voters {
		last, ever := m.closed[[2]string{leader, v}]
		if v != leader && (!m.connected(leader, v) || ever && !last.Before(r.campaigns)) {
			lost++
		}
	}
	if lost <= len(m.voters)/2 {
		m.fail("5: %s is confirmed for %s, whose connections to all but %d voters were open", r.Self, leader, lost)
	}
}

// timeoutNow obeys a TimeoutNow, or refuses it.
func (m *model) timeoutNow(r *modelReplica, from string) {
	if r.pledge.CheckTimeoutNow(r.Settings, m.view(r), from) != nil {
		return
	}
	m.admitted++
	switch {
	case r.stalled:
		m.fail("8: %s obeys TimeoutNow with a stalled disk", r.Self)
	case r.role != Follower || from != r.Self && from != r.leader || from == r.Self && r.pledge.replaces != r.leader:
		m.fail("6: %s, role %d, leader %q, obeys the TimeoutNow of %s", r.Self, r.role, r.leader, from)
	}
	m.elect(r, true)
}

// elect makes a replica a candidate in a new term.
func (m *model) elect(r *modelReplica, transfer bool) {
	r.role, r.leader, r.campaign = Candidate, "", nil
	r.term++
	r.votedIn, r.votes = r.term, map[string]bool{r.Self: true}
	term, log := r.term, r.log
	for _, id := range m.voters {
		if id == r.Self {
			continue
		}
		m.send(r, id, "vote?", func(to *modelReplica) {
			if term < to.term || !transfer && to.leader != "" {
				return
			}
			if term > to.term {
				to.term, to.role, to.leader, to.campaign = term, Follower, "", nil
			}
			if to.votedIn >= term || log.Term < to.log.Term || log.Term == to.log.Term && log.Index < to.log.Index {
				return
			}
			to.votedIn = term
			m.send(to, r.Self, "vote", func(r *modelReplica) { m.countVote(r, to.Self, term) })
		})
	}
	m.after(r, modelHeartbeat, "election timeout", func() {
		if r.role == Candidate && r.term == term {
			m.elect(r, false)
		}
	})
}

func (m *model) countVote(r *modelReplica, voter string, term uint64) {
	if r.role != Candidate || r.term != term {
		return
	}
	if r.votes[voter] = true; len(r.votes) <= len(m.voters)/2 {
		return
	}
	for id, other := range m.replicas {
		if id != r.Self && other.role == Leader && other.term == term {
			m.fail("raft: %s and %s lead in term %d", id, r.Self, term)
		}
	}
	r.role, r.leader = Leader, r.Self
	m.heartbeats(r, term)
}

func (m *model) heartbeats(r *modelReplica, term uint64) {
	if r.role != Leader || r.term != term {
		return
	}
	for _, id := range m.ids {
		if id == r.Self {
			continue
		}
		m.send(r, id, "heartbeat", func(to *modelReplica) {
			if term < to.term {
				m.send(to, r.Self, "refused", func(r *modelReplica) {
					if to.term > r.term {
						r.term, r.role, r.leader = to.term, Follower, ""
					}
				})
				return
			}
			to.term, to.role, to.leader, to.contact = term, Follower, r.Self, m.now
		})
	}
	m.after(r, modelHeartbeat/4, "heartbeats", func() { m.heartbeats(r, term) })
}

// watch inspects the leader after a pause.
func (m *model) watch(r *modelReplica, pause time.Duration) {
	m.after(r, pause, "watches the leader", func() {
		w := Watch{r.Settings}
		a := w.Inspect(m.view(r), m.now)
		if a.Step != RequestRanks {
			r.reported = r.contact
			m.watchStep(r, a)
			return
		}
		r.rankRound++
		round, starts := r.rankRound, r.starts
		r.ranking, r.reported, r.awaited = NewRanking(r.log, r.contact), r.contact, 0
		finish := func() {
			r.rankRound++
			m.watchStep(r, w.AddRanks(m.view(r), r.ranking, m.now))
		}
		for _, id := range m.voters {
			if id == r.Self || id == r.leader {
				continue
			}
			r.awaited++
			m.send(r, id, "rank?", func(to *modelReplica) {
				log, contact := to.log, to.contact
				if to.role != Follower {
					contact = time.Time{}
				}
				m.send(to, r.Self, "rank", func(r *modelReplica) {
					if r.starts != starts || r.rankRound != round {
						return
					}
					silence := time.Duration(0)
					if !contact.IsZero() {
						silence = max(1, m.now.Sub(contact))
					}
					r.ranking.Add(log, silence, m.now)
					if silence > 0 && m.now.Add(-silence).After(r.reported) {
						r.reported = m.now.Add(-silence)
					}
					if r.awaited--; r.awaited == 0 {
						finish()
					}
				})
			})
		}
		m.after(r, a.Pause, "rank timeout", func() {
			if r.rankRound == round {
				finish()
			}
		})
	})
}

// watchStep takes a step of a Watch.
func (m *model) watchStep(r *modelReplica, a WatchAction) {
	switch a.Step {
	case SleepUntilOverdue:
		m.after(r, a.Until.Sub(m.now), "overdue", func() {
			m.watchStep(r, Watch{r.Settings}.CheckOverdue(m.view(r), m.now))
		})
	case CheckLeader:
		if silence := min(m.now.Sub(r.reported), m.now.Sub(r.contact)); silence < modelHeartbeat {
			m.fail("9: %s checks its leader %v after a contact", r.Self, silence)
		}
		if m.checked.IsZero() {
			m.checked = m.now
		}
		if r.role == Follower && slices.Contains(m.voters, r.Self) && !r.stalled {
			m.prevote(r)
		}
		m.watch(r, a.Pause)
	default:
		m.watch(r, a.Pause)
	}
}

// prevote asks for votes in advance: voters that have a leader refuse.
func (m *model) prevote(r *modelReplica) {
	r.role, r.leader = Candidate, ""
	votes := map[string]bool{r.Self: true}
	term := r.term
	for _, id := range m.voters {
		if id == r.Self {
			continue
		}
		m.send(r, id, "pre-vote?", func(to *modelReplica) {
			if to.leader != "" || to.term > term {
				return
			}
			m.send(to, r.Self, "pre-vote", func(r *modelReplica) {
				if votes[to.Self] = true; r.role == Candidate && r.term == term && len(votes) > len(m.voters)/2 {
					m.elect(r, false)
				}
			})
		})
	}
}
