package webhooks

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/uuid"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// failure is the error of a webhook call that failed or returned an invalid response.
type failure struct {
	webhook string
	err     error
	code    int
}

func (f *failure) Error() string {
	return fmt.Sprintf("failed calling webhook %q: %v", f.webhook, f.err)
}
func (f *failure) Unwrap() error { return f.err }

// errTimeout returns the error for a request that has exceeded its deadline.
func errTimeout() error {
	return apierrors.NewTimeoutError("request did not complete within requested timeout", 0)
}

// invocation is the evaluation of one write by the mutating webhooks or by the validating webhooks.
type invocation struct {
	attempt *matching.Attempt
	engine  *Webhooks
	set     *hookSet
	kind    string // typeMutating or typeValidating
	round   int
	views   map[matching.Target]*objectView
}

// objectView is a matching.View and its JSON encoding.
type objectView struct {
	*matching.View
	json *encodedObjects
}

// viewFor returns the attempt in the API version that a webhook receives; nil if the webhook does
// not apply to the attempt.
func (a *invocation) viewFor(ctx context.Context, h *hook) (*objectView, error) {
	t, ok, err := h.criteria.Match(ctx, a.attempt, a.engine.cfg.Versions, a.engine.cfg.Cluster)
	if !ok || err != nil {
		return nil, err
	}
	v, err := a.viewAs(ctx, t)
	if err != nil || h.conditions == nil {
		return v, err
	}
	in := &cel.Input{Object: v.Object, Old: v.Old, Request: a.attempt.Request(v.Target), User: a.attempt.User}
	if a.engine.cfg.Authorizer != nil {
		in.Authorizer = a.engine.cfg.Authorizer(ctx)
	}
	met, err := h.conditions().AreMet(ctx, in)
	if err != nil {
		if h.ignores {
			return nil, nil
		}
		return nil, apierrors.NewForbidden(a.attempt.Resource.GroupResource(), a.attempt.Name, err)
	}
	if !met {
		return nil, nil
	}
	return v, nil
}

func (a *invocation) viewAs(ctx context.Context, t matching.Target) (*objectView, error) {
	if v := a.views[t]; v != nil {
		return v, nil
	}
	view, err := a.engine.cfg.Versions.View(ctx, a.attempt, t)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	if a.views == nil {
		a.views = make(map[matching.Target]*objectView, 1)
	}
	a.views[t] = &objectView{View: view}
	return a.views[t], nil
}

func (v *objectView) encodeView() (encodedObjects, error) {
	if v.json == nil {
		e, err := encodeObjects(v.View)
		if err != nil {
			return e, err
		}
		v.json = &e
	}
	return *v.json, nil
}

// callWebhook calls one webhook. An error is a *failure or an API status: the webhook's denial, or
// the reason why it was not called.
func (a *invocation) callWebhook(ctx context.Context, h *hook, v *objectView) (*reviewResponse, error) {
	if a.attempt.DryRun && h.sideEffects {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("admission webhook %q does not support dry run", h.name))
	}
	fail := func(code int, format string, args ...any) error {
		return &failure{h.name, fmt.Errorf(format, args...), code}
	}
	if h.review == "" {
		return nil, fail(http.StatusBadRequest,
			"could not create admission objects: webhook does not accept known AdmissionReview versions (v1, v1beta1)")
	}
	e, err := v.encodeView()
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	uid := uuid.NewUUID()
	body, err := newReview(h.review, uid, a.attempt, v.View, e)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	to, err := h.endpoint.openEndpoint()
	if err != nil {
		return nil, fail(http.StatusInternalServerError, "could not get REST client: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, h.timeout)
	defer cancel()
	most := maxValidating
	if a.kind == typeMutating {
		most = maxMutating
	}
	data, err := to.Ask(ctx, timeoutQuery(ctx), body, most)
	if err != nil {
		return nil, fail(http.StatusServiceUnavailable, "failed to call webhook: %w", err)
	}
	out, err := readResponse(data, h.review, uid, a.kind == typeMutating)
	if err != nil {
		return nil, fail(http.StatusServiceUnavailable, "received invalid webhook response: %w", err)
	}
	a.forwardWarnings(ctx, h, out)
	if !out.Allowed {
		return nil, newDenial(h.name, out.Status)
	}
	return out, nil
}

// timeoutQuery returns the URL query with the timeout of the call in whole seconds, rounded up.
func timeoutQuery(ctx context.Context) string {
	deadline, ok := ctx.Deadline()
	left := time.Until(deadline)
	if !ok || left <= 0 {
		return ""
	}
	whole := left.Truncate(time.Second)
	if whole != left {
		whole += time.Second
	}
	return "timeout=" + url.QueryEscape(whole.String())
}

// forwardWarnings forwards the warnings in the response to the client and its audit annotations to
// the audit event.
func (a *invocation) forwardWarnings(ctx context.Context, h *hook, response *reviewResponse) {
	for i, key := range slices.Sorted(maps.Keys(response.AuditAnnotations)) {
		if i == maxAnnotations {
			break
		}
		if len(key) <= 128 && !strings.Contains(key, "/") {
			api.Annotate(ctx, h.name+"/"+key, response.AuditAnnotations[key])
		}
	}
	for i, text := range response.Warnings {
		if i == maxWarnings {
			break
		}
		api.Warn(ctx, text)
	}
}

// handleResult counts the result of a call in the metrics. It returns the error with which the
// request fails; nil if the request continues.
func (a *invocation) handleResult(ctx context.Context, h *hook, err error, duration time.Duration) error {
	m, op := a.engine.metrics, string(a.attempt.Operation)
	var f *failure
	var status apierrors.APIStatus
	switch {
	case err == nil:
		h.logRecovery(ctx, a.engine.cfg.Log)
		m.observeResponse(h, a.kind, op, http.StatusOK, false, duration)
		return nil
	case errors.As(err, &f):
		ignored := h.ignores || a.isEssentialWrite(h)
		m.observeResponse(h, a.kind, op, f.code, !ignored, duration)
		canceled := errors.Is(ctx.Err(), context.Canceled)
		if ignored {
			if !canceled {
				m.countFailOpen(h, a.kind)
				api.Annotate(ctx, a.annotationKey("failed-open.", h), h.name)
				h.logFailure(a.engine.cfg.Log, "failed calling webhook, failing open", f.err)
			}
			if ctx.Err() != nil {
				return errTimeout()
			}
			return nil
		}
		if !canceled {
			m.countRejection(h, a.kind, op, errorCalling, f.code)
			h.logFailure(a.engine.cfg.Log, "failed calling webhook, failing closed", f.err)
		}
		return apierrors.NewInternalError(f)
	case errors.As(err, &status) && apierrors.ReasonForError(err) != "InternalError":
		code := int(status.Status().Code)
		m.countRejection(h, a.kind, op, errorNone, code)
		m.observeResponse(h, a.kind, op, code, true, duration)
		return err
	}
	m.countRejection(h, a.kind, op, errorInternal, 0)
	m.observeResponse(h, a.kind, op, 0, true, duration)
	return err
}

// annotationKey returns the key of the audit annotation about webhook h, which contains the round
// and the index of the webhook.
func (a *invocation) annotationKey(prefix string, h *hook) string {
	group := "validating.webhook.admission.k8s.io/"
	if a.kind == typeMutating {
		group = "mutation.webhook.admission.k8s.io/"
	}
	return fmt.Sprintf("%s%sround_%d_index_%d", prefix, group, a.round, h.index)
}
