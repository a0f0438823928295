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
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/internal/jsonpatch"
)

// maxDocumentBytes is the maximum JSON size of a patched document. It is at least as large as the
// JSON of the largest object that a request can contain.
const maxDocumentBytes = 3 << 20

// Patch applies a JSON patch, a merge patch, a strategic merge patch or a server-side apply. A
// server-side apply creates a missing object and then returns created = true. The patch is applied
// to the newest state of the object, and again after a concurrent write. A resourceVersion in the
// patch is a precondition.
func (r *Registry) Patch(ctx context.Context, req *api.Request, a Admission) (
	obj runtime.Object, created bool, err error,
) {
	if errs := metav1validation.ValidatePatchOptions(&req.Patch.Options, req.Patch.Type); len(errs) > 0 {
		return nil, false, apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "PatchOptions"}, "",
			errs)
	}
	if err := checkPatchType(req); err != nil {
		return nil, false, err
	}
	w, err := r.newWrite(ctx, req, a, req.Patch.Options.DryRun, req.Patch.Options.FieldManager)
	if err != nil {
		return nil, false, err
	}
	f, err := w.facetRules()
	if err != nil {
		return nil, false, err
	}
	p := patcher{w: w, facet: f}
	if req.Patch.Type == types.ApplyPatchType {
		return p.serverSideApply(ctx)
	}
	stored, _, err := w.changeObject(ctx, w.newUpdate(f, func(cur current) (proposal, error) {
		return p.proposePatched(ctx, cur)
	}))
	if err != nil {
		return nil, false, err
	}
	if f.view != nil {
		return f.view(stored), false, nil
	}
	return stored, false, nil
}

// checkPatchType returns an error (415) if the kind does not support the patch type of the request.
func checkPatchType(req *api.Request) error {
	supported := req.Kind.SupportedPatchTypes()
	if slices.Contains(supported, req.Patch.Type) {
		return nil
	}
	names := make([]string, len(supported))
	for i, t := range supported {
		names[i] = string(t)
	}
	return storeerrors.NewStatus(http.StatusUnsupportedMediaType, metav1.StatusReasonUnsupportedMediaType,
		"the body of the request was in an unknown format - accepted media types include: "+strings.Join(names, ", "),
		0)
}

// patcher applies the patch of a request to the object or subresource of the request.
type patcher struct {
	w     *write
	facet facet
}

// proposePatched returns a proposal that contains the stored object with the request's patch
// applied.
func (p patcher) proposePatched(ctx context.Context, stored current) (proposal, error) {
	w, f := p.w, p.facet
	if f.merge != nil {
		body := f.view(stored.obj)
		next := w.served.Kind.Subresources[f.name].New()
		if err := p.patchInto(ctx, body, next); err != nil {
			return proposal{}, err
		}
		return w.proposeBody(f, stored, next)
	}
	next := w.req.Kind.Type.New()
	if err := p.patchInto(ctx, stored.obj, next); err != nil {
		return proposal{}, err
	}
	if next.GetName() != stored.obj.GetName() || next.GetNamespace() != stored.obj.GetNamespace() {
		return proposal{}, newNameMismatch(next.GetName(), w.req.Name)
	}
	if next.GetResourceVersion() != stored.obj.GetResourceVersion() {
		return proposal{}, storeerrors.NewModifiedConflict(w.req.Kind.GroupResource(), w.req.Name)
	}
	return proposeUpdate(next)
}

// patchInto applies the request's patch to the JSON of source and decodes the result into target.
// source is not modified.
func (p patcher) patchInto(ctx context.Context, source, target runtime.Object) error {
	before, err := p.w.registry.Encoded(source, runtime.ContentTypeJSON)
	if err != nil {
		return err
	}
	after, err := p.applyPatch(ctx, before, target)
	if err != nil {
		return err
	}
	if err := decodelimits.CheckJSON(after, target); err != nil {
		return newTooLargeError(fmt.Errorf("the patched object: %w", err))
	}
	return p.decodeStrictly(ctx, after, target)
}

// applyPatch returns the JSON document doc with the request's patch applied. goType is an object of
// the document's Go type: the tags of the type define how a strategic merge patch treats lists.
func (p patcher) applyPatch(ctx context.Context, doc []byte, goType runtime.Object) ([]byte, error) {
	req := p.w.req
	data := req.Patch.Body
	if req.Patch.Type != types.JSONPatchType { // JSON patches have their own limit for operations
		if err := decodelimits.CheckJSON(data, nil); err != nil {
			return nil, newTooLargeError(err)
		}
	}
	switch req.Patch.Type {
	case types.JSONPatchType:
		out, err := jsonpatch.Apply(ctx, doc, data, maxDocumentBytes)
		return out, toPatchStatus(err)
	case types.MergePatchType:
		out, err := jsonpatch.Merge(ctx, doc, data, maxDocumentBytes)
		return out, toPatchStatus(err)
	case types.StrategicMergePatchType:
		return strategicMerge(doc, data, goType)
	}
	return nil, apierrors.NewGenericServerResponse(http.StatusUnsupportedMediaType, "patch",
		req.Kind.GroupResource(), req.Name,
		fmt.Sprintf("patches of type %q are not supported", req.Patch.Type), 0, false)
}

func toPatchStatus(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, jsonpatch.ErrMalformed):
		return apierrors.NewBadRequest(err.Error())
	case errors.Is(err, jsonpatch.ErrTooLarge):
		return newTooLargeError(err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	return newUnprocessable(err)
}

func newTooLargeError(err error) error { return apierrors.NewRequestEntityTooLargeError(err.Error()) }

// maxComparisons is the maximum number of list items that one strategic merge patch may compare
// with each other (see countComparisons).
const maxComparisons = 1 << 20

func strategicMerge(doc, data []byte, like runtime.Object) ([]byte, error) {
	if n, err := countComparisons(doc, data, like); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	} else if n > maxComparisons {
		return nil,
			newTooLargeError(errors.New("the lists are too long for a strategic merge patch; use a JSON patch " +
				"or a merge patch"))
	}
	out, err := mergeStrategically(doc, data, like)
	switch {
	case err == nil:
		return out, nil
	case errors.Is(err, mergepatch.ErrNoListOfLists), mergepatch.IsPreconditionFailed(err):
		return nil, newUnprocessable(err)
	}
	return nil, apierrors.NewBadRequest(err.Error())
}

// mergeStrategically returns the document doc with a strategic merge patch applied. It converts
// panics of the library to errors: the library panics if the value of a directive is not a string.
func mergeStrategically(doc, patch []byte, goType any) (out []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			out, err = nil, fmt.Errorf("the strategic merge patch cannot be applied: %v", p)
		}
	}()
	return strategicpatch.StrategicMergePatch(doc, patch, goType)
}

// newUnprocessable returns the error (422) that Kubernetes returns for a patch that cannot be
// applied. It contains the text of err.
func newUnprocessable(err error) error {
	status := apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "", schema.GroupResource{}, "",
		err.Error(), 0, false)
	status.ErrStatus.Message += ": " + err.Error()
	return status
}

// decodeStrictly decodes the patched document into target. It returns a 400 for a value of the
// wrong type. Unknown fields are rejected, warned about or ignored, as the request's
// fieldValidation requires.
func (p patcher) decodeStrictly(ctx context.Context, data []byte, target runtime.Object) error {
	strict, err := api.DecodeJSON(data, target, true)
	if err != nil {
		return apierrors.NewBadRequest(fmt.Sprintf("the patched %s cannot be decoded: %v", p.w.req.Kind.GVK.Kind,
			api.DescribeMismatch(data, target, err)))
	}
	if len(strict) == 0 {
		return nil
	}
	switch p.w.req.Patch.Options.FieldValidation {
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
