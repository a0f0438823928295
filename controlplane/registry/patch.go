package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/mergepatch"
	"k8s.io/apimachinery/pkg/util/strategicpatch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
	"keelson.dev/keelson/internal/jsonpatch"
)

// maxDocumentBytes is the maximum JSON size of a patched document. It is at least the JSON size of
// a whole object in a request.
const maxDocumentBytes = 3 << 20

// Patch applies a JSON, merge, strategic-merge or server-side apply patch. Apply creates a missing
// object; created reports that. The patch is applied to the newest state, and again after a
// concurrent write. A resourceVersion in the patch makes it conditional.
func (r *Registry) Patch(ctx context.Context, req *api.Request, a Admission) (obj runtime.Object, created bool, err error) {
	if errs := metav1validation.ValidatePatchOptions(&req.PatchO, req.PatchType); len(errs) > 0 {
		return nil, false, apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "PatchOptions"}, "", errs)
	}
	if err := checkPatchType(req); err != nil {
		return nil, false, err
	}
	w, err := r.newWrite(ctx, req, a, req.PatchO.DryRun, req.PatchO.FieldManager)
	if err != nil {
		return nil, false, err
	}
	f, err := w.facet()
	if err != nil {
		return nil, false, err
	}
	if req.PatchType == types.ApplyPatchType {
		return w.apply(ctx, f)
	}
	stored, _, err := w.change(ctx, w.updateStep(f, func(cur current) (proposal, error) {
		return w.patched(ctx, f, cur)
	}))
	if err != nil {
		return nil, false, err
	}
	if f.view != nil {
		return f.view(stored), false, nil
	}
	return stored, false, nil
}

// checkPatchType rejects patch types that the kind does not support.
func checkPatchType(req *api.Request) error {
	takes := req.Kind.Patches()
	if slices.Contains(takes, req.PatchType) {
		return nil
	}
	names := make([]string, len(takes))
	for i, t := range takes {
		names[i] = string(t)
	}
	return newStatus(http.StatusUnsupportedMediaType, metav1.StatusReasonUnsupportedMediaType,
		"the body of the request was in an unknown format - accepted media types include: "+strings.Join(names, ", "), 0)
}

// patched returns the result of applying the request's patch to cur.
func (w *write) patched(ctx context.Context, f facet, cur current) (proposal, error) {
	if f.merge != nil {
		body := f.view(cur.obj)
		next := w.kind.Subresources[f.name].New()
		if err := w.patchInto(ctx, body, next); err != nil {
			return proposal{}, err
		}
		return w.proposeBody(f, cur, next)
	}
	next := w.req.Kind.New()
	if err := w.patchInto(ctx, cur.obj, next); err != nil {
		return proposal{}, err
	}
	if next.GetName() != cur.obj.GetName() || next.GetNamespace() != cur.obj.GetNamespace() {
		return proposal{}, nameMismatch(next.GetName(), w.req.Name)
	}
	if next.GetResourceVersion() != cur.obj.GetResourceVersion() {
		return proposal{}, modifiedConflict(w.req.Kind.GroupResource(), w.req.Name)
	}
	return whole(next)
}

// patchInto applies the patch to old and decodes the result into next.
func (w *write) patchInto(ctx context.Context, old, next runtime.Object) error {
	before, err := w.r.Encoded(old, runtime.ContentTypeJSON)
	if err != nil {
		return err
	}
	after, err := w.applyPatch(ctx, before, next)
	if err != nil {
		return err
	}
	if err := decodelimits.CheckJSON(after, next); err != nil {
		return tooMuch(fmt.Errorf("the patched object: %w", err))
	}
	return w.decodeStrictly(ctx, after, next)
}

// applyPatch applies the request's patch to a JSON document. like is the Go type: its tags define
// how a strategic merge treats lists.
func (w *write) applyPatch(ctx context.Context, doc []byte, like runtime.Object) ([]byte, error) {
	data := w.req.Patch
	if w.req.PatchType != types.JSONPatchType { // JSON patches have their own limit of operations
		if err := decodelimits.CheckJSON(data, nil); err != nil {
			return nil, tooMuch(err)
		}
	}
	switch w.req.PatchType {
	case types.JSONPatchType:
		out, err := jsonpatch.Apply(ctx, doc, data, maxDocumentBytes)
		return out, patchError(err)
	case types.MergePatchType:
		out, err := jsonpatch.Merge(ctx, doc, data, maxDocumentBytes)
		return out, patchError(err)
	case types.StrategicMergePatchType:
		return strategicMerge(doc, data, like)
	}
	return nil, apierrors.NewGenericServerResponse(http.StatusUnsupportedMediaType, "patch", w.req.Kind.GroupResource(), w.req.Name,
		fmt.Sprintf("patches of type %q are not supported", w.req.PatchType), 0, false)
}

func patchError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, jsonpatch.ErrMalformed):
		return apierrors.NewBadRequest(err.Error())
	case errors.Is(err, jsonpatch.ErrTooLarge):
		return tooMuch(err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	return unprocessable(err)
}

func tooMuch(err error) error { return apierrors.NewRequestEntityTooLargeError(err.Error()) }

// maxComparisons bounds the item comparisons of a strategic merge.
const maxComparisons = 1 << 20

func strategicMerge(doc, data []byte, like runtime.Object) ([]byte, error) {
	if n, err := comparisons(doc, data, like); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	} else if n > maxComparisons {
		return nil, tooMuch(errors.New("a strategic merge of lists this long compares too much; a JSON patch or a merge patch may do"))
	}
	out, err := mergeStrategically(doc, data, like)
	switch {
	case err == nil:
		return out, nil
	case errors.Is(err, mergepatch.ErrNoListOfLists), mergepatch.IsPreconditionFailed(err):
		return nil, unprocessable(err)
	}
	return nil, apierrors.NewBadRequest(err.Error())
}

// mergeStrategically converts panics of the library to errors. The library assumes that the values
// of directives are strings, which a patch need not satisfy.
func mergeStrategically(doc, patch []byte, like any) (out []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			out, err = nil, fmt.Errorf("the strategic merge patch cannot be applied: %v", p)
		}
	}()
	return strategicpatch.StrategicMergePatch(doc, patch, like)
}

// unprocessable returns Kubernetes' 422 for a patch that cannot be applied, with the reason.
func unprocessable(err error) error {
	status := apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "", schema.GroupResource{}, "", err.Error(), 0, false)
	status.ErrStatus.Message += ": " + err.Error()
	return status
}

// decodeStrictly decodes the patched document into into. A value of the wrong type is a 400.
// Unknown fields are rejected, warned about or ignored, as the request's fieldValidation requires.
func (w *write) decodeStrictly(ctx context.Context, data []byte, into runtime.Object) error {
	strict, err := api.DecodeJSON(data, into, true)
	if err != nil {
		return apierrors.NewBadRequest(fmt.Sprintf("the patched %s cannot be read: %v", w.req.Kind.GVK.Kind, api.Misfit(data, into, err)))
	}
	if len(strict) == 0 {
		return nil
	}
	switch w.req.PatchO.FieldValidation {
	case metav1.FieldValidationStrict:
		texts := make([]string, len(strict))
		for i, e := range strict {
			texts[i] = e.Error()
		}
		return apierrors.NewBadRequest("strict decoding error: " + strings.Join(texts, ", "))
	case metav1.FieldValidationWarn, "":
		for _, e := range strict {
			api.Warn(ctx, e.Error())
		}
	}
	return nil
}
