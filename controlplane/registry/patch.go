package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/mergepatch"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	kjson "sigs.k8s.io/json"

	"keelson.dev/keelson/controlplane/api"
)

// maxJSONPatchOps bounds the work that one JSON patch can ask for.
const maxJSONPatchOps = 10000

// Patch applies JSON, merge, strategic-merge and server-side apply patches. Apply creates what is absent; created says so.
// A patch is applied to the newest state, again when another write came between; a
// resourceVersion inside it makes it conditional.
func (r *Registry) Patch(ctx context.Context, req *api.Request, a Admission) (obj runtime.Object, created bool, err error) {
	if errs := metav1validation.ValidatePatchOptions(&req.PatchO, req.PatchType); len(errs) > 0 {
		return nil, false, apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "PatchOptions"}, "", errs)
	}
	w, err := r.newWrite(req, a, req.PatchO.DryRun, req.PatchO.FieldManager)
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
	stored, _, err := w.change(ctx, w.updateStep(f, func(cur *entry) (api.Object, error) {
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

// patched returns the object that the request's patch makes of cur.
func (w *write) patched(ctx context.Context, f facet, cur *entry) (api.Object, error) {
	if f.merge != nil {
		body := f.view(cur.obj)
		next := body.DeepCopyObject()
		if err := w.patchInto(ctx, body, next); err != nil {
			return nil, err
		}
		obj := cur.obj.DeepCopyObject().(api.Object)
		return obj, w.mergeBody(f, obj, cur, next)
	}
	next := w.req.Kind.New()
	if err := w.patchInto(ctx, cur.obj, next); err != nil {
		return nil, err
	}
	if next.GetName() != cur.obj.GetName() || next.GetNamespace() != cur.obj.GetNamespace() {
		return nil, nameMismatch(next.GetName(), w.req.Name)
	}
	if next.GetResourceVersion() != cur.obj.GetResourceVersion() {
		return nil, modifiedConflict(w.req.Kind.GroupResource(), w.req.Name)
	}
	return next, nil
}

// patchInto patches old and decodes the result into next.
func (w *write) patchInto(ctx context.Context, old, next runtime.Object) error {
	before, err := w.r.Encoded(old, runtime.ContentTypeJSON)
	if err != nil {
		return err
	}
	after, err := w.applyPatch(before, next)
	if err != nil {
		return err
	}
	reflect.ValueOf(next).Elem().SetZero() // a decoder would merge into what is there
	return w.decodeStrictly(ctx, after, next)
}

// applyPatch applies the request's patch to a JSON document. like is the Go type
// whose tags say how a strategic merge treats lists.
func (w *write) applyPatch(doc []byte, like runtime.Object) ([]byte, error) {
	data := w.req.Patch
	switch w.req.PatchType {
	case types.JSONPatchType:
		return jsonPatch(doc, data)
	case types.MergePatchType:
		if !startsObject(data) {
			return nil, apierrors.NewBadRequest("the patch is not a JSON object")
		}
		out, err := jsonpatch.MergePatch(doc, data)
		if err != nil {
			return nil, apierrors.NewBadRequest(err.Error())
		}
		return out, nil
	case types.StrategicMergePatchType:
		out, err := strategicpatch.StrategicMergePatch(doc, data, like)
		switch {
		case err == nil:
			return out, nil
		case errors.Is(err, mergepatch.ErrBadPatchFormatForPrimitiveList), errors.Is(err, mergepatch.ErrBadPatchFormatForRetainKeys),
			errors.Is(err, mergepatch.ErrBadPatchFormatForSetElementOrderList), errors.Is(err, mergepatch.ErrUnsupportedStrategicMergePatchFormat):
			return nil, apierrors.NewBadRequest(err.Error())
		case errors.Is(err, mergepatch.ErrNoListOfLists), mergepatch.IsPreconditionFailed(err):
			return nil, unprocessable(err)
		default:
			return nil, apierrors.NewBadRequest(err.Error())
		}
	}
	return nil, apierrors.NewGenericServerResponse(http.StatusUnsupportedMediaType, "patch", w.req.Kind.GroupResource(), w.req.Name,
		fmt.Sprintf("patches of type %q are not supported", w.req.PatchType), 0, false)
}

func jsonPatch(doc, data []byte) ([]byte, error) {
	patch, err := jsonpatch.DecodePatch(data)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if len(patch) > maxJSONPatchOps {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("a JSON patch has at most %d operations, this one has %d", maxJSONPatchOps, len(patch)))
	}
	out, err := patch.Apply(doc)
	if err != nil {
		return nil, unprocessable(err)
	}
	return out, nil
}

// unprocessable is Kubernetes' 422 for a patch that cannot be applied, and says why besides.
func unprocessable(err error) error {
	status := apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "", schema.GroupResource{}, "", err.Error(), 0, false)
	status.ErrStatus.Message += ": " + err.Error()
	return status
}

func startsObject(data []byte) bool { return bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) }

// decodeStrictly decodes the patched document. What does not fit the type is a
// 400; fields that the type does not know are refused, warned of or ignored as the request says.
func (w *write) decodeStrictly(ctx context.Context, data []byte, into runtime.Object) error {
	strict, err := kjson.UnmarshalStrict(data, into)
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
