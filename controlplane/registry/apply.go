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
	kjson "sigs.k8s.io/json"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
	"keelson.dev/keelson/controlplane/registry/fieldowners"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
)

// serverSideApply applies the server-side apply patch of the request to the object or subresource.
// If the object does not exist, it creates the object and returns created = true.
func (p patcher) serverSideApply(ctx context.Context) (obj runtime.Object, created bool, err error) {
	w, f := p.w, p.facet
	if f.merge != nil {
		obj, err := p.applyToSubresource(ctx)
		return obj, false, err
	}
	intent, err := p.decodeIntent(w.req.Kind.GVK)
	if err != nil {
		return nil, false, err
	}
	fm, err := w.fieldOwners().fieldManager(f.name)
	if err != nil {
		return nil, false, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
	}
	w.applied = true
	ctx, cancel := w.registry.cache.WithTimeout(ctx)
	defer cancel()
	for {
		stored, _, err := w.changeObject(ctx, w.newUpdate(f, func(cur current) (proposal, error) {
			obj, err := p.applyTo(fm, cur.obj, p.withoutDropped(intent, cur.obj))
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
		stored, err = p.applyNew(ctx, fm, intent)
		if err == nil {
			return stored, true, nil
		}
		if !apierrors.IsAlreadyExists(err) || ctx.Err() != nil {
			return nil, false, err
		}
		// Another client created it meanwhile: apply to that object.
	}
}

// applyNew creates the object that the apply patch describes and returns it.
func (p patcher) applyNew(ctx context.Context, fm *managedfields.FieldManager, intent *unstructured.Unstructured) (
	api.Object, error,
) {
	w := p.w
	empty := w.req.Kind.Type.New()
	w.req.Kind.SetTypeMeta(empty)
	obj, err := p.applyTo(fm, empty, p.withoutDropped(intent, empty))
	if err != nil {
		return nil, err
	}
	obj.SetResourceVersion("")
	return w.createObject(ctx, obj, func(api.Object) {})
}

// decodeIntent returns the decoded apply patch. It returns an error if the patch is too large or
// malformed, or if its type, name or namespace differs from that of the request.
func (p patcher) decodeIntent(want schema.GroupVersionKind) (*unstructured.Unstructured, error) {
	w := p.w
	data, err := decodelimits.FromYAML(w.req.Patch.Body)
	if errors.Is(err, decodelimits.ErrTooMuch) {
		return nil, newTooLargeError(err)
	}
	if err != nil {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("error decoding YAML: %v", err))
	}
	if err := decodelimits.CheckJSON(data, w.req.Kind.Type.New()); err != nil {
		return nil, newTooLargeError(err)
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
		return nil, newNameMismatch(u.GetName(), w.req.Name)
	}
	if w.req.Kind.Namespaced {
		if u.GetNamespace() == "" {
			u.SetNamespace(w.req.Namespace)
		}
		if u.GetNamespace() != w.req.Namespace {
			return nil,
				apierrors.NewBadRequest("the namespace of the provided object does not match the namespace " +
					"sent on the request")
		}
	}
	return u, nil
}

// withoutDropped returns the apply patch (intent) without the fields that Kubernetes drops before
// it stores an object. The field manager then does not own these fields.
func (p patcher) withoutDropped(intent *unstructured.Unstructured, live api.Object) *unstructured.Unstructured {
	answers := p.w.req.Kind.Schema.Answers
	if !answers.DropsFields() {
		return intent
	}
	out := intent.DeepCopy()
	answers.DropFrom(out.Object, live)
	return out
}

// applyTo returns the result of merging the apply patch (intent) into the live object, by the rules
// of field ownership. A conflict with another field manager is a 409 with one cause per field.
func (p patcher) applyTo(fm *managedfields.FieldManager, live api.Object, intent *unstructured.Unstructured) (
	api.Object, error,
) {
	w := p.w
	if v := intent.GetResourceVersion(); v != "" && v != live.GetResourceVersion() {
		return nil, storeerrors.NewModifiedConflict(w.req.Kind.GroupResource(), w.req.Name)
	}
	force := w.req.Patch.Options.Force != nil && *w.req.Patch.Options.Force
	out, err := fm.Apply(live, intent.DeepCopy(), w.manager, force)
	if err != nil {
		var status apierrors.APIStatus
		if errors.As(err, &status) {
			return nil, err
		}
		// The patch has an unknown field, or a value of the wrong type.
		return nil, apierrors.NewBadRequest(p.describeFailure(intent, err))
	}
	obj, ok := out.(api.Object)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("%s: apply returned a %T",
			storeerrors.DescribeRequest(w.req), out))
	}
	return obj, nil
}

// describeFailure returns the text of err, an error of the field manager for the apply patch. If a
// value of the patch has the wrong type, the text contains the path of that value.
func (p patcher) describeFailure(intent *unstructured.Unstructured, err error) string {
	if data, e := intent.MarshalJSON(); e == nil {
		if found := api.DescribeMismatch(data, p.w.req.Kind.Type.New(), err); found != err {
			return fmt.Sprintf("%v (%v)", err, found)
		}
	}
	return err.Error()
}

// applyToSubresource performs a server-side apply to a subresource with its own type (scale), and
// returns the updated subresource.
func (p patcher) applyToSubresource(ctx context.Context) (runtime.Object, error) {
	w, f := p.w, p.facet
	s := w.req.Kind.Subresources[f.name]
	intent, err := p.decodeIntent(s.GVK)
	if err != nil {
		return nil, err
	}
	data, err := intent.MarshalJSON()
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if strict, err := kjson.UnmarshalStrict(data, s.New()); err != nil || len(strict) > 0 {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("the applied %s cannot be decoded: %v", s.GVK.Kind,
			errors.Join(append(strict, err)...)))
	}
	fm, err := w.fieldOwners().fieldManager(f.name)
	if err != nil {
		return nil, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
	}
	w.applied = true
	stored, _, err := w.changeObject(ctx, w.newUpdate(f, func(cur current) (proposal, error) {
		live, err := fieldowners.SubresourceBody(w.req.Kind, s, cur.obj)
		if err != nil {
			return proposal{}, err
		}
		body, err := p.applyTo(fm, live, intent)
		if err != nil {
			return proposal{}, err
		}
		next, err := w.proposeBody(f, cur, body)
		if err != nil {
			return proposal{}, err
		}
		return next, fieldowners.SetParentEntries(w.req.Kind, s, next.obj, cur.obj.GetManagedFields(), body)
	}))
	if err != nil {
		return nil, err
	}
	return f.view(stored), nil
}
