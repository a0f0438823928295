package nodegateway

import (
	"context"
	"crypto/x509"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Limits for the authentication and authorization reviews that a node requests for clients of its
// HTTPS server.
const (
	maxReviews      = 16 // concurrent reviews of one node
	reviewPatience  = 5 * time.Second
	maxReviewBytes  = 32 << 10 // of a token, or of a user name, its groups and its certificate
	maxReviewGroups = 256
)

// SignServing implements fleetv1.FleetServer: it signs a certificate for the HTTPS server of the
// calling node, unless the node's client certificate is revoked.
func (s *Server) SignServing(ctx context.Context, r *fleetv1.ServingRequest) (_ *fleetv1.ServingResponse, err error) {
	node, err := nodeOf(ctx)
	if err != nil {
		return nil, err
	}
	if s.cfg.SignServing == nil {
		return nil, status.Error(codes.Unimplemented, "fleet: this replica signs no certificates of nodes' servers")
	}
	rec := s.asks(ctx, servingAsked(fleetv1.Fleet_SignServing_FullMethodName, node))
	defer func() { rec.done(err) }()
	if err := rec.known(api.NodeUser(node)); err != nil {
		return nil, err
	}
	if r, ok, err := s.freshRevocation(ctx, node); err != nil {
		return nil, err
	} else if ok && r.Covers(certificateOf(ctx)) {
		return nil, errRevoked(node)
	}
	cert, err := s.cfg.SignServing(node, r.CsrDer, addressOf(ctx))
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: certificate of the server of node %s: %v", node, err)
	}
	return &fleetv1.ServingResponse{CertificatePem: cert}, nil
}

// addressOf returns the caller's IP address as seen by this replica, or the zero address.
func addressOf(ctx context.Context) netip.Addr {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return netip.Addr{}
	}
	a, err := netip.ParseAddrPort(p.Addr.String())
	if err != nil {
		return netip.Addr{}
	}
	return a.Addr().Unmap().WithZone("")
}

// Review implements fleetv1.FleetServer: it authenticates a client of the node's HTTPS server and
// checks the client's access. The reviews are made with the node's identity, and only for
// subresources of its own Node.
func (s *Server) Review(ctx context.Context, r *fleetv1.ReviewRequest) (*fleetv1.ReviewResponse, error) {
	node, err := nodeOf(ctx)
	if err != nil {
		return nil, err
	}
	if s.revoked(node, certificateOf(ctx)) {
		return nil, errRevoked(node)
	}
	if err := fitReview(r); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: review for node %s: %v", node, err)
	}
	leave, ok := s.reviews.enter(node, maxReviews)
	if !ok {
		return nil, status.Errorf(codes.ResourceExhausted, "fleet: node %s has %d reviews under way: it asks again", node, maxReviews)
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, reviewPatience)
	defer cancel()
	if s.revokedClient(r.User, r.Certificate) {
		return &fleetv1.ReviewResponse{Reason: "the client certificate was revoked"}, nil
	}
	as := s.cfg.Client.As(api.NodeUser(node))
	who := &authorizationv1.SubjectAccessReviewSpec{User: r.User, Groups: r.Groups}
	if r.Token != "" {
		got, err := client.Create(ctx, as, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: r.Token}})
		if err != nil {
			return nil, status.Errorf(codes.Unavailable, "fleet: token review for node %s: %v", node, err)
		}
		if !got.Status.Authenticated {
			return &fleetv1.ReviewResponse{Reason: got.Status.Error}, nil
		}
		u := got.Status.User
		who = &authorizationv1.SubjectAccessReviewSpec{User: u.Username, UID: u.UID, Groups: u.Groups}
		for k, v := range u.Extra {
			if who.Extra == nil {
				who.Extra = make(map[string]authorizationv1.ExtraValue, len(u.Extra))
			}
			who.Extra[k] = authorizationv1.ExtraValue(v)
		}
	}
	out := &fleetv1.ReviewResponse{Authenticated: true, User: who.User}
	for _, sub := range r.Subresources {
		spec := *who
		spec.ResourceAttributes = &authorizationv1.ResourceAttributes{Verb: r.Verb, Version: "v1", Resource: "nodes",
			Subresource: sub, Name: node}
		got, err := client.Create(ctx, as, &authorizationv1.SubjectAccessReview{Spec: spec})
		if err != nil {
			return nil, status.Errorf(codes.Unavailable, "fleet: access review for node %s: %v", node, err)
		}
		if out.Reason = got.Status.Reason; got.Status.Allowed {
			out.Allowed = true
			break
		}
	}
	return out, nil
}

// revokedClient reports whether a client certificate, as passed on by a node, is a revoked
// certificate of the node user. An unparsable certificate counts as revoked, because the node has
// accepted it as one of the cluster.
func (s *Server) revokedClient(user string, der []byte) bool {
	node, ok := strings.CutPrefix(user, api.NodeUserPrefix)
	if !ok || len(der) == 0 { // agents of earlier releases send no certificate
		return false
	}
	cert, err := x509.ParseCertificate(der)
	return err != nil || cert.Subject.CommonName != user || s.revoked(node, cert)
}

// fitReview returns an error if a review request is malformed or too large.
func fitReview(r *fleetv1.ReviewRequest) error {
	size := len(r.Token) + len(r.User) + len(r.Certificate)
	for _, g := range r.Groups {
		size += len(g)
	}
	switch {
	case size > maxReviewBytes || len(r.Groups) > maxReviewGroups:
		return fmt.Errorf("who asks takes %d bytes and %d groups: at most %d and %d are looked at", size, len(r.Groups),
			maxReviewBytes, maxReviewGroups)
	case (r.Token == "") == (r.User == ""):
		return fmt.Errorf("either a token or a user is to be judged")
	case !slices.Contains([]string{"get", "create", "update", "patch", "delete"}, r.Verb):
		return fmt.Errorf("verb %.20q is none that a node's server knows", r.Verb)
	case len(r.Subresources) == 0 || len(r.Subresources) > 4:
		return fmt.Errorf("%d subresources: want one to four", len(r.Subresources))
	}
	return checkNames(r.Subresources...)
}
