package replica

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/raft"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore/replica/failover"
	"keelson.dev/keelson/raftstore/replica/peernet"
	"keelson.dev/keelson/raftstore/replica/rolelog"
)

// A machine that vanishes is detected only after HeartbeatTimeout, because it cannot be
// distinguished from a slow machine. A process that exits is detected immediately, because its
// kernel closes all its connections and refuses new ones. Package failover makes the decisions;
// this file dials, sends and receives.

// maxProbes is the maximum number of concurrent probes of the leader that this replica makes for
// other voters.
const maxProbes = 4

// pledgeKeeper holds the failover.Pledge of this replica. It is safe for concurrent use.
type pledgeKeeper struct {
	mu     sync.Mutex
	pledge failover.Pledge
}

// usePledge calls decide with the pledge, while no other goroutine uses it. decide must not block.
func (k *pledgeKeeper) usePledge(decide func(p *failover.Pledge)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	decide(&k.pledge)
}

// elections starts elections before raft's own timers would, transfers leadership, and answers the
// pledge requests of other voters. A pledge is the promise to vote for one candidate in place of an
// exited leader. Package failover makes the decisions.
type elections struct {
	node *node
	net  *network

	pledge    pledgeKeeper
	probes    chan struct{} // one slot per concurrent probe of the leader that another voter has requested
	shortened bool          // raft has the shortened timeouts of checkLeaderNow; guarded by node.tuning
	roles     rolelog.Log
}

func newElections(n *node, net *network) *elections {
	return &elections{node: n, net: net, probes: make(chan struct{}, maxProbes)}
}

// watchLeaderProcess keeps a connection to the leader. When the connection breaks, it probes the
// leader's process, and runs a campaign if the process has exited. It does so only while this
// replica is a voter. It returns nil when ctx ends.
func (e *elections) watchLeaderProcess(ctx context.Context) error {
	for ctx.Err() == nil {
		id, address, moved := e.node.role.currentLeader()
		if id == "" || id == e.node.cfg.Name {
			select {
			case <-moved:
			case <-ctx.Done():
			}
			continue
		}
		during, end := peernet.WithCancelOn(ctx, moved)
		if e.net.peers.AwaitBroken(during, address) == nil && isVoter(e.node.currentVoters(), e.node.cfg.Name) &&
			e.probeExited(during, id, address) {
			e.runCampaign(during, id)
		}
		select { // limits the rate of the probes while the leader is followed again or is silent
		case <-during.Done():
		case <-time.After(e.node.cfg.Timeouts.HeartbeatTimeout / 4):
		}
		end()
	}
	return nil
}

// answerPledgeRequest reports whether this replica pledges to vote for the replica that sent the
// request. If the answer depends on it, it first probes whether the process of the leader has
// exited. It refuses the request if maxProbes probes are running already.
func (e *elections) answerPledgeRequest(ctx context.Context, req failover.PledgeRequest) bool {
	id, address, _ := e.node.role.currentLeader()
	var answer failover.Answer
	view := e.electionView(id)
	e.pledge.usePledge(func(p *failover.Pledge) {
		answer = p.AnswerRequest(e.failoverSettings(), view, req, time.Now())
	})
	if answer != failover.ProbeLeader {
		return answer == failover.Grant
	}
	select {
	case e.probes <- struct{}{}:
		defer func() { <-e.probes }()
	default:
		return false
	}
	if !e.probeExited(ctx, id, address) {
		return false
	}
	pledged := false
	view = e.electionView(id)
	e.pledge.usePledge(func(p *failover.Pledge) { pledged = p.AnswerAfterProbe(view, req, time.Now()) })
	return pledged
}

func (e *elections) failoverSettings() failover.Settings {
	return failover.Settings{Self: e.node.cfg.Name, HeartbeatTimeout: e.node.cfg.Timeouts.HeartbeatTimeout}
}

// contactView returns a View with raft's role and last contact and the given leader. It omits the
// voters and the log position, so that it reads no disk.
func (e *elections) contactView(leader string) failover.View {
	v := failover.View{Leader: leader, LastContact: e.node.raft.LastContact()}
	switch e.node.raft.State() {
	case raft.Follower:
		v.Role = failover.Follower
	case raft.Leader:
		v.Role = failover.Leader
	default:
		v.Role = failover.Candidate
	}
	return v
}

// electionView returns contactView together with the voters and the end of this replica's log.
func (e *elections) electionView(leader string) failover.View {
	v := e.contactView(leader)
	for _, s := range e.node.currentVoters() {
		v.Voters = append(v.Voters, string(s.ID))
	}
	v.Log = e.ownPosition()
	return v
}

// ownPosition returns the index and term of the last entry of this replica's log, and the age of
// its oldest pending disk write.
func (e *elections) ownPosition() failover.LogPosition {
	own := failover.LogPosition{ID: e.node.cfg.Name, WritePending: e.node.meters.disk.OldestWriteAge()}
	own.Index, own.Term = e.node.lastLogEntry()
	return own
}

// probeExited reports whether the process of the leader, which has the given ID and address, has
// exited. It returns false if this is still undecided after failover.ProbeTimeout or when ctx ends.
func (e *elections) probeExited(ctx context.Context, id, address string) bool {
	ctx, cancel := context.WithTimeout(ctx, failover.ProbeTimeout)
	defer cancel()
	var probe failover.ExitProbe
	for {
		switch probe.Observe(e.dialLeader(ctx, address), !e.net.port.Callers.HasNone(id)) {
		case failover.Exited:
			return true
		case failover.Running:
			return false
		}
		select {
		case <-time.After(failover.ProbeInterval):
		case <-ctx.Done():
			return false
		}
	}
}

// dialLeader dials an address once and closes the connection. It returns whether the dial was
// accepted, was refused, or failed for another reason.
func (e *elections) dialLeader(ctx context.Context, address string) failover.DialResult {
	ctx, cancel := context.WithTimeout(ctx, failover.DialTimeout)
	defer cancel()
	conn, err := e.net.peers.DialTCP(ctx, address)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return failover.DialRefused
	}
	if err != nil || conn.Close() != nil {
		return failover.DialFailed
	}
	return failover.DialAccepted
}

// runCampaign requests the pledges of the other voters in order to replace an exited leader. When a
// majority of the voters, including this replica, has pledged to vote for this replica, it makes
// this replica a candidate and returns. It returns without a candidacy when ctx ends or when the
// campaign stops. The campaign stops if this replica cannot be elected, or if a leader has been in
// contact since. It also stops when raft's own check of a silent leader is due.
func (e *elections) runCampaign(ctx context.Context, leader string) {
	campaign := failover.NewCampaign(e.failoverSettings(), leader, e.node.raft.LastContact())
	for ctx.Err() == nil {
		action := campaign.StartRound(e.electionView(leader))
		voters := e.node.currentVoters()
		for action.Step == failover.Request {
			tally := e.requestPledges(ctx, leader, voters, action)
			jitter := time.Duration(rand.Int64N(int64(failover.PledgeDuration)))
			view := e.electionView(leader)
			pledged := tally.Pledged
			e.pledge.usePledge(func(p *failover.Pledge) {
				action = campaign.FinishRound(p, view, tally, time.Now(), jitter)
			})
			if action.Step == failover.Stand {
				e.becomeCandidate(leader, pledged, action.Voters)
				return
			}
		}
		if action.Step == failover.Stop {
			return
		}
		select {
		case <-time.After(action.Pause):
		case <-ctx.Done():
		}
	}
}

// becomeCandidate makes this replica a candidate immediately. It sends itself a TimeoutNow, as a
// leader does when it transfers its leadership. leader is the exited leader. pledged and voters are
// the numbers of pledges and of voters, for the log.
func (e *elections) becomeCandidate(leader string, pledged, voters int) {
	e.node.log.Info("the leader's process has exited: starting an election", "leader", leader, "pledged", pledged,
		"voters", voters)
	withdraw := e.roles.AnnounceIntent("the process of leader " + leader + " has exited")
	e.pledge.usePledge(func(p *failover.Pledge) { p.RecordCandidacy(leader) })
	req := &raft.TimeoutNowRequest{RPCHeader: e.net.rpcHeader()}
	var resp raft.TimeoutNowResponse
	if err := e.net.trans.TimeoutNow(raft.ServerID(e.node.cfg.Name), raft.ServerAddress(e.net.address), req,
		&resp); err != nil {
		withdraw()
		e.node.log.Warn("cannot start an election in the place of an exited leader", "leader", leader, "error", err)
	}
}

// requestPledges sends a pledge request to all voters except this replica and the exited leader. It
// returns the tally when a majority has pledged to vote for this replica, or when each request has
// been answered or has timed out. action contains the arguments of the request.
func (e *elections) requestPledges(ctx context.Context, leader string, voters []raft.Server,
	action failover.Action) failover.Tally {
	var requests sync.WaitGroup
	defer requests.Wait()
	ctx, cancel := context.WithTimeout(ctx, failover.RequestTimeout)
	defer cancel()
	own := e.ownPosition()
	req := &storev1.StateRequest{EndedLeader: leader, From: own.ID, LastIndex: own.Index, LastTerm: own.Term,
		Stands: action.Confirm}
	responses, sent := make(chan failover.PledgeResponse, len(voters)), 0
	for _, v := range voters {
		if id := string(v.ID); id == e.node.cfg.Name || id == leader {
			continue
		}
		sent++
		requests.Go(func() { responses <- e.requestPledge(ctx, v, req, own) })
	}
	tally := failover.NewTally(sent, action.Majority)
	for !tally.IsDone() {
		tally.Add(<-responses)
	}
	return tally
}

// requestPledge sends a pledge request to one voter and returns its response. The response is zero
// if the voter does not respond or belongs to another raft cluster. own is the end of this
// replica's log, which is compared with the voter's log.
func (e *elections) requestPledge(ctx context.Context, v raft.Server, req *storev1.StateRequest,
	own failover.LogPosition) failover.PledgeResponse {
	client, err := e.net.peers.Client(string(v.Address))
	if err != nil {
		return failover.PledgeResponse{}
	}
	s, err := client.State(ctx, req)
	if err != nil || s.GetGroup() != e.net.group.ID() {
		return failover.PledgeResponse{}
	}
	log := failover.LogPosition{Term: s.GetLastTerm(), Index: s.GetLastIndex(), ID: string(v.ID)}
	return failover.PledgeResponse{Pledged: s.GetEnded(), BetterLog: own.Less(log)}
}

// isVoter reports whether a replica is among the voters.
func isVoter(voters []raft.Server, name string) bool {
	return slices.ContainsFunc(voters, func(v raft.Server) bool { return string(v.ID) == name })
}
