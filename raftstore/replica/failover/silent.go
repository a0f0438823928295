package failover

import "time"

// Without this package, raft checks for a silent leader at random times, up to three times
// HeartbeatTimeout after the last contact. With pre-vote, the first follower that checks is refused
// by the followers that have not checked yet, and then waits for a whole election timeout. Watch
// makes these checks prompt without changing the decisions of raft. The followers agree on the
// leader's last contact, because one of them may have received a later heartbeat than the others.
// Each follower makes raft check exactly when HeartbeatTimeout has passed since that contact. The
// follower with the most up-to-date log checks last: at that time the other followers have no
// leader either, and grant its pre-vote. If the followers disagree, raft's own timers still apply.
// RaftTimeout makes them longer, so that none expires between the first check and the last.

// stagger is the time between the checks of two followers. It is long enough for a refused pre-vote
// to finish, even on a busy machine.
const stagger = 25 * time.Millisecond

// RaftTimeout returns the timeout that raft is configured with, given the timeout in the
// configuration of the replica. It is a tenth longer, so that raft's own timer expires after the
// checks of Watch.
func RaftTimeout(configured time.Duration) time.Duration { return configured + configured/10 }

// WatchStep is the next step of a Watch.
type WatchStep int

// The possible steps of a Watch.
const (
	// Sleep: the caller waits for Pause and calls Inspect.
	Sleep WatchStep = iota
	// RequestRanks: the caller requests log position and last contact from the other voters, with a
	// timeout of Pause, and calls AddRanks.
	RequestRanks
	// SleepUntilOverdue: the caller waits until the time Until and calls CheckOverdue.
	SleepUntilOverdue
	// CheckLeader: the caller makes raft check its leader immediately, then waits for Pause and
	// calls Inspect.
	CheckLeader
)

// WatchAction is the next step of a Watch, with the arguments of the step.
type WatchAction struct {
	Step  WatchStep
	Pause time.Duration
	Until time.Time
	// HasLeader means that the leader is alive, so that raft's timeouts are reset to their usual
	// values.
	HasLeader bool
}

// Watch decides when raft checks whether a silent leader is overdue.
type Watch struct{ Settings }

// Inspect returns the next step, which depends on the time since the leader's last message.
func (w Watch) Inspect(v View, now time.Time) WatchAction {
	if v.Role != Follower || v.Leader == "" || v.Leader == w.Self {
		return WatchAction{Step: Sleep, Pause: w.HeartbeatTimeout, HasLeader: v.Leader == w.Self}
	}
	if a, ok := w.sleepAfterContact(v, now); ok {
		a.HasLeader = true
		return a
	}
	if silence := now.Sub(v.LastContact); silence < w.HeartbeatTimeout {
		// The rank of this replica is needed before the leader is overdue.
		return WatchAction{Step: RequestRanks, Pause: w.HeartbeatTimeout - silence}
	}
	return w.checkNow()
}

// AddRanks returns the next step after the other voters have responded. r contains their responses.
func (w Watch) AddRanks(v View, r Ranking, now time.Time) WatchAction {
	if a, ok := w.sleepAfterContact(v, now); ok {
		return a
	}
	overdue := r.LastContact.Add(w.HeartbeatTimeout)
	return WatchAction{Step: SleepUntilOverdue, Until: overdue.Add(time.Duration(r.Rank)*stagger + time.Millisecond)}
}

// CheckOverdue returns the next step at the time when the leader is overdue according to all
// responses. It is CheckLeader unless the leader has sent a message since.
func (w Watch) CheckOverdue(v View, now time.Time) WatchAction {
	if now.Sub(v.LastContact) < w.HeartbeatTimeout {
		return WatchAction{Step: Sleep, Pause: w.HeartbeatTimeout / 2}
	}
	return w.checkNow()
}

// sleepAfterContact returns a Sleep until half of HeartbeatTimeout has passed since the last
// contact with a leader, and true. If that time has passed already, it returns false.
func (w Watch) sleepAfterContact(v View, now time.Time) (WatchAction, bool) {
	half, silence := w.HeartbeatTimeout/2, now.Sub(v.LastContact)
	if silence >= half {
		return WatchAction{}, false
	}
	return WatchAction{Step: Sleep, Pause: half - silence + time.Millisecond}, true
}

func (w Watch) checkNow() WatchAction {
	return WatchAction{Step: CheckLeader, Pause: w.HeartbeatTimeout}
}

// Ranking is the position of a replica in the order in which the followers of a silent leader check
// whether it is overdue.
type Ranking struct {
	// Rank is the number of voters that check before this replica: those with a less up-to-date
	// log, except the leader.
	Rank int
	// LastContact is the latest time at which this replica, or a voter that has responded, had
	// contact with the leader.
	LastContact time.Time

	own LogPosition
}

// NewRanking returns the ranking of a replica before any response. own is the end of its log, and
// contact is its own last contact with the leader.
func NewRanking(own LogPosition, contact time.Time) Ranking {
	return Ranking{own: own, LastContact: contact}
}

// Add counts the response of a voter, received at the time now. silence is the time since that
// voter's last contact with its leader. 0 means that the voter follows no leader.
func (r *Ranking) Add(log LogPosition, silence time.Duration, now time.Time) {
	if log.Less(r.own) {
		r.Rank++
	}
	if silence <= 0 {
		return
	}
	if contact := now.Add(-silence); contact.After(r.LastContact) {
		r.LastContact = contact
	}
}
