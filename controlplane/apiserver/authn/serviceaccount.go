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

// ObjectReader reads the objects to which tokens are bound. It reads this replica's cache where
// possible.
type ObjectReader interface {
	// UID returns the UID of an object. deletedAt is its deletion timestamp; zero if it is not
	// being deleted. ok is false if the object does not exist.
	UID(ctx context.Context, resource, namespace, name string) (uid string, deletedAt time.Time, ok bool)
	// Get returns the object itself, which is shared and must not be modified.
	Get(ctx context.Context, resource, namespace, name string) (api.Object, bool)
}

// MarkUsed writes a day into the last-used label of the Secret of a token.
type MarkUsed func(ctx context.Context, secret *corev1.Secret, day string) error

// deletionGrace is how long a token stays valid after the deletion timestamp of an object to which
// the token is bound.
const deletionGrace = 60 * time.Second

// ServiceAccounts verifies service account tokens. A token's signature is checked once per minute;
// the existence of its bound objects is checked on each request.
type ServiceAccounts struct {
	tokens    *pki.ServiceTokens
	audiences []string
	objects   ObjectReader
	clock     func() time.Time
	markUsed  MarkUsed

	mu         sync.Mutex
	verified   map[[sha256.Size]byte]verifiedToken
	markedDays map[types.UID]time.Time // last attempt to write the label, by UID of the Secret
}

type verifiedToken struct {
	claims *pki.Claims
	until  time.Time
	key    string // ID of the signing key; the cached claims are invalid once this key is no longer accepted
}

const (
	verifiedLifetime = time.Minute
	maxVerified      = 4096
)

// NewServiceAccounts returns a verifier of the service account tokens that this cluster issues, and
// of tokens stored in Secrets. By default, a token must have one of the audiences. objects reads
// the objects to which tokens are bound; markUsed may be nil.
func NewServiceAccounts(
	tokens *pki.ServiceTokens, audiences []string, objects ObjectReader, markUsed MarkUsed, clock func() time.Time,
) *ServiceAccounts {
	return &ServiceAccounts{
		tokens: tokens, audiences: audiences, objects: objects, clock: clock, markUsed: markUsed,
		verified: make(map[[sha256.Size]byte]verifiedToken), markedDays: make(map[types.UID]time.Time),
	}
}

// VerifyToken verifies a service account token of this cluster. ok is false for tokens of other
// issuers.
func (s *ServiceAccounts) VerifyToken(ctx context.Context, token string, audiences []string) (
	TokenIdentity, bool, error,
) {
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
	c, err := s.verifiedClaims(token, audiences)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	good, err := commonAudiences(audiences, c.Audiences)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	if err := s.checkBoundObjects(ctx, c); err != nil {
		return TokenIdentity{}, false, err
	}
	return TokenIdentity{User: c.User(), Audiences: good}, true, nil
}

// commonAudiences returns the intersection of the requested audiences and the token's audiences. An
// empty intersection is an error.
func commonAudiences(requested, available []string) ([]string, error) {
	var good []string
	for _, a := range requested {
		if slices.Contains(available, a) {
			good = append(good, a)
		}
	}
	if len(good) == 0 {
		return nil, fmt.Errorf("service account token: %w", pki.ErrAudience)
	}
	return good, nil
}

func (s *ServiceAccounts) verifiedClaims(token string, audiences []string) (*pki.Claims, error) {
	now := s.clock()
	sum := sha256.Sum256([]byte(token))
	s.mu.Lock()
	t, ok := s.verified[sum]
	s.mu.Unlock()
	if ok && now.Before(t.until) && s.tokens.Accepts(t.key) {
		return t.claims, nil
	}
	c, err := s.tokens.Verify(token, audiences, now)
	if err != nil {
		return c, err
	}
	until := now.Add(verifiedLifetime)
	if c.Expiry.Before(until) {
		until = c.Expiry
	}
	s.mu.Lock()
	if len(s.verified) >= maxVerified {
		clear(s.verified)
	}
	s.verified[sum] = verifiedToken{claims: c, until: until, key: pki.ParseKeyID(token)}
	s.mu.Unlock()
	return c, nil
}

// checkBoundObjects returns an error unless each object to which the token is bound exists and has
// the UID in the token. An object that is being deleted counts as existing for deletionGrace.
func (s *ServiceAccounts) checkBoundObjects(ctx context.Context, c *pki.Claims) error {
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
		uid, deletedAt, ok := s.objects.UID(ctx, b.resource, b.namespace, b.ref.Name)
		one := strings.TrimSuffix(b.resource, "s")
		switch {
		case !ok:
			return fmt.Errorf("service account token has been invalidated: %s %q no longer exists", one, b.ref.Name)
		case uid != b.ref.UID:
			return fmt.Errorf("service account token has been invalidated: %s %q has another UID than the token",
				one, b.ref.Name)
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
