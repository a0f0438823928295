package replica

import (
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sync/errgroup"
)

// role is who leads, as this replica knows it.
type role struct {
	mu      sync.Mutex
	id      string
	address string
	moved   chan struct{} // closed and replaced at each change
}

func (o *role) init() { o.moved = make(chan struct{}) }

// leader returns the leader's name; false when none is known.
func (o *role) leader() (string, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.id, o.id != ""
}

// current returns the leader and a channel that closes when that changes.
func (o *role) current() (id, address string, moved <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.id, o.address, o.moved
}

func (o *role) set(id, address string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.id == id && o.address == address {
		return false
	}
	o.id, o.address = id, address
	close(o.moved)
	o.moved = make(chan struct{})
	return true
}

// watchRole follows raft's two sources about leadership: observations say who
// leads, notify says when this replica begins and ceases to. It ends a leadership
// whose disk hangs.
func (r *Replica) watchRole(g *errgroup.Group, notify <-chan bool) {
	// One place is enough: an observation only says that it is time to look.
	seen := make(chan raft.Observation, 1)
	observer := raft.NewObserver(seen, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	})
	r.raft.RegisterObserver(observer)
	g.Go(func() error {
		defer r.raft.DeregisterObserver(observer)
		defer r.lead.end()
		check := time.NewTimer(r.untilHung())
		defer check.Stop()
		leads := false // by raft's last notice
		for {
			r.learnLeader()
			select {
			case <-seen:
			case leads = <-notify:
				r.lead.end()
			case <-check.C:
			case <-r.ctx.Done():
				return nil
			}
			// While its disk hangs, raft's main loop is blocked and gives no notice. A leadership that ended so is followed by
			// another one of the same term when the disk answers and nobody else was elected.
			r.lead.follow(r, leads && !r.hangs())
			check.Reset(r.untilHung())
		}
	})
}

// leads is who leads by raft's account. A candidate knows of none: when the
// leader that handed over to it stops before the votes are in, raft goes on
// naming that one, for as long as nobody is elected.
func (r *Replica) leads() (raft.ServerAddress, raft.ServerID) {
	address, id := r.raft.LeaderWithID()
	if r.raft.State() == raft.Candidate {
		return "", ""
	}
	return address, id
}

func (r *Replica) learnLeader() {
	address, id := r.leads()
	if r.role.set(string(id), string(address)) {
		r.meters.leaders.Add(1)
		if id != "" {
			r.lately.note(time.Now())
		}
		r.log.Info("leader changed", "leader", string(id), "term", r.raft.CurrentTerm())
	}
}
