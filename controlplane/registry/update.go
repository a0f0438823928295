package registry

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// Update replaces an object or the part of a subresource. With a resourceVersion it replaces
// exactly that state (else 409). Without one it replaces any state, unless the kind is Conditional
// (422). A missing object is a 404, or is created if the kind has CreatesByUpdate. An update
// without a change writes nothing.
func (r *Registry) Update(ctx context.Context, req *api.Request, a Admission) (obj runtime.Object, created bool, err error) {
	w, err := r.newWrite(ctx, req, a, req.Update.DryRun, req.Update.FieldManager)
	if err != nil {
		return nil, false, err
	}
	f, err := w.facet()
	if err != nil {
		return nil, false, err
	}
	if f.merge != nil {
		stored, _, err := w.change(ctx, w.updateStep(f, func(cur current) (proposal, error) {
			return w.proposeBody(f, cur, req.Object.DeepCopyObject())
		}))
		if err != nil {
			return nil, false, err
		}
		return f.view(stored), false, nil
	}
	wanted, ok := req.Object.(api.Object)
	if !ok {
		return nil, false, apierrors.NewBadRequest(fmt.Sprintf("a %T cannot be stored", req.Object))
	}
	if err := w.checkReplacement(wanted); err != nil {
		return nil, false, err
	}
	if req.Kind.CreatesByUpdate && f.name == "" {
		return w.replaceOrCreate(ctx, f, wanted)
	}
	stored, err := w.replace(ctx, f, wanted)
	return stored, false, err
}

// replaceOrCreate replaces the object, or creates it if it does not exist. A creation ignores the
// resourceVersion in the body. A UID in the body is a conflict then, because it names an object
// that does not exist.
func (w *write) replaceOrCreate(ctx context.Context, f facet, obj api.Object) (api.Object, bool, error) {
	ctx, cancel := w.r.bounded(ctx)
	defer cancel()
	for {
		stored, err := w.replace(ctx, f, obj)
		if err == nil || !w.absent {
			return stored, false, err
		}
		if uid := obj.GetUID(); uid != "" {
			return nil, false, otherUID(w.req, uid, "")
		}
		fresh := obj.DeepCopyObject().(api.Object)
		fresh.SetResourceVersion("")
		stored, err = w.create(ctx, fresh, w.trackCreate)
		if err == nil {
			return stored, true, nil
		}
		if !apierrors.IsAlreadyExists(err) || ctx.Err() != nil {
			return nil, false, err
		}
		// Another client created it meanwhile: replace that object.
	}
}

// replace replaces the stored object by obj.
func (w *write) replace(ctx context.Context, f facet, obj api.Object) (api.Object, error) {
	req := w.req
	// Admission modifies its input, so a retry must start from a copy of the client's object. With
	// a resourceVersion, a retry happens only because other objects changed, and may start from the
	// result of the earlier admission.
	version := obj.GetResourceVersion()
	again := version == "" || req.Kind.Reservations != nil || req.Kind.CreatesByUpdate
	stored, _, err := w.change(ctx, w.updateStep(f, func(cur current) (proposal, error) {
		switch version {
		case cur.obj.GetResourceVersion():
		case "":
			if req.Kind.Conditional {
				return proposal{}, unconditional(req)
			}
		default:
			return proposal{}, modifiedConflict(req.Kind.GroupResource(), req.Name)
		}
		if again {
			return whole(obj.DeepCopyObject().(api.Object))
		}
		return whole(obj)
	}))
	if err != nil {
		return nil, err
	}
	return stored, nil
}

// unconditional returns the error for an update without a required resourceVersion. As in
// Kubernetes, it has the resource in place of the kind.
func unconditional(req *api.Request) error {
	of := schema.GroupKind{Group: req.Kind.GVK.Group, Kind: req.Kind.Resource}
	at := field.NewPath("metadata", "resourceVersion")
	return apierrors.NewInvalid(of, req.Name, field.ErrorList{field.Invalid(at, uint64(0), "must be specified for an update")})
}

// otherUID returns the conflict of a write with the UID want for an object with the UID have ("" if
// it does not exist).
func otherUID(req *api.Request, want, have types.UID) error {
	return apierrors.NewConflict(req.Kind.GroupResource(), req.Name,
		fmt.Errorf("Precondition failed: UID in precondition: %v, UID in object meta: %v", want, have))
}

// checkReplacement sets a missing name, and rejects an object that the request does not name.
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

// Modify reads, changes and writes one stored object. It is used for subresources with their own
// rules (eviction), and retries on conflict unless change returns an error. change receives a copy
// of the stored object. The request's subresource is not interpreted. If nothing changed, nothing
// is written.
func (r *Registry) Modify(ctx context.Context, req *api.Request, a Admission, change func(obj api.Object) error) (api.Object, error) {
	return r.modify(ctx, req, a, func(cur current) (proposal, error) {
		next := cur.obj.DeepCopyObject().(api.Object)
		if err := change(next); err != nil {
			return proposal{}, err
		}
		return whole(next)
	})
}

// ModifyBy is Modify for a request with its own body (a Binding). Admission treats the body as an
// object to be created, and may modify it. Then change writes the body into a copy of the stored
// object.
func (r *Registry) ModifyBy(
	ctx context.Context, req *api.Request, a Admission, body runtime.Object, change func(obj api.Object, body runtime.Object) error,
) (api.Object, error) {
	return r.modify(ctx, req, a, func(cur current) (proposal, error) {
		return proposal{obj: cur.obj.DeepCopyObject().(api.Object), body: body.DeepCopyObject(), merge: change, late: true, op: api.Create}, nil
	})
}

func (r *Registry) modify(
	ctx context.Context, req *api.Request, a Admission, propose func(cur current) (proposal, error),
) (api.Object, error) {
	dryRun, manager := req.Update.DryRun, req.Update.FieldManager
	switch req.Verb {
	case api.VerbCreate:
		dryRun, manager = req.Create.DryRun, req.Create.FieldManager
	case api.VerbPatch:
		dryRun, manager = req.PatchO.DryRun, req.PatchO.FieldManager
	}
	w, err := r.newWrite(ctx, req, a, dryRun, manager)
	if err != nil {
		return nil, err
	}
	obj, _, err := w.change(ctx, w.updateStep(facet{name: req.Subresource}, propose))
	return obj, err
}

// facet is the part of an object that an update may change: the object itself or a subresource.
type facet struct {
	name    string // of the subresource; "" is the object itself
	prepare func(obj, old api.Object)
	view    func(obj api.Object) runtime.Object
	merge   func(obj api.Object, body runtime.Object) error
}

// facet returns the update rules of the request's subresource.
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
	case name == "status" && k.Ops.SetStatus != nil:
		f.prepare = func(obj, old api.Object) { keepStatus(k, obj, old) }
	case name == "finalize" && hasSpecFinalizers(k.New()):
		f.prepare = keepAllButSpecFinalizers
	default:
		return facet{}, apierrors.NewMethodNotSupported(k.GroupResource(), string(w.req.Verb)+" "+name)
	}
	return f, nil
}

// proposeBody merges the body of a subresource with its own type (scale) into a copy of cur. A
// resourceVersion in the body is a precondition. The proposal may modify the body.
func (w *write) proposeBody(f facet, cur current, body runtime.Object) (proposal, error) {
	if m, ok := body.(interface{ GetResourceVersion() string }); ok {
		if v := m.GetResourceVersion(); v != "" && v != cur.obj.GetResourceVersion() {
			return proposal{}, modifiedConflict(w.req.Kind.GroupResource(), w.req.Name)
		}
	}
	next := cur.obj.DeepCopyObject().(api.Object)
	return proposal{obj: next, body: body, old: f.view(cur.obj), merge: f.merge, op: api.Update}, f.merge(next, body)
}

// updateStep wraps propose with the rules of an update: it tracks managers, runs mutating
// admission, resets fields that clients may not set, and validates the result.
func (w *write) updateStep(f facet, propose func(cur current) (proposal, error)) step {
	return func(ctx context.Context, cur current) (outcome, error) {
		p, err := propose(cur)
		if err != nil {
			return outcome{}, err
		}
		obj := p.obj
		if uid := obj.GetUID(); uid != "" && uid != cur.obj.GetUID() {
			return outcome{}, otherUID(w.req, uid, cur.obj.GetUID())
		}
		w.settle(f, obj, cur.obj)
		if !p.late {
			w.track(f, obj, cur.obj)
		}
		a := w.begin(p.op, obj, cur.obj)
		if p.merge != nil {
			a.Object, a.OldObject = p.body, p.old
		}
		if obj, err = w.admitted(ctx, f, p, cur); err != nil {
			return outcome{}, err
		}
		if p.late {
			w.track(f, obj, cur.obj)
		}
		w.prepare(f, obj, cur.obj)
		a.Finish()
		a.Removes = finished(obj)
		if w.a != nil {
			if err := w.a.Validate(ctx, a); err != nil {
				return outcome{}, err
			}
		}
		// A bind continues the request that created the pod, so it changes neither generation nor
		// trace.
		binds, desired := w.req.Subresource == "binding", false
		if binds {
			obj.SetGeneration(cur.obj.GetGeneration())
		} else {
			desired = nextGeneration(w.kind, obj, cur.obj)
		}
		traceOnUpdate(obj, cur.obj, w.req.TraceParent, desired)
		return outcome{obj: obj, differs: binds || desired, remove: finished(obj)}, nil
	}
}

// settle sets the type and immutable metadata of the new object, applies defaults, and removes the
// fields that Kubernetes drops.
func (w *write) settle(f facet, obj, old api.Object) {
	w.req.Kind.SetTypeMeta(obj)
	keepMeta(obj, old)
	obj.SetResourceVersion(old.GetResourceVersion())
	w.complete(f.name, obj)
	w.req.Kind.Answers.Drop(obj, old)
}

// admitted returns the proposed object after mutating admission.
func (w *write) admitted(ctx context.Context, f facet, p proposal, cur current) (api.Object, error) {
	a := &w.attempt
	if w.a != nil {
		if err := w.mutate(ctx, a); err != nil {
			return nil, err
		}
	}
	obj := a.Whole
	if p.merge != nil && (w.a != nil || p.late) {
		if err := p.merge(obj, a.Object); err != nil {
			return nil, err
		}
	}
	if w.a != nil {
		w.settle(f, obj, cur.obj)
	}
	return obj, nil
}

// prepare resets the fields that a client may not set, whichever component has set them. The
// managedFields stay as tracked.
func (w *write) prepare(f facet, obj, old api.Object) {
	if f.prepare == nil {
		return
	}
	managed := obj.GetManagedFields()
	f.prepare(obj, old)
	keepMeta(obj, old)
	obj.SetManagedFields(managed)
	obj.SetResourceVersion(old.GetResourceVersion())
}

// track records the fields that the manager changed, unless server-side apply has done it. For a
// subresource, it first resets all other fields, so that the manager does not own them.
func (w *write) track(f facet, obj, old api.Object) {
	if w.applied {
		return
	}
	if f.prepare != nil && f.name != "" && w.tracks(f.name, obj, old) {
		f.prepare(obj, old)
		keepMeta(obj, old)
	}
	w.trackUpdate(f.name, obj, old)
}
