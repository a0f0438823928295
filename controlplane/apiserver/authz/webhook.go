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

// Asker sends a request object to a webhook and decodes the response into answer.
type Asker interface {
	Post(ctx context.Context, question, answer any) error
}

// Matcher reports whether a request is to be sent to the webhook.
type Matcher interface {
	Eval(ctx context.Context, r *authorizationv1.SubjectAccessReview) (bool, error)
}

// WebhookConfig is the input of NewWebhook.
type WebhookConfig struct {
	Name    string
	Service Asker
	Version string // version of authorization.k8s.io in requests: v1 or v1beta1
	// How long responses that allow, and all other responses, are cached; 0 = not cached.
	AllowedTTL, OtherTTL time.Duration
	// OnError is the decision when the webhook fails: NoOpinion or Deny.
	OnError Decision
	Match   Matcher // nil = every request
	Clock   func() time.Time
	Log     *slog.Logger // may be nil
}

// Webhook authorizes by sending SubjectAccessReviews to a webhook.
type Webhook struct {
	conf    WebhookConfig
	cache   *ttlcache.Cache[[sha256.Size]byte, answer]
	flights singleflight.Group
	faults  *rate.Limiter // limits how often faults are logged
}

// answer is the webhook's response.
type answer = authorizationv1.SubjectAccessReviewStatus

// webhookCache is the maximum size of the response cache in bytes.
const webhookCache = 8 << 20

// NewWebhook returns an authorizer that uses c.Service.
func NewWebhook(c WebhookConfig) (*Webhook, error) {
	if c.Version != "v1" && c.Version != "v1beta1" {
		return nil, fmt.Errorf("version %q of SubjectAccessReview: want v1 or v1beta1", c.Version)
	}
	return &Webhook{
		conf: c, faults: rate.NewLimiter(1, 5),
		cache: ttlcache.New[[sha256.Size]byte, answer](webhookCache),
	}, nil
}

// Authorize returns the webhook's decision, or the configured OnError if the webhook fails. It
// returns NoOpinion for requests that Match excludes. A response that both allows and denies is
// Deny.
func (w *Webhook) Authorize(ctx context.Context, a *Attributes) (Decision, string) {
	r := &authorizationv1.SubjectAccessReview{Spec: reviewOf(a)}
	if w.conf.Match != nil {
		switch ok, err := w.conf.Match.Eval(ctx, r); {
		case err != nil:
			return w.failed(err)
		case !ok:
			return NoOpinion, ""
		}
	}
	status, err := w.status(ctx, &r.Spec)
	switch {
	case err != nil:
		return w.failed(err)
	case status.Denied && status.Allowed:
		return Deny, fmt.Sprintf("webhook %s both allows and denies", w.conf.Name)
	case status.Denied:
		return Deny, status.Reason
	case status.Allowed:
		return Allow, status.Reason
	}
	return NoOpinion, status.Reason
}

// failed returns the decision and reason for a failed call. The error itself is only logged, at a
// limited rate because any client can cause it.
func (w *Webhook) failed(err error) (Decision, string) {
	if w.conf.Log != nil && w.faults.Allow() {
		w.conf.Log.Warn("an authorization webhook could not be asked", "webhook", w.conf.Name, "err", err)
	}
	return w.conf.OnError, fmt.Sprintf("webhook %s could not be asked", w.conf.Name)
}

// status returns the webhook's response, from the cache if possible. Concurrent calls for the same
// review share one request.
func (w *Webhook) status(ctx context.Context, spec *authorizationv1.SubjectAccessReviewSpec) (answer, error) {
	var none answer
	text, err := json.Marshal(spec)
	if err != nil {
		return none, err
	}
	key := sha256.Sum256(text)
	if s, ok := w.cache.Get(key, w.conf.Clock()); ok {
		return s, nil
	}
	done := w.flights.DoChan(string(key[:]), func() (any, error) {
		s, err := w.ask(context.WithoutCancel(ctx), spec)
		ttl := w.conf.OtherTTL
		if s.Allowed {
			ttl = w.conf.AllowedTTL
		}
		if err == nil && ttl > 0 {
			w.cache.Put(key, s, int64(len(s.Reason)), w.conf.Clock().Add(ttl))
		}
		return s, err
	})
	select {
	case r := <-done:
		return r.Val.(answer), r.Err
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

func (w *Webhook) ask(ctx context.Context, spec *authorizationv1.SubjectAccessReviewSpec) (answer, error) {
	meta := metav1.TypeMeta{APIVersion: authorizationv1.GroupName + "/" + w.conf.Version, Kind: "SubjectAccessReview"}
	var question any = &authorizationv1.SubjectAccessReview{TypeMeta: meta, Spec: *spec}
	if w.conf.Version == "v1beta1" { // v1beta1 names the field of the groups "group"
		old := &authorizationv1beta1.SubjectAccessReview{TypeMeta: meta, Spec: authorizationv1beta1.SubjectAccessReviewSpec{
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
		Status answer `json:"status"`
	}
	err := w.conf.Service.Post(ctx, question, &review)
	review.Status.Reason = api.Clip(review.Status.Reason, 1024)
	return review.Status, err
}
