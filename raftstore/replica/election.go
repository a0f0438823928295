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
// makes both prompt without changing what raft decides. Every follower makes
// raft look exactly when the leader is overdue, and the one with the best log
// a moment after the others: by then they miss the leader too and grant its
// pre-vote. Should the watchdogs disagree, raft's own timers still hold.

// stagger is the time between two followers' looks: enough for a refused
// pre-vote to be over.
const stagger = 12 * time.Millisecond

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
		leader, known := r.role.leader()
		if r.raft.State() != raft.Follower || !known || leader == r.cfg.Name {
			timer.Reset(overdue)
			continue
		}
		silent := time.Since(r.raft.LastContact())
		switch {
		case silent < overdue/2:
			timer.Reset(overdue/2 - silent + time.Millisecond)
		case silent < overdue:
			// Suspicious: find this replica's place before the leader is overdue.
			place := r.place(ctx, leader, overdue-silent)
			silent = time.Since(r.raft.LastContact())
			if silent < overdue/2 {
				timer.Reset(overdue/2 - silent + time.Millisecond)
				continue
			}
			wait := time.NewTimer(overdue - silent + time.Duration(place)*stagger + time.Millisecond)
			select {
			case <-wait.C:
			case <-ctx.Done():
				wait.Stop()
				return nil
			}
			if time.Since(r.raft.LastContact()) >= overdue {
				r.look()
			}
			timer.Reset(overdue)
		default:
			r.look()
			timer.Reset(overdue)
		}
	}
}

// look makes raft check at once whether its leader is overdue. raft does so
// when the timeout is shortened.
func (r *Replica) look() {
	r.tuning.Lock()
	defer r.tuning.Unlock()
	conf := r.raft.ReloadableConfig()
	conf.HeartbeatTimeout = r.cfg.HeartbeatTimeout - time.Microsecond
	shortened := r.raft.ReloadConfig(conf)
	conf.HeartbeatTimeout = r.cfg.HeartbeatTimeout
	if err := r.raft.ReloadConfig(conf); err != nil || shortened != nil {
		r.log.Warn("looking for the leader", "error", err, "shortening", shortened)
	}
}

// standing is how good a replica's log is; the better one should lead.
type standing struct {
	term, index uint64
	id          string
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
// silent leader apart, whose log is worse. Who does not answer is not waited for.
func (r *Replica) place(ctx context.Context, leader string, within time.Duration) int {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var mine standing
	mine.index, mine.term = r.lastEntry()
	mine.id = r.cfg.Name
	voters := r.voters()
	answers := make(chan bool, len(voters))
	asked := 0
	for _, v := range voters {
		if string(v.ID) == r.cfg.Name || string(v.ID) == leader {
			continue
		}
		asked++
		go func() {
			theirs, ok := r.standingOf(ctx, v)
			answers <- ok && theirs.less(mine)
		}()
	}
	place := 0
	for ; asked > 0; asked-- {
		if <-answers {
			place++
		}
	}
	return place
}

func (r *Replica) standingOf(ctx context.Context, v raft.Server) (standing, bool) {
	client, err := r.peers.client(string(v.Address))
	if err != nil {
		return standing{}, false
	}
	s, err := client.State(ctx, &storev1.StateRequest{})
	if err != nil {
		return standing{}, false
	}
	return standing{term: s.GetLastTerm(), index: s.GetLastIndex(), id: string(v.ID)}, true
}

// lastEntry is the position of the end of this replica's log. The term is 0
// when a snapshot has replaced the entry.
func (r *Replica) lastEntry() (index, term uint64) {
	index = r.raft.LastIndex()
	var l raft.Log
	if index > 0 && r.disk.logs.GetLog(index, &l) == nil {
		term = l.Term
	}
	return index, term
}
