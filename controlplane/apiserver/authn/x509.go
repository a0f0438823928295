package authn

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// X509 authenticates clients by client certificates: the common name is the user name, each
// organization is a group.
type X509 struct {
	CAs   func() *x509.CertPool // the current CAs; nil = no certificate is accepted
	Clock func() time.Time
	// Revoked returns an error if an otherwise valid certificate is revoked. It may be nil.
	Revoked func(ctx context.Context, leaf *x509.Certificate) error
	// Seen is called with the client certificate of each authenticated request. It may be nil.
	Seen func(leaf *x509.Certificate)
}

// Authenticate returns the user of the client certificate. The result is cached per connection
// until the CAs change or a certificate of the chain expires.
func (m X509) Authenticate(r *http.Request) (api.User, bool, error) {
	if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 || m.CAs == nil {
		return api.User{}, false, nil
	}
	pool := m.CAs()
	if pool == nil {
		return api.User{}, false, nil
	}
	now := m.Clock()
	cache, _ := r.Context().Value(connKey{}).(*connIdentity)
	leaf := r.TLS.PeerCertificates[0]
	if u, ok := cache.cachedUser(pool, now); ok {
		return m.unlessRevoked(r.Context(), leaf, u)
	}
	between := x509.NewCertPool()
	for _, c := range r.TLS.PeerCertificates[1:] {
		between.AddCert(c)
	}
	chains, err := leaf.Verify(x509.VerifyOptions{
		Roots: pool, Intermediates: between, CurrentTime: now,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	if err != nil {
		return api.User{}, false, fmt.Errorf("verifying certificate SN=%s, CN=%q failed: %w", leaf.SerialNumber,
			leaf.Subject.CommonName, err)
	}
	if leaf.Subject.CommonName == "" {
		return api.User{}, false, fmt.Errorf("verifying certificate SN=%s failed: it has no common name",
			leaf.SerialNumber)
	}
	u := withGroup(api.User{
		Name:   leaf.Subject.CommonName,
		Groups: leaf.Subject.Organization,
		Extra:  map[string][]string{credentialID: {credentialOf(leaf)}},
	}, api.GroupAuthenticated)
	cache.storeUser(pool, u, earliestEnd(chains[0]))
	return m.unlessRevoked(r.Context(), leaf, u)
}

const credentialID = "authentication.kubernetes.io/credential-id"

func credentialOf(leaf *x509.Certificate) string {
	sum := sha256.Sum256(leaf.Raw)
	return "X509SHA256=" + hex.EncodeToString(sum[:])
}

// ProvenBy reports whether the client certificate leaf authenticated the sender. A certificate on
// the connection alone proves nothing: a client authenticated by a token may present any
// certificate, with any name and groups.
func ProvenBy(sender api.User, leaf *x509.Certificate) bool {
	return slices.Equal(sender.Extra[credentialID], []string{credentialOf(leaf)})
}

func (m X509) unlessRevoked(ctx context.Context, leaf *x509.Certificate, u api.User) (api.User, bool, error) {
	if m.Revoked != nil {
		if err := m.Revoked(ctx, leaf); err != nil {
			return api.User{}, false, fmt.Errorf("certificate SN=%s, CN=%q: %w", leaf.SerialNumber,
				leaf.Subject.CommonName, err)
		}
	}
	if m.Seen != nil {
		m.Seen(leaf)
	}
	return u, true, nil
}

func earliestEnd(chain []*x509.Certificate) time.Time {
	end := chain[0].NotAfter
	for _, c := range chain[1:] {
		if c.NotAfter.Before(end) {
			end = c.NotAfter
		}
	}
	return end
}

type connKey struct{}

// connIdentity caches the user of a connection's certificate.
type connIdentity struct {
	mu    sync.Mutex
	pool  *x509.CertPool
	user  api.User
	until time.Time
}

// ConnContext adds a cache for the user of the client certificate to the context of a connection.
// It is used as http.Server.ConnContext.
func ConnContext(ctx context.Context, _ net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, &connIdentity{})
}

func (c *connIdentity) cachedUser(pool *x509.CertPool, currentTime time.Time) (api.User, bool) {
	if c == nil {
		return api.User{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pool == nil || c.pool != pool && !c.pool.Equal(pool) || !currentTime.Before(c.until) {
		return api.User{}, false
	}
	return c.user, true
}

func (c *connIdentity) storeUser(pool *x509.CertPool, u api.User, until time.Time) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pool, c.user, c.until = pool, u, until
}

func decodeBase64URL(s string) (string, bool) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	return string(b), err == nil
}
