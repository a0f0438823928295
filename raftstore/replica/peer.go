package replica

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica/failover"
	"keelson.dev/keelson/raftstore/replica/proposals"
)

// maxForward is the maximum number of proposals in one Forward call.
const maxForward = 4 * proposals.BatchOps

// peerServer serves the gRPC calls of the other replicas. It only decodes requests, calls functions
// of this package and encodes responses.
type peerServer struct {
	storev1.UnimplementedPeerServer
	r *Replica
}

func (s *peerServer) ReadIndex(ctx context.Context, req *storev1.ReadIndexRequest) (*storev1.ReadIndexResponse, error) {
	if err := s.r.node.awaitRunning(ctx); err != nil {
		return nil, errorToStatus(err)
	}
	if id, _ := s.r.node.role.currentID(); id != s.r.node.cfg.Name || s.r.net.group.IsForeign(req.GetGroup()) {
		return nil, errorToStatus(raftstore.ErrNotLeader)
	}
	at, err := s.r.reads.rounds.AwaitRound(ctx)
	if err != nil {
		return nil, errorToStatus(err)
	}
	return &storev1.ReadIndexResponse{Index: at.Index, NowUnixMs: s.r.node.clock.CurrentTime()}, nil
}

func (s *peerServer) AddMember(ctx context.Context, req *storev1.AddMemberRequest) (*storev1.AddMemberResponse, error) {
	if err := s.r.node.awaitRunning(ctx); err != nil {
		return nil, errorToStatus(err)
	}
	if err := s.r.members.addLocally(ctx, req.GetId(), req.GetAddress(), req.GetLearner()); err != nil {
		return nil, errorToStatus(err)
	}
	return &storev1.AddMemberResponse{}, nil
}

func (s *peerServer) Promote(ctx context.Context, req *storev1.PromoteRequest) (*storev1.PromoteResponse, error) {
	if err := s.r.node.awaitRunning(ctx); err != nil {
		return nil, errorToStatus(err)
	}
	if err := s.r.members.promoteLocally(ctx, req.GetId()); err != nil {
		return nil, errorToStatus(err)
	}
	return &storev1.PromoteResponse{}, nil
}

func (s *peerServer) TransferLeadership(ctx context.Context,
	req *storev1.TransferLeadershipRequest) (*storev1.TransferLeadershipResponse, error) {
	if err := s.r.node.awaitRunning(ctx); err != nil {
		return nil, errorToStatus(err)
	}
	leader, err := s.r.members.stepDownLocally(ctx, req.GetTo())
	if err != nil {
		return nil, errorToStatus(err)
	}
	return &storev1.TransferLeadershipResponse{Leader: leader}, nil
}

func (s *peerServer) RemoveMember(ctx context.Context,
	req *storev1.RemoveMemberRequest) (*storev1.RemoveMemberResponse, error) {
	if err := s.r.node.awaitRunning(ctx); err != nil {
		return nil, errorToStatus(err)
	}
	if err := s.r.members.removeLocally(ctx, req.GetId()); err != nil {
		return nil, errorToStatus(err)
	}
	return &storev1.RemoveMemberResponse{}, nil
}

func (s *peerServer) State(ctx context.Context, req *storev1.StateRequest) (*storev1.StateResponse, error) {
	if err := s.r.node.awaitRunning(ctx); err != nil {
		return nil, errorToStatus(err)
	}
	resp := &storev1.StateResponse{
		Id: s.r.node.cfg.Name, Term: s.r.node.raft.CurrentTerm(), Group: s.r.net.group.ID(),
		AppliedIndex: s.r.node.fsm.Line.CurrentIndex(), Revision: uint64(s.r.Applied()),
		FeatureLevel: s.r.node.cfg.Program.FeatureLevel, Standby: s.r.node.cfg.Program.Standby(),
	}
	resp.LastIndex, resp.LastTerm = s.r.node.lastLogEntry()
	resp.DiskPendingUs = uint64(s.r.node.meters.disk.OldestWriteAge().Microseconds())
	if s.r.node.raft.State() == raft.Follower {
		resp.SilentUs = uint64(max(1, time.Since(s.r.node.raft.LastContact()).Microseconds()))
	}
	if leader := req.GetEndedLeader(); leader != "" {
		resp.Ended = s.r.elections.answerPledgeRequest(ctx, failover.PledgeRequest{
			Leader: leader, Confirm: req.GetStands(),
			From: failover.LogPosition{Term: req.GetLastTerm(), Index: req.GetLastIndex(), ID: req.GetFrom()},
		})
	}
	if req.GetHash() {
		h, at, err := s.r.comparer.computeHash(ctx, raftstore.Revision(req.GetRevision()))
		if err != nil {
			return nil, errorToStatus(err)
		}
		resp.Hash, resp.HashedRevision = h, uint64(at)
		resp.DiskBytes = s.r.snapshots.usage.measureBytes(s.r.node.cfg.Storage.DataDir)
	}
	return resp, nil
}

func (s *peerServer) Admit(ctx context.Context, req *storev1.AdmitRequest) (*storev1.AdmitResponse, error) {
	if err := s.r.node.awaitRunning(ctx); err != nil {
		return nil, errorToStatus(err)
	}
	if err := s.r.net.acceptAdmission(req.GetId(), req.GetGroup()); err != nil {
		return nil, errorToStatus(err)
	}
	return &storev1.AdmitResponse{}, nil
}

// refusals maps gRPC status codes to the errors of package raftstore that have the same meaning.
var refusals = map[codes.Code]error{
	codes.InvalidArgument: raftstore.ErrInvalid,
	codes.NotFound:        raftstore.ErrUnknownMember,
	codes.AlreadyExists:   raftstore.ErrMemberExists,
	codes.OutOfRange:      raftstore.ErrNoMajority,
	// gRPC itself never returns this code, nor the following one
	codes.PermissionDenied: raftstore.ErrTooOld,
	codes.Aborted:          raftstore.ErrTransferFailed, // a previous release interprets it as ErrUnavailable
}

// errorToStatus converts an error to a gRPC status for another replica. FailedPrecondition means
// that the call has had no effect, because this replica cannot execute it.
func errorToStatus(err error) error {
	for code, refusal := range refusals {
		if errors.Is(err, refusal) {
			return status.Error(code, err.Error())
		}
	}
	switch {
	case errors.Is(err, proposals.ErrNotProposed), errors.Is(err, raftstore.ErrNotLeader):
		return status.Error(codes.FailedPrecondition, err.Error())
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return status.FromContextError(err).Err()
	case errors.Is(err, raftstore.ErrClosed):
		return status.Error(codes.FailedPrecondition, err.Error())
	default:
		return status.Error(codes.Unavailable, err.Error())
	}
}

// statusToError converts a gRPC status of another replica to an error.
func statusToError(err error) error {
	if err == nil {
		return nil
	}
	kind, known := refusals[status.Code(err)]
	switch {
	case known:
		// the message starts with the text of the error already
		text := status.Convert(err).Message()
		return fmt.Errorf("%w%s", kind, strings.TrimPrefix(text, kind.Error()))
	case status.Code(err) == codes.FailedPrecondition:
		return fmt.Errorf("%w: %w", raftstore.ErrNotLeader, err)
	default:
		return fmt.Errorf("%w: %w", raftstore.ErrUnavailable, err)
	}
}
