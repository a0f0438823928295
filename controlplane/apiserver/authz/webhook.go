package authz

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/time/rate"
	authorizationv1 "k8s.io/api/authorization/v1"
	authorizationv1beta1 "k8s.io/api/authorization/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/ttlcache"
)

// Poster sends a request object to a webhook and decodes the webhook's response into answer.
type Poster interface {
	Post(ctx context.Context, question, answer any) error
}

// Matcher reports whether a request is to be sent to the webhook.
type Matcher interface {
	Eval(ctx context.Context, r *authorizationv1.SubjectAccessReview) (bool, error)
}

// WebhookConfig contains the service, version, caching and failure policy of an authorization
// webhook.
type WebhookConfig struct {
	Name    string
	Service Poster
	Version string // version of authorization.k8s.io in requests: v1 or v1beta1
	// How long responses are cached that allow the request, and all other responses; 0 = not
	// cached.
	AllowedTTL, OtherTTL time.Duration
	// OnError is the decision when the webhook fails: NoOpinion or Deny.
	OnError Decision
	Match   Matcher // nil = every request
	Clock   func() time.Time
	Log     *slog.Logger // may be nil
}

// Webhook is an authorizer that sends SubjectAccessReviews to a webhook.
type Webhook struct {
	config  WebhookConfig
	cache   *ttlcache.Cache[[sha256.Size]byte, reviewResult]
	flights singleflight.Group
	faults  *rate.Limiter // limits how often faults are logged
}

// reviewResult is the status of a SubjectAccessReview that the webhook has returned.
type reviewResult = authorizationv1.SubjectAccessReviewStatus

// webhookCache is the maximum size of the response cache in bytes.
const webhookCache = 8 << 20

// NewWebhook returns an authorizer that sends SubjectAccessReviews to c.Service.
func NewWebhook(c WebhookConfig) (*Webhook, error) {
	if c.Version != "v1" && c.Version != "v1beta1" {
		return nil, fmt.Errorf("version %q of SubjectAccessReview: want v1 or v1beta1", c.Version)
	}
	return &Webhook{
		config: c, faults: rate.NewLimiter(1, 5),
		cache: ttlcache.New[[sha256.Size]byte, reviewResult](webhookCache),
	}, nil
}

// Authorize returns the webhook's decision, or the configured OnError if the webhook fails. It
// returns NoOpinion for requests that Match excludes. If a response both allows and denies,
// Authorize returns Deny.
func (w *Webhook) Authorize(ctx context.Context, a *Attributes) (Decision, string) {
	r := &authorizationv1.SubjectAccessReview{Spec: reviewOf(a)}
	if w.config.Match != nil {
		switch ok, err := w.config.Match.Eval(ctx, r); {
		case err != nil:
			return w.decideOnFailure(err)
		case !ok:
			return NoOpinion, ""
		}
	}
	status, err := w.reviewStatus(ctx, &r.Spec)
	switch {
	case err != nil:
		return w.decideOnFailure(err)
	case status.Denied && status.Allowed:
		return Deny, fmt.Sprintf("webhook %s both allows and denies", w.config.Name)
	case status.Denied:
		return Deny, status.Reason
	case status.Allowed:
		return Allow, status.Reason
	}
	return NoOpinion, status.Reason
}

// decideOnFailure returns the decision and reason for a failed call. The error itself is only
// logged, at a limited rate because any client can cause it.
func (w *Webhook) decideOnFailure(err error) (Decision, string) {
	if w.config.Log != nil && w.faults.Allow() {
		w.config.Log.Warn("calling an authorization webhook failed", "webhook", w.config.Name, "err", err)
	}
	return w.config.OnError, fmt.Sprintf("calling webhook %s failed", w.config.Name)
}

// reviewStatus returns the webhook's response, from the cache if possible. Concurrent calls for the
// same review share one request.
func (w *Webhook) reviewStatus(ctx context.Context, spec *authorizationv1.SubjectAccessReviewSpec) (
	reviewResult, error,
) {
	var none reviewResult
	text, err := json.Marshal(spec)
	if err != nil {
		return none, err
	}
	key := sha256.Sum256(text)
	if s, ok := w.cache.Get(key, w.config.Clock()); ok {
		return s, nil
	}
	done := w.flights.DoChan(string(key[:]), func() (any, error) {
		s, err := w.callService(context.WithoutCancel(ctx), spec)
		ttl := w.config.OtherTTL
		if s.Allowed {
			ttl = w.config.AllowedTTL
		}
		if err == nil && ttl > 0 {
			w.cache.Put(key, s, int64(len(s.Reason)), w.config.Clock().Add(ttl))
		}
		return s, err
	})
	select {
	case r := <-done:
		return r.Val.(reviewResult), r.Err
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

func (w *Webhook) callService(ctx context.Context, spec *authorizationv1.SubjectAccessReviewSpec) (
	reviewResult, error,
) {
	meta := metav1.TypeMeta{APIVersion: authorizationv1.GroupName + "/" + w.config.Version, Kind: "SubjectAccessReview"}
	var question any = &authorizationv1.SubjectAccessReview{TypeMeta: meta, Spec: *spec}
	if w.config.Version == "v1beta1" { // v1beta1 names the field of the groups "group"
		old := &authorizationv1beta1.SubjectAccessReview{TypeMeta: meta,
			Spec: authorizationv1beta1.SubjectAccessReviewSpec{
				User: spec.User, UID: spec.UID, Groups: spec.Groups,
				ResourceAttributes:    (*authorizationv1beta1.ResourceAttributes)(spec.ResourceAttributes),
				NonResourceAttributes: (*authorizationv1beta1.NonResourceAttributes)(spec.NonResourceAttributes),
			}}
		for k, v := range spec.Extra {
			if old.Spec.Extra == nil {
				old.Spec.Extra = make(map[string]authorizationv1beta1.ExtraValue, len(spec.Extra))
			}
			old.Spec.Extra[k] = authorizationv1beta1.ExtraValue(v)
		}
		question = old
	}
	var review struct {
		Status reviewResult `json:"status"`
	}
	err := w.config.Service.Post(ctx, question, &review)
	review.Status.Reason = api.Truncate(review.Status.Reason, 1024)
	return review.Status, err
}
