package registry

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// Update replaces an object or a facet of it. With a resourceVersion it replaces exactly that state (409 otherwise);
// without one it replaces whatever is stored. A missing object is a 404. What would store the same again stores nothing.
func (r *Registry) Update(ctx context.Context, req *api.Request, a Admission) (runtime.Object, error) {
	w, err := r.newWrite(req, a, req.Update.DryRun, req.Update.FieldManager)
	if err != nil {
		return nil, err
	}
	f, err := w.facet()
	if err != nil {
		return nil, err
	}
	if f.merge != nil {
		stored, _, err := w.change(ctx, w.updateStep(f, func(cur *entry) (api.Object, error) {
			next := cur.obj.DeepCopyObject().(api.Object)
			return next, w.mergeBody(f, next, cur, req.Object)
		}))
		if err != nil {
			return nil, err
		}
		return f.view(stored), nil
	}
	obj, ok := req.Object.(api.Object)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("a %T cannot be stored", req.Object))
	}
	if err := w.checkReplacement(obj); err != nil {
		return nil, err
	}
	// Admission changes what it is given; a second attempt must start from the client's object.
	version, again := obj.GetResourceVersion(), obj.GetResourceVersion() == "" || req.Kind.Reservations != nil
	stored, _, err := w.change(ctx, w.updateStep(f, func(cur *entry) (api.Object, error) {
		if version != "" && version != cur.obj.GetResourceVersion() {
			return nil, modifiedConflict(req.Kind.GroupResource(), req.Name)
		}
		if again {
			return obj.DeepCopyObject().(api.Object), nil
		}
		return obj, nil
	}))
	if err != nil {
		return nil, err
	}
	return stored, nil
}

// checkReplacement refuses an object that is not the one named by the request.
func (w *write) checkReplacement(obj api.Object) error {
	if err := w.checkNamespace(obj); err != nil {
		return err
	}
	if obj.GetName() == "" {
		obj.SetName(w.req.Name)
	}
	if obj.GetName() != w.req.Name {
		return nameMismatch(obj.GetName(), w.req.Name)
	}
	return nil
}

// Modify is read-modify-write of one stored object, retried on conflict unless change returns an error:
// for subresources with rules of their own (binding, eviction, scale). change receives a copy of the stored object.
// The request's subresource is not interpreted; what change leaves equal is not written.
func (r *Registry) Modify(ctx context.Context, req *api.Request, a Admission, change func(obj api.Object) error) (api.Object, error) {
	dryRun, manager := req.Update.DryRun, req.Update.FieldManager
	switch req.Verb {
	case api.VerbCreate:
		dryRun, manager = req.Create.DryRun, req.Create.FieldManager
	case api.VerbPatch:
		dryRun, manager = req.PatchO.DryRun, req.PatchO.FieldManager
	}
	w, err := r.newWrite(req, a, dryRun, manager)
	if err != nil {
		return nil, err
	}
	obj, _, err := w.change(ctx, w.updateStep(facet{name: req.Subresource}, func(cur *entry) (api.Object, error) {
		next := cur.obj.DeepCopyObject().(api.Object)
		return next, change(next)
	}))
	return obj, err
}

// facet is the part of an object that an update may change.
type facet struct {
	name    string // of the subresource; "" is the object itself
	prepare func(obj, old api.Object)
	view    func(obj api.Object) runtime.Object
	merge   func(obj api.Object, body runtime.Object) error
}

// facet finds the rules of the request's subresource.
func (w *write) facet() (facet, error) {
	k, name := w.req.Kind, w.req.Subresource
	f := facet{name: name}
	sub := k.Subresources[name]
	switch {
	case name == "":
		f.prepare = k.PrepareUpdate
	case sub != nil && sub.Merge != nil:
		f.view, f.merge = sub.View, sub.Merge
	case sub != nil && sub.PrepareUpdate != nil:
		f.prepare = sub.PrepareUpdate
	case name == "status":
		f.prepare = func(obj, old api.Object) { keepStatus(obj, old) }
	case name == "finalize" && hasSpecFinalizers(k.New()):
		f.prepare = keepAllButSpecFinalizers
	default:
		return facet{}, apierrors.NewMethodNotSupported(k.GroupResource(), string(w.req.Verb)+" "+name)
	}
	return f, nil
}

// mergeBody lets a facet with a body of its own (scale) write into next. A
// resourceVersion in the body is a precondition, as on the object itself.
func (w *write) mergeBody(f facet, next api.Object, cur *entry, body runtime.Object) error {
	if m, ok := body.(interface{ GetResourceVersion() string }); ok {
		if v := m.GetResourceVersion(); v != "" && v != cur.obj.GetResourceVersion() {
			return modifiedConflict(w.req.Kind.GroupResource(), w.req.Name)
		}
	}
	return f.merge(next, body)
}

// updateStep makes the rules of an update around propose, which returns the
// wanted object, its own to change.
func (w *write) updateStep(f facet, propose func(cur *entry) (api.Object, error)) step {
	return func(ctx context.Context, cur *entry) (outcome, error) {
		obj, err := propose(cur)
		if err != nil {
			return outcome{}, err
		}
		if uid := obj.GetUID(); uid != "" && uid != cur.obj.GetUID() {
			return outcome{}, apierrors.NewConflict(w.req.Kind.GroupResource(), w.req.Name,
				fmt.Errorf("Precondition failed: UID in precondition: %v, UID in object meta: %v", uid, cur.obj.GetUID()))
		}
		w.req.Kind.SetTypeMeta(obj)
		keepMeta(obj, cur.obj)
		if f.prepare != nil {
			f.prepare(obj, cur.obj)
			keepMeta(obj, cur.obj)
		}
		obj.SetResourceVersion(cur.obj.GetResourceVersion())
		w.complete(f.name, obj)
		if !w.applied {
			w.trackUpdate(f.name, obj, cur.obj) // what admission adds belongs to nobody: an apply may not take it away
		}
		if err := w.admit(ctx, obj, cur.obj); err != nil {
			return outcome{}, err
		}
		desired := nextGeneration(obj, cur.obj)
		if w.req.Subresource == "binding" {
			// A bind is a step of the apply that made the pod, not a wish of its own.
			desired = false
			obj.SetGeneration(cur.obj.GetGeneration())
		}
		traceOnUpdate(obj, cur.obj, w.req.TraceParent, desired)
		return outcome{obj: obj, remove: finished(obj)}, nil
	}
}
