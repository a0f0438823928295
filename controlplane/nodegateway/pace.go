package nodegateway

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// fullPace is the number of nodes up to which heartbeats use the configured interval. In larger
	// clusters the interval and the suspect timeout grow linearly until slowPace nodes, by the
	// factors slowestBeat and longestWait.
	fullPace    = 1000
	slowPace    = 5000
	slowestBeat = 3 // times the configured interval
	longestWait = 2 // times the configured timeout

	// joinsAtOnce bounds the sessions that start concurrently on a replica. joinPatience is the
	// time for which others wait; it is shorter than an agent's wait for Welcome. If thousands of
	// agents connect, started sessions finish first: a session that timed out would connect again
	// and add load.
	joinsAtOnce  = 32
	joinPatience = 4 * time.Second
	// joinSlot is the longest time for which a starting session occupies its slot.
	joinSlot = 4 * time.Second

	leastGrace = time.Second
)

// paceOf returns the heartbeat interval and the suspect timeout for a cluster with the given number
// of nodes. beat and suspect are the configured values.
func paceOf(beat, suspect time.Duration, nodes int) (every, silence time.Duration) {
	over := min(max(0, nodes-fullPace), slowPace-fullPace)
	longer := func(d time.Duration, most int) time.Duration {
		return d + d*time.Duration((most-1)*over)/(slowPace-fullPace)
	}
	return longer(beat, slowestBeat), longer(suspect, longestWait)
}

// pace returns the present heartbeat interval and suspect timeout of this cluster.
func (s *Server) pace() (every, silence time.Duration) {
	return paceOf(s.cfg.Heartbeat, s.cfg.Suspect, s.view.peers.size())
}

// graceAfter returns the grace period of a node after its session ended. A suspect timeout longer
// than configured is deducted, down to leastGrace.
func (s *Server) graceAfter(silence time.Duration) time.Duration {
	if over := silence - s.cfg.Suspect; over > 0 {
		return max(s.cfg.Grace-over, min(leastGrace, s.cfg.Grace))
	}
	return s.cfg.Grace
}

// turns is a semaphore for starting sessions.
type turns chan struct{}

// take waits up to patience for a slot and returns the function that frees it. The slot is freed
// automatically after joinSlot.
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
