package replica

import (
	"context"
	"time"

	"github.com/hashicorp/raft"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// Left to itself raft looks for a dead leader at random moments, up to three
// times HeartbeatTimeout after its last word. Worse, with pre-vote the first
// follower to look is refused by those that have not looked yet and then waits
// for a whole election timeout: it takes the second to win. The watchdog below
// makes both prompt without changing what raft decides. The followers agree on
// when the leader spoke last, which one of them may have heard a heartbeat later
// than the others. Every follower makes raft look exactly when the leader is
// overdue since then, and the one with the best log a moment after the others:
// by then they miss the leader too and grant its pre-vote. Should the watchdogs
// disagree, raft's own timers still hold; they are a little longer (slack), so
// that none of them goes off between the first look and the last.

// stagger is the time between two followers' looks: enough for a refused
// pre-vote to be over, also on a busy machine.
const stagger = 25 * time.Millisecond

// slack is by how much raft's own timeouts are longer than the configured ones.
func slack(d time.Duration) time.Duration { return d + d/10 }

// watchLeader runs the watchdog of this replica.
func (r *Replica) watchLeader(ctx context.Context) error {
	overdue := r.cfg.HeartbeatTimeout
	if v := r.voters(); len(v) == 1 && string(v[0].ID) == r.cfg.Name {
		r.look() // nobody to wait for
	}
	timer := time.NewTimer(overdue)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil
		}
		next, err := r.watchOnce(ctx, overdue)
		if err != nil {
			return nil
		}
		timer.Reset(next)
	}
}

// watchOnce looks after the leader once and says when to do so again; an error
// when ctx has ended.
func (r *Replica) watchOnce(ctx context.Context, overdue time.Duration) (time.Duration, error) {
	leader, known := r.role.leader()
	if r.raft.State() != raft.Follower || !known || leader == r.cfg.Name {
		if leader == r.cfg.Name {
			r.relax()
		}
		return overdue, nil
	}
	silent := time.Since(r.raft.LastContact())
	if silent < overdue/2 {
		r.relax()
		return overdue/2 - silent + time.Millisecond, nil
	}
	if silent < overdue {
		// Suspicious: find this replica's place before the leader is overdue.
		place, since := r.place(ctx, leader, overdue-silent)
		if silent = time.Since(r.raft.LastContact()); silent < overdue/2 {
			return overdue/2 - silent + time.Millisecond, nil
		}
		wait := time.NewTimer(time.Until(since.Add(overdue + time.Duration(place)*stagger + time.Millisecond)))
		defer wait.Stop()
		select {
		case <-wait.C:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
		if time.Since(r.raft.LastContact()) < overdue {
			return overdue / 2, nil
		}
	}
	r.look()
	return overdue, nil
}

// look makes raft check at once whether its leader is overdue. raft does so
// when the timeout is shortened.
func (r *Replica) look() {
	r.tuning.Lock()
	defer r.tuning.Unlock()
	r.hasty = true
	longer := r.haste(r.cfg.HeartbeatTimeout) // so that the next is shorter, whatever it was before
	if err := r.haste(r.cfg.HeartbeatTimeout - time.Microsecond); err != nil || longer != nil {
		r.log.Warn("looking for the leader", "error", err, "before", longer)
	}
}

// relax undoes what look has done: there is a leader.
func (r *Replica) relax() {
	r.tuning.Lock()
	defer r.tuning.Unlock()
	if !r.hasty {
		return
	}
	if err := r.haste(slack(r.cfg.HeartbeatTimeout)); err != nil {
		r.log.Warn("waiting for the leader as usual again", "error", err)
		return
	}
	r.hasty = false
}

// haste sets raft's timeouts; r.tuning is held.
func (r *Replica) haste(heartbeat time.Duration) error {
	conf := r.raft.ReloadableConfig()
	conf.HeartbeatTimeout, conf.ElectionTimeout = heartbeat, max(heartbeat, r.cfg.ElectionTimeout)
	return r.raft.ReloadConfig(conf)
}

// standing is how good a replica's log is; the better one should lead.
type standing struct {
	term, index uint64
	id          string
	pending     time.Duration // how long its oldest disk write has been under way; 0 in answers of a previous release
}

func (s standing) less(o standing) bool {
	if s.term != o.term {
		return s.term < o.term
	}
	if s.index != o.index {
		return s.index < o.index
	}
	return s.id < o.id
}

// place counts the voters that this replica should let look first: those, the
// silent leader apart, whose log is worse. since is when any of them, or this
// replica, last heard from the leader. Who does not answer is not waited for.
func (r *Replica) place(ctx context.Context, leader string, within time.Duration) (place int, since time.Time) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	mine := r.ownStanding()
	voters := r.voters()
	type answer struct {
		first bool
		since time.Time
	}
	answers := make(chan answer, len(voters))
	asked := 0
	for _, v := range voters {
		if string(v.ID) == r.cfg.Name || string(v.ID) == leader {
			continue
		}
		asked++
		go func() {
			theirs, silent, ok := r.standingOf(ctx, v)
			a := answer{first: ok && theirs.less(mine)}
			if ok && silent > 0 {
				a.since = time.Now().Add(-silent)
			}
			answers <- a
		}()
	}
	since = r.raft.LastContact()
	for ; asked > 0; asked-- {
		a := <-answers
		if a.first {
			place++
		}
		if a.since.After(since) {
			since = a.since
		}
	}
	return place, since
}

// standingOf asks a voter how good its log is and for how long it has not heard
// from its leader; 0 when it follows none.
func (r *Replica) standingOf(ctx context.Context, v raft.Server) (standing, time.Duration, bool) {
	client, err := r.peers.client(string(v.Address))
	if err != nil {
		return standing{}, 0, false
	}
	s, err := client.State(ctx, &storev1.StateRequest{})
	if err != nil {
		return standing{}, 0, false
	}
	silent := time.Duration(s.GetSilentUs()) * time.Microsecond
	pending := time.Duration(s.GetDiskPendingUs()) * time.Microsecond
	return standing{term: s.GetLastTerm(), index: s.GetLastIndex(), id: string(v.ID), pending: pending}, silent, true
}

// lastEntry is the position of the end of this replica's log. The term is 0
// when a snapshot has replaced the entry.
func (r *Replica) lastEntry() (index, term uint64) {
	index = r.raft.LastIndex()
	var l raft.Log
	if index > 0 && r.disk.Log.GetLog(index, &l) == nil {
		term = l.Term
	}
	return index, term
}
