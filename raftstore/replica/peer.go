package replica

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// maxMessage bounds a gRPC message: one that is larger would end the stream of all
// batches. By far smaller are the largest that there are, a batch of one commit and
// the outcomes of maxForward proposals; the rest is for leaders of older versions,
// whose outcomes show the conflicting values.
const maxMessage = 64 << 20

// peerWindow is how much a peer may send before it hears that it was read: what
// is forwarded at once fits. It is fixed, so that no pings measure the line.
const peerWindow = (inFlight + 1) * batchBytes

func peerServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(handshaken{}), grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage),
		grpc.InitialWindowSize(peerWindow), grpc.InitialConnWindowSize(peerWindow),
	}
}

// maxForward bounds the proposals of one Forward call.
const maxForward = 4 * batchOps

// peers are the gRPC connections to the other replicas, by address.
type peers struct {
	tls  *tls.Config
	dial func(ctx context.Context, address string) (net.Conn, error)

	mu     sync.Mutex
	conns  map[string]*grpc.ClientConn
	closed bool
}

func (p *peers) init(c Config) {
	p.tls, p.dial, p.conns = c.ClientTLS, c.Dial, make(map[string]*grpc.ClientConn)
}

func (p *peers) client(address string) (storev1.PeerClient, error) {
	conn, err := p.conn(address)
	if err != nil {
		return nil, err
	}
	return storev1.NewPeerClient(conn), nil
}

func (p *peers) conn(address string) (*grpc.ClientConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, raftstore.ErrClosed
	}
	conn := p.conns[address]
	if conn == nil {
		var err error
		conn, err = grpc.NewClient("passthrough:///"+address,
			grpc.WithTransportCredentials(credentials.NewTLS(p.tls.Clone())),
			grpc.WithContextDialer(p.dial),
			grpc.WithInitialWindowSize(peerWindow), grpc.WithInitialConnWindowSize(peerWindow),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 300 * time.Millisecond},
				MinConnectTimeout: time.Second,
			}),
		)
		if err != nil {
			return nil, fmt.Errorf("connecting to replica at %s: %w", address, err)
		}
		p.conns[address] = conn
	}
	return conn, nil
}

// broken keeps a connection to a peer and returns when it has broken, or cannot be made; an error when ctx ended first.
func (p *peers) broken(ctx context.Context, address string) error {
	conn, err := p.conn(address)
	if err != nil {
		return err
	}
	for {
		state := conn.GetState()
		switch state {
		case connectivity.Idle:
			conn.Connect()
		case connectivity.TransientFailure, connectivity.Shutdown:
			return nil
		}
		if !conn.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}
		if state == connectivity.Ready {
			return nil
		}
	}
}

func (p *peers) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, c := range p.conns {
		c.Close()
	}
}

// peerServer answers the other replicas. It translates and decides nothing.
type peerServer struct {
	storev1.UnimplementedPeerServer
	r *Replica
}

func (s *peerServer) ReadIndex(ctx context.Context, req *storev1.ReadIndexRequest) (*storev1.ReadIndexResponse, error) {
	if err := s.r.up(ctx); err != nil {
		return nil, statusOf(err)
	}
	if id, _ := s.r.role.leader(); id != s.r.cfg.Name || s.r.group.strangers(req.GetGroup()) {
		return nil, statusOf(raftstore.ErrNotLeader)
	}
	at, err := s.r.reads.do(ctx)
	if err != nil {
		return nil, statusOf(err)
	}
	return &storev1.ReadIndexResponse{Index: at.index, NowUnixMs: s.r.clock.read()}, nil
}

func (s *peerServer) AddMember(ctx context.Context, req *storev1.AddMemberRequest) (*storev1.AddMemberResponse, error) {
	if err := s.r.up(ctx); err != nil {
		return nil, statusOf(err)
	}
	if err := s.r.addHere(ctx, req.GetId(), req.GetAddress(), req.GetLearner()); err != nil {
		return nil, statusOf(err)
	}
	return &storev1.AddMemberResponse{}, nil
}

func (s *peerServer) Promote(ctx context.Context, req *storev1.PromoteRequest) (*storev1.PromoteResponse, error) {
	if err := s.r.up(ctx); err != nil {
		return nil, statusOf(err)
	}
	if err := s.r.promoteHere(ctx, req.GetId()); err != nil {
		return nil, statusOf(err)
	}
	return &storev1.PromoteResponse{}, nil
}

func (s *peerServer) TransferLeadership(ctx context.Context, req *storev1.TransferLeadershipRequest) (*storev1.TransferLeadershipResponse, error) {
	if err := s.r.up(ctx); err != nil {
		return nil, statusOf(err)
	}
	leader, err := s.r.stepDownHere(ctx, req.GetTo())
	if err != nil {
		return nil, statusOf(err)
	}
	return &storev1.TransferLeadershipResponse{Leader: leader}, nil
}

func (s *peerServer) RemoveMember(ctx context.Context, req *storev1.RemoveMemberRequest) (*storev1.RemoveMemberResponse, error) {
	if err := s.r.up(ctx); err != nil {
		return nil, statusOf(err)
	}
	if err := s.r.removeHere(ctx, req.GetId()); err != nil {
		return nil, statusOf(err)
	}
	return &storev1.RemoveMemberResponse{}, nil
}

func (s *peerServer) State(ctx context.Context, req *storev1.StateRequest) (*storev1.StateResponse, error) {
	if err := s.r.up(ctx); err != nil {
		return nil, statusOf(err)
	}
	resp := &storev1.StateResponse{
		Id: s.r.cfg.Name, Term: s.r.raft.CurrentTerm(), Group: s.r.group.id(),
		AppliedIndex: s.r.fsm.line.get(), Revision: uint64(s.r.Applied()), FeatureLevel: s.r.cfg.FeatureLevel,
		Standby: s.r.cfg.Standby(),
	}
	resp.LastIndex, resp.LastTerm = s.r.lastEntry()
	resp.DiskPendingUs = uint64(s.r.meters.pendingWrite().Microseconds())
	if s.r.raft.State() == raft.Follower {
		resp.SilentUs = uint64(max(1, time.Since(s.r.raft.LastContact()).Microseconds()))
	}
	if leader := req.GetEndedLeader(); leader != "" {
		resp.Ended = s.r.seesEnded(ctx, leader, standing{term: req.GetLastTerm(), index: req.GetLastIndex(), id: req.GetFrom()}, req.GetStands())
	}
	if req.GetHash() {
		h, at, err := s.r.hash(ctx, raftstore.Revision(req.GetRevision()))
		if err != nil {
			return nil, statusOf(err)
		}
		resp.Hash, resp.HashedRevision = h, uint64(at)
		resp.DiskBytes = s.r.usage.bytes(s.r.cfg.DataDir)
	}
	return resp, nil
}

func (s *peerServer) Admit(ctx context.Context, req *storev1.AdmitRequest) (*storev1.AdmitResponse, error) {
	if err := s.r.up(ctx); err != nil {
		return nil, statusOf(err)
	}
	if err := s.r.admitHere(req.GetId(), req.GetGroup()); err != nil {
		return nil, statusOf(err)
	}
	return &storev1.AdmitResponse{}, nil
}

// refusals are the errors that mean the same on the other side.
var refusals = map[codes.Code]error{
	codes.InvalidArgument: raftstore.ErrInvalid,
	codes.NotFound:        raftstore.ErrUnknownMember,
	codes.AlreadyExists:   raftstore.ErrMemberExists,
	codes.OutOfRange:      raftstore.ErrNoMajority,
	// gRPC says none of these codes by itself.
	codes.PermissionDenied: raftstore.ErrTooOld,
	codes.Aborted:          raftstore.ErrTransferFailed, // a previous release takes it for ErrUnavailable
}

// statusOf translates an error for another replica. FailedPrecondition means:
// not done, and not by this replica.
func statusOf(err error) error {
	for code, refusal := range refusals {
		if errors.Is(err, refusal) {
			return status.Error(code, err.Error())
		}
	}
	switch {
	case errors.Is(err, errNotProposed), errors.Is(err, raftstore.ErrNotLeader):
		return status.Error(codes.FailedPrecondition, err.Error())
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return status.FromContextError(err).Err()
	case errors.Is(err, raftstore.ErrClosed):
		return status.Error(codes.FailedPrecondition, err.Error())
	default:
		return status.Error(codes.Unavailable, err.Error())
	}
}

// fromStatus is the other side of statusOf.
func fromStatus(err error) error {
	if err == nil {
		return nil
	}
	kind, known := refusals[status.Code(err)]
	switch {
	case known:
		// The message begins with that of the error already.
		text := status.Convert(err).Message()
		return fmt.Errorf("%w%s", kind, strings.TrimPrefix(text, kind.Error()))
	case status.Code(err) == codes.FailedPrecondition:
		return fmt.Errorf("%w: %w", raftstore.ErrNotLeader, err)
	default:
		return fmt.Errorf("%w: %w", raftstore.ErrUnavailable, err)
	}
}
