package fleet

import (
	"context"
	"crypto/x509"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// nodeOf is the node that the caller's verified certificate names.
func nodeOf(ctx context.Context) (string, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", status.Error(codes.Unauthenticated, "fleet: no peer")
	}
	t, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(t.State.VerifiedChains) == 0 {
		return "", status.Error(codes.Unauthenticated, "fleet: a client certificate is required")
	}
	node, ok := nodeOfCertificate(t.State.VerifiedChains[0][0])
	if !ok {
		return "", status.Error(codes.PermissionDenied, "fleet: the certificate is not a node's")
	}
	return node, nil
}

func nodeOfCertificate(c *x509.Certificate) (string, bool) {
	node, ok := strings.CutPrefix(c.Subject.CommonName, api.NodeUserPrefix)
	return node, ok && node != "" && slices.Contains(c.Subject.Organization, api.GroupNodes)
}

// The uses of join tokens.
const (
	useNode         = "node"
	useControlPlane = "controlplane"
)

// checkToken judges a join token. Every refusal looks alike from outside; the log has the reason.
func (s *Server) checkToken(ctx context.Context, token, use string) error {
	refused := status.Error(codes.Unauthenticated, "fleet: the join token is unknown, expired or of another kind")
	source, now := sourceOf(ctx), time.Now()
	if s.refusals.exhausted(source, now) {
		return status.Errorf(codes.ResourceExhausted, "fleet: too many joins from %s have failed: wait some seconds", source)
	}
	fields := strings.Split(token, ".") // keelson1.USE.ID.SECRET.CAHASH
	if len(fields) != 5 || len(validation.IsDNS1123Subdomain(fields[2])) > 0 {
		s.refusals.note(source, now, "no join token", "use", use)
		return refused
	}
	c := s.cfg.Client.As(s.cfg.System)
	secret, err := client.Get[*v1.Secret](ctx, c, metav1.NamespaceSystem, "bootstrap-token-"+fields[2])
	if apierrors.IsNotFound(err) {
		s.refusals.note(source, now, "no such token", "id", fields[2], "use", use)
		return refused
	}
	if err != nil {
		return status.Errorf(codes.Unavailable, "fleet: read join token: %v", err)
	}
	if err := s.cfg.CheckToken(token, use, secret, time.Now()); err != nil {
		s.refusals.note(source, now, err.Error(), "id", fields[2], "use", use)
		return refused
	}
	return nil
}

// Enroll implements fleetv1.EnrollmentServer.
func (s *Server) Enroll(ctx context.Context, r *fleetv1.EnrollRequest) (*fleetv1.EnrollResponse, error) {
	if msgs := validation.IsDNS1123Subdomain(r.NodeName); len(msgs) > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll node %q: bad name: %s", r.NodeName, strings.Join(msgs, "; "))
	}
	if err := s.checkToken(ctx, r.Token, useNode); err != nil {
		return nil, err
	}
	cert, err := s.cfg.SignNode(r.NodeName, r.CsrDer)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll node %s: %v", r.NodeName, err)
	}
	list, _ := s.cfg.Replicas()
	s.cfg.Log.Info("node enrolled", "node", r.NodeName)
	return &fleetv1.EnrollResponse{CertificatePem: cert, CaPem: s.cfg.CA(), Replicas: list}, nil
}

// EnrollReplica implements fleetv1.EnrollmentServer.
func (s *Server) EnrollReplica(ctx context.Context, r *fleetv1.EnrollReplicaRequest) (*fleetv1.EnrollReplicaResponse, error) {
	if s.cfg.EnrollReplica == nil {
		return nil, status.Error(codes.Unimplemented, "fleet: this replica does not enrol others")
	}
	if msgs := validation.IsDNS1123Label(r.Name); len(msgs) > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll replica %q: bad name: %s", r.Name, strings.Join(msgs, "; "))
	}
	if err := s.checkToken(ctx, r.Token, useControlPlane); err != nil {
		return nil, err
	}
	out, err := s.cfg.EnrollReplica(ctx, r)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "fleet: enroll replica %s: %v", r.Name, err)
	}
	s.cfg.Log.Info("replica enrolled", "name", r.Name, "peer", r.PeerAddress)
	return out, nil
}

// RenewCertificate implements fleetv1.FleetServer.
func (s *Server) RenewCertificate(ctx context.Context, r *fleetv1.RenewRequest) (*fleetv1.RenewResponse, error) {
	node, err := nodeOf(ctx)
	if err != nil {
		return nil, err
	}
	cert, err := s.cfg.SignNode(node, r.CsrDer)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: renew certificate of node %s: %v", node, err)
	}
	return &fleetv1.RenewResponse{CertificatePem: cert}, nil
}
