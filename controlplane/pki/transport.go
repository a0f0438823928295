package pki

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// ErrNotReplica: the other end of a peer connection is no replica of this cluster.
var ErrNotReplica = errors.New("pki: the peer's certificate is not that of a replica")

// retryIssue is how long a failed renewal waits while the old certificate is good.
const retryIssue = time.Minute

// Rotator keeps one certificate fresh: each handshake gets the current one, and
// the first handshake past two thirds of its life makes the next. Nothing runs
// in the background and no connection is cut. Safe for concurrent use.
type Rotator struct {
	issue func(now time.Time) (*tls.Certificate, error)
	now   func() time.Time
	// stale says of a certificate that it is to be made anew although its time has not come; nil = of none.
	stale func(leaf *x509.Certificate) bool

	mu      sync.Mutex
	current *tls.Certificate // guarded by mu; Leaf is set
	retry   time.Time        // guarded by mu; not before this after a failure
}

// NewRotator issues certificates by issue, whose results must have a Leaf.
func NewRotator(issue func(now time.Time) (*tls.Certificate, error), now func() time.Time) *Rotator {
	return &Rotator{issue: issue, now: now}
}

// Rotator keeps a certificate of profile p fresh.
func (ca *CA) Rotator(p Profile, now func() time.Time) *Rotator {
	return NewRotator(func(t time.Time) (*tls.Certificate, error) {
		c, err := ca.Issue(p, t)
		if err != nil {
			return nil, err
		}
		return &c.TLS, nil
	}, now)
}

// Certificate is the certificate to use now. A renewal that fails is no error
// while the current certificate is still valid.
func (r *Rotator) Certificate() (*tls.Certificate, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	if r.current != nil && now.Before(renewAt(r.current.Leaf)) && (r.stale == nil || !r.stale(r.current.Leaf)) {
		return r.current, nil
	}
	valid := r.current != nil && now.Before(r.current.Leaf.NotAfter)
	if valid && now.Before(r.retry) {
		return r.current, nil
	}
	c, err := r.issue(now)
	switch {
	case err == nil:
		r.current = c
		return c, nil
	case valid:
		r.retry = now.Add(retryIssue)
		return r.current, nil
	}
	return nil, fmt.Errorf("pki: renewing a certificate: %w", err)
}

// RenewAt is when a certificate is to be renewed that a Rotator keeps.
func RenewAt(c *x509.Certificate) time.Time { return renewAt(c) }

// renewAt is when the certificate is two thirds through its life.
func renewAt(c *x509.Certificate) time.Time {
	return c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 3 * 2)
}

// GetCertificate is for tls.Config, the serving end.
func (r *Rotator) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return r.Certificate()
}

// GetClientCertificate is for tls.Config, the calling end.
func (r *Rotator) GetClientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return r.Certificate()
}

// ServerTLS serves with cert. A client may present a certificate; one that does
// not chain to ca fails the handshake, and a client without is left to bearer tokens.
func ServerTLS(ca *x509.CertPool, cert *Rotator, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: cert.GetCertificate,
		ClientCAs:      ca,
		ClientAuth:     tls.VerifyClientCertIfGiven,
		Time:           now,
	}
}

// ClientTLS trusts servers of ca. cert is nil for a client that has only a
// token; serverName "" means the host that is dialled.
func ClientTLS(ca *x509.CertPool, cert *Rotator, serverName string, now func() time.Time) *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: ca, ServerName: serverName, Time: now}
	if cert != nil {
		c.GetClientCertificate = cert.GetClientCertificate
	}
	return c
}

// NodeTLS trusts the HTTPS server of one node, whose certificate names the node and need not name an address: the
// connection comes through the node's own tunnel.
func NodeTLS(ca *x509.CertPool, cert *Rotator, node string, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetClientCertificate: cert.GetClientCertificate,
		InsecureSkipVerify:   true, // VerifyConnection does, without a host's name
		VerifyConnection: func(cs tls.ConnectionState) error {
			leaf := cs.PeerCertificates[0]
			usages := []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: ca, CurrentTime: now(), KeyUsages: usages}); err != nil {
				return fmt.Errorf("the server of node %s: %w", node, err)
			}
			if want := api.NodeUserPrefix + node; leaf.Subject.CommonName != want {
				return fmt.Errorf("the server is of %q, not of %q", leaf.Subject.CommonName, want)
			}
			return nil
		},
	}
}

// PeerTLS is both ends of connections between replicas. Either end must show a
// certificate of ca for GroupReplicas: no other certificate of the same CA
// (an agent's, a user's) opens the store (ErrNotReplica).
func PeerTLS(ca *x509.CertPool, cert *Rotator, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetCertificate:       cert.GetCertificate,
		GetClientCertificate: cert.GetClientCertificate,
		ClientCAs:            ca,
		RootCAs:              ca,
		ClientAuth:           tls.RequireAndVerifyClientCert,
		ServerName:           PeerServerName,
		Time:                 now,
		VerifyConnection: func(cs tls.ConnectionState) error {
			_, err := PeerName(cs)
			return err
		},
	}
}

// PeerName is the name of the replica at the other end of a verified connection.
func PeerName(cs tls.ConnectionState) (string, error) {
	if len(cs.PeerCertificates) == 0 {
		return "", fmt.Errorf("%w: there is none", ErrNotReplica)
	}
	subject := cs.PeerCertificates[0].Subject
	if !slices.Contains(subject.Organization, GroupReplicas) {
		return "", fmt.Errorf("%w: it names %q in %q", ErrNotReplica, subject.CommonName, subject.Organization)
	}
	return subject.CommonName, nil
}
