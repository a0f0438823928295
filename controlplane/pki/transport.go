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

// ErrNotReplica is the error when the other end of a peer connection is not a replica of this
// cluster.
var ErrNotReplica = errors.New("pki: the peer's certificate is not that of a replica")

// retryIssue is the interval between failed renewals while the current certificate is valid.
const retryIssue = time.Minute

// Rotator provides a certificate for TLS handshakes and renews it. The first handshake after two
// thirds of its life issues the next one. Nothing runs in the background and no connection is
// closed. Safe for concurrent use.
type Rotator struct {
	issue func(now time.Time) (*tls.Certificate, error)
	now   func() time.Time
	// stale reports whether a certificate must be replaced before its renewal time; nil = never.
	stale func(leaf *x509.Certificate) bool

	mu      sync.Mutex
	current *tls.Certificate // guarded by mu; Leaf is set
	retry   time.Time        // guarded by mu; no renewal before this time after a failure
}

// NewRotator returns a Rotator that gets its certificates from issue. Their Leaf must be set.
func NewRotator(issue func(now time.Time) (*tls.Certificate, error), now func() time.Time) *Rotator {
	return &Rotator{issue: issue, now: now}
}

// Rotator returns a Rotator for certificates of profile p.
func (ca *CA) Rotator(p Profile, now func() time.Time) *Rotator {
	return NewRotator(func(t time.Time) (*tls.Certificate, error) {
		c, err := ca.Issue(p, t)
		if err != nil {
			return nil, err
		}
		return &c.TLS, nil
	}, now)
}

// Certificate returns the current certificate, after renewing it if it is due. A failed renewal is
// not an error while the current certificate is valid.
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

// RenewAt returns when a Rotator renews the certificate.
func RenewAt(c *x509.Certificate) time.Time { return renewAt(c) }

// renewAt returns when two thirds of the certificate's life have passed.
func renewAt(c *x509.Certificate) time.Time {
	return c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 3 * 2)
}

// GetCertificate returns the current certificate, for tls.Config of a server.
func (r *Rotator) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return r.Certificate()
}

// GetClientCertificate returns the current certificate, for tls.Config of a client.
func (r *Rotator) GetClientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return r.Certificate()
}

// ServerTLS returns a server configuration with the certificate of cert. A client certificate is
// optional; one that does not chain to ca fails the handshake. Clients without a certificate
// authenticate by bearer token.
func ServerTLS(ca *x509.CertPool, cert *Rotator, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: cert.GetCertificate,
		ClientCAs:      ca,
		ClientAuth:     tls.VerifyClientCertIfGiven,
		Time:           now,
	}
}

// ClientTLS returns a client configuration that trusts servers with certificates of ca. cert is nil
// for a client that has only a token; serverName "" means the dialed host.
func ClientTLS(ca *x509.CertPool, cert *Rotator, serverName string, now func() time.Time) *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: ca, ServerName: serverName, Time: now}
	if cert != nil {
		c.GetClientCertificate = cert.GetClientCertificate
	}
	return c
}

// NodeTLS returns a client configuration for the HTTPS server of one node. Its certificate must
// name the node but need not contain an address, because the connection uses the node's own tunnel.
func NodeTLS(ca *x509.CertPool, cert *Rotator, node string, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetClientCertificate: cert.GetClientCertificate,
		InsecureSkipVerify:   true, // VerifyConnection verifies, without a host name
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

// PeerTLS returns the configuration for both ends of connections between replicas. Each end must
// present a certificate of ca with the organization GroupReplicas. Other certificates of the same
// CA, such as those of agents and users, fail with ErrNotReplica.
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

// PeerName returns the name of the replica at the other end of a verified connection.
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
