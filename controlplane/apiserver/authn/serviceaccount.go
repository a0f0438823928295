package authn

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
)

// Living looks up the objects to which tokens are bound, in this replica's cache where possible.
type Living interface {
	// UID returns the UID of an existing object. deletedAt is its deletion timestamp, or zero. ok
	// is false when the object does not exist.
	UID(ctx context.Context, resource, namespace, name string) (uid string, deletedAt time.Time, ok bool)
	// Get returns the object itself, which is shared and must not be modified.
	Get(ctx context.Context, resource, namespace, name string) (api.Object, bool)
}

// MarkUsed writes the day on which a Secret's token was last used into the Secret.
type MarkUsed func(ctx context.Context, secret *corev1.Secret, day string) error

// deletionGrace is how long a token stays valid after the deletion timestamp of an object to which
// it is bound.
const deletionGrace = 60 * time.Second

// ServiceAccounts verifies service account tokens. A token's signature is checked once per minute;
// the existence of its bound objects is checked on each request.
type ServiceAccounts struct {
	tokens    *pki.ServiceTokens
	audiences []string
	living    Living
	clock     func() time.Time
	markUsed  MarkUsed

	mu     sync.Mutex
	seen   map[[sha256.Size]byte]seenToken
	marked map[types.UID]time.Time // last attempt to write the label, by UID of the Secret
}

type seenToken struct {
	claims *pki.Claims
	until  time.Time
	key    string // ID of the signing key; the cached claims are invalid once this key is no longer accepted
}

const (
	seenFor = time.Minute
	seenMax = 4096
)

// NewServiceAccounts returns a verifier of the tokens that this cluster issues and of tokens stored
// in Secrets. A token needs one of the API's audiences.
func NewServiceAccounts(tokens *pki.ServiceTokens, audiences []string, living Living, markUsed MarkUsed, clock func() time.Time) *ServiceAccounts {
	return &ServiceAccounts{
		tokens: tokens, audiences: audiences, living: living, clock: clock, markUsed: markUsed,
		seen: make(map[[sha256.Size]byte]seenToken), marked: make(map[types.UID]time.Time),
	}
}

// VerifyToken verifies a service account token of this cluster. ok is false for tokens of other
// issuers.
func (s *ServiceAccounts) VerifyToken(ctx context.Context, token string, audiences []string) (TokenIdentity, bool, error) {
	issuer := issuerOf(token)
	if issuer != s.tokens.Issuer() && issuer != pki.SecretIssuer {
		return TokenIdentity{}, false, nil
	}
	if len(audiences) == 0 {
		audiences = s.audiences
	}
	if issuer == pki.SecretIssuer {
		return s.verifyOfSecret(ctx, token, audiences)
	}
	c, err := s.claims(token, audiences)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	good, err := both(audiences, c.Audiences)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	if err := s.alive(ctx, c); err != nil {
		return TokenIdentity{}, false, err
	}
	return TokenIdentity{User: c.User(), Audiences: good}, true, nil
}

// both returns the intersection of the requested audiences and the token's audiences. An empty
// intersection is an error.
func both(asked, has []string) ([]string, error) {
	var good []string
	for _, a := range asked {
		if slices.Contains(has, a) {
			good = append(good, a)
		}
	}
	if len(good) == 0 {
		return nil, fmt.Errorf("service account token: %w", pki.ErrAudience)
	}
	return good, nil
}

func (s *ServiceAccounts) claims(token string, audiences []string) (*pki.Claims, error) {
	now := s.clock()
	sum := sha256.Sum256([]byte(token))
	s.mu.Lock()
	t, ok := s.seen[sum]
	s.mu.Unlock()
	if ok && now.Before(t.until) && s.tokens.Accepts(t.key) {
		return t.claims, nil
	}
	c, err := s.tokens.Verify(token, audiences, now)
	if err != nil {
		return c, err
	}
	until := now.Add(seenFor)
	if c.Expiry.Before(until) {
		until = c.Expiry
	}
	s.mu.Lock()
	if len(s.seen) >= seenMax {
		clear(s.seen)
	}
	s.seen[sum] = seenToken{claims: c, until: until, key: pki.KeyIDOf(token)}
	s.mu.Unlock()
	return c, nil
}

// alive returns an error unless each object to which the token is bound exists with the UID in the
// token. A deleted object counts as existing for deletionGrace.
func (s *ServiceAccounts) alive(ctx context.Context, c *pki.Claims) error {
	refs := []struct {
		resource, namespace string
		ref                 *pki.Ref
	}{
		{"serviceaccounts", c.Namespace, &c.ServiceAccount},
		{"pods", c.Namespace, c.Pod},
		{"secrets", c.Namespace, c.Secret},
	}
	if c.Pod == nil {
		// The node of a pod-bound token is informational and is not checked.
		refs = append(refs, struct {
			resource, namespace string
			ref                 *pki.Ref
		}{"nodes", "", c.Node})
	}
	for _, b := range refs {
		if b.ref == nil {
			continue
		}
		uid, deletedAt, ok := s.living.UID(ctx, b.resource, b.namespace, b.ref.Name)
		one := strings.TrimSuffix(b.resource, "s")
		switch {
		case !ok:
			return fmt.Errorf("service account token has been invalidated: %s %q no longer exists", one, b.ref.Name)
		case uid != b.ref.UID:
			return fmt.Errorf("service account token has been invalidated: %s %q is another object than the token was bound to", one, b.ref.Name)
		case !deletedAt.IsZero() && s.clock().After(deletedAt.Add(deletionGrace)):
			return fmt.Errorf("service account token has been invalidated: %s %q is being deleted", one, b.ref.Name)
		}
	}
	return nil
}

// issuerOf returns the iss claim of a JWT without verifying it; "" if the token is not a JWT.
func issuerOf(token string) string {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return ""
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return ""
	}
	var c struct {
		Issuer string `json:"iss"`
	}
	if json.Unmarshal(payload, &c) != nil {
		return ""
	}
	return c.Issuer
}
