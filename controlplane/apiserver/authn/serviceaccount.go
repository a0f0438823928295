package authn

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

// ServiceAccountClaims is what a service account token says.
type ServiceAccountClaims struct {
	ID             string // "jti"
	Issuer         string
	Subject        string // "system:serviceaccount:<namespace>:<name>"
	Audiences      []string
	Expires        time.Time
	NotBefore      time.Time
	IssuedAt       time.Time
	Namespace      string
	ServiceAccount ObjectRef
	Pod            *ObjectRef // the pod that the token is bound to
	Secret         *ObjectRef
	Node           *ObjectRef
	WarnAfter      time.Time // the token should have been renewed by then; zero = none
}

// ObjectRef names one incarnation of an object.
type ObjectRef struct{ Name, UID string }

// Living answers whether bound objects still exist, from this replica's cache where possible.
type Living interface {
	// UID returns that of the living object; deletedAt is when its deletion was
	// asked for (zero when it was not). ok is false when there is no such object.
	UID(ctx context.Context, resource, namespace, name string) (uid string, deletedAt time.Time, ok bool)
}

// deletionGrace is how long a token outlives the graceful end of what it is bound to.
const deletionGrace = 60 * time.Second

// ServiceAccounts recognises service account tokens. Signatures are checked once
// per token and minute; that the bound objects live is checked on every request.
type ServiceAccounts struct {
	verify    func(token string) (ServiceAccountClaims, error)
	issuer    string
	audiences []string
	living    Living
	clock     func() time.Time

	mu   sync.Mutex
	seen map[[sha256.Size]byte]seenToken
}

type seenToken struct {
	claims ServiceAccountClaims
	until  time.Time
}

const (
	seenFor = time.Minute
	seenMax = 4096
)

// NewServiceAccounts recognises tokens of the issuer that verify accepts; audiences
// are those of this API, of which a token needs one.
func NewServiceAccounts(verify func(string) (ServiceAccountClaims, error), issuer string, audiences []string, living Living, clock func() time.Time) *ServiceAccounts {
	return &ServiceAccounts{
		verify: verify, issuer: issuer, audiences: audiences, living: living, clock: clock,
		seen: make(map[[sha256.Size]byte]seenToken),
	}
}

// VerifyToken is TokenVerifier.
func (s *ServiceAccounts) VerifyToken(ctx context.Context, token string, audiences []string) (TokenIdentity, bool, error) {
	if issuerOf(token) != s.issuer {
		return TokenIdentity{}, false, nil
	}
	c, err := s.claims(token)
	if err != nil {
		return TokenIdentity{}, false, err
	}
	if len(audiences) == 0 {
		audiences = s.audiences
	}
	var good []string
	for _, a := range audiences {
		if slices.Contains(c.Audiences, a) {
			good = append(good, a)
		}
	}
	if len(good) == 0 {
		return TokenIdentity{}, false, fmt.Errorf("token audiences %q is invalid for the target audiences %q", c.Audiences, audiences)
	}
	if err := s.alive(ctx, c); err != nil {
		return TokenIdentity{}, false, err
	}
	return TokenIdentity{User: c.user(), Audiences: good}, true, nil
}

func (s *ServiceAccounts) claims(token string) (ServiceAccountClaims, error) {
	now := s.clock()
	sum := sha256.Sum256([]byte(token))
	s.mu.Lock()
	t, ok := s.seen[sum]
	s.mu.Unlock()
	if ok && now.Before(t.until) {
		return t.claims, nil
	}
	c, err := s.verify(token)
	if err != nil {
		return c, err
	}
	if !c.Expires.IsZero() && !now.Before(c.Expires) {
		return c, errors.New("service account token has expired")
	}
	until := now.Add(seenFor)
	if !c.Expires.IsZero() && c.Expires.Before(until) {
		until = c.Expires
	}
	s.mu.Lock()
	if len(s.seen) >= seenMax {
		clear(s.seen)
	}
	s.seen[sum] = seenToken{claims: c, until: until}
	s.mu.Unlock()
	return c, nil
}

// alive requires that everything the token is bound to still exists in the same incarnation.
func (s *ServiceAccounts) alive(ctx context.Context, c ServiceAccountClaims) error {
	refs := []struct {
		resource, namespace string
		ref                 *ObjectRef
	}{
		{"serviceaccounts", c.Namespace, &c.ServiceAccount},
		{"pods", c.Namespace, c.Pod},
		{"secrets", c.Namespace, c.Secret},
	}
	if c.Pod == nil {
		// A token bound to a pod names the node for information only.
		refs = append(refs, struct {
			resource, namespace string
			ref                 *ObjectRef
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

// user is the identity of the token's holder.
func (c ServiceAccountClaims) user() api.User {
	u := api.User{
		Name:   c.Subject,
		UID:    c.ServiceAccount.UID,
		Groups: []string{api.GroupServiceAccounts, api.GroupServiceAccounts + ":" + c.Namespace, api.GroupAuthenticated},
		Extra:  map[string][]string{},
	}
	if c.ID != "" {
		u.Extra["authentication.kubernetes.io/credential-id"] = []string{"JTI=" + c.ID}
	}
	if c.Pod != nil {
		u.Extra["authentication.kubernetes.io/pod-name"] = []string{c.Pod.Name}
		u.Extra["authentication.kubernetes.io/pod-uid"] = []string{c.Pod.UID}
	}
	if c.Node != nil {
		u.Extra["authentication.kubernetes.io/node-name"] = []string{c.Node.Name}
		u.Extra["authentication.kubernetes.io/node-uid"] = []string{c.Node.UID}
	}
	return u
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
