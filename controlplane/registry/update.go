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
	"keelson.dev/keelson/controlplane/registry/objectmeta"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
)

// Update replaces an object, or the part of it that a subresource contains. With a resourceVersion,
// it replaces only the state with that version, and otherwise returns a 409. Without a
// resourceVersion, it replaces any state, unless the kind requires one (Writes.Conditional, 422). A
// missing object is a 404, or is created if the kind has Writes.CreatesByUpdate. An update without
// a change writes nothing.
func (r *Registry) Update(ctx context.Context, req *api.Request, a Admission) (
	obj runtime.Object, created bool, err error,
) {
	w, err := r.newWrite(ctx, req, a, req.Update.DryRun, req.Update.FieldManager)
	if err != nil {
		return nil, false, err
	}
	f, err := w.facetRules()
	if err != nil {
		return nil, false, err
	}
	if f.merge != nil {
		stored, _, err := w.changeObject(ctx, w.newUpdate(f, func(cur current) (proposal, error) {
			return w.proposeBody(f, cur, req.Object.DeepCopyObject())
		}))
		if err != nil {
			return nil, false, err
		}
		return f.view(stored), false, nil
	}
	replacement, ok := req.Object.(api.Object)
	if !ok {
		return nil, false, apierrors.NewBadRequest(fmt.Sprintf("a %T cannot be stored", req.Object))
	}
	if err := w.checkReplacement(replacement); err != nil {
		return nil, false, err
	}
	if req.Kind.Writes.CreatesByUpdate && f.name == "" {
		return w.replaceOrCreate(ctx, f, replacement)
	}
	stored, err := w.replaceObject(ctx, f, replacement)
	return stored, false, err
}

// replaceOrCreate replaces the object, or creates it if it does not exist, and returns whether it
// created it. A creation ignores the resourceVersion in obj. If the object does not exist, a UID in
// obj is a conflict (409).
func (w *write) replaceOrCreate(ctx context.Context, f facet, obj api.Object) (api.Object, bool, error) {
	ctx, cancel := w.registry.cache.WithTimeout(ctx)
	defer cancel()
	for {
		stored, err := w.replaceObject(ctx, f, obj)
		if err == nil || !w.absent {
			return stored, false, err
		}
		if uid := obj.GetUID(); uid != "" {
			return nil, false, newUIDConflict(w.req, uid, "")
		}
		created := obj.DeepCopyObject().(api.Object)
		created.SetResourceVersion("")
		stored, err = w.createObject(ctx, created, w.fieldOwners().trackCreate)
		if err == nil {
			return stored, true, nil
		}
		if !apierrors.IsAlreadyExists(err) || ctx.Err() != nil {
			return nil, false, err
		}
		// Another client created it meanwhile: replace that object.
	}
}

// replaceObject replaces the stored object with obj, and returns the stored result.
func (w *write) replaceObject(ctx context.Context, f facet, obj api.Object) (api.Object, error) {
	req := w.req
	// Admission modifies its input, so a retry must start from a copy of the client's object. With
	// a resourceVersion, a retry happens only because other objects changed, and may start from the
	// result of the earlier admission.
	version := obj.GetResourceVersion()
	copies := version == "" || req.Kind.Commit.Reservations != nil || req.Kind.Writes.CreatesByUpdate
	stored, _, err := w.changeObject(ctx, w.newUpdate(f, func(cur current) (proposal, error) {
		switch version {
		case cur.obj.GetResourceVersion():
		case "":
			if req.Kind.Writes.Conditional {
				return proposal{}, newVersionRequired(req)
			}
		default:
			return proposal{}, storeerrors.NewModifiedConflict(req.Kind.GroupResource(), req.Name)
		}
		if copies {
			return proposeUpdate(obj.DeepCopyObject().(api.Object))
		}
		return proposeUpdate(obj)
	}))
	if err != nil {
		return nil, err
	}
	return stored, nil
}

// newVersionRequired returns the error (422) for an update without a resourceVersion if the kind
// requires one. As in Kubernetes, the error contains the resource in place of the kind.
func newVersionRequired(req *api.Request) error {
	resource := schema.GroupKind{Group: req.Kind.GVK.Group, Kind: req.Kind.Resource}
	at := field.NewPath("metadata", "resourceVersion")
	return apierrors.NewInvalid(resource, req.Name,
		field.ErrorList{field.Invalid(at, uint64(0), "must be specified for an update")})
}

// newUIDConflict returns the error (409) for a write that requests another UID than that of the
// stored object. stored is "" if the object does not exist.
func newUIDConflict(req *api.Request, requested, stored types.UID) error {
	return apierrors.NewConflict(req.Kind.GroupResource(), req.Name,
		fmt.Errorf("Precondition failed: UID in precondition: %v, UID in object meta: %v", requested, stored))
}

// checkReplacement sets a missing name of obj to that of the request. It returns an error if the
// name or namespace of obj differs from that of the request.
func (w *write) checkReplacement(obj api.Object) error {
	if err := w.checkNamespace(obj); err != nil {
		return err
	}
	if obj.GetName() == "" {
		obj.SetName(w.req.Name)
	}
	if obj.GetName() != w.req.Name {
		return newNameMismatch(obj.GetName(), w.req.Name)
	}
	return nil
}

// Modify calls change with a copy of one stored object, and stores the result. If the commit
// conflicts, it calls change again with the newer state. An error of change fails the request. It
// ignores the request's subresource, and is for subresources with their own rules (eviction). If
// change modifies nothing, nothing is written.
func (r *Registry) Modify(ctx context.Context, req *api.Request, a Admission, change func(obj api.Object) error) (
	api.Object, error,
) {
	return r.modifyObject(ctx, req, a, func(cur current) (proposal, error) {
		next := cur.obj.DeepCopyObject().(api.Object)
		if err := change(next); err != nil {
			return proposal{}, err
		}
		return proposeUpdate(next)
	})
}

// ModifyBy is like Modify, for a request with a body of another type (a Binding). Admission treats
// the body as an object to be created, and may modify it. Then change writes the body into a copy
// of the stored object.
func (r *Registry) ModifyBy(
	ctx context.Context, req *api.Request, a Admission, body runtime.Object,
	change func(obj api.Object, body runtime.Object) error,
) (api.Object, error) {
	return r.modifyObject(ctx, req, a, func(cur current) (proposal, error) {
		return proposal{obj: cur.obj.DeepCopyObject().(api.Object), body: body.DeepCopyObject(), merge: change,
			mergeLate: true, op: api.Create}, nil
	})
}

func (r *Registry) modifyObject(
	ctx context.Context, req *api.Request, a Admission, propose func(cur current) (proposal, error),
) (api.Object, error) {
	dryRun, manager := req.Update.DryRun, req.Update.FieldManager
	switch req.Verb {
	case api.VerbCreate:
		dryRun, manager = req.Create.DryRun, req.Create.FieldManager
	case api.VerbPatch:
		dryRun, manager = req.Patch.Options.DryRun, req.Patch.Options.FieldManager
	}
	w, err := r.newWrite(ctx, req, a, dryRun, manager)
	if err != nil {
		return nil, err
	}
	obj, _, err := w.changeObject(ctx, w.newUpdate(facet{name: req.Subresource}, propose))
	return obj, err
}

// facet is the part of an object that an update may change: the whole object or a subresource.
type facet struct {
	name    string // of the subresource; "" is the object itself
	prepare func(obj, old api.Object)
	view    func(obj api.Object) runtime.Object
	merge   func(obj api.Object, body runtime.Object) error
}

// facetRules returns the rules for updates of the request's subresource or, without a subresource,
// of the whole object.
func (w *write) facetRules() (facet, error) {
	k, name := w.req.Kind, w.req.Subresource
	f := facet{name: name}
	sub := k.Subresources[name]
	switch {
	case name == "":
		f.prepare = k.Writes.PrepareUpdate
	case sub != nil && sub.Merge != nil:
		f.view, f.merge = sub.View, sub.Merge
	case sub != nil && sub.PrepareUpdate != nil:
		f.prepare = sub.PrepareUpdate
	case name == "status" && k.Type.Ops.SetStatus != nil:
		f.prepare = func(obj, old api.Object) { objectmeta.KeepAllButStatus(k, obj, old) }
	case name == "finalize" && objectmeta.HasSpecFinalizers(k.Type.New()):
		f.prepare = objectmeta.KeepAllButSpecFinalizers
	default:
		return facet{}, apierrors.NewMethodNotSupported(k.GroupResource(), string(w.req.Verb)+" "+name)
	}
	return f, nil
}

// proposeBody returns a proposal that merges the body of a subresource with its own type (a Scale)
// into a copy of the stored object. A resourceVersion in the body is a precondition. The caller
// must not use the body afterwards.
func (w *write) proposeBody(f facet, stored current, body runtime.Object) (proposal, error) {
	if m, ok := body.(interface{ GetResourceVersion() string }); ok {
		if v := m.GetResourceVersion(); v != "" && v != stored.obj.GetResourceVersion() {
			return proposal{}, storeerrors.NewModifiedConflict(w.req.Kind.GroupResource(), w.req.Name)
		}
	}
	next := stored.obj.DeepCopyObject().(api.Object)
	return proposal{obj: next, body: body, old: f.view(stored.obj), merge: f.merge, op: api.Update}, f.merge(next, body)
}

// newUpdate returns a changeFunc that stores the object that propose returns. The changeFunc
// records the field owners, runs admission, resets fields that clients may not set, and increments
// the generation if the desired state changed.
func (w *write) newUpdate(f facet, propose func(cur current) (proposal, error)) changeFunc {
	return func(ctx context.Context, cur current) (outcome, error) {
		p, err := propose(cur)
		if err != nil {
			return outcome{}, err
		}
		obj := p.obj
		if uid := obj.GetUID(); uid != "" && uid != cur.obj.GetUID() {
			return outcome{}, newUIDConflict(w.req, uid, cur.obj.GetUID())
		}
		w.setServerFields(f, obj, cur.obj)
		if !p.mergeLate {
			w.trackUpdate(f, obj, cur.obj)
		}
		a := w.startAttempt(p.op, obj, cur.obj)
		if p.merge != nil {
			a.Object, a.OldObject = p.body, p.old
		}
		if obj, err = w.mutateProposal(ctx, f, p, cur); err != nil {
			return outcome{}, err
		}
		if p.mergeLate {
			w.trackUpdate(f, obj, cur.obj)
		}
		w.resetFields(f, obj, cur.obj)
		a.Finish()
		a.Removes = isRemovable(obj)
		if w.admission != nil {
			if err := w.admission.Validate(ctx, a); err != nil {
				return outcome{}, err
			}
		}
		// A bind continues the request that created the pod, so it changes neither generation nor
		// trace.
		binding, desired := w.req.Subresource == "binding", false
		if binding {
			obj.SetGeneration(cur.obj.GetGeneration())
		} else {
			desired = objectmeta.AdvanceGeneration(w.served.Kind, obj, cur.obj)
		}
		objectmeta.SetTraceOnUpdate(obj, cur.obj, w.req.Client.TraceParent, desired)
		return outcome{obj: obj, changed: binding || desired, remove: isRemovable(obj)}, nil
	}
}

// setServerFields sets the apiVersion, kind and immutable metadata of the new object obj. It also
// applies defaults, and removes the fields that Kubernetes drops before it stores an object.
func (w *write) setServerFields(f facet, obj, old api.Object) {
	w.req.Kind.SetTypeMeta(obj)
	objectmeta.KeepMeta(obj, old)
	obj.SetResourceVersion(old.GetResourceVersion())
	w.setDefaults(f.name, obj)
	w.req.Kind.Schema.Answers.Drop(obj, old)
}

// mutateProposal runs mutating admission on a proposal and returns the resulting object.
func (w *write) mutateProposal(ctx context.Context, f facet, p proposal, stored current) (api.Object, error) {
	a := &w.attempt
	if w.admission != nil {
		if err := w.runMutation(ctx, a); err != nil {
			return nil, err
		}
	}
	obj := a.Whole
	if p.merge != nil && (w.admission != nil || p.mergeLate) {
		if err := p.merge(obj, a.Object); err != nil {
			return nil, err
		}
	}
	if w.admission != nil {
		w.setServerFields(f, obj, stored.obj)
	}
	return obj, nil
}

// resetFields resets the fields of obj that a client may not set to those of the stored object,
// even if admission has set them. managedFields are not reset.
func (w *write) resetFields(f facet, obj, stored api.Object) {
	if f.prepare == nil {
		return
	}
	managed := obj.GetManagedFields()
	f.prepare(obj, stored)
	objectmeta.KeepMeta(obj, stored)
	obj.SetManagedFields(managed)
	obj.SetResourceVersion(stored.GetResourceVersion())
}

// trackUpdate records the fields that the write changed in the managedFields of obj, unless
// server-side apply has already recorded them. For a subresource, it first resets all other fields,
// so that the manager does not own them.
func (w *write) trackUpdate(f facet, obj, stored api.Object) {
	if w.applied {
		return
	}
	if f.prepare != nil && f.name != "" && w.fieldOwners().isTracked(f.name, obj, stored) {
		f.prepare(obj, stored)
		objectmeta.KeepMeta(obj, stored)
	}
	w.fieldOwners().trackUpdate(f.name, obj, stored)
}
