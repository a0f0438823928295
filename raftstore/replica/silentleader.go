package replica

import (
	"context"
	"time"

	"github.com/hashicorp/raft"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore/replica/failover"
)

// watchLeader makes raft check a silent leader at the times that failover.Watch determines. It
// returns nil when ctx ends.
func (e *elections) watchLeader(ctx context.Context) error {
	if v := e.node.currentVoters(); len(v) == 1 && string(v[0].ID) == e.node.cfg.Name {
		e.checkLeaderNow() // no other voter could lead
	}
	timer := time.NewTimer(e.node.cfg.Timeouts.HeartbeatTimeout)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil
		}
		pause, err := e.inspectLeader(ctx)
		if err != nil {
			return nil
		}
		timer.Reset(pause)
	}
}

// inspectLeader executes the steps of failover.Watch once and returns the pause until the next
// inspection. It returns the error of ctx if ctx ends.
func (e *elections) inspectLeader(ctx context.Context) (time.Duration, error) {
	watch := failover.Watch{Settings: e.failoverSettings()}
	leader, _ := e.node.role.currentID()
	action := watch.Inspect(e.contactView(leader), time.Now())
	if action.HasLeader {
		e.restoreTimeouts()
	}
	if action.Step == failover.RequestRanks {
		ranking := e.requestRanks(ctx, leader, action.Pause)
		action = watch.AddRanks(e.contactView(leader), ranking, time.Now())
	}
	if action.Step == failover.SleepUntilOverdue {
		overdue := time.NewTimer(time.Until(action.Until))
		defer overdue.Stop()
		select {
		case <-overdue.C:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
		action = watch.CheckOverdue(e.contactView(leader), time.Now())
	}
	if action.Step == failover.CheckLeader {
		e.checkLeaderNow()
	}
	return action.Pause, nil
}

// checkLeaderNow makes raft check immediately whether its leader is overdue. It shortens raft's
// heartbeat timeout, because raft then makes this check.
func (e *elections) checkLeaderNow() {
	e.node.tuning.Lock()
	defer e.node.tuning.Unlock()
	e.shortened = true
	errLonger := e.setTimeouts(e.node.cfg.Timeouts.HeartbeatTimeout) // so that the next value is shorter than this one
	if err := e.setTimeouts(e.node.cfg.Timeouts.HeartbeatTimeout - time.Microsecond); err != nil || errLonger != nil {
		e.node.log.Warn("cannot shorten raft's timeouts to check the leader", "error", err, "before", errLonger)
	}
}

// restoreTimeouts resets the timeouts that checkLeaderNow has changed. It is called when a leader
// is alive.
func (e *elections) restoreTimeouts() {
	e.node.tuning.Lock()
	defer e.node.tuning.Unlock()
	if !e.shortened {
		return
	}
	if err := e.setTimeouts(failover.RaftTimeout(e.node.cfg.Timeouts.HeartbeatTimeout)); err != nil {
		e.node.log.Warn("cannot restore raft's timeouts", "error", err)
		return
	}
	e.shortened = false
}

// setTimeouts sets raft's heartbeat timeout, and its election timeout to at least the same value.
// The caller holds node.tuning.
func (e *elections) setTimeouts(heartbeat time.Duration) error {
	conf := e.node.raft.ReloadableConfig()
	conf.HeartbeatTimeout, conf.ElectionTimeout = heartbeat, max(heartbeat, e.node.cfg.Timeouts.ElectionTimeout)
	return e.node.raft.ReloadConfig(conf)
}

// requestRanks returns this replica's ranking among the followers of the silent leader. It requests
// the log positions and last contacts of the other voters. A voter that does not respond within the
// timeout does not count.
func (e *elections) requestRanks(ctx context.Context, leader string, timeout time.Duration) failover.Ranking {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	type response struct {
		log     failover.LogPosition
		silence time.Duration
		at      time.Time
		ok      bool
	}
	own, voters := e.ownPosition(), e.node.currentVoters()
	responses := make(chan response, len(voters))
	outstanding := 0
	for _, v := range voters {
		if string(v.ID) == e.node.cfg.Name || string(v.ID) == leader {
			continue
		}
		outstanding++
		go func() {
			log, silence, ok := e.net.requestPosition(ctx, v)
			responses <- response{log, silence, time.Now(), ok}
		}()
	}
	ranking := failover.NewRanking(own, e.node.raft.LastContact())
	for ; outstanding > 0; outstanding-- {
		if a := <-responses; a.ok {
			ranking.Add(a.log, a.silence, a.at)
		}
	}
	return ranking
}

// requestPosition requests the end of a voter's log, and the time since the voter's last contact
// with its leader. The time is 0 if the voter follows no leader. The last result is false if the
// voter does not respond.
func (n *network) requestPosition(ctx context.Context, v raft.Server) (failover.LogPosition, time.Duration, bool) {
	client, err := n.peers.Client(string(v.Address))
	if err != nil {
		return failover.LogPosition{}, 0, false
	}
	s, err := client.State(ctx, &storev1.StateRequest{})
	if err != nil {
		return failover.LogPosition{}, 0, false
	}
	silence := time.Duration(s.GetSilentUs()) * time.Microsecond
	pending := time.Duration(s.GetDiskPendingUs()) * time.Microsecond
	return failover.LogPosition{Term: s.GetLastTerm(), Index: s.GetLastIndex(), ID: string(v.ID),
		WritePending: pending}, silence, true
}

// lastLogEntry returns the index and term of the last entry in this replica's log. The term is 0 if
// a snapshot has replaced the entry.
func (n *node) lastLogEntry() (index, term uint64) {
	index = n.raft.LastIndex()
	var l raft.Log
	if index > 0 && n.disk.Log.GetLog(index, &l) == nil {
		term = l.Term
	}
	return index, term
}
