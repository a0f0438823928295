package registry

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/managedfields"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
)

// apply performs a server-side apply. It creates the object if it does not exist; created reports
// that.
func (w *write) apply(ctx context.Context, f facet) (obj runtime.Object, created bool, err error) {
	if f.merge != nil {
		obj, err := w.applyToFacet(ctx, f)
		return obj, false, err
	}
	intent, err := w.intent(w.req.Kind.GVK)
	if err != nil {
		return nil, false, err
	}
	fm, err := w.r.fields.of(w.served, f.name)
	if err != nil {
		return nil, false, statusError(err, describe(w.req))
	}
	w.applied = true
	ctx, cancel := w.r.bounded(ctx)
	defer cancel()
	for {
		stored, _, err := w.change(ctx, w.updateStep(f, func(cur current) (proposal, error) {
			obj, err := w.applyTo(fm, cur.obj, w.withoutDropped(intent, cur.obj))
			return proposal{obj: obj, op: api.Update}, err
		}))
		if err == nil {
			return stored, false, nil
		}
		if !apierrors.IsNotFound(err) || f.name != "" {
			return nil, false, err
		}
		if uid := intent.GetUID(); uid != "" {
			return nil, false, apierrors.NewConflict(w.req.Kind.GroupResource(), w.req.Name,
				fmt.Errorf("uid mismatch: the provided object specified uid %s, and no existing object was found", uid))
		}
		stored, err = w.applyNew(ctx, fm, intent)
		if err == nil {
			return stored, true, nil
		}
		if !apierrors.IsAlreadyExists(err) || ctx.Err() != nil {
			return nil, false, err
		}
		// Another client created it meanwhile: apply to that object.
	}
}

func (w *write) applyNew(ctx context.Context, fm *managedfields.FieldManager, intent *unstructured.Unstructured) (api.Object, error) {
	empty := w.req.Kind.New()
	w.req.Kind.SetTypeMeta(empty)
	obj, err := w.applyTo(fm, empty, w.withoutDropped(intent, empty))
	if err != nil {
		return nil, err
	}
	obj.SetResourceVersion("")
	return w.create(ctx, obj, func(api.Object) {})
}

// intent decodes the apply patch and checks that it is for the object of the request.
func (w *write) intent(want schema.GroupVersionKind) (*unstructured.Unstructured, error) {
	data, err := decodelimits.FromYAML(w.req.Patch)
	if errors.Is(err, decodelimits.ErrTooMuch) {
		return nil, tooMuch(err)
	}
	if err != nil {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("error decoding YAML: %v", err))
	}
	if err := decodelimits.CheckJSON(data, w.req.Kind.New()); err != nil {
		return nil, tooMuch(err)
	}
	u := &unstructured.Unstructured{}
	if err := utiljson.Unmarshal(data, &u.Object); err != nil || u.Object == nil {
		return nil, apierrors.NewBadRequest("the patch is not an object")
	}
	if gvk := u.GroupVersionKind(); gvk != want {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the patch is for %s, the request for %s", gvk, want))
	}
	if u.GetName() == "" {
		u.SetName(w.req.Name)
	}
	if u.GetName() != w.req.Name {
		return nil, nameMismatch(u.GetName(), w.req.Name)
	}
	if w.req.Kind.Namespaced {
		if u.GetNamespace() == "" {
			u.SetNamespace(w.req.Namespace)
		}
		if u.GetNamespace() != w.req.Namespace {
			return nil, apierrors.NewBadRequest("the namespace of the provided object does not match the namespace sent on the request")
		}
	}
	return u, nil
}

// withoutDropped returns the intent without the fields that Kubernetes drops, so that the manager
// does not own them.
func (w *write) withoutDropped(intent *unstructured.Unstructured, live api.Object) *unstructured.Unstructured {
	if !w.req.Kind.Answers.DropsFields() {
		return intent
	}
	out := intent.DeepCopy()
	w.req.Kind.Answers.DropFrom(out.Object, live)
	return out
}

// applyTo merges the intent into live by the rules of field ownership. Conflicts are returned as a
// 409 with one cause per field.
func (w *write) applyTo(fm *managedfields.FieldManager, live api.Object, intent *unstructured.Unstructured) (api.Object, error) {
	if v := intent.GetResourceVersion(); v != "" && v != live.GetResourceVersion() {
		return nil, modifiedConflict(w.req.Kind.GroupResource(), w.req.Name)
	}
	force := w.req.PatchO.Force != nil && *w.req.PatchO.Force
	out, err := fm.Apply(live, intent.DeepCopy(), w.manager, force)
	if err != nil {
		var status apierrors.APIStatus
		if errors.As(err, &status) {
			return nil, err
		}
		return nil, apierrors.NewBadRequest(w.misapplied(intent, err)) // an unknown field, or a value of the wrong type
	}
	obj, ok := out.(api.Object)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("%s: applying gave a %T", describe(w.req), out))
	}
	return obj, nil
}

// misapplied returns the text of err. It adds the path of a value of the wrong type.
func (w *write) misapplied(intent *unstructured.Unstructured, err error) string {
	if data, e := intent.MarshalJSON(); e == nil {
		if found := api.Misfit(data, w.req.Kind.New(), err); found != err {
			return fmt.Sprintf("%v (%v)", err, found)
		}
	}
	return err.Error()
}
