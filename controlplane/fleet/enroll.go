package fleet

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

// certificateOf is the certificate for which nodeOf has vouched.
func certificateOf(ctx context.Context) *x509.Certificate {
	p, _ := peer.FromContext(ctx)
	return p.AuthInfo.(credentials.TLSInfo).State.VerifiedChains[0][0]
}

func nodeOfCertificate(c *x509.Certificate) (string, bool) {
	node, ok := strings.CutPrefix(c.Subject.CommonName, api.NodeUserPrefix)
	return node, ok && node != "" && slices.Contains(c.Subject.Organization, api.GroupNodes)
}

// errNoToken is what every refused join token looks like from outside; the log has the reason.
var errNoToken = status.Error(codes.Unauthenticated, "fleet: the join token is unknown, expired, used up or of another kind")

// join is one who asks to join with a token.
type join struct {
	srv    *Server
	token  pki.Token
	role   pki.Role
	name   string // under which it wants to join
	source netip.Addr
	api    *client.Client
}

// joining begins a join, unless too many of its source have failed.
func (s *Server) joining(ctx context.Context, token string, role pki.Role, name string) (*join, error) {
	j := &join{srv: s, role: role, name: name, source: sourceOf(ctx), api: s.cfg.Client.As(s.cfg.System).ForClusterVerb()}
	if s.refusals.exhausted(j.source, time.Now()) {
		return nil, status.Errorf(codes.ResourceExhausted, "fleet: too many joins from %s have failed: wait some seconds", j.source)
	}
	var err error
	if j.token, err = pki.ParseToken(token); err != nil {
		return nil, j.refuse(err)
	}
	if j.token.Role != role {
		return nil, j.refuse(fmt.Errorf("the token is for role %q, not %q", j.token.Role, role))
	}
	return j, nil
}

func (j *join) refuse(why error) error {
	j.srv.refusals.note(j.source, time.Now(), why.Error(), "id", j.token.ID, "role", j.role, "name", j.name)
	return errNoToken
}

// record reads what stands for the token.
func (j *join) record(ctx context.Context) (*v1.Secret, error) {
	secret, err := client.Get[*v1.Secret](ctx, j.api, pki.TokenNamespace, j.token.SecretName())
	if apierrors.IsNotFound(err) {
		return nil, j.refuse(errors.New("no such token"))
	}
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "fleet: read join token: %v", err)
	}
	return secret, nil
}

// check says what the token grants.
func (j *join) check(ctx context.Context) (pki.Grant, error) {
	secret, err := j.record(ctx)
	if err != nil {
		return pki.Grant{}, err
	}
	g, err := j.srv.cfg.TokenKey.Check(j.token, secret, j.name, time.Now())
	if err != nil {
		return g, j.refuse(err)
	}
	return g, nil
}

// spendTries is how often a use is taken down anew because others join with the same token.
const spendTries = 50

// spend takes down that user, a single word, joins with the token. After it the join cannot be refused any more.
func (j *join) spend(ctx context.Context, user string) error {
	for range spendTries {
		secret, err := j.record(ctx)
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

// Enroll implements fleetv1.EnrollmentServer.
func (s *Server) Enroll(ctx context.Context, r *fleetv1.EnrollRequest) (*fleetv1.EnrollResponse, error) {
	if msgs := validation.IsDNS1123Subdomain(r.NodeName); len(msgs) > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll node %.80q: bad name: %s", r.NodeName, strings.Join(msgs, "; "))
	}
	j, err := s.joining(ctx, r.Token, pki.RoleNode, r.NodeName)
	if err != nil {
		return nil, err
	}
	grant, err := j.check(ctx)
	if err != nil {
		return nil, err
	}
	if err := j.vacant(ctx, grant); err != nil {
		return nil, err
	}
	revoked, _, err := s.freshRevocation(ctx, r.NodeName)
	if err != nil {
		return nil, err
	}
	if revoked.Named && !grant.Replace {
		s.refusals.note(j.source, time.Now(), "the node was revoked", "id", j.token.ID, "name", j.name)
		return nil, errRevoked(r.NodeName)
	}
	cert, err := s.cfg.SignNode(r.NodeName, r.CsrDer, revoked.After())
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll node %s: %v", r.NodeName, err)
	}
	if err := j.spend(ctx, r.NodeName+"/"+requestKey(r.CsrDer)); err != nil {
		return nil, err
	}
	list, _ := s.cfg.Replicas()
	s.cfg.Log.Info("node enrolled", "node", r.NodeName, "token", j.token.ID, "source", j.source)
	return &fleetv1.EnrollResponse{CertificatePem: cert, CaPem: s.cfg.CA(), Replicas: list}, nil
}

// vacant refuses the name of a Node that exists, unless the token was made for that.
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
	j.srv.refusals.note(j.source, time.Now(), "a Node of this name exists", "id", j.token.ID, "name", j.name)
	return status.Errorf(codes.PermissionDenied, "fleet: node %s exists: delete it, or have it replaced by a token of "+
		"'kctl cluster token create --names %s --replace'", j.name, j.name)
}

// requestKey tells the keys of signing requests apart.
func requestKey(csr []byte) string {
	r, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return "" // then nothing was signed
	}
	sum := sha256.Sum256(r.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:12])
}

// EnrollReplica implements fleetv1.EnrollmentServer.
func (s *Server) EnrollReplica(ctx context.Context, r *fleetv1.EnrollReplicaRequest) (*fleetv1.EnrollReplicaResponse, error) {
	if s.cfg.EnrollReplica == nil {
		return nil, status.Error(codes.Unimplemented, "fleet: this replica does not enrol others")
	}
	if msgs := validation.IsDNS1123Label(r.Name); len(msgs) > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll replica %.80q: bad name: %s", r.Name, strings.Join(msgs, "; "))
	}
	j, err := s.joining(ctx, r.Token, pki.RoleControlPlane, r.Name)
	if err != nil {
		return nil, err
	}
	if _, err := j.check(ctx); err != nil {
		return nil, err
	}
	out, err := s.cfg.EnrollReplica(ctx, r)
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "fleet: enroll replica %s: %v", r.Name, err)
	}
	// Every answer is a use of its own: it holds the keys of the cluster, and nothing proves that two come from one machine.
	if err := j.spend(ctx, r.Name+"/"+rand.Text()); err != nil {
		return nil, err
	}
	s.cfg.Log.Info("replica enrolled", "name", r.Name, "peer", r.PeerAddress, "token", j.token.ID, "source", j.source)
	return out, nil
}

// RenewCertificate implements fleetv1.FleetServer.
func (s *Server) RenewCertificate(ctx context.Context, r *fleetv1.RenewRequest) (*fleetv1.RenewResponse, error) {
	node, err := nodeOf(ctx)
	if err != nil {
		return nil, err
	}
	if r, ok, err := s.freshRevocation(ctx, node); err != nil {
		return nil, err
	} else if ok && r.Covers(certificateOf(ctx)) {
		return nil, errRevoked(node)
	}
	cert, err := s.cfg.SignNode(node, r.CsrDer, time.Time{})
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: renew certificate of node %s: %v", node, err)
	}
	return &fleetv1.RenewResponse{CertificatePem: cert}, nil
}
