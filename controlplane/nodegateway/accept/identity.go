package accept

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/clusterid"
)

// interceptStream is a stream interceptor that sends this replica's cluster ID and incarnation. It
// refuses an agent that has seen a later incarnation of the cluster, which is started by a recovery
// or restore.
func (a *Acceptor) interceptStream(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo,
	handler grpc.StreamHandler) error {
	if err := a.compareIdentity(stream.Context(), stream.SetHeader); err != nil {
		return err
	}
	return handler(srv, stream)
}

// interceptCall does for unary calls what interceptStream does for streams.
func (a *Acceptor) interceptCall(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any,
	error) {
	set := func(md metadata.MD) error { return grpc.SetHeader(ctx, md) }
	if err := a.compareIdentity(ctx, set); err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

// compareIdentity sends this replica's cluster ID and incarnation with set. It returns an error if
// the agent sends a later incarnation of the cluster. The agent's value has no other effect.
func (a *Acceptor) compareIdentity(ctx context.Context, set func(metadata.MD) error) error {
	if a.cfg.Identity == nil {
		return nil
	}
	own, known := a.cfg.Identity()
	if !known {
		return nil
	}
	if err := set(metadata.Pairs(clusterid.Key, own.String())); err != nil {
		return err
	}
	theirs, err := clusterid.Parse(strings.Join(metadata.ValueFromIncomingContext(ctx, clusterid.Key), ","))
	if err == nil && own.Before(theirs) {
		return status.Error(codes.FailedPrecondition,
			(&clusterid.AbandonedError{Replica: a.cfg.Lifetime.Replica, Newest: theirs}).Error())
	}
	return nil
}
