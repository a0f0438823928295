package nodegateway

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// nodeOf returns the node name in the caller's verified client certificate.
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

// certificateOf returns the caller's client certificate. Call it only after nodeOf has succeeded.
func certificateOf(ctx context.Context) *x509.Certificate {
	p, _ := peer.FromContext(ctx)
	return p.AuthInfo.(credentials.TLSInfo).State.VerifiedChains[0][0]
}

func nodeOfCertificate(c *x509.Certificate) (string, bool) {
	node, ok := strings.CutPrefix(c.Subject.CommonName, api.NodeUserPrefix)
	return node, ok && node != "" && slices.Contains(c.Subject.Organization, api.GroupNodes)
}

// errNoToken is the error for every refused join token; the reason is only logged.
var errNoToken = status.Error(codes.Unauthenticated,
	"fleet: the join token is unknown, expired, used up or of another kind")

// join is one attempt to join the cluster with a token.
type join struct {
	srv    *Server
	token  pki.Token
	role   pki.Role
	name   string // requested node or replica name
	source netip.Addr
	api    *client.Client
	record *entry
}

// joining parses the token and returns a new join. It fails if the token's role differs or if too
// many joins from the same source have failed.
func (s *Server) joining(ctx context.Context, rec *entry, token string, role pki.Role, name string) (*join, error) {
	j := &join{srv: s, role: role, name: name, source: sourceOf(ctx),
		api: s.cfg.Client.As(s.cfg.System).ForClusterVerb(), record: rec}
	if s.refusals.exhausted(j.source, time.Now()) {
		return nil, status.Errorf(codes.ResourceExhausted,
			"fleet: too many joins from %s have failed: wait some seconds", j.source)
	}
	var err error
	if j.token, err = pki.ParseToken(token); err != nil {
		return nil, j.refuse(err)
	}
	rec.asked.Token = j.token.ID
	if j.token.Role != role {
		return nil, j.refuse(fmt.Errorf("the token is for role %q, not %q", j.token.Role, role))
	}
	return j, nil
}

func (j *join) refuse(why error) error {
	j.record.reason = why.Error()
	j.srv.refusals.note(j.source, time.Now(), why.Error(), "id", j.token.ID, "role", j.role, "name", j.name)
	return errNoToken
}

// tokenRecord reads the Secret of the join token.
func (j *join) tokenRecord(ctx context.Context) (*v1.Secret, error) {
	waits := j.srv.cfg.TokensWait != nil && j.srv.cfg.TokensWait() // read first: the tokens may be stored between the two reads
	secret, err := client.Get[*v1.Secret](ctx, j.api, pki.TokenNamespace, j.token.SecretName())
	switch {
	case apierrors.IsNotFound(err) && waits:
		return nil, status.Error(codes.Unavailable, "fleet: the join tokens made with the cluster are not stored yet: try again")
	case apierrors.IsNotFound(err):
		return nil, j.refuse(errors.New("no such token"))
	}
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "fleet: read join token: %v", err)
	}
	return secret, nil
}

// check validates the token and returns its grant. It also checks that user, a single word, may use
// the token, without recording the use.
func (j *join) check(ctx context.Context, user string) (pki.Grant, error) {
	secret, err := j.tokenRecord(ctx)
	if err != nil {
		return pki.Grant{}, err
	}
	now := time.Now()
	g, err := j.srv.cfg.TokenKey.Check(j.token, secret, j.name, now)
	if err == nil {
		_, err = j.srv.cfg.TokenKey.Use(j.token, secret, j.name, user, now) // fail before any change is made
	}
	if err != nil {
		return g, j.refuse(err)
	}
	return g, j.record.known(UserOfToken(j.token.ID))
}

// spendTries bounds the retries of a token use that conflicts with other joins by the same token.
const spendTries = 50

// spend records a use of the token by user, a single word. It is the last step of a join: after it,
// the join cannot be refused. Calls on this replica are serialised, because all but one of
// concurrent updates would conflict.
func (j *join) spend(ctx context.Context, user string) error {
	select {
	case j.srv.spending <- struct{}{}:
		defer func() { <-j.srv.spending }()
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
	for range spendTries {
		secret, err := j.tokenRecord(ctx)
		if err != nil {
			return err
		}
		next, err := j.srv.cfg.TokenKey.Use(j.token, secret, j.name, user, time.Now())
		if err != nil {
			return j.refuse(err)
		}
		if next == nil {
			return nil
		}
		_, err = client.Update(ctx, j.api, next)
		if err == nil {
			return nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return status.Errorf(codes.Unavailable, "fleet: record the use of join token %s: %v", j.token.ID, err)
		}
	}
	return status.Errorf(codes.Unavailable, "fleet: too many join with token %s at once: try again", j.token.ID)
}

// Enroll implements fleetv1.EnrollmentServer: it signs the client certificate of a node that
// presents a valid join token.
func (s *Server) Enroll(ctx context.Context, r *fleetv1.EnrollRequest) (_ *fleetv1.EnrollResponse, err error) {
	rec := s.asks(ctx, nodeAsked(fleetv1.Enrollment_Enroll_FullMethodName, r.NodeName))
	defer func() { rec.done(err) }()
	if msgs := validation.IsDNS1123Subdomain(r.NodeName); len(msgs) > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll node %.80q: bad name: %s", r.NodeName,
			strings.Join(msgs, "; "))
	}
	j, err := s.joining(ctx, rec, r.Token, pki.RoleNode, r.NodeName)
	if err != nil {
		return nil, err
	}
	key := requestKey(r.CsrDer)
	grant, err := j.check(ctx, r.NodeName+"/"+key)
	if err != nil {
		return nil, err
	}
	claimed, err := j.claim(ctx, key, grant)
	if err != nil {
		return nil, err
	}
	cert, err := j.admitNode(ctx, grant, key, r.CsrDer)
	if err != nil {
		j.unclaim(ctx, claimed)
		return nil, err
	}
	list, _ := s.replicas()
	s.cfg.Log.Info("node enrolled", "node", r.NodeName, "token", j.token.ID, "source", j.source)
	return &fleetv1.EnrollResponse{CertificatePem: cert, CaPem: s.cfg.CA.PEM(), Replicas: list}, nil
}

// admitNode signs the node's certificate and records the token use. The node name must have been
// claimed.
func (j *join) admitNode(ctx context.Context, grant pki.Grant, key string, csr []byte) (certPEM []byte, err error) {
	if err := j.vacant(ctx, grant); err != nil {
		return nil, err
	}
	revoked, _, err := j.srv.freshRevocation(ctx, j.name)
	if err != nil {
		return nil, err
	}
	if revoked.Named && !grant.Replace {
		_ = j.refuse(errors.New("the node was revoked"))
		return nil, errRevoked(j.name)
	}
	cert, err := j.srv.cfg.SignNode(j.name, csr, revoked.After())
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll node %s: %v", j.name, err)
	}
	return cert, j.spend(ctx, j.name+"/"+key)
}

// vacant returns an error if a Node with the requested name exists, unless the grant allows
// replacement.
func (j *join) vacant(ctx context.Context, grant pki.Grant) error {
	if grant.Replace {
		return nil
	}
	_, err := client.Get[*v1.Node](ctx, j.api, "", j.name)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return status.Errorf(codes.Unavailable, "fleet: read node %s: %v", j.name, err)
	}
	return j.deny("a Node of this name exists", codes.PermissionDenied,
		"fleet: node %s exists: delete it, or have it replaced by a token of "+
			"'kctl cluster token create --names %s --replace'", j.name, j.name)
}

// requestKey returns a short hash of the public key of a signing request.
func requestKey(csr []byte) string {
	r, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return "" // an unparsable request; SignNode refuses it
	}
	sum := sha256.Sum256(r.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:12])
}

// EnrollReplica implements fleetv1.EnrollmentServer: it returns the keys that a new control plane
// replica needs, and adds the replica to the raft group.
func (s *Server) EnrollReplica(ctx context.Context,
	r *fleetv1.EnrollReplicaRequest) (_ *fleetv1.EnrollReplicaResponse, err error) {
	rec := s.asks(ctx, replicaAsked(fleetv1.Enrollment_EnrollReplica_FullMethodName, r.Name))
	defer func() { rec.done(err) }()
	if s.cfg.EnrollReplica == nil {
		return nil, status.Error(codes.Unimplemented, "fleet: this replica does not enrol others")
	}
	if msgs := validation.IsDNS1123Label(r.Name); len(msgs) > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll replica %.80q: bad name: %s", r.Name,
			strings.Join(msgs, "; "))
	}
	j, err := s.joining(ctx, rec, r.Token, pki.RoleControlPlane, r.Name)
	if err != nil {
		return nil, err
	}
	// Every response counts as one use. It contains the cluster's keys, and nothing proves that two
	// requests come from one machine.
	user := r.Name + "/" + rand.Text()
	if _, err := j.check(ctx, user); err != nil {
		return nil, err
	}
	out, err := s.cfg.EnrollReplica(ctx, r)
	if err != nil {
		code := codes.Unavailable
		if status.Code(err) == codes.InvalidArgument { // a retry would fail in the same way
			code = codes.InvalidArgument
		}
		return nil, status.Errorf(code, "fleet: enroll replica %s: %s", r.Name, status.Convert(err).Message())
	}
	if err := j.spend(ctx, user); err != nil {
		return nil, err
	}
	s.cfg.Log.Info("replica enrolled", "name", r.Name, "peer", r.PeerAddress, "token", j.token.ID, "source", j.source)
	return out, nil
}

// RenewCertificate implements fleetv1.FleetServer: it signs a new client certificate for the
// calling node, unless its certificate is revoked.
func (s *Server) RenewCertificate(ctx context.Context, r *fleetv1.RenewRequest) (_ *fleetv1.RenewResponse, err error) {
	node, err := nodeOf(ctx)
	if err != nil {
		return nil, err
	}
	rec := s.asks(ctx, renewalAsked(fleetv1.Fleet_RenewCertificate_FullMethodName, node))
	defer func() { rec.done(err) }()
	if err := rec.known(api.User{Name: api.NodeUserPrefix + node,
		Groups: []string{api.GroupNodes, api.GroupAuthenticated}}); err != nil {
		return nil, err
	}
	revoked, ok, err := s.freshRevocation(ctx, node)
	if err != nil {
		return nil, err
	}
	if ok && revoked.Covers(certificateOf(ctx)) {
		return nil, errRevoked(node)
	}
	cert, err := s.cfg.SignNode(node, r.CsrDer, revoked.After())
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: renew certificate of node %s: %v", node, err)
	}
	return &fleetv1.RenewResponse{CertificatePem: cert}, nil
}
