package nodegateway

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// fullPace is up to how many nodes each is heard of as often as configured. In larger clusters nodes say less often
	// that they live, down to a third as often at slowPace nodes, and are waited for up to twice as long.
	fullPace    = 1000
	slowPace    = 5000
	slowestBeat = 3 // times the configured one
	longestWait = 2 // times the configured one

	// joinsAtOnce is how many sessions a replica begins at once, and joinPatience for how long others wait for their turn,
	// less than agents wait for their welcome. When thousands come together, those that are in are served first: a
	// session that broke for want of an answer would come again, and make more work than it was.
	joinsAtOnce  = 32
	joinPatience = 4 * time.Second
	// joinSlot is the longest time for which a session that begins keeps others from it.
	joinSlot = 4 * time.Second

	leastGrace = time.Second
)

// paceOf is how often a node says that it lives in a cluster of so many, and after which silence it is given up.
func paceOf(beat, suspect time.Duration, nodes int) (every, silence time.Duration) {
	over := min(max(0, nodes-fullPace), slowPace-fullPace)
	longer := func(d time.Duration, most int) time.Duration {
		return d + d*time.Duration((most-1)*over)/(slowPace-fullPace)
	}
	return longer(beat, slowestBeat), longer(suspect, longestWait)
}

// pace is that of this cluster now.
func (s *Server) pace() (every, silence time.Duration) {
	return paceOf(s.cfg.Heartbeat, s.cfg.Suspect, s.view.peers.size())
}

// graceAfter is how long a node has to come back. One that was waited for because it was silent has had a part of that.
func (s *Server) graceAfter(silence time.Duration) time.Duration {
	if over := silence - s.cfg.Suspect; over > 0 {
		return max(s.cfg.Grace-over, min(leastGrace, s.cfg.Grace))
	}
	return s.cfg.Grace
}

// turns are taken by sessions that begin.
type turns chan struct{}

// take waits for a turn, and returns what ends it; it ends by itself after a while.
func (t turns) take(ctx context.Context, patience time.Duration) (end func(), err error) {
	wait := time.NewTimer(patience)
	defer wait.Stop()
	select {
	case t <- struct{}{}:
	case <-wait.C:
		return nil, status.Errorf(codes.Unavailable, "fleet: %d sessions begin here already: try another replica, or later", cap(t))
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	var once sync.Once
	free := func() { once.Do(func() { <-t }) }
	slow := time.AfterFunc(joinSlot, free)
	return func() {
		slow.Stop()
		free()
	}, nil
}
