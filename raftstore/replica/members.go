package replica

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
)

// AddMember makes the replica id at address a voting member, from any replica.
// It is added as a learner first and promoted when it has caught up, so that
// it never weakens the majority. Doing it again is a no-op.
func (r *Replica) AddMember(ctx context.Context, id, address string) error {
	err := r.onLeader(ctx,
		func() error { return r.addHere(ctx, id, address) },
		func(c storev1.PeerClient) error {
			_, err := c.AddMember(ctx, &storev1.AddMemberRequest{Id: id, Address: address})
			return err
		})
	if err != nil {
		return fmt.Errorf("adding replica %s at %s: %w", id, address, err)
	}
	return nil
}

// RemoveMember takes a replica out of the group, from any replica. Removing
// one that is not a member is a no-op.
func (r *Replica) RemoveMember(ctx context.Context, id string) error {
	err := r.onLeader(ctx,
		func() error { return r.removeHere(ctx, id) },
		func(c storev1.PeerClient) error {
			_, err := c.RemoveMember(ctx, &storev1.RemoveMemberRequest{Id: id})
			return err
		})
	if err != nil {
		return fmt.Errorf("removing replica %s: %w", id, err)
	}
	return nil
}

// onLeader does something on the leader, here or by asking it, and tries again
// while leadership moves.
func (r *Replica) onLeader(ctx context.Context, here func() error, there func(storev1.PeerClient) error) error {
	if err := r.up(ctx); err != nil {
		return err
	}
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
				err = fromStatus(there(client))
			}
		}
		if err == nil || errors.Is(err, raftstore.ErrInvalid) || ctx.Err() != nil {
			return err
		}
		if stop := r.pause(ctx); stop != nil {
			return fmt.Errorf("%w (last attempt: %w)", stop, err)
		}
	}
}

// fromStatus is the other side of statusOf.
func fromStatus(err error) error {
	switch status.Code(err) {
	case codes.OK:
		return nil
	case codes.FailedPrecondition:
		return fmt.Errorf("%w: %w", raftstore.ErrNotLeader, err)
	case codes.InvalidArgument:
		return fmt.Errorf("%w: %w", raftstore.ErrInvalid, err)
	default:
		return fmt.Errorf("%w: %w", raftstore.ErrUnavailable, err)
	}
}

// addHere adds a member on the leader.
func (r *Replica) addHere(ctx context.Context, id, address string) error {
	if _, _, err := net.SplitHostPort(address); err != nil || id == "" {
		return fmt.Errorf("%w: replica %q at address %q", raftstore.ErrInvalid, id, address)
	}
	if r.lead.established() == nil {
		return raftstore.ErrNotLeader
	}
	for _, s := range r.raft.GetConfiguration().Configuration().Servers {
		switch {
		case string(s.ID) == id && string(s.Address) == address && s.Suffrage == raft.Voter:
			return nil
		case string(s.ID) != id && string(s.Address) == address:
			return fmt.Errorf("%w: address %s is that of replica %s", raftstore.ErrInvalid, address, s.ID)
		}
	}
	if err := configError(r.outcome(r.raft.AddNonvoter(raft.ServerID(id), raft.ServerAddress(address), 0, configTimeout))); err != nil {
		return err
	}
	r.log.Info("learner added", "member", id, "address", address)
	if err := r.awaitLearner(ctx, id, address); err != nil {
		return err
	}
	if err := configError(r.outcome(r.raft.AddVoter(raft.ServerID(id), raft.ServerAddress(address), 0, configTimeout))); err != nil {
		return err
	}
	r.log.Info("member promoted", "member", id, "address", address)
	return nil
}

// awaitLearner waits until a learner has nearly caught up.
func (r *Replica) awaitLearner(ctx context.Context, id, address string) error {
	client, err := r.peers.client(address)
	if err != nil {
		return err
	}
	poll := time.NewTicker(learnerPoll)
	defer poll.Stop()
	for {
		if r.lead.established() == nil {
			return raftstore.ErrNotLeader
		}
		commit := r.raft.CommitIndex()
		ask, cancel := context.WithTimeout(ctx, time.Second)
		state, err := client.State(ask, &storev1.StateRequest{})
		cancel()
		switch {
		case err == nil && state.GetId() != id:
			return fmt.Errorf("%w: the replica at %s is %q and not %q", raftstore.ErrInvalid, address, state.GetId(), id)
		case err == nil && state.GetAppliedIndex()+learnerLag >= commit && state.GetAppliedIndex() > 0:
			return nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for the learner to catch up: %w", ctx.Err())
		case <-r.ctx.Done():
			return raftstore.ErrClosed
		}
	}
}

// removeHere removes a member on the leader.
func (r *Replica) removeHere(ctx context.Context, id string) error {
	if r.lead.established() == nil {
		return raftstore.ErrNotLeader
	}
	if id == r.cfg.Name && len(r.voters()) > 1 {
		// Another leader removes this one, so that writes do not wait for an election.
		if err := r.TransferLeadership(ctx); err != nil {
			return err
		}
		return raftstore.ErrNotLeader
	}
	return configError(r.outcome(r.raft.RemoveServer(raft.ServerID(id), 0, configTimeout)))
}

func configError(err error) error {
	if errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipLost) {
		return fmt.Errorf("%w: %w", raftstore.ErrNotLeader, err)
	}
	return err
}
