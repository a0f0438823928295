package nodegateway

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Enroll implements fleetv1.EnrollmentServer: it returns the client certificate of a node that
// presents a valid join token.
func (s *Server) Enroll(ctx context.Context, r *fleetv1.EnrollRequest) (*fleetv1.EnrollResponse, error) {
	cert, err := s.enroller.EnrollNode(ctx, r.NodeName, r.Token, r.CsrDer)
	if err != nil {
		return nil, err
	}
	list, _ := s.streams.ReplicasForAgents()
	return &fleetv1.EnrollResponse{CertificatePem: cert, CaPem: s.cfg.CA.PEM(), Replicas: list}, nil
}

// EnrollReplica implements fleetv1.EnrollmentServer: it returns the keys and the configuration that
// a joining control-plane replica needs.
func (s *Server) EnrollReplica(ctx context.Context, r *fleetv1.EnrollReplicaRequest) (*fleetv1.EnrollReplicaResponse,
	error) {
	return s.enroller.EnrollReplica(ctx, r)
}

// RenewCertificate implements fleetv1.FleetServer: it returns a new client certificate for the
// calling node, unless its certificate is revoked.
func (s *Server) RenewCertificate(ctx context.Context, r *fleetv1.RenewRequest) (*fleetv1.RenewResponse, error) {
	node, err := wire.CallerNode(ctx)
	if err != nil {
		return nil, err
	}
	cert, err := s.enroller.RenewCertificate(ctx, node, wire.CallerCertificate(ctx), r.CsrDer)
	if err != nil {
		return nil, err
	}
	return &fleetv1.RenewResponse{CertificatePem: cert}, nil
}

// SignServing implements fleetv1.FleetServer: it returns a certificate for the HTTPS server of the
// calling node, unless the node's client certificate is revoked.
func (s *Server) SignServing(ctx context.Context, r *fleetv1.ServingRequest) (*fleetv1.ServingResponse, error) {
	node, err := wire.CallerNode(ctx)
	if err != nil {
		return nil, err
	}
	cert, err := s.enroller.SignServing(ctx, node, wire.CallerCertificate(ctx), wire.CallerAddress(ctx), r.CsrDer)
	if err != nil {
		return nil, err
	}
	return &fleetv1.ServingResponse{CertificatePem: cert}, nil
}

// Review implements fleetv1.FleetServer: it authenticates a client of the calling node's HTTPS
// server and checks the client's access.
func (s *Server) Review(ctx context.Context, r *fleetv1.ReviewRequest) (*fleetv1.ReviewResponse, error) {
	node, err := wire.CallerNode(ctx)
	if err != nil {
		return nil, err
	}
	return s.reviewer.Review(ctx, node, wire.CallerCertificate(ctx), r)
}

// Session implements fleetv1.FleetServer: it runs the node's session, which sends the node's
// objects and receives its reports.
func (s *Server) Session(stream fleetv1.Fleet_SessionServer) error {
	node, err := wire.CallerNode(stream.Context())
	if err != nil {
		return err
	}
	first, err := wire.ReceiveFirst(s.lifetime, stream)
	if err != nil {
		return err
	}
	hello := first.GetHello()
	if hello == nil || hello.NodeName != node {
		return status.Errorf(codes.InvalidArgument, "fleet: session of node %s: the first message must be its Hello",
			node)
	}
	return s.sessions.ServeSession(stream, node, wire.CallerCertificate(stream.Context()), hello)
}

// Standby implements fleetv1.FleetServer: it runs the standby connection of a node, which every
// agent has to every replica. It closes an older standby connection of the same node.
func (s *Server) Standby(stream fleetv1.Fleet_StandbyServer) error {
	node, err := wire.CallerNode(stream.Context())
	if err != nil {
		return err
	}
	first, err := wire.ReceiveFirst(s.lifetime, stream)
	if err != nil {
		return err
	}
	if hello := first.GetHello(); hello == nil || hello.NodeName != node {
		return status.Errorf(codes.InvalidArgument, "fleet: standby of node %s: the first message must be its Hello",
			node)
	}
	return s.streams.ServeStandby(stream, node)
}

// Tunnel implements fleetv1.FleetServer: it passes a stream that an agent has opened to the
// function that requested the tunnel, and keeps the stream open until that function is done.
func (s *Server) Tunnel(stream fleetv1.Fleet_TunnelServer) error {
	node, err := wire.CallerNode(stream.Context())
	if err != nil {
		return err
	}
	received, err := s.streams.CountOpening(node)
	if err != nil {
		return err
	}
	first, err := wire.ReceiveFirst(s.lifetime, stream)
	received()
	if err != nil {
		return err
	}
	return s.streams.ServeTunnel(stream, node, first.GetOpen().GetId())
}
