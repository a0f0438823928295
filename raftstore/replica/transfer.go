package replica

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica/failover"
)

const (
	// successorTimeout is how long a voter may take to respond with its log position.
	successorTimeout = 250 * time.Millisecond
	successorPoll    = 5 * time.Millisecond
)

// TransferLeadership transfers leadership to the voter with the most up-to-date log if this replica
// leads. It returns when another replica leads.
func (r *Replica) TransferLeadership(ctx context.Context) error {
	if err := r.node.awaitRunning(ctx); err != nil {
		return err
	}
	if _, err := r.elections.transferLeadership(ctx, "", "asked to step down"); err != nil {
		return fmt.Errorf("transferring leadership: %w", err)
	}
	return nil
}

// transferLeadership transfers leadership to the voter with the ID successor. If successor is "",
// it transfers leadership to the voter with the most up-to-date log. reason is for the log. It
// returns the first replica that leads after this one.
//
// From the request until the other replica leads, raft accepts no proposals. It first sends all
// missing entries, and gives up only after an election timeout. The voter is therefore selected
// before the request (see failover.Successor). Callers retry when the leader changes. A failed
// transfer is not repeated for the same request.
func (e *elections) transferLeadership(ctx context.Context, successor raft.ServerID,
	reason string) (leader string, err error) {
	s, err := e.awaitSuccessor(ctx, successor)
	if err != nil {
		return "", err
	}
	done := make(chan error, 1)
	over := e.roles.AnnounceIntent(fmt.Sprintf("%s: transferring leadership to %s", reason, s.ID))
	go func() {
		err := e.node.awaitFuture(e.node.raft.LeadershipTransferToServer(s.ID, s.Address))
		over()
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			if err = e.transferError(s, err); err != nil {
				return "", err
			}
		}
	case <-ctx.Done():
		return "", ctx.Err()
	}
	// the leader must be known, so that callers may stop at once
	for {
		id, _, moved := e.node.role.currentLeader()
		if id != "" && id != e.node.cfg.Name {
			return id, nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return "", ctx.Err()
		case <-e.node.ctx.Done():
			return "", raftstore.ErrClosed
		}
	}
}

// transferError converts an error that raft returned for a leadership transfer to target. The
// result is nil if another replica leads in spite of the error, and ErrNotLeader if no transfer was
// attempted. If it is ErrTransferFailed, this replica still leads.
func (e *elections) transferError(target raft.Server, err error) error {
	if err := classifyConfigError(err); errors.Is(err, raftstore.ErrNotLeader) || errors.Is(err, raft.ErrRaftShutdown) {
		return err
	}
	if id, _ := e.node.role.currentID(); id != "" && id != e.node.cfg.Name {
		return nil
	}
	return fmt.Errorf("%w: %s was requested to lead and was not elected: %w", raftstore.ErrTransferFailed,
		target.ID, err)
}

// awaitSuccessor waits until a voter other than this replica has nearly all of this replica's log,
// and returns that voter. If successor is not "", it waits for the voter with this ID.
func (e *elections) awaitSuccessor(ctx context.Context, successor raft.ServerID) (raft.Server, error) {
	poll := time.NewTicker(successorPoll)
	defer poll.Stop()
	var stalled string
	for {
		if e.node.raft.State() != raft.Leader {
			return raft.Server{}, raftstore.ErrNotLeader
		}
		last := e.node.raft.LastIndex()
		best, choice := e.selectSuccessor(ctx, successor, last)
		stalled = cmp.Or(choice.Stalled, stalled) // ctx may end during the last poll
		if choice.IsReady(last) {
			return best, nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			if best.ID == "" && stalled != "" {
				return best, fmt.Errorf(
					"%w: a disk write of %s, which should lead, has been pending for more than %v: %w",
					raftstore.ErrUnavailable, stalled, failover.MaxPendingWrite, ctx.Err())
			}
			if best.ID == "" {
				return best, fmt.Errorf("%w: no voter that could lead responds: %w",
					raftstore.ErrUnavailable, ctx.Err())
			}
			return best, fmt.Errorf("%w: %s has entry %d of %d: %w", raftstore.ErrUnavailable, best.ID,
				choice.Best.Index, last, ctx.Err())
		case <-e.node.ctx.Done():
			return best, raftstore.ErrClosed
		}
	}
}

// selectSuccessor requests the log positions of the other voters. If successor is not "", it
// requests only that of the voter with this ID. best is the first voter with a nearly complete log,
// and selectSuccessor then does not wait for the others. Without such a voter, best is the voter
// with the most up-to-date log. best is zero if no voter can lead. last is the index of the
// leader's last entry.
func (e *elections) selectSuccessor(ctx context.Context, successor raft.ServerID,
	last uint64) (best raft.Server, choice failover.Successor) {
	ctx, cancel := context.WithTimeout(ctx, successorTimeout)
	defer cancel()
	type response struct {
		voter   raft.Server
		log     failover.LogPosition
		silence time.Duration
		ok      bool
	}
	voters := e.node.currentVoters()
	responses := make(chan response, len(voters))
	outstanding := 0
	for _, v := range voters {
		if string(v.ID) == e.node.cfg.Name || successor != "" && v.ID != successor {
			continue
		}
		outstanding++
		go func() {
			log, silence, ok := e.net.requestPosition(ctx, v)
			responses <- response{v, log, silence, ok}
		}()
	}
	choice = failover.NewSuccessor(e.failoverSettings(), last)
	for ; outstanding > 0; outstanding-- {
		a := <-responses
		done := choice.Add(a.log, a.silence, a.ok)
		if choice.Best.ID != "" && choice.Best.ID == string(a.voter.ID) {
			best = a.voter
		}
		if done {
			break
		}
	}
	return best, choice
}
