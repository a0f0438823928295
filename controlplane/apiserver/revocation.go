package apiserver

import (
	"context"
	"crypto/x509"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/connlimit"
)

// revokedCheckPeriod is the interval at which the certificates of open connections are checked. If
// a certificate is revoked, or its CA is no longer trusted, the connection is closed, which ends
// its watches.
const revokedCheckPeriod = time.Second

// errRevoked is the error for a certificate that would be valid but is revoked.
var errRevoked = errors.New("it is revoked")

// certConns holds the open connections on which clients presented a certificate.
type certConns struct {
	mu     sync.Mutex
	byConn map[*connlimit.Conn]*x509.Certificate
}

// recordConn stores the connection of a request if the client presented a certificate on it.
func (n *certConns) recordConn(r *http.Request, place *connlimit.Conn) {
	if place == nil || r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.byConn == nil {
		n.byConn = make(map[*connlimit.Conn]*x509.Certificate)
	}
	n.byConn[place] = r.TLS.PeerCertificates[0]
}

// closeRevoked closes the connections with a certificate for which isRevoked returns true. It also
// removes connections that are already closed.
func (n *certConns) closeRevoked(isRevoked func(*x509.Certificate) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c, cert := range n.byConn {
		if isRevoked(cert) {
			c.Close()
		}
		if c.IsClosed() {
			delete(n.byConn, c)
		}
	}
}

func isNodeCert(c *x509.Certificate) bool {
	return strings.HasPrefix(c.Subject.CommonName, api.NodeUserPrefix)
}

// revocations closes the connections of clients with certificates that are revoked or no longer
// trusted.
type revocations struct {
	cluster   *clusterReader
	clientCAs func() *x509.CertPool // nil = no client certificate is accepted
	conns     certConns
}

// checkRevoked returns an error if the otherwise valid certificate of a node is revoked. It returns
// nil for certificates of other users.
func (v *revocations) checkRevoked(ctx context.Context, c *x509.Certificate) error {
	if !isNodeCert(c) {
		return nil
	}
	kind := v.cluster.byName["secrets"]
	r := &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: pki.TokenNamespace,
		Name: pki.RevocationName(strings.TrimPrefix(c.Subject.CommonName, api.NodeUserPrefix))}
	r.Get.ResourceVersion = "0" // from this replica's cache, which lags only moments behind the store
	o, err := v.cluster.pipeline.registry.GetObject(ctx, r)
	if err != nil {
		return nil // no revocation exists, or nothing can be read; then no request is served either
	}
	secret, _ := o.(*corev1.Secret)
	if rev, ok := pki.ParseRevocation(secret); ok && rev.Covers(c) {
		return errRevoked
	}
	return nil
}

// sweepRevoked closes connections with revoked or no longer trusted certificates every
// revokedCheckPeriod, until ctx ends.
func (v *revocations) sweepRevoked(ctx context.Context) error {
	tick := time.NewTicker(revokedCheckPeriod)
	defer tick.Stop()
	believed := trustedCAs{current: v.clientCAs}
	for {
		select {
		case <-tick.C:
			strange := believed.compareTrusted()
			v.conns.closeRevoked(func(c *x509.Certificate) bool { return v.checkRevoked(ctx, c) != nil || strange(c) })
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// trustedCAs detects certificates of a CA that was trusted before and is no longer trusted.
type trustedCAs struct {
	current                  func() *x509.CertPool // returns the trusted CAs; nil = no CA is trusted
	previous, beforePrevious *x509.CertPool        // the CAs at the last and the second to last call of compareTrusted
}

// compareTrusted compares the trusted CAs with those at the previous calls. gone reports whether
// the CA of a certificate was trusted before and is no longer. A removed CA is reported at two
// calls in a row, so that the second call covers a connection that was stored during the change.
func (a *trustedCAs) compareTrusted() (gone func(*x509.Certificate) bool) {
	never := func(*x509.Certificate) bool { return false }
	if a.current == nil {
		return never
	}
	pool, before := a.current(), a.beforePrevious
	if before == nil || pool.Equal(before) {
		before = a.previous
	}
	a.beforePrevious, a.previous = a.previous, pool
	if before == nil || pool.Equal(before) {
		return never
	}
	return func(c *x509.Certificate) bool { return issuedBy(before, c) && !issuedBy(pool, c) }
}

// issuedBy reports whether a CA of the pool issued a certificate. It ignores the expiry of the
// certificate.
func issuedBy(pool *x509.CertPool, c *x509.Certificate) bool {
	_, err := c.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: c.NotAfter,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err == nil
}
