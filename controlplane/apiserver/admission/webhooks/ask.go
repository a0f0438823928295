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
	why     error
	code    int
}

func (f *failure) Error() string {
	return fmt.Sprintf("failed calling webhook %q: %v", f.webhook, f.why)
}
func (f *failure) Unwrap() error { return f.why }

// errTimeout returns the error for a request that has exceeded its deadline.
func errTimeout() error {
	return apierrors.NewTimeoutError("request did not complete within requested timeout", 0)
}

// attempt is one write during its evaluation by the mutating or the validating webhooks.
type attempt struct {
	*matching.Attempt
	of    *Webhooks
	set   *set
	kind  string // typeMutating or typeValidating
	round int
	views map[matching.Target]*seen
}

// seen is a view and its JSON encoding.
type seen struct {
	*matching.View
	json *encoded
}

// concerns returns the view that a webhook receives; nil if the webhook does not apply to the
// attempt.
func (a *attempt) concerns(ctx context.Context, h *hook) (*seen, error) {
	t, ok, err := h.criteria.Match(ctx, a.Attempt, a.of.cfg.Versions, a.of.cfg.Cluster)
	if !ok || err != nil {
		return nil, err
	}
	v, err := a.view(ctx, t)
	if err != nil || h.conditions == nil {
		return v, err
	}
	in := &cel.Input{Object: v.Object, Old: v.Old, Request: a.Request(v.Target), User: a.User}
	if a.of.cfg.Authorizer != nil {
		in.Authorizer = a.of.cfg.Authorizer(ctx)
	}
	met, err := h.conditions().Met(ctx, in)
	if err != nil {
		if h.ignores {
			return nil, nil
		}
		return nil, apierrors.NewForbidden(a.Resource.GroupResource(), a.Name, err)
	}
	if !met {
		return nil, nil
	}
	return v, nil
}

func (a *attempt) view(ctx context.Context, t matching.Target) (*seen, error) {
	if v := a.views[t]; v != nil {
		return v, nil
	}
	view, err := a.of.cfg.Versions.View(ctx, a.Attempt, t)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	if a.views == nil {
		a.views = make(map[matching.Target]*seen, 1)
	}
	a.views[t] = &seen{View: view}
	return a.views[t], nil
}

func (v *seen) encode() (encoded, error) {
	if v.json == nil {
		e, err := encode(v.View)
		if err != nil {
			return e, err
		}
		v.json = &e
	}
	return *v.json, nil
}

// ask calls one webhook. An error is a *failure or an API status: the webhook's denial, or the
// reason why it was not called.
func (a *attempt) ask(ctx context.Context, h *hook, v *seen) (*answer, error) {
	if a.DryRun && h.sideEffects {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("admission webhook %q does not support dry run", h.name))
	}
	fail := func(code int, format string, args ...any) error {
		return &failure{h.name, fmt.Errorf(format, args...), code}
	}
	if h.review == "" {
		return nil, fail(http.StatusBadRequest,
			"could not create admission objects: webhook does not accept known AdmissionReview versions (v1, v1beta1)")
	}
	e, err := v.encode()
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	uid := uuid.NewUUID()
	body, err := question(h.review, uid, a.Attempt, v.View, e)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	to, err := h.endpoint.get()
	if err != nil {
		return nil, fail(http.StatusInternalServerError, "could not get REST client: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, h.timeout)
	defer cancel()
	most := maxValidating
	if a.kind == typeMutating {
		most = maxMutating
	}
	data, err := to.Ask(ctx, query(ctx), body, most)
	if err != nil {
		return nil, fail(http.StatusServiceUnavailable, "failed to call webhook: %w", err)
	}
	out, err := readAnswer(data, h.review, uid, a.kind == typeMutating)
	if err != nil {
		return nil, fail(http.StatusServiceUnavailable, "received invalid webhook response: %w", err)
	}
	a.pass(ctx, h, out)
	if !out.Allowed {
		return nil, denial(h.name, out.Status)
	}
	return out, nil
}

// query returns the URL query with the timeout of the call in whole seconds, rounded up.
func query(ctx context.Context) string {
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

// pass forwards the warnings in the response to the client and its audit annotations to the audit
// event.
func (a *attempt) pass(ctx context.Context, h *hook, out *answer) {
	for i, key := range slices.Sorted(maps.Keys(out.AuditAnnotations)) {
		if i == maxAnnotations {
			break
		}
		if len(key) <= 128 && !strings.Contains(key, "/") {
			api.Annotate(ctx, h.name+"/"+key, out.AuditAnnotations[key])
		}
	}
	for i, text := range out.Warnings {
		if i == maxWarnings {
			break
		}
		api.Warn(ctx, text)
	}
}

// judge counts the result of a call and returns the error with which the request fails; nil if it
// continues.
func (a *attempt) judge(ctx context.Context, h *hook, err error, took time.Duration) error {
	m, op := a.of.metrics, string(a.Operation)
	var f *failure
	var status apierrors.APIStatus
	switch {
	case err == nil:
		h.logAnswer(ctx, a.of.cfg.Log)
		m.answered(h, a.kind, op, http.StatusOK, false, took)
		return nil
	case errors.As(err, &f):
		ignored := h.ignores || a.lifeline(h)
		m.answered(h, a.kind, op, f.code, !ignored, took)
		canceled := errors.Is(ctx.Err(), context.Canceled)
		if ignored {
			if !canceled {
				m.open(h, a.kind)
				api.Annotate(ctx, a.note("failed-open.", h), h.name)
				h.logFailure(a.of.cfg.Log, "failed calling webhook, failing open", f.why)
			}
			if ctx.Err() != nil {
				return errTimeout()
			}
			return nil
		}
		if !canceled {
			m.rejection(h, a.kind, op, errorCalling, f.code)
			h.logFailure(a.of.cfg.Log, "failed calling webhook, failing closed", f.why)
		}
		return apierrors.NewInternalError(f)
	case errors.As(err, &status) && apierrors.ReasonForError(err) != "InternalError":
		code := int(status.Status().Code)
		m.rejection(h, a.kind, op, errorNone, code)
		m.answered(h, a.kind, op, code, true, took)
		return err
	}
	m.rejection(h, a.kind, op, errorInternal, 0)
	m.answered(h, a.kind, op, 0, true, took)
	return err
}

// note returns the key of the audit annotation about a webhook in this round.
func (a *attempt) note(prefix string, h *hook) string {
	group := "validating.webhook.admission.k8s.io/"
	if a.kind == typeMutating {
		group = "mutation.webhook.admission.k8s.io/"
	}
	return fmt.Sprintf("%s%sround_%d_index_%d", prefix, group, a.round, h.index)
}
