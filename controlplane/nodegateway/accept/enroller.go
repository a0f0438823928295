// Package accept accepts the connections of agents, admits new nodes and replicas to the cluster,
// signs certificates, and revokes them.
//
// An Acceptor accepts connections. Clients without a node certificate can only call the Enrollment
// service. An Enroller checks join tokens. Revocations watches the revocation records and closes
// the connections of revoked nodes.
package accept

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/retry"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// errNoToken is the error for every refused join token. The reason is only logged.
var errNoToken = status.Error(codes.Unauthenticated,
	"fleet: the join token is unknown, expired, used up or of another kind")

// EnrollConfig is the configuration for the enrollment of nodes and replicas, and for signing their
// certificates.
type EnrollConfig struct {
	// TokenKey verifies that this cluster created a join token's Secret.
	TokenKey pki.TokenKey
	// TokensPending reports whether the first join tokens of the cluster are not stored yet. A
	// client with an unknown token must then try again. It may be nil.
	TokensPending func() bool
	// SignNode verifies the CSR and signs a client certificate for CN system:node:NAME, O
	// system:nodes. The certificate's issue time is now, or atLeast if that is later: certificates
	// that were issued earlier are revoked.
	SignNode func(node string, csrDER []byte, atLeast time.Time) (certPEM []byte, err error)
	// SignServing signs a certificate for a node's HTTPS server. seen is the address from which the
	// node connects. If SignServing is nil, such requests are refused.
	SignServing func(node string, csrDER []byte, seen netip.Addr) (certPEM []byte, err error)
	// CertificateLife is the lifetime of certificates that SignNode signs.
	CertificateLife time.Duration
	// EnrollReplica returns the keys and the configuration for a joining replica. The caller has
	// checked the token. If it is nil, replicas are refused.
	EnrollReplica func(ctx context.Context, r *fleetv1.EnrollReplicaRequest) (*fleetv1.EnrollReplicaResponse, error)
	// Audit starts the audit event of a request to join or to renew a certificate. It returns a
	// function that completes the event, or an error if the event must be recorded and cannot be
	// recorded. If it is nil, nothing is recorded.
	Audit func(AuditRequest) (func(AuditResult), error)
}

// Enroller admits nodes and replicas to the cluster and signs the certificates of nodes. Its
// methods are safe for concurrent use. Create it with NewEnroller.
type Enroller struct {
	cfg         EnrollConfig
	client      *client.Client // acts as the system user, and may write the records of cluster commands
	revocations *Revocations
	log         *slog.Logger
	refusals    *refusals
	spending    chan struct{} // semaphore for recording a use of a token
}

// NewEnroller returns an enroller. The client c acts as the system user.
func NewEnroller(cfg EnrollConfig, c *client.Client, revocations *Revocations, log *slog.Logger) *Enroller {
	return &Enroller{cfg: cfg, client: c.ForClusterVerb(), revocations: revocations, log: log,
		refusals: newRefusals(log), spending: make(chan struct{}, 1)}
}

// join is one request to join the cluster with a token.
type join struct {
	enroller *Enroller
	token    pki.Token
	role     pki.Role
	name     string // requested node or replica name
	source   netip.Addr
	audit    *auditEntry
}

// newJoin parses the token and returns a new join. It fails if the token is for another role, or if
// too many joins from the same source address have failed.
func (e *Enroller) newJoin(ctx context.Context, audit *auditEntry, token string, role pki.Role, name string) (*join,
	error) {
	j := &join{enroller: e, role: role, name: name, source: callerSource(ctx), audit: audit}
	if e.refusals.isExhausted(j.source, time.Now()) {
		return nil, status.Errorf(codes.ResourceExhausted,
			"fleet: too many joins from %s have failed: wait some seconds", j.source)
	}
	var err error
	if j.token, err = pki.ParseToken(token); err != nil {
		return nil, j.refuseJoin(err)
	}
	audit.request.Token = j.token.ID
	if j.token.Role != role {
		return nil, j.refuseJoin(fmt.Errorf("the token is for role %q, not %q", j.token.Role, role))
	}
	return j, nil
}

// refuseJoin logs the reason and records it for the audit event. It returns the error for the
// client, which does not contain the reason.
func (j *join) refuseJoin(reason error) error {
	j.audit.reason = reason.Error()
	j.enroller.refusals.recordRefusal(j.source, time.Now(), reason.Error(), "id", j.token.ID, "role", j.role, "name",
		j.name)
	return errNoToken
}

// readTokenSecret reads the Secret of the join token from the store.
func (j *join) readTokenSecret(ctx context.Context) (*v1.Secret, error) {
	// read first, because the tokens may be stored between the two reads
	pending := j.enroller.cfg.TokensPending != nil && j.enroller.cfg.TokensPending()
	secret, err := client.Get[*v1.Secret](ctx, j.enroller.client, pki.TokenNamespace, j.token.SecretName())
	switch {
	case apierrors.IsNotFound(err) && pending:
		return nil, status.Error(codes.Unavailable,
			"fleet: the join tokens created with the cluster are not stored yet: try again")
	case apierrors.IsNotFound(err):
		return nil, j.refuseJoin(errors.New("the token does not exist"))
	}
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "fleet: read join token: %v", err)
	}
	return secret, nil
}

// checkToken validates the token and returns its permissions. It also checks that user, which must
// be a single word, may use the token, but does not record the use.
func (j *join) checkToken(ctx context.Context, user string) (pki.Grant, error) {
	secret, err := j.readTokenSecret(ctx)
	if err != nil {
		return pki.Grant{}, err
	}
	now, key := time.Now(), j.enroller.cfg.TokenKey
	grant, err := key.CheckToken(j.token, secret, j.name, now)
	if err == nil {
		_, err = key.UseToken(j.token, secret, j.name, user, now) // fails before anything is changed
	}
	if err != nil {
		return grant, j.refuseJoin(err)
	}
	return grant, j.audit.setUser(UserOfToken(j.token.ID))
}

// maxSpendTries is the maximum number of attempts to record the use of a token. An attempt fails if
// another join with the same token is recorded at the same time.
const maxSpendTries = 50

// spendToken records a use of the token by user, which must be a single word. It is the last step
// of a join: after it, the join cannot be refused. Calls on this replica are serialized, because
// all but one of concurrent updates would conflict.
func (j *join) spendToken(ctx context.Context, user string) error {
	select {
	case j.enroller.spending <- struct{}{}:
		defer func() { <-j.enroller.spending }()
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
	return retry.OnConflict(maxSpendTries, func() (again bool, err error) {
		secret, err := j.readTokenSecret(ctx)
		if err != nil {
			return false, err
		}
		next, err := j.enroller.cfg.TokenKey.UseToken(j.token, secret, j.name, user, time.Now())
		if err != nil {
			return false, j.refuseJoin(err)
		}
		if next == nil {
			return false, nil
		}
		_, err = client.Update(ctx, j.enroller.client, next)
		switch {
		case err == nil:
			return false, nil
		case apierrors.IsConflict(err), apierrors.IsNotFound(err):
			return true, status.Errorf(codes.Unavailable,
				"fleet: too many machines join with token %s at once: try again",
				j.token.ID)
		}
		return false, status.Errorf(codes.Unavailable, "fleet: record the use of join token %s: %v", j.token.ID, err)
	})
}

// EnrollNode signs the client certificate of a new node that presents a valid join token. The error
// has a gRPC status.
func (e *Enroller) EnrollNode(ctx context.Context, node, token string, csrDER []byte) (certPEM []byte, err error) {
	audit := e.newAuditEntry(ctx, nodeEnrollmentRequest(fleetv1.Enrollment_Enroll_FullMethodName, node))
	defer func() { audit.completeEvent(err) }()
	if msgs := validation.IsDNS1123Subdomain(node); len(msgs) > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll node %.80q: bad name: %s", node,
			strings.Join(msgs, "; "))
	}
	j, err := e.newJoin(ctx, audit, token, pki.RoleNode, node)
	if err != nil {
		return nil, err
	}
	key := hashRequestKey(csrDER)
	grant, err := j.checkToken(ctx, node+"/"+key)
	if err != nil {
		return nil, err
	}
	claim, err := j.claimName(ctx, key, grant)
	if err != nil {
		return nil, err
	}
	cert, err := j.admitNode(ctx, grant, key, csrDER)
	if err != nil {
		j.releaseClaim(ctx, claim)
		return nil, err
	}
	e.log.Info("node enrolled", "node", node, "token", j.token.ID, "source", j.source)
	return cert, nil
}

// admitNode signs the node's certificate and records the use of the token. The caller must have
// claimed the node name.
func (j *join) admitNode(ctx context.Context, grant pki.Grant, key string, csr []byte) (certPEM []byte, err error) {
	if err := j.checkVacancy(ctx, grant); err != nil {
		return nil, err
	}
	revocation, _, err := j.enroller.revocations.readStored(ctx, j.name)
	if err != nil {
		return nil, err
	}
	if revocation.Named && !grant.Replace {
		_ = j.refuseJoin(errors.New("the node was revoked"))
		return nil, wire.RevokedError(j.name)
	}
	cert, err := j.enroller.cfg.SignNode(j.name, csr, revocation.After())
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll node %s: %v", j.name, err)
	}
	return cert, j.spendToken(ctx, j.name+"/"+key)
}

// checkVacancy returns an error if a Node with the requested name exists, unless the token's
// permissions allow replacing it.
func (j *join) checkVacancy(ctx context.Context, grant pki.Grant) error {
	if grant.Replace {
		return nil
	}
	_, err := client.Get[*v1.Node](ctx, j.enroller.client, "", j.name)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return status.Errorf(codes.Unavailable, "fleet: read node %s: %v", j.name, err)
	}
	return j.denyJoin("a Node of this name exists", codes.PermissionDenied,
		"fleet: node %s exists: delete it, or replace it with a token of "+
			"'kctl cluster token create --names %s --replace'", j.name, j.name)
}

// hashRequestKey returns a short hash of the public key of a certificate signing request.
func hashRequestKey(csr []byte) string {
	r, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return "" // a request that cannot be parsed; SignNode refuses it
	}
	sum := sha256.Sum256(r.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:12])
}

// EnrollReplica returns the keys and the configuration that a joining control-plane replica needs.
// The error has a gRPC status.
func (e *Enroller) EnrollReplica(ctx context.Context,
	r *fleetv1.EnrollReplicaRequest) (_ *fleetv1.EnrollReplicaResponse, err error) {
	audit := e.newAuditEntry(ctx, replicaEnrollmentRequest(fleetv1.Enrollment_EnrollReplica_FullMethodName, r.Name))
	defer func() { audit.completeEvent(err) }()
	if e.cfg.EnrollReplica == nil {
		return nil, status.Error(codes.Unimplemented, "fleet: this replica does not enroll others")
	}
	if msgs := validation.IsDNS1123Label(r.Name); len(msgs) > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: enroll replica %.80q: bad name: %s", r.Name,
			strings.Join(msgs, "; "))
	}
	j, err := e.newJoin(ctx, audit, r.Token, pki.RoleControlPlane, r.Name)
	if err != nil {
		return nil, err
	}
	// Every response is a use of the token: it contains the cluster's keys, and nothing proves that
	// two requests come from one machine.
	user := r.Name + "/" + rand.Text()
	if _, err := j.checkToken(ctx, user); err != nil {
		return nil, err
	}
	keys, err := e.cfg.EnrollReplica(ctx, r)
	if err != nil {
		code := codes.Unavailable
		if status.Code(err) == codes.InvalidArgument { // another attempt would fail in the same way
			code = codes.InvalidArgument
		}
		return nil, status.Errorf(code, "fleet: enroll replica %s: %s", r.Name, status.Convert(err).Message())
	}
	if err := j.spendToken(ctx, user); err != nil {
		return nil, err
	}
	e.log.Info("replica enrolled", "name", r.Name, "peer", r.PeerAddress, "token", j.token.ID, "source", j.source)
	return keys, nil
}

// RenewCertificate signs a new client certificate for a node, unless cert, its current certificate,
// is revoked. The error has a gRPC status.
func (e *Enroller) RenewCertificate(ctx context.Context, node string, cert *x509.Certificate,
	csrDER []byte) (certPEM []byte, err error) {
	audit := e.newAuditEntry(ctx, renewalRequest(fleetv1.Fleet_RenewCertificate_FullMethodName, node))
	defer func() { audit.completeEvent(err) }()
	if err := audit.setUser(api.User{Name: api.NodeUserPrefix + node,
		Groups: []string{api.GroupNodes, api.GroupAuthenticated}}); err != nil {
		return nil, err
	}
	revocation, ok, err := e.revocations.readStored(ctx, node)
	if err != nil {
		return nil, err
	}
	if ok && revocation.Covers(cert) {
		return nil, wire.RevokedError(node)
	}
	if certPEM, err = e.cfg.SignNode(node, csrDER, revocation.After()); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: renew certificate of node %s: %v", node, err)
	}
	return certPEM, nil
}

// SignServing signs a certificate for the HTTPS server of a node, unless cert, the node's client
// certificate, is revoked. seen is the address from which the node connects. The error has a gRPC
// status.
func (e *Enroller) SignServing(ctx context.Context, node string, cert *x509.Certificate, seen netip.Addr,
	csrDER []byte) (certPEM []byte, err error) {
	if e.cfg.SignServing == nil {
		return nil, status.Error(codes.Unimplemented, "fleet: this replica signs no certificates of nodes' servers")
	}
	audit := e.newAuditEntry(ctx, servingRequest(fleetv1.Fleet_SignServing_FullMethodName, node))
	defer func() { audit.completeEvent(err) }()
	if err := audit.setUser(api.NodeUser(node)); err != nil {
		return nil, err
	}
	revoked, err := e.revocations.IsRevokedInStore(ctx, node, cert)
	if err != nil {
		return nil, err
	}
	if revoked {
		return nil, wire.RevokedError(node)
	}
	if certPEM, err = e.cfg.SignServing(node, csrDER, seen); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "fleet: certificate of the server of node %s: %v", node, err)
	}
	return certPEM, nil
}
