package authn

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/ttlcache"
)

// Poster sends a request object to a webhook and decodes the webhook's response into answer.
type Poster interface {
	Post(ctx context.Context, question, answer any) error
}

// Webhook verifies tokens by sending TokenReviews to a webhook.
type Webhook struct {
	service    Poster
	apiVersion string
	audiences  []string // of this API
	ttl        time.Duration
	clock      func() time.Time
	cache      *ttlcache.Cache[[sha256.Size]byte, *reviewResult]
	flights    singleflight.Group
}

// reviewResult is the webhook's response for one token.
type reviewResult struct {
	identity TokenIdentity
	ok       bool
	err      error
}

// webhookCache is the maximum size of the response cache in bytes.
const webhookCache = 8 << 20

// NewWebhook returns a verifier that sends TokenReviews to service, in version v1 or v1beta1 of
// authentication.k8s.io. Responses are cached for ttl.
func NewWebhook(
	service Poster, version string, audiences []string, ttl time.Duration, clock func() time.Time,
) (*Webhook, error) {
	if version != "v1" && version != "v1beta1" {
		return nil, fmt.Errorf("version %q of TokenReview: want v1 or v1beta1", version)
	}
	return &Webhook{
		service: service, apiVersion: authenticationv1.GroupName + "/" + version, audiences: audiences,
		ttl: ttl, clock: clock,
		cache: ttlcache.New[[sha256.Size]byte, *reviewResult](webhookCache),
	}, nil
}

// VerifyToken returns the result of the webhook's TokenReview, from the cache if possible.
// Concurrent calls for the same token share one request. Failed requests to the webhook are not
// cached.
func (w *Webhook) VerifyToken(ctx context.Context, token string, audiences []string) (TokenIdentity, bool, error) {
	if len(audiences) == 0 {
		audiences = w.audiences
	}
	key := sha256.Sum256([]byte(strings.Join(audiences, "\x00") + "\x00\x00" + token))
	if v, ok := w.cache.Get(key, w.clock()); ok {
		return v.identity, v.ok, v.err
	}
	// The shared call is limited by the webhook's timeout. It serves all waiting callers, so the
	// cancellation of the first caller must not cancel it.
	done := w.flights.DoChan(string(key[:]), func() (any, error) {
		v, err := w.callService(context.WithoutCancel(ctx), token, audiences)
		if err == nil && w.ttl > 0 {
			w.cache.Put(key, v, v.sizeInBytes(), w.clock().Add(w.ttl))
		}
		return v, err
	})
	select {
	case r := <-done:
		if r.Err != nil {
			return TokenIdentity{}, false, &Fault{Public: "calling the token webhook failed", Err: r.Err}
		}
		v := r.Val.(*reviewResult)
		return v.identity, v.ok, v.err
	case <-ctx.Done():
		return TokenIdentity{}, false, ctx.Err()
	}
}

func (w *Webhook) callService(ctx context.Context, token string, audiences []string) (*reviewResult, error) {
	q := authenticationv1.TokenReview{
		TypeMeta: metav1.TypeMeta{APIVersion: w.apiVersion, Kind: "TokenReview"},
		Spec:     authenticationv1.TokenReviewSpec{Token: token, Audiences: audiences},
	}
	var a authenticationv1.TokenReview
	if err := w.service.Post(ctx, &q, &a); err != nil {
		return nil, err
	}
	s := &a.Status
	switch {
	case !s.Authenticated && s.Error != "":
		return &reviewResult{err: errors.New(api.Truncate(s.Error, 1024))}, nil
	case !s.Authenticated:
		return &reviewResult{}, nil
	case s.User.Username == "":
		return nil, errors.New("the webhook authenticated a token but returned no user")
	}
	good := audiences
	if len(s.Audiences) > 0 {
		good = intersectAudiences(audiences, s.Audiences)
	} else if len(w.audiences) > 0 {
		// A webhook without support for audiences authenticates tokens for this API's audiences
		// only.
		good = intersectAudiences(audiences, w.audiences)
	}
	if len(audiences) > 0 && len(good) == 0 {
		return &reviewResult{}, nil
	}
	u := api.User{Name: s.User.Username, UID: s.User.UID, Groups: s.User.Groups}
	for k, values := range s.User.Extra {
		if u.Extra == nil {
			u.Extra = make(map[string][]string, len(s.User.Extra))
		}
		u.Extra[k] = values
	}
	return &reviewResult{identity: TokenIdentity{User: u, Audiences: good}, ok: true}, nil
}

// sizeInBytes returns the approximate size of the result in memory.
func (v *reviewResult) sizeInBytes() int64 {
	u := &v.identity.User
	n := len(u.Name) + len(u.UID)
	add := func(texts []string) {
		for _, t := range texts {
			n += len(t) + 16
		}
	}
	add(u.Groups)
	add(v.identity.Audiences)
	for k, values := range u.Extra {
		n += len(k) + 64
		add(values)
	}
	if v.err != nil {
		n += len(v.err.Error())
	}
	return int64(n)
}

func intersectAudiences(requested, available []string) []string {
	var out []string
	for _, a := range requested {
		if slices.Contains(available, a) {
			out = append(out, a)
		}
	}
	return out
}

// ForAPI wraps a verifier of tokens that have no audiences. The tokens are valid only for the
// audiences of this API.
type ForAPI struct {
	TokenVerifier
	Audiences []string
}

// VerifyToken verifies the token if one of the requested audiences is this API's; otherwise ok is
// false.
func (f ForAPI) VerifyToken(ctx context.Context, token string, audiences []string) (TokenIdentity, bool, error) {
	if len(audiences) == 0 {
		return f.TokenVerifier.VerifyToken(ctx, token, nil)
	}
	good := intersectAudiences(audiences, f.Audiences)
	if len(good) == 0 {
		return TokenIdentity{}, false, nil
	}
	i, ok, err := f.TokenVerifier.VerifyToken(ctx, token, nil)
	i.Audiences = good
	return i, ok, err
}
