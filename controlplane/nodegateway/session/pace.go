package session

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// fullPace is the number of nodes up to which heartbeats have the configured interval. With
	// more nodes, the interval and the suspect timeout grow linearly up to slowPace nodes, where
	// they are multiplied by slowestBeat and longestWait.
	fullPace    = 1000
	slowPace    = 5000
	slowestBeat = 3 // factor for the configured interval
	longestWait = 2 // factor for the configured timeout

	// maxStartingSessions is the maximum number of sessions that start at the same time on a
	// replica. Others wait for at most startTimeout, which is shorter than an agent waits for
	// Welcome. So if thousands of agents connect, starting sessions are finished first: a session
	// that timed out would connect again and add load.
	maxStartingSessions = 32
	startTimeout        = 4 * time.Second
	// maxSlotTime is the maximum time for which a starting session occupies its slot.
	maxSlotTime = 4 * time.Second

	minGrace = time.Second
)

// heartbeatPace returns the heartbeat interval and the suspect timeout (silence) for a cluster with
// a number of nodes. beat and suspect are the configured values.
func heartbeatPace(beat, suspect time.Duration, nodes int) (interval, silence time.Duration) {
	over := min(max(0, nodes-fullPace), slowPace-fullPace)
	longer := func(d time.Duration, most int) time.Duration {
		return d + d*time.Duration((most-1)*over)/(slowPace-fullPace)
	}
	return longer(beat, slowestBeat), longer(suspect, longestWait)
}

// currentPace returns the current heartbeat interval and suspect timeout of this cluster.
func (s *Server) currentPace() (interval, silence time.Duration) {
	return heartbeatPace(s.cfg.Timing.Heartbeat, s.cfg.Timing.Suspect, s.cfg.View.PeerCount())
}

// graceAfterSilence returns the grace period of a node whose session ended because of the suspect
// timeout silence. If that timeout is longer than configured, the difference is subtracted, down to
// minGrace.
func (s *Server) graceAfterSilence(silence time.Duration) time.Duration {
	if over := silence - s.cfg.Timing.Suspect; over > 0 {
		return max(s.cfg.Timing.Grace-over, min(minGrace, s.cfg.Timing.Grace))
	}
	return s.cfg.Timing.Grace
}

// startSlots is a semaphore for starting sessions.
type startSlots chan struct{}

// acquireSlot waits for a slot, at most for timeout. end frees the slot, which is also freed
// automatically after maxSlotTime.
func (t startSlots) acquireSlot(ctx context.Context, timeout time.Duration) (end func(), err error) {
	wait := time.NewTimer(timeout)
	defer wait.Stop()
	select {
	case t <- struct{}{}:
	case <-wait.C:
		return nil, status.Errorf(codes.Unavailable,
			"fleet: %d sessions are starting on this replica: try another replica, or later", cap(t))
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	var once sync.Once
	free := func() { once.Do(func() { <-t }) }
	slow := time.AfterFunc(maxSlotTime, free)
	return func() {
		slow.Stop()
		free()
	}, nil
}
