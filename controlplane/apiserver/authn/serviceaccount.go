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

// Living answers whether bound objects still exist, from this replica's cache where possible.
type Living interface {
	// UID returns that of the living object; deletedAt is when its deletion was
	// asked for (zero when it was not). ok is false when there is no such object.
	UID(ctx context.Context, resource, namespace, name string) (uid string, deletedAt time.Time, ok bool)
	// Get returns the living object itself, shared.
	Get(ctx context.Context, resource, namespace, name string) (api.Object, bool)
}

// MarkUsed writes into a Secret the day on which its token was used last.
type MarkUsed func(ctx context.Context, secret *corev1.Secret, day string) error

// deletionGrace is how long a token outlives the graceful end of what it is bound to.
const deletionGrace = 60 * time.Second

// ServiceAccounts recognises service account tokens. Signatures are checked once
// per token and minute; that the bound objects live is checked on every request.
type ServiceAccounts struct {
	tokens    *pki.ServiceTokens
	audiences []string
	living    Living
	clock     func() time.Time
	markUsed  MarkUsed

	mu     sync.Mutex
	seen   map[[sha256.Size]byte]seenToken
	marked map[types.UID]time.Time // when a Secret's label was written or tried last
}

type seenToken struct {
	claims *pki.Claims
	until  time.Time
	key    string // the id of the one that signed it: believed no longer than that
}

const (
	seenFor = time.Minute
	seenMax = 4096
)

// NewServiceAccounts recognises tokens of the issuer and those that Secrets hold; audiences are those of this API, of
// which a token needs one.
func NewServiceAccounts(tokens *pki.ServiceTokens, audiences []string, living Living, markUsed MarkUsed, clock func() time.Time) *ServiceAccounts {
	return &ServiceAccounts{
		tokens: tokens, audiences: audiences, living: living, clock: clock, markUsed: markUsed,
		seen: make(map[[sha256.Size]byte]seenToken), marked: make(map[types.UID]time.Time),
	}
}

// VerifyToken is TokenVerifier.
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

// both are the audiences that are asked for and that the token is good for.
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

// alive requires that everything the token is bound to still exists in the same incarnation.
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
		// A token bound to a pod names the node for information only.
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

// issuerOf reads the issuer of a JWT without trusting it; "" when it is not a JWT.
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
