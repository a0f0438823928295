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

// ErrNotReplica is returned if the other end of a connection between replicas does not present the
// certificate of a replica of this cluster.
var ErrNotReplica = errors.New("pki: the peer's certificate is not that of a replica")

// retryIssue is the pause after a failed renewal, while the current certificate is still valid.
const retryIssue = time.Minute

// Rotator provides a certificate for TLS handshakes and renews it. The first handshake after two
// thirds of the certificate's lifetime renews it. Rotator starts no goroutine and closes no
// connection. It is safe for concurrent use.
type Rotator struct {
	issue func(now time.Time) (*tls.Certificate, error)
	now   func() time.Time
	// stale reports whether a certificate must be replaced before its renewal time. It may be nil.
	stale func(leaf *x509.Certificate) bool

	mu      sync.Mutex
	current *tls.Certificate // guarded by mu; Leaf is set
	retry   time.Time        // guarded by mu; no renewal before this time after a failure
}

// NewRotator returns a Rotator for certificates that issue creates. issue must set the field Leaf
// of each certificate.
func NewRotator(issue func(now time.Time) (*tls.Certificate, error), now func() time.Time) *Rotator {
	return &Rotator{issue: issue, now: now}
}

// Rotator returns a Rotator for certificates with the profile p, which ca issues.
func (ca *CA) Rotator(p Profile, now func() time.Time) *Rotator {
	return NewRotator(func(t time.Time) (*tls.Certificate, error) {
		c, err := ca.Issue(p, t)
		if err != nil {
			return nil, err
		}
		return &c.TLS, nil
	}, now)
}

// Certificate returns the current certificate. If its renewal time has passed, Certificate renews
// it first. A failed renewal is not an error while the current certificate is valid.
func (r *Rotator) Certificate() (*tls.Certificate, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	if r.current != nil && now.Before(renewalTime(r.current.Leaf)) && (r.stale == nil || !r.stale(r.current.Leaf)) {
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

// RenewalTime returns the time at which a Rotator renews the certificate c.
func RenewalTime(c *x509.Certificate) time.Time { return renewalTime(c) }

// renewalTime returns the time at which two thirds of the lifetime of the certificate c have
// passed.
func renewalTime(c *x509.Certificate) time.Time {
	return c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 3 * 2)
}

// GetCertificate returns the current certificate. It is for the field of this name in the
// tls.Config of a server.
func (r *Rotator) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return r.Certificate()
}

// GetClientCertificate returns the current certificate. It is for the field of this name in the
// tls.Config of a client.
func (r *Rotator) GetClientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return r.Certificate()
}

// ServerTLS returns the TLS configuration of a server that presents the certificate of rotator. A
// client certificate is optional: clients without a certificate authenticate by bearer token. The
// handshake fails if a client presents a certificate that is not signed by a CA in the pool ca.
func ServerTLS(ca *x509.CertPool, rotator *Rotator, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: rotator.GetCertificate,
		ClientCAs:      ca,
		ClientAuth:     tls.VerifyClientCertIfGiven,
		Time:           now,
	}
}

// ClientTLS returns the TLS configuration of a client that trusts servers with certificates signed
// by a CA in the pool ca. The client presents the certificate of rotator, which is nil for a client
// that has only a token. If serverName is empty, the server's certificate must contain the dialed
// host.
func ClientTLS(ca *x509.CertPool, rotator *Rotator, serverName string, now func() time.Time) *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: ca, ServerName: serverName, Time: now}
	if rotator != nil {
		c.GetClientCertificate = rotator.GetClientCertificate
	}
	return c
}

// NodeTLS returns the TLS configuration of a client of one node's HTTPS server. The server's
// certificate must contain the node's name. It need not contain an address, because the connection
// uses the node's own tunnel. The client presents the certificate of rotator.
func NodeTLS(ca *x509.CertPool, rotator *Rotator, node string, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetClientCertificate: rotator.GetClientCertificate,
		InsecureSkipVerify:   true, // VerifyConnection verifies, without a host name
		VerifyConnection: func(cs tls.ConnectionState) error {
			leaf := cs.PeerCertificates[0]
			usages := []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: ca, CurrentTime: now(), KeyUsages: usages}); err != nil {
				return fmt.Errorf("the server of node %s: %w", node, err)
			}
			if want := api.NodeUserPrefix + node; leaf.Subject.CommonName != want {
				return fmt.Errorf("the server's certificate is for %q, not for %q", leaf.Subject.CommonName, want)
			}
			return nil
		},
	}
}

// PeerTLS returns the TLS configuration for both ends of connections between replicas. Each end
// presents the certificate of its rotator. The certificate must be signed by a CA in the pool ca
// and have the organization GroupReplicas. Other certificates of the same CA, such as those of
// agents and users, fail with ErrNotReplica.
func PeerTLS(ca *x509.CertPool, rotator *Rotator, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetCertificate:       rotator.GetCertificate,
		GetClientCertificate: rotator.GetClientCertificate,
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

// PeerName returns the name of the replica at the other end of cs, a connection with verified
// certificates. It returns ErrNotReplica if the certificate is not that of a replica.
func PeerName(cs tls.ConnectionState) (string, error) {
	if len(cs.PeerCertificates) == 0 {
		return "", fmt.Errorf("%w: there is none", ErrNotReplica)
	}
	subject := cs.PeerCertificates[0].Subject
	if !slices.Contains(subject.Organization, GroupReplicas) {
		return "", fmt.Errorf("%w: its common name is %q, its organizations are %q", ErrNotReplica, subject.CommonName,
			subject.Organization)
	}
	return subject.CommonName, nil
}
