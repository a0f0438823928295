package replica

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
)

// From the moment at which raft is told to hand leadership over until the other
// leads, it takes no proposals. It first brings the other's log up to its own,
// however far behind that is, and gives up only after an election timeout. So
// who is to lead is looked for before: a voter that answers, lacks next to
// nothing, whose disk answers, and that has just heard this leader: it would not
// stand for election for one whom it does not follow. Callers try again as soon as
// the leader changes. A transfer that fails is not tried again for the same request.

const (
	// transferLag is how many entries a successor may lack: under load some are
	// always on their way.
	transferLag = 64
	// successorPatience is how long a voter has to say how far it is.
	successorPatience = 250 * time.Millisecond
	successorPoll     = 5 * time.Millisecond
	// writePatience is how long the oldest write of a voter may have been waiting for its disk: to be elected, it has to write
	// its own vote.
	writePatience = 500 * time.Millisecond
)

// TransferLeadership hands leadership to the voter with the best log, if this
// replica leads, and returns when another leads.
func (r *Replica) TransferLeadership(ctx context.Context) error {
	if err := r.up(ctx); err != nil {
		return err
	}
	if _, err := r.transfer(ctx, "", "asked to step down"); err != nil {
		return fmt.Errorf("transferring leadership: %w", err)
	}
	return nil
}

// transfer hands leadership to a voter; "" is whoever has the best log. why is for the log. It returns the first replica that
// leads after this one.
func (r *Replica) transfer(ctx context.Context, to raft.ServerID, why string) (leader string, err error) {
	s, err := r.successor(ctx, to)
	if err != nil {
		return "", err
	}
	done := make(chan error, 1)
	over := r.roles.intend(fmt.Sprintf("%s: handing over to %s", why, s.ID))
	go func() {
		err := r.outcome(r.raft.LeadershipTransferToServer(s.ID, s.Address))
		over()
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			if err = r.transferError(s, err); err != nil {
				return "", err
			}
		}
	case <-ctx.Done():
		return "", ctx.Err()
	}
	// Done when another is known to lead, so that callers may stop at once.
	for {
		id, _, moved := r.role.current()
		if id != "" && id != r.cfg.Name {
			return id, nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return "", ctx.Err()
		case <-r.ctx.Done():
			return "", raftstore.ErrClosed
		}
	}
}

// transferError translates an error of raft for a transfer to s. ErrNotLeader says that nothing was attempted, nil that another
// leads all the same. After ErrTransferFailed this replica leads as before.
func (r *Replica) transferError(s raft.Server, err error) error {
	if err := configError(err); errors.Is(err, raftstore.ErrNotLeader) || errors.Is(err, raft.ErrRaftShutdown) {
		return err
	}
	if id, _ := r.role.leader(); id != "" && id != r.cfg.Name {
		return nil
	}
	return fmt.Errorf("%w: %s was asked to take it and was not elected: %w", raftstore.ErrTransferFailed, s.ID, err)
}

// successor waits until a voter other than this one, or the one named, has
// nearly all of this replica's log.
func (r *Replica) successor(ctx context.Context, to raft.ServerID) (raft.Server, error) {
	poll := time.NewTicker(successorPoll)
	defer poll.Stop()
	var stalled raft.ServerID
	for {
		if r.raft.State() != raft.Leader {
			return raft.Server{}, raftstore.ErrNotLeader
		}
		mine := r.raft.LastIndex()
		best, at, now := r.bestVoter(ctx, to, mine-min(mine, transferLag))
		stalled = cmp.Or(now, stalled) // the last poll may be cut short by ctx
		if best.ID != "" && at.index+transferLag >= mine {
			return best, nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			if best.ID == "" && stalled != "" {
				return best, fmt.Errorf("%w: a disk write of %s, which should lead, has been pending for more than %v: %w",
					raftstore.ErrUnavailable, stalled, writePatience, ctx.Err())
			}
			if best.ID == "" {
				return best, fmt.Errorf("%w: no voter that could lead answers: %w", raftstore.ErrUnavailable, ctx.Err())
			}
			return best, fmt.Errorf("%w: %s has entry %d of %d: %w", raftstore.ErrUnavailable, best.ID, at.index, mine, ctx.Err())
		case <-r.ctx.Done():
			return best, raftstore.ErrClosed
		}
	}
}

// bestVoter asks the other voters, or the one named, how far they are. It
// returns the first that has come to enough, without waiting for the others,
// else the best of all. A voter whose disk is stalled is never the best.
func (r *Replica) bestVoter(ctx context.Context, to raft.ServerID, enough uint64) (best raft.Server, at standing, stalled raft.ServerID) {
	ctx, cancel := context.WithTimeout(ctx, successorPatience)
	defer cancel()
	type answer struct {
		voter raft.Server
		at    standing
		ok    bool
	}
	voters := r.voters()
	answers := make(chan answer, len(voters))
	asked := 0
	for _, v := range voters {
		if string(v.ID) == r.cfg.Name || to != "" && v.ID != to {
			continue
		}
		asked++
		go func() {
			at, silent, ok := r.standingOf(ctx, v)
			answers <- answer{v, at, ok && silent < r.cfg.HeartbeatTimeout}
		}()
	}
	for ; asked > 0; asked-- {
		a := <-answers
		if a.at.pending > writePatience {
			stalled = a.voter.ID
		} else if a.ok && (best.ID == "" || at.less(a.at)) {
			best, at = a.voter, a.at
			if at.index >= enough {
				break
			}
		}
	}
	return best, at, stalled
}
