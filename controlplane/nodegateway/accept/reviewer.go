package accept

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Limits of the authentication and authorization reviews that a node requests for clients of its
// HTTPS server.
const (
	maxReviews      = 16 // number of concurrent reviews of one node
	reviewTimeout   = 5 * time.Second
	maxReviewBytes  = 32 << 10 // size of a token, or of a user name, its groups and its certificate
	maxReviewGroups = 256
)

// Reviewer authenticates and authorizes the clients of the HTTPS servers of nodes. Its methods are
// safe for concurrent use. Create it with NewReviewer.
type Reviewer struct {
	client      *client.Client // acts as no user by default: each review is made as the node
	revocations *Revocations
	running     operationLimiter[string] // running reviews by node
}

// NewReviewer returns a reviewer. The client c must have no user set.
func NewReviewer(c *client.Client, revocations *Revocations) *Reviewer {
	return &Reviewer{client: c, revocations: revocations}
}

// Review authenticates a client of the node's HTTPS server and checks the client's access. The
// reviews are made with the node's identity, and only for subresources of its own Node. cert is the
// node's certificate. The error has a gRPC status.
func (v *Reviewer) Review(ctx context.Context, node string, cert *x509.Certificate,
	r *fleetv1.ReviewRequest) (*fleetv1.ReviewResponse, error) {
	if v.revocations.IsRevoked(node, cert) {
		return nil, wire.RevokedError(node)
	}
	if err := checkReview(r); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: review for node %s: %v", node, err)
	}
	end, ok := v.running.startOperation(node, maxReviews)
	if !ok {
		return nil, status.Errorf(codes.ResourceExhausted,
			"fleet: node %s has %d running reviews: try again later", node, maxReviews)
	}
	defer end()
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	if v.isRevokedClient(r.User, r.Certificate) {
		return &fleetv1.ReviewResponse{Reason: "the client certificate was revoked"}, nil
	}
	nodeClient := v.client.As(api.NodeUser(node))
	subject := &authorizationv1.SubjectAccessReviewSpec{User: r.User, Groups: r.Groups}
	if r.Token != "" {
		review, err := client.Create(ctx, nodeClient,
			&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: r.Token}})
		if err != nil {
			return nil, status.Errorf(codes.Unavailable, "fleet: token review for node %s: %v", node, err)
		}
		if !review.Status.Authenticated {
			return &fleetv1.ReviewResponse{Reason: review.Status.Error}, nil
		}
		subject = subjectOfUser(review.Status.User)
	}
	response := &fleetv1.ReviewResponse{Authenticated: true, User: subject.User}
	for _, subresource := range r.Subresources {
		spec := *subject
		spec.ResourceAttributes = &authorizationv1.ResourceAttributes{Verb: r.Verb, Version: "v1", Resource: "nodes",
			Subresource: subresource, Name: node}
		review, err := client.Create(ctx, nodeClient, &authorizationv1.SubjectAccessReview{Spec: spec})
		if err != nil {
			return nil, status.Errorf(codes.Unavailable, "fleet: access review for node %s: %v", node, err)
		}
		if response.Reason = review.Status.Reason; review.Status.Allowed {
			response.Allowed = true
			break
		}
	}
	return response, nil
}

// subjectOfUser returns a SubjectAccessReview spec with the name, groups and attributes of a user.
func subjectOfUser(u authenticationv1.UserInfo) *authorizationv1.SubjectAccessReviewSpec {
	subject := &authorizationv1.SubjectAccessReviewSpec{User: u.Username, UID: u.UID, Groups: u.Groups}
	for k, v := range u.Extra {
		if subject.Extra == nil {
			subject.Extra = make(map[string]authorizationv1.ExtraValue, len(u.Extra))
		}
		subject.Extra[k] = authorizationv1.ExtraValue(v)
	}
	return subject
}

// isRevokedClient reports whether der, the client certificate of user that a node passed on, is a
// revoked node certificate. A certificate that cannot be parsed is considered revoked, because the
// node has accepted it as a certificate of the cluster.
func (v *Reviewer) isRevokedClient(user string, der []byte) bool {
	node, ok := strings.CutPrefix(user, api.NodeUserPrefix)
	if !ok || len(der) == 0 { // agents of earlier releases send no certificate
		return false
	}
	cert, err := x509.ParseCertificate(der)
	return err != nil || cert.Subject.CommonName != user || v.revocations.IsRevoked(node, cert)
}

// checkReview returns an error if a review request is malformed or too large.
func checkReview(r *fleetv1.ReviewRequest) error {
	size := len(r.Token) + len(r.User) + len(r.Certificate)
	for _, g := range r.Groups {
		size += len(g)
	}
	switch {
	case size > maxReviewBytes || len(r.Groups) > maxReviewGroups:
		return fmt.Errorf("the client has %d bytes and %d groups, more than %d and %d", size, len(r.Groups),
			maxReviewBytes, maxReviewGroups)
	case (r.Token == "") == (r.User == ""):
		return errors.New("want either a token or a user")
	case !slices.Contains([]string{"get", "create", "update", "patch", "delete"}, r.Verb):
		return fmt.Errorf("verb %.20q is not supported by a node's server", r.Verb)
	case len(r.Subresources) == 0 || len(r.Subresources) > 4:
		return fmt.Errorf("%d subresources: want one to four", len(r.Subresources))
	}
	return wire.CheckNameLengths(r.Subresources...)
}
