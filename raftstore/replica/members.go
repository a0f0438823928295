package replica

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica/peernet"
)

const (
	// learnerPoll is how often the leader requests the state of a learner.
	learnerPoll = 25 * time.Millisecond
	// learnerLag is how many entries a learner may lack when it is promoted.
	learnerLag = 64
	// configTimeout is how long a change of raft's configuration may be queued.
	configTimeout = 5 * time.Second
	// majorityPatience is how long the remaining voters have to respond before a voter is removed.
	majorityPatience = 3 * time.Second
	// spreadPatience is how long a promotion waits until the other voters have received the entry
	// of the promotion.
	spreadPatience = 10 * time.Second
	// spreadTries is the number of unanswered requests after which a promotion no longer waits for
	// a voter.
	spreadTries = 3
)

// membership changes the members of the raft cluster and requests their state.
type membership struct {
	node      *node
	net       *network
	elections *elections

	levels sync.Mutex // held while a member is added or promoted, and while HoldMembers decides
	heard  stateCache
}

// AddMember makes the replica with the given ID and address a voting member. It works on any
// replica. It adds a learner, waits until the learner has caught up, and promotes it, so that the
// majority is never weakened. Adding a member again is a no-op.
//
// Errors: ErrInvalid if the address belongs to another member or another replica responds there;
// ErrMemberExists if id is a voting member already and its disk is empty; ErrTooOld if the replica
// does not support the level of StoredLevel.
func (r *Replica) AddMember(ctx context.Context, id, address string) error {
	return r.members.addMember(ctx, id, address, false)
}

// AddLearner makes the replica with the given ID and address a member without a vote. The learner
// receives all entries and serves reads, but does not count for a majority. The errors are those of
// AddMember.
func (r *Replica) AddLearner(ctx context.Context, id, address string) error {
	return r.members.addMember(ctx, id, address, true)
}

func (m *membership) addMember(ctx context.Context, id, address string, learner bool) error {
	err := errors.Join(checkName(id), checkAddress(address))
	if err != nil {
		return fmt.Errorf("adding a replica: %w", err)
	}
	err = m.callLeader(ctx, id,
		func() error { return m.addLocally(ctx, id, address, learner) },
		func(c storev1.PeerClient) error {
			_, err := c.AddMember(ctx, &storev1.AddMemberRequest{Id: id, Address: address, Learner: learner})
			return statusToError(err)
		})
	if err != nil {
		return fmt.Errorf("adding replica %s at %s: %w", id, address, err)
	}
	return nil
}

// Promote makes a learner a voting member as soon as it has caught up. It works on any replica. It
// returns when every voter that responds has received the change. Promoting a voter is a no-op. It
// returns ErrUnknownMember if id is not a member.
func (r *Replica) Promote(ctx context.Context, id string) error {
	err := r.members.callLeader(ctx, id,
		func() error { return r.members.promoteLocally(ctx, id) },
		func(c storev1.PeerClient) error {
			_, err := c.Promote(ctx, &storev1.PromoteRequest{Id: id})
			return statusToError(err)
		})
	if err != nil {
		return fmt.Errorf("promoting replica %s: %w", id, err)
	}
	return nil
}

// RemoveMember removes a replica from the raft cluster. It works on any replica.
//
// Errors: ErrUnknownMember if id is not a member; ErrNoMajority if id is the last voter, or if
// fewer than a majority of the remaining voters can be reached. The removal cannot be forced in
// this case, because it must be committed by a majority of the remaining voters.
func (r *Replica) RemoveMember(ctx context.Context, id string) error {
	unclear := false // an attempt may have removed the member
	settle := func(err error) error {
		if unclear && errors.Is(err, raftstore.ErrUnknownMember) {
			return nil
		}
		unclear = unclear || err != nil && !isRefusal(err)
		return err
	}
	err := r.members.callLeader(ctx, id,
		func() error { return settle(r.members.removeLocally(ctx, id)) },
		func(c storev1.PeerClient) error {
			_, err := c.RemoveMember(ctx, &storev1.RemoveMemberRequest{Id: id})
			return settle(statusToError(err))
		})
	if err != nil {
		return fmt.Errorf("removing replica %s: %w", id, err)
	}
	return nil
}

// answerGrace is how long the response of a previous leader is awaited after a new leader is known.
const answerGrace = time.Second

// StepDown transfers leadership to the voter with the ID successor. If successor is "", it
// transfers leadership to the voter with the most up-to-date log. It works on any replica. It
// returns the new leader. A call makes one attempt, because the leader accepts no proposals during
// an attempt. Errors: ErrUnknownMember, ErrInvalid if successor cannot lead, ErrTransferFailed.
func (r *Replica) StepDown(ctx context.Context, successor string) (leader string, err error) {
	unclear := ""  // ID of the leader that may have stepped down, although its response was lost
	var lost error // the error of the attempt with the lost response
	attempt := func(ask func(leader string) (string, error)) error {
		now, _ := r.node.role.currentID()
		switch {
		case now == "":
			return raftstore.ErrUnavailable
		case now == successor || successor == "" && unclear != "" && now != unclear:
			leader = now
			return nil
		case now == unclear:
			return fmt.Errorf("%w: %s leads and may have made an attempt whose answer was lost: %w",
				raftstore.ErrTransferFailed, now, lost)
		}
		var err error
		leader, err = ask(now)
		if err != nil && !isRefusal(err) && !errors.Is(err, raftstore.ErrNotLeader) {
			unclear, lost = now, err
		}
		return err
	}
	err = r.members.callLeader(ctx, successor,
		func() error {
			return attempt(func(string) (string, error) { return r.members.stepDownLocally(ctx, successor) })
		},
		func(c storev1.PeerClient) error {
			return attempt(func(leader string) (string, error) {
				now, _, moved := r.node.role.currentLeader()
				if now != leader {
					return "", raftstore.ErrNotLeader
				}
				// After a change of the leader the answer of the previous leader is awaited only
				// briefly. A replica that lost its leadership before this call answers at once that
				// it has made no attempt.
				during, end := peernet.WithCancelAfter(ctx, moved, answerGrace)
				defer end()
				// without WaitForReady a broken connection would look like an attempt with a lost
				// answer
				resp, err := c.TransferLeadership(during, &storev1.TransferLeadershipRequest{To: successor},
					grpc.WaitForReady(true))
				return resp.GetLeader(), statusToError(err)
			})
		})
	if err != nil {
		return "", fmt.Errorf("stepping down: %w", err)
	}
	return leader, nil
}

// callLeader calls local if this replica leads. Otherwise it calls remote with a client of the
// leader. It retries while the leader changes. Both functions return the errors of package
// raftstore. name is the replica that the call concerns. If name is not valid UTF-8, it cannot be
// sent, and callLeader returns the error for an unknown member.
func (m *membership) callLeader(ctx context.Context, name string, local func() error,
	remote func(storev1.PeerClient) error) error {
	if err := m.node.awaitRunning(ctx); err != nil {
		return err
	}
	if !utf8.ValidString(name) {
		if _, err := m.node.findMember(name); err != nil {
			return err
		}
	}
	var previous error // the error of the previous attempt, which explains more than a deadline
	for {
		var err error
		switch id, address, _ := m.node.role.currentLeader(); id {
		case "":
			err = raftstore.ErrUnavailable
		case m.node.cfg.Name:
			err = local()
		default:
			var client storev1.PeerClient
			if client, err = m.net.peers.Client(address); err == nil {
				err = remote(client)
			}
		}
		switch {
		case err == nil || isRefusal(err):
			return err
		case ctx.Err() != nil && previous != nil:
			return fmt.Errorf("%w (previous attempt: %w)", err, previous)
		case ctx.Err() != nil:
			return err
		}
		if stop := m.node.waitForRetry(ctx); stop != nil {
			return fmt.Errorf("%w (last attempt: %w)", stop, err)
		}
		previous = err
	}
}

// isRefusal reports whether an error is final: another attempt would return the same error.
func isRefusal(err error) bool {
	return errors.Is(err, raftstore.ErrInvalid) || errors.Is(err, raftstore.ErrUnknownMember) ||
		errors.Is(err, raftstore.ErrMemberExists) || errors.Is(err, raftstore.ErrTooOld) ||
		errors.Is(err, raftstore.ErrNoMajority) ||
		errors.Is(err, raftstore.ErrTransferFailed)
}

func (n *node) members() []raft.Server {
	return n.raft.GetConfiguration().Configuration().Servers
}

func (n *node) findMember(id string) (raft.Server, error) {
	for _, s := range n.members() {
		if string(s.ID) == id {
			return s, nil
		}
	}
	return raft.Server{}, fmt.Errorf("%w: %q is not among %s", raftstore.ErrUnknownMember, id, joinNames(n.members()))
}

func joinNames(servers []raft.Server) string {
	all := make([]string, len(servers))
	for i, s := range servers {
		all[i] = string(s.ID)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// addLocally adds a member, as a learner or as a voter. It works on the leader only.
func (m *membership) addLocally(ctx context.Context, id, address string, learner bool) error {
	if err := errors.Join(checkName(id), checkAddress(address)); err != nil {
		return err
	}
	if m.node.lead.currentLeadership() == nil {
		return raftstore.ErrNotLeader
	}
	ctx, cancel := withReplyMargin(ctx)
	defer cancel()
	var entry raft.Server
	for _, s := range m.node.members() {
		if string(s.ID) == id {
			entry = s
		} else if string(s.Address) == address {
			return fmt.Errorf("%w: address %s belongs to replica %s", raftstore.ErrInvalid, address, s.ID)
		}
	}
	done := string(entry.Address) == address && (entry.Suffrage == raft.Voter || learner)
	if id == m.node.cfg.Name && done {
		return nil
	}
	level, err := m.admitMember(ctx, id, address, entry, done && entry.ID != "")
	if err != nil {
		return err
	}
	if entry.ID != "" && done {
		return nil
	}
	if entry.ID == "" || string(entry.Address) != address {
		if err := m.addLearner(ctx, id, address, level); err != nil {
			return err
		}
	}
	if learner {
		return nil
	}
	return m.promoteLocally(ctx, id)
}

// promoteLocally makes a learner a voter. It works on the leader only.
func (m *membership) promoteLocally(ctx context.Context, id string) error {
	if m.node.lead.currentLeadership() == nil {
		return raftstore.ErrNotLeader
	}
	s, err := m.node.findMember(id)
	if err != nil || s.Suffrage == raft.Voter {
		return err
	}
	ctx, cancel := withReplyMargin(ctx)
	defer cancel()
	level, err := m.awaitLearner(ctx, s)
	if err != nil {
		return err
	}
	index, err := m.giveVote(ctx, s, level)
	if err != nil {
		return err
	}
	m.node.log.Info("member promoted", "member", id, "address", string(s.Address))
	m.awaitPromotionSpread(ctx, id, index)
	return nil
}

// giveVote makes a learner a voter and returns the raft index of the committed change. level is the
// highest feature level that the learner supports.
func (m *membership) giveVote(ctx context.Context, learner raft.Server, level uint32) (index uint64, err error) {
	m.levels.Lock()
	defer m.levels.Unlock()
	if err := m.checkLevel(ctx, string(learner.ID), level); err != nil {
		return 0, err
	}
	change := m.node.raft.AddVoter(learner.ID, learner.Address, 0, configTimeout)
	if err := classifyConfigError(m.node.awaitFuture(change)); err != nil {
		return 0, err
	}
	return change.Index(), nil
}

// awaitPromotionSpread waits until the other voters have received the entry that made the replica
// id a voter. The majority that committed the entry may be this leader and id alone. If this leader
// failed then, no replica could lead until it returned. The other voters would not vote for id,
// because in their configuration id is not a voter. id would not vote for them, because its log is
// more up to date. awaitPromotionSpread does not wait for a voter that does not respond, because it
// may be absent for long.
func (m *membership) awaitPromotionSpread(ctx context.Context, id string, index uint64) {
	ctx, cancel := context.WithTimeout(ctx, spreadPatience)
	defer cancel()
	term := m.node.raft.CurrentTerm()
	for _, s := range m.node.currentVoters() {
		for tries := 0; string(s.ID) != m.node.cfg.Name && m.node.lead.currentLeadership() != nil; {
			ask, cancel := context.WithTimeout(ctx, memberTimeout)
			state, err := m.net.requestState(ask, s)
			cancel()
			if err == nil && state.GetLastTerm() >= term && state.GetLastIndex() >= index {
				break
			}
			if err != nil {
				tries++
			}
			if tries == spreadTries || m.node.waitForRetry(ctx) != nil {
				m.node.log.Warn(
					"a voter does not have a promotion yet: if the leader fails before, possibly no replica can lead",
					"voter", string(s.ID), "promoted", id, "error", err)
				break
			}
		}
	}
}

// awaitLearner waits until a learner lacks at most learnerLag committed entries. It returns the
// highest feature level that the learner supports.
func (m *membership) awaitLearner(ctx context.Context, learner raft.Server) (level uint32, err error) {
	poll := time.NewTicker(learnerPoll)
	defer poll.Stop()
	for {
		if m.node.lead.currentLeadership() == nil {
			return 0, raftstore.ErrNotLeader
		}
		commit := m.node.raft.CommitIndex()
		ask, cancel := context.WithTimeout(ctx, memberTimeout)
		state, err := m.net.requestState(ask, learner)
		cancel()
		if err == nil && state.GetAppliedIndex()+learnerLag >= commit && state.GetAppliedIndex() > 0 {
			return state.GetFeatureLevel(), nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return 0, fmt.Errorf("waiting for learner %s to catch up: %w", learner.ID, ctx.Err())
		case <-m.node.ctx.Done():
			return 0, raftstore.ErrClosed
		}
	}
}

// removeLocally removes a member. It works on the leader only.
func (m *membership) removeLocally(ctx context.Context, id string) error {
	if m.node.lead.currentLeadership() == nil {
		return raftstore.ErrNotLeader
	}
	s, err := m.node.findMember(id)
	if err != nil {
		return err
	}
	if s.Suffrage == raft.Voter {
		if err := m.checkMajorityWithout(ctx, s); err != nil {
			return err
		}
	}
	if id == m.node.cfg.Name {
		// another leader removes this one, so that commits do not wait for an election
		if _, err := m.elections.transferLeadership(ctx, "", "to be removed"); err != nil {
			return err
		}
		return raftstore.ErrNotLeader
	}
	if err := classifyConfigError(m.node.awaitFuture(m.node.raft.RemoveServer(s.ID, 0, configTimeout))); err != nil {
		return err
	}
	m.heard.dropMember(id)
	m.node.log.Info("member removed", "member", id, "address", string(s.Address))
	return nil
}

// checkMajorityWithout returns an error unless a majority of the voters other than voter responds.
func (m *membership) checkMajorityWithout(ctx context.Context, voter raft.Server) error {
	stay := slices.DeleteFunc(m.node.currentVoters(), func(v raft.Server) bool { return v.ID == voter.ID })
	if len(stay) == 0 {
		return fmt.Errorf("%w: %s is the only voter: add another first", raftstore.ErrNoMajority, voter.ID)
	}
	ctx, cancel := context.WithTimeout(ctx, majorityPatience)
	defer cancel()
	answered := m.requestStates(ctx)
	silent := slices.DeleteFunc(slices.Clone(stay), func(v raft.Server) bool { return answered[v.ID] })
	if alive, need := len(stay)-len(silent), len(stay)/2+1; alive < need {
		return fmt.Errorf("%w: only %d of the %d remaining voters can be reached: start %s again, or remove it first",
			raftstore.ErrNoMajority, alive, len(stay), joinNames(silent))
	}
	return nil
}

// stepDownLocally transfers leadership to the voter with the ID successor. If successor is "", it
// transfers leadership to the voter with the most up-to-date log. It returns the new leader. It
// works on the leader only.
func (m *membership) stepDownLocally(ctx context.Context, successor string) (string, error) {
	if m.node.lead.currentLeadership() == nil {
		return "", raftstore.ErrNotLeader
	}
	if successor == m.node.cfg.Name {
		return successor, nil
	}
	if len(m.node.currentVoters()) < 2 {
		return "", fmt.Errorf("%w: %s is the only voter: no other replica could lead", raftstore.ErrInvalid,
			m.node.cfg.Name)
	}
	if successor == "" {
		return m.elections.transferLeadership(ctx, "", "asked to step down")
	}
	return m.transferTo(ctx, successor)
}

func (m *membership) transferTo(ctx context.Context, to string) (leader string, err error) {
	s, err := m.node.findMember(to)
	if err != nil {
		return "", err
	}
	if s.Suffrage != raft.Voter {
		return "", fmt.Errorf("%w: %s is a learner: promote it first", raftstore.ErrInvalid, to)
	}
	return m.elections.transferLeadership(ctx, s.ID, "asked to step down")
}

func classifyConfigError(err error) error {
	if errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipLost) ||
		errors.Is(err, raft.ErrLeadershipTransferInProgress) {
		return fmt.Errorf("%w: %w", raftstore.ErrNotLeader, err)
	}
	return err
}
