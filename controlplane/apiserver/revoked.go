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

// revokedEvery is how often connections are looked through for those whose certificate was revoked, or is by an authority
// that is believed no more: their watches end then.
const revokedEvery = time.Second

// errRevoked: the certificate was good once.
var errRevoked = errors.New("it was revoked")

// shownConns are the connections to this API whose clients have shown a certificate.
type shownConns struct {
	mu     sync.Mutex
	byConn map[*connlimit.Conn]*x509.Certificate
}

// note remembers the connection of a request that shows a certificate.
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

// sweep closes the connections that gone says it of, and forgets those that are closed.
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

// revoked says why a node's certificate, good otherwise, is not.
func (s *Server) revoked(ctx context.Context, c *x509.Certificate) error {
	if !ofNode(c) {
		return nil
	}
	kind := s.known.byName["secrets"]
	r := &api.Request{Verb: api.VerbGet, Kind: kind, Namespace: pki.TokenNamespace,
		Name: pki.RevocationName(strings.TrimPrefix(c.Subject.CommonName, api.NodeUserPrefix))}
	r.Get.ResourceVersion = "0" // this replica's cache: a watch keeps it within moments of the store
	o, err := s.cfg.Registry.Get(ctx, r)
	if err != nil {
		return nil // none exists; while nothing can be read, nothing is served either
	}
	secret, _ := o.(*corev1.Secret)
	if rev, ok := pki.RevocationOf(secret); ok && rev.Covers(c) {
		return errRevoked
	}
	return nil
}

// sweepRevoked runs until ctx ends.
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

// authorities tell of certificates by authorities that were believed and are no more.
type authorities struct {
	now       func() *x509.CertPool // nil = none exist
	was, were *x509.CertPool        // at the last two looks
}

// look returns what says so of a certificate. One whose connection was noted in the moment of the change is told of at the
// second look.
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

// byOneOf says whether a certificate is by an authority that is believed; whether it has ended is not asked.
func byOneOf(pool *x509.CertPool, c *x509.Certificate) bool {
	_, err := c.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: c.NotAfter, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err == nil
}
