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

// Mutate calls the matching mutating webhooks one after the other; each sees the changes of the
// previous ones. If a webhook changes the object, of.Object is a new object. The caller keeps
// rounds between the rounds of a write.
func (w *Webhooks) Mutate(ctx context.Context, of *matching.Attempt, rounds *matching.Rounds) error {
	s := w.now.Load()
	if s == nil || len(s.mutating) == 0 || of.Exempt() {
		return nil
	}
	rounds.Begin(of.Object)
	defer func() { rounds.End(of.Object) }()
	a := &attempt{Attempt: of, of: w, set: s, kind: typeMutating, round: rounds.Round()}
	for _, h := range s.mutating {
		if rounds.Skips(h.id) {
			continue
		}
		v, err := a.concerns(ctx, h)
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
		changed, err := a.mutate(ctx, h, v)
		a.noteMutation(ctx, h, changed)
		if err := a.judge(ctx, h, err, time.Since(start)); err != nil {
			return err
		}
		if changed {
			rounds.Changed()
		}
		if h.again {
			rounds.Asked(h.id)
		}
	}
	return nil
}

// mutate calls one webhook and applies the patch in its response. It reports whether the object has
// changed.
func (a *attempt) mutate(ctx context.Context, h *hook, v *seen) (changed bool, err error) {
	out, err := a.ask(ctx, h, v)
	if err != nil || len(out.Patch) == 0 {
		return false, err
	}
	if *out.PatchType != string(admissionv1.PatchTypeJSONPatch) {
		return false, &failure{h.name, fmt.Errorf("unsupported patch type %q", api.Clip(*out.PatchType, 64)), 500}
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
	next, err := a.patched(ctx, h, v, out.Patch)
	if err != nil {
		return false, err
	}
	if equality.Semantic.DeepEqual(v.Object, next) {
		return false, nil
	}
	key := fmt.Sprintf("patch.webhook.admission.k8s.io/round_%d_index_%d", a.round, h.index)
	api.AnnotateContent(ctx, key, a.patchNote(h, out.Patch))
	view := matching.View{Target: v.Target, Object: next}
	if a.Object, err = a.of.cfg.Versions.Back(ctx, a.Attempt, &view); err != nil {
		return false, apierrors.NewInternalError(fmt.Errorf("failed to convert object: %w", err))
	}
	a.views = nil // later webhooks need views of the new object
	return true, nil
}

// patched returns the object of a view after a patch.
func (a *attempt) patched(ctx context.Context, h *hook, v *seen, patch []byte) (runtime.Object, error) {
	doc, err := v.encode()
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
	next := a.of.cfg.Versions.New(a.Attempt, v.Kind)
	if next == nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("%v is not served", v.Kind))
	}
	if err := decodelimits.CheckJSON(data, next); err != nil {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("admission webhook %q: %v", h.name, err))
	}
	if _, err := api.DecodeJSON(data, next, false); err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("admission webhook %q: %w", h.name, api.Misfit(data, next, err)))
	}
	if gvk := next.GetObjectKind().GroupVersionKind(); gvk != v.Object.GetObjectKind().GroupVersionKind() {
		return nil, apierrors.NewInternalError(fmt.Errorf("admission webhook %q made a %v of a %v", h.name, gvk, v.Kind))
	}
	a.of.cfg.Versions.Default(a.Attempt, v.Kind, next)
	return next, a.of.cfg.Versions.Keep(a.Attempt, v.Kind, next, v.Object)
}

// noteMutation adds an audit annotation about whether the webhook changed the object.
func (a *attempt) noteMutation(ctx context.Context, h *hook, changed bool) {
	text, err := json.Marshal(struct {
		Configuration string `json:"configuration"`
		Webhook       string `json:"webhook"`
		Mutated       bool   `json:"mutated"`
	}{h.configuration, h.name, changed})
	if err == nil {
		api.Annotate(ctx, a.note("", h), string(text))
	}
}

func (a *attempt) patchNote(h *hook, patch []byte) string {
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
