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

// revokedEvery is how often open connections are checked for certificates that are revoked or
// issued by a CA that is no longer trusted. Such connections are closed, which ends their watches.
const revokedEvery = time.Second

// errRevoked reports that a certificate was valid and is now revoked.
var errRevoked = errors.New("it was revoked")

// shownConns holds the open connections on which clients presented a certificate.
type shownConns struct {
	mu     sync.Mutex
	byConn map[*connlimit.Conn]*x509.Certificate
}

// note stores the connection of a request that presents a client certificate.
func (n *shownConns) note(r *http.Request, place *connlimit.Conn) {
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

// sweep closes the connections if gone returns true for their certificate, and removes closed
// connections.
func (n *shownConns) sweep(gone func(*x509.Certificate) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for c, cert := range n.byConn {
		if gone(cert) {
			c.Close()
		}
		if c.IsClosed() {
			delete(n.byConn, c)
		}
	}
}

func ofNode(c *x509.Certificate) bool {
	return strings.HasPrefix(c.Subject.CommonName, api.NodeUserPrefix)
}

// revoked returns an error if a node's otherwise valid certificate is revoked. It returns nil for
// other certificates.
func (s *Server) revoked(ctx context.Context, c *x509.Certificate) error {
	if !ofNode(c) {
		return nil
	}
	kind := s.known.byName["secrets"]
	r := &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: pki.TokenNamespace,
		Name: pki.RevocationName(strings.TrimPrefix(c.Subject.CommonName, api.NodeUserPrefix))}
	r.Get.ResourceVersion = "0" // from this replica's cache, which lags only moments behind the store
	o, err := s.cfg.Registry.Get(ctx, r)
	if err != nil {
		return nil // no revocation exists; while nothing can be read, nothing is served either
	}
	secret, _ := o.(*corev1.Secret)
	if rev, ok := pki.RevocationOf(secret); ok && rev.Covers(c) {
		return errRevoked
	}
	return nil
}

// sweepRevoked closes connections with revoked or no longer trusted certificates every
// revokedEvery, until ctx ends.
func (s *Server) sweepRevoked(ctx context.Context) error {
	tick := time.NewTicker(revokedEvery)
	defer tick.Stop()
	believed := authorities{now: s.cfg.ClientCAs}
	for {
		select {
		case <-tick.C:
			strange := believed.look()
			s.shown.sweep(func(c *x509.Certificate) bool { return s.revoked(ctx, c) != nil || strange(c) })
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// authorities detects certificates of a CA that was trusted and no longer is.
type authorities struct {
	now       func() *x509.CertPool // returns the trusted CAs; nil = none exist
	was, were *x509.CertPool        // the pools of the last and the second to last call of look
}

// look compares the trusted CAs with the previous ones. gone reports whether a certificate was
// trusted before and no longer is. A removed CA is reported at two calls, so a connection stored
// during the change is found by the second.
func (a *authorities) look() (gone func(*x509.Certificate) bool) {
	never := func(*x509.Certificate) bool { return false }
	if a.now == nil {
		return never
	}
	pool, before := a.now(), a.were
	if before == nil || pool.Equal(before) {
		before = a.was
	}
	a.were, a.was = a.was, pool
	if before == nil || pool.Equal(before) {
		return never
	}
	return func(c *x509.Certificate) bool { return byOneOf(before, c) && !byOneOf(pool, c) }
}

// byOneOf reports whether a CA of the pool issued a certificate. It ignores the expiry of the
// certificate.
func byOneOf(pool *x509.CertPool, c *x509.Certificate) bool {
	_, err := c.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: c.NotAfter, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err == nil
}
