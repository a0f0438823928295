package replica

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

const (
	// learnerPoll is how often the leader asks a learner how far it is.
	learnerPoll = 25 * time.Millisecond
	// learnerLag is how many entries a learner may be behind to be promoted.
	learnerLag = 64
	// configTimeout bounds how long one change of configuration may queue.
	configTimeout = 5 * time.Second
	// majorityPatience is how long the voters that are to stay have to show
	// that they are there.
	majorityPatience = 3 * time.Second
	// spreadPatience is how long a promotion waits for voters that answer and
	// have not heard of it.
	spreadPatience = 10 * time.Second
	// spreadTries is how often one is asked that does not answer.
	spreadTries = 3
)

// AddMember makes the replica id at address a voting member, from any replica:
// AddLearner, wait until it has caught up, Promote. So it never weakens the
// majority. Doing it again is a no-op.
//
// Errors: ErrInvalid when the address is another member's or another replica
// answers there; ErrMemberExists when id is a voting member already and its
// disk is empty; ErrTooOld when id understands less than StoredLevel.
func (r *Replica) AddMember(ctx context.Context, id, address string) error {
	return r.add(ctx, id, address, false)
}

// AddLearner makes the replica id at address a member without a vote: it gets
// everything and serves reads, and counts in no majority. Errors as AddMember.
func (r *Replica) AddLearner(ctx context.Context, id, address string) error {
	return r.add(ctx, id, address, true)
}

func (r *Replica) add(ctx context.Context, id, address string, learner bool) error {
	err := errors.Join(checkName(id), checkAddress(address))
	if err != nil {
		return fmt.Errorf("adding a replica: %w", err)
	}
	err = r.onLeader(ctx, id,
		func() error { return r.addHere(ctx, id, address, learner) },
		func(c storev1.PeerClient) error {
			_, err := c.AddMember(ctx, &storev1.AddMemberRequest{Id: id, Address: address, Learner: learner})
			return fromStatus(err)
		})
	if err != nil {
		return fmt.Errorf("adding replica %s at %s: %w", id, address, err)
	}
	return nil
}

// Promote makes a learner a voting member as soon as it has caught up, from any
// replica, and returns when every voter that answers knows of it. Promoting a
// voter is a no-op. ErrUnknownMember when id is no member.
func (r *Replica) Promote(ctx context.Context, id string) error {
	err := r.onLeader(ctx, id,
		func() error { return r.promoteHere(ctx, id) },
		func(c storev1.PeerClient) error {
			_, err := c.Promote(ctx, &storev1.PromoteRequest{Id: id})
			return fromStatus(err)
		})
	if err != nil {
		return fmt.Errorf("promoting replica %s: %w", id, err)
	}
	return nil
}

// RemoveMember takes a replica out of the group, from any replica.
//
// Errors: ErrUnknownMember when id is no member; ErrNoMajority when id is the
// last voter, or when fewer than a majority of the voters that would be left
// can be reached. There is no way to force the latter: raft counts the change
// by the majority that is to be, so that it could not commit.
func (r *Replica) RemoveMember(ctx context.Context, id string) error {
	unclear := false // an attempt may have removed it
	settle := func(err error) error {
		if unclear && errors.Is(err, raftstore.ErrUnknownMember) {
			return nil
		}
		unclear = unclear || err != nil && !refusal(err)
		return err
	}
	err := r.onLeader(ctx, id,
		func() error { return settle(r.removeHere(ctx, id)) },
		func(c storev1.PeerClient) error {
			_, err := c.RemoveMember(ctx, &storev1.RemoveMemberRequest{Id: id})
			return settle(fromStatus(err))
		})
	if err != nil {
		return fmt.Errorf("removing replica %s: %w", id, err)
	}
	return nil
}

// answerGrace is how long the answer of a previous leader is awaited once there is another one.
const answerGrace = time.Second

// StepDown makes the leader hand leadership over, to the voter named or, with
// "", to the one with the best log, from any replica. It returns who leads
// afterwards. A leader makes one attempt for one call: it takes no proposals meanwhile.
// Errors: ErrUnknownMember, ErrInvalid when to cannot lead, ErrTransferFailed.
func (r *Replica) StepDown(ctx context.Context, to string) (leader string, err error) {
	unclear := ""  // the leader that may have stepped down, and could not say so
	var lost error // the error of its attempt
	attempt := func(ask func(leader string) (string, error)) error {
		now, _ := r.role.leader()
		switch {
		case now == "":
			return raftstore.ErrUnavailable
		case now == to || to == "" && unclear != "" && now != unclear:
			leader = now
			return nil
		case now == unclear:
			return fmt.Errorf("%w: %s may have tried, did not say so, and leads: %w", raftstore.ErrTransferFailed, now, lost)
		}
		var err error
		leader, err = ask(now)
		if err != nil && !refusal(err) && !errors.Is(err, raftstore.ErrNotLeader) {
			unclear, lost = now, err
		}
		return err
	}
	err = r.onLeader(ctx, to,
		func() error {
			return attempt(func(string) (string, error) { return r.stepDownHere(ctx, to) })
		},
		func(c storev1.PeerClient) error {
			return attempt(func(leader string) (string, error) {
				now, _, moved := r.role.current()
				if now != leader {
					return "", raftstore.ErrNotLeader
				}
				// Another leader waits a moment only for the answer of the previous one: a replica that lost its leadership
				// before this call answers at once that it made no attempt.
				during, end := untilAfter(ctx, moved, answerGrace)
				defer end()
				// Without WaitForReady a broken connection would look like an attempt whose answer was lost.
				resp, err := c.TransferLeadership(during, &storev1.TransferLeadershipRequest{To: to}, grpc.WaitForReady(true))
				return resp.GetLeader(), fromStatus(err)
			})
		})
	if err != nil {
		return "", fmt.Errorf("stepping down: %w", err)
	}
	return leader, nil
}

// onLeader does something on the leader, here or by asking it, and tries again
// while leadership moves. Both return the errors of this package. A name that
// cannot be sent is no member's.
func (r *Replica) onLeader(ctx context.Context, name string, here func() error, there func(storev1.PeerClient) error) error {
	if err := r.up(ctx); err != nil {
		return err
	}
	if !utf8.ValidString(name) {
		if _, err := r.member(name); err != nil {
			return err
		}
	}
	var said error // by the attempt before: that time was up meanwhile tells less
	for {
		var err error
		switch id, address, _ := r.role.current(); id {
		case "":
			err = raftstore.ErrUnavailable
		case r.cfg.Name:
			err = here()
		default:
			var client storev1.PeerClient
			if client, err = r.peers.client(address); err == nil {
				err = there(client)
			}
		}
		switch {
		case err == nil || refusal(err):
			return err
		case ctx.Err() != nil && said != nil:
			return fmt.Errorf("%w (the attempt before: %w)", err, said)
		case ctx.Err() != nil:
			return err
		}
		if stop := r.pause(ctx); stop != nil {
			return fmt.Errorf("%w (last attempt: %w)", stop, err)
		}
		said = err
	}
}

// refusal reports an answer that another attempt would not change.
func refusal(err error) bool {
	return errors.Is(err, raftstore.ErrInvalid) || errors.Is(err, raftstore.ErrUnknownMember) ||
		errors.Is(err, raftstore.ErrMemberExists) || errors.Is(err, raftstore.ErrTooOld) || errors.Is(err, raftstore.ErrNoMajority) ||
		errors.Is(err, raftstore.ErrTransferFailed)
}

func (r *Replica) servers() []raft.Server {
	return r.raft.GetConfiguration().Configuration().Servers
}

func (r *Replica) member(id string) (raft.Server, error) {
	for _, s := range r.servers() {
		if string(s.ID) == id {
			return s, nil
		}
	}
	return raft.Server{}, fmt.Errorf("%w: %q is not among %s", raftstore.ErrUnknownMember, id, names(r.servers()))
}

func names(servers []raft.Server) string {
	all := make([]string, len(servers))
	for i, s := range servers {
		all[i] = string(s.ID)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// addHere adds a member on the leader.
func (r *Replica) addHere(ctx context.Context, id, address string, learner bool) error {
	if err := errors.Join(checkName(id), checkAddress(address)); err != nil {
		return err
	}
	if r.lead.established() == nil {
		return raftstore.ErrNotLeader
	}
	ctx, cancel := toAnswer(ctx)
	defer cancel()
	var is raft.Server
	for _, s := range r.servers() {
		if string(s.ID) == id {
			is = s
		} else if string(s.Address) == address {
			return fmt.Errorf("%w: address %s is that of replica %s", raftstore.ErrInvalid, address, s.ID)
		}
	}
	done := string(is.Address) == address && (is.Suffrage == raft.Voter || learner)
	if id == r.cfg.Name && done {
		return nil
	}
	level, err := r.admit(ctx, id, address, is, done && is.ID != "")
	if err != nil {
		return err
	}
	if is.ID != "" && done {
		return nil
	}
	if is.ID == "" || string(is.Address) != address {
		if err := r.addLearner(ctx, id, address, level); err != nil {
			return err
		}
	}
	if learner {
		return nil
	}
	return r.promoteHere(ctx, id)
}

// promoteHere makes a learner a voter on the leader.
func (r *Replica) promoteHere(ctx context.Context, id string) error {
	if r.lead.established() == nil {
		return raftstore.ErrNotLeader
	}
	s, err := r.member(id)
	if err != nil || s.Suffrage == raft.Voter {
		return err
	}
	ctx, cancel := toAnswer(ctx)
	defer cancel()
	level, err := r.awaitLearner(ctx, s)
	if err != nil {
		return err
	}
	index, err := r.giveVote(ctx, s, level)
	if err != nil {
		return err
	}
	r.log.Info("member promoted", "member", id, "address", string(s.Address))
	r.spread(ctx, id, index)
	return nil
}

// giveVote commits that a learner is a voter, and returns the entry's index.
func (r *Replica) giveVote(ctx context.Context, s raft.Server, level uint32) (index uint64, err error) {
	r.levels.Lock()
	defer r.levels.Unlock()
	if err := r.understands(ctx, string(s.ID), level); err != nil {
		return 0, err
	}
	change := r.raft.AddVoter(s.ID, s.Address, 0, configTimeout)
	if err := configError(r.outcome(change)); err != nil {
		return 0, err
	}
	return change.Index(), nil
}

// spread waits until the other voters have the entry that made id a voter. The
// majority that committed it may be this leader and id alone; were the leader
// to die then, the others would refuse id their votes, and id, whose log is
// longer, would refuse them its own: nobody could lead until the dead one is
// back. Who does not answer may be away for long and is not waited for.
func (r *Replica) spread(ctx context.Context, id string, index uint64) {
	ctx, cancel := context.WithTimeout(ctx, spreadPatience)
	defer cancel()
	term := r.raft.CurrentTerm()
	for _, s := range r.voters() {
		for tries := 0; string(s.ID) != r.cfg.Name && r.lead.established() != nil; {
			ask, cancel := context.WithTimeout(ctx, askMember)
			state, err := r.stateOf(ask, s)
			cancel()
			if err == nil && state.GetLastTerm() >= term && state.GetLastIndex() >= index {
				break
			}
			if err != nil {
				tries++
			}
			if tries == spreadTries || r.pause(ctx) != nil {
				r.log.Warn("a voter has not heard of a promotion: until it has, the leader's end may leave nobody who can lead",
					"voter", string(s.ID), "promoted", id, "err", err)
				break
			}
		}
	}
}

// awaitLearner waits until a learner has nearly caught up, and returns the level that it understands.
func (r *Replica) awaitLearner(ctx context.Context, s raft.Server) (level uint32, err error) {
	poll := time.NewTicker(learnerPoll)
	defer poll.Stop()
	for {
		if r.lead.established() == nil {
			return 0, raftstore.ErrNotLeader
		}
		commit := r.raft.CommitIndex()
		ask, cancel := context.WithTimeout(ctx, askMember)
		state, err := r.stateOf(ask, s)
		cancel()
		if err == nil && state.GetAppliedIndex()+learnerLag >= commit && state.GetAppliedIndex() > 0 {
			return state.GetFeatureLevel(), nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return 0, fmt.Errorf("waiting for learner %s to catch up: %w", s.ID, ctx.Err())
		case <-r.ctx.Done():
			return 0, raftstore.ErrClosed
		}
	}
}

// removeHere removes a member on the leader.
func (r *Replica) removeHere(ctx context.Context, id string) error {
	if r.lead.established() == nil {
		return raftstore.ErrNotLeader
	}
	s, err := r.member(id)
	if err != nil {
		return err
	}
	if s.Suffrage == raft.Voter {
		if err := r.majorityWithout(ctx, s); err != nil {
			return err
		}
	}
	if id == r.cfg.Name {
		// Another leader removes this one, so that writes do not wait for an election.
		if _, err := r.transfer(ctx, "", "to be removed"); err != nil {
			return err
		}
		return raftstore.ErrNotLeader
	}
	if err := configError(r.outcome(r.raft.RemoveServer(s.ID, 0, configTimeout))); err != nil {
		return err
	}
	r.heard.forget(id)
	r.log.Info("member removed", "member", id, "address", string(s.Address))
	return nil
}

// majorityWithout refuses to remove a voter when too few would be left.
func (r *Replica) majorityWithout(ctx context.Context, s raft.Server) error {
	stay := slices.DeleteFunc(r.voters(), func(v raft.Server) bool { return v.ID == s.ID })
	if len(stay) == 0 {
		return fmt.Errorf("%w: %s is the only voter: add another first", raftstore.ErrNoMajority, s.ID)
	}
	ctx, cancel := context.WithTimeout(ctx, majorityPatience)
	defer cancel()
	answered := r.askMembers(ctx)
	silent := slices.DeleteFunc(slices.Clone(stay), func(v raft.Server) bool { return answered[v.ID] })
	if alive, need := len(stay)-len(silent), len(stay)/2+1; alive < need {
		return fmt.Errorf("%w: of the voters that would be left only %d of %d can be reached: start %s again, or remove it first",
			raftstore.ErrNoMajority, alive, len(stay), names(silent))
	}
	return nil
}

// stepDownHere hands leadership over, on the leader.
func (r *Replica) stepDownHere(ctx context.Context, to string) (string, error) {
	if r.lead.established() == nil {
		return "", raftstore.ErrNotLeader
	}
	if to == r.cfg.Name {
		return to, nil
	}
	if len(r.voters()) < 2 {
		return "", fmt.Errorf("%w: %s is the only voter: nobody could lead in its place", raftstore.ErrInvalid, r.cfg.Name)
	}
	if to == "" {
		return r.transfer(ctx, "", "asked to step down")
	}
	return r.handTo(ctx, to)
}

func (r *Replica) handTo(ctx context.Context, to string) (leader string, err error) {
	s, err := r.member(to)
	if err != nil {
		return "", err
	}
	if s.Suffrage != raft.Voter {
		return "", fmt.Errorf("%w: %s is a learner: promote it first", raftstore.ErrInvalid, to)
	}
	return r.transfer(ctx, s.ID, "asked to step down")
}

func configError(err error) error {
	if errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipLost) || errors.Is(err, raft.ErrLeadershipTransferInProgress) {
		return fmt.Errorf("%w: %w", raftstore.ErrNotLeader, err)
	}
	return err
}
