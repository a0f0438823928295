package webhooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/internal/jsonpatch"
)

// Mutate calls the matching mutating webhooks one after the other; each webhook receives the object
// with the changes of the previous webhooks. If a webhook changes the object, request.Object
// becomes a new object. The caller passes the same rounds in both rounds of a write.
func (w *Webhooks) Mutate(ctx context.Context, request *matching.Attempt, rounds *matching.Rounds) error {
	s := w.current.Load()
	if s == nil || len(s.mutating) == 0 || request.Exempt() {
		return nil
	}
	rounds.StartRound(request.Object)
	defer func() { rounds.FinishRound(request.Object) }()
	a := &invocation{attempt: request, engine: w, set: s, kind: typeMutating, round: rounds.Round()}
	for _, h := range s.mutating {
		if rounds.Skips(h.id) {
			continue
		}
		v, err := a.viewFor(ctx, h)
		if err != nil {
			return err
		}
		if v == nil {
			continue
		}
		if ctx.Err() != nil {
			return errTimeout()
		}
		start := time.Now()
		changed, err := a.mutateObject(ctx, h, v)
		a.recordMutation(ctx, h, changed)
		if err := a.handleResult(ctx, h, err, time.Since(start)); err != nil {
			return err
		}
		if changed {
			rounds.Changed()
		}
		if h.reinvoke {
			rounds.MarkCalled(h.id)
		}
	}
	return nil
}

// mutateObject calls one webhook and applies the patch in its response. It reports whether the
// object has changed.
func (a *invocation) mutateObject(ctx context.Context, h *hook, v *objectView) (changed bool, err error) {
	out, err := a.callWebhook(ctx, h, v)
	if err != nil || len(out.Patch) == 0 {
		return false, err
	}
	if *out.PatchType != string(admissionv1.PatchTypeJSONPatch) {
		return false, &failure{h.name, fmt.Errorf("unsupported patch type %q", api.Truncate(*out.PatchType, 64)), 500}
	}
	var ops []json.RawMessage
	if err := json.Unmarshal(out.Patch, &ops); err != nil {
		return false, &failure{h.name, fmt.Errorf("received undecodable patch in webhook response: %w", err), 503}
	}
	if len(ops) == 0 {
		return false, nil
	}
	if v.Object == nil {
		return false, apierrors.NewInternalError(fmt.Errorf(
			"admission webhook %q attempted to modify the object, which is not supported for this operation", h.name))
	}
	next, err := a.applyPatch(ctx, h, v, out.Patch)
	if err != nil {
		return false, err
	}
	if equality.Semantic.DeepEqual(v.Object, next) {
		return false, nil
	}
	key := fmt.Sprintf("patch.webhook.admission.k8s.io/round_%d_index_%d", a.round, h.index)
	api.AnnotateContent(ctx, key, a.patchAnnotation(h, out.Patch))
	view := matching.View{Target: v.Target, Object: next}
	if a.attempt.Object, err = a.engine.cfg.Versions.ToStored(ctx, a.attempt, &view); err != nil {
		return false, apierrors.NewInternalError(fmt.Errorf("failed to convert object: %w", err))
	}
	a.views = nil // later webhooks need views of the new object
	return true, nil
}

// applyPatch returns the object of a view after a JSON patch, in the API version of the attempt.
func (a *invocation) applyPatch(ctx context.Context, h *hook, v *objectView, patch []byte) (runtime.Object, error) {
	doc, err := v.encodeView()
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	data, err := jsonpatch.Apply(ctx, doc.object, patch, decodelimits.MaxBytes)
	switch {
	case errors.Is(err, jsonpatch.ErrMalformed):
		return nil, &failure{h.name, fmt.Errorf("received undecodable patch in webhook response: %w", err), 503}
	case errors.Is(err, jsonpatch.ErrTooLarge):
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("admission webhook %q: %v", h.name, err))
	case err != nil:
		return nil, apierrors.NewInternalError(err)
	}
	next := a.engine.cfg.Versions.New(a.attempt, v.Kind)
	if next == nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("%v is not served", v.Kind))
	}
	if err := decodelimits.CheckJSON(data, next); err != nil {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("admission webhook %q: %v", h.name, err))
	}
	if _, err := api.DecodeJSON(data, next, false); err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("admission webhook %q: %w", h.name,
			api.DescribeMismatch(data, next, err)))
	}
	if gvk := next.GetObjectKind().GroupVersionKind(); gvk != v.Object.GetObjectKind().GroupVersionKind() {
		return nil, apierrors.NewInternalError(fmt.Errorf("admission webhook %q returned a %v for a %v",
			h.name, gvk, v.Kind))
	}
	a.engine.cfg.Versions.Default(a.attempt, v.Kind, next)
	return next, a.engine.cfg.Versions.RestoreImmutable(a.attempt, v.Kind, next, v.Object)
}

// recordMutation adds an audit annotation about whether the webhook changed the object.
func (a *invocation) recordMutation(ctx context.Context, h *hook, changed bool) {
	text, err := json.Marshal(struct {
		Configuration string `json:"configuration"`
		Webhook       string `json:"webhook"`
		Mutated       bool   `json:"mutated"`
	}{h.configuration, h.name, changed})
	if err == nil {
		api.Annotate(ctx, a.annotationKey("", h), string(text))
	}
}

func (a *invocation) patchAnnotation(h *hook, patch []byte) string {
	text, err := json.Marshal(struct {
		Configuration string          `json:"configuration"`
		Webhook       string          `json:"webhook"`
		Patch         json.RawMessage `json:"patch"`
		PatchType     string          `json:"patchType"`
	}{h.configuration, h.name, patch, string(admissionv1.PatchTypeJSONPatch)})
	if err != nil {
		return ""
	}
	return string(text)
}
