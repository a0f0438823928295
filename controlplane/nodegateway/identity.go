package nodegateway

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/clusterid"
)

// identified is a stream interceptor that sends this replica's cluster identity. It refuses an
// agent that knows a later incarnation of the cluster, that is, one recovered or restored since.
func (s *Server) identified(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := s.compareIdentity(stream.Context(), stream.SetHeader); err != nil {
		return err
	}
	return handler(srv, stream)
}

// identifiedCall is the unary form of identified.
func (s *Server) identifiedCall(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	set := func(md metadata.MD) error { return grpc.SetHeader(ctx, md) }
	if err := s.compareIdentity(ctx, set); err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

// compareIdentity sends this replica's cluster identity with set. It returns an error if the agent
// knows a later incarnation of the cluster. The agent's claim has no other effect.
func (s *Server) compareIdentity(ctx context.Context, set func(metadata.MD) error) error {
	if s.cfg.Identity == nil {
		return nil
	}
	own, known := s.cfg.Identity()
	if !known {
		return nil
	}
	if err := set(metadata.Pairs(clusterid.Key, own.String())); err != nil {
		return err
	}
	theirs, err := clusterid.Parse(strings.Join(metadata.ValueFromIncomingContext(ctx, clusterid.Key), ","))
	if err == nil && own.Before(theirs) {
		return status.Error(codes.FailedPrecondition, (&clusterid.AbandonedError{Replica: s.cfg.Replica, Newest: theirs}).Error())
	}
	return nil
}
