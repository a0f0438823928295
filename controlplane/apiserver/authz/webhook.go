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

// Asker puts a question to a service and decodes the answer.
type Asker interface {
	Post(ctx context.Context, question, answer any) error
}

// Matcher says whether a question is one for the service.
type Matcher interface {
	Eval(ctx context.Context, r *authorizationv1.SubjectAccessReview) (bool, error)
}

// WebhookConfig is what a Webhook is made of.
type WebhookConfig struct {
	Name    string
	Service Asker
	Version string // of authorization.k8s.io in which the service is spoken to: v1 or v1beta1
	// For how long answers are remembered; 0 = not at all.
	AllowedTTL, OtherTTL time.Duration
	// OnError is the decision when the service cannot be asked: NoOpinion or Deny.
	OnError Decision
	Match   Matcher // nil = every question
	Clock   func() time.Time
	Log     *slog.Logger // may be nil
}

// Webhook has a service decide that answers SubjectAccessReviews.
type Webhook struct {
	conf    WebhookConfig
	cache   *ttlcache.Cache[[sha256.Size]byte, answer]
	flights singleflight.Group
	faults  *rate.Limiter // of those that are logged
}

// answer is what the service says.
type answer = authorizationv1.SubjectAccessReviewStatus

// webhookCache bounds what is remembered of answers, in bytes.
const webhookCache = 8 << 20

// NewWebhook returns the authorizer.
func NewWebhook(c WebhookConfig) (*Webhook, error) {
	if c.Version != "v1" && c.Version != "v1beta1" {
		return nil, fmt.Errorf("version %q of SubjectAccessReview: want v1 or v1beta1", c.Version)
	}
	return &Webhook{
		conf: c, faults: rate.NewLimiter(1, 5),
		cache: ttlcache.New[[sha256.Size]byte, answer](webhookCache),
	}, nil
}

// Authorize is Authorizer.
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

// failed tells who asks that there is no answer. Why is for the log, once in a while: anybody can make it happen.
func (w *Webhook) failed(err error) (Decision, string) {
	if w.conf.Log != nil && w.faults.Allow() {
		w.conf.Log.Warn("an authorization webhook could not be asked", "webhook", w.conf.Name, "err", err)
	}
	return w.conf.OnError, fmt.Sprintf("webhook %s could not be asked", w.conf.Name)
}

// status asks, once at a time for the same question.
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
	if w.conf.Version == "v1beta1" { // which calls the groups "group"
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
