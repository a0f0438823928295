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

// Update replaces an object or a facet of it. With a resourceVersion it replaces exactly that state (409 otherwise);
// without one it replaces whatever is stored, unless the kind is Conditional (422). A missing object is a 404, or is
// created where the kind CreatesByUpdate. What would store the same again stores nothing.
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

// replaceOrCreate replaces the object, or makes it where none exists. Then the resourceVersion in the body counts for
// nothing, but an uid still names an object that is not there.
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
		// Somebody created it in between: replace theirs.
	}
}

// replace puts obj in the place of what is stored.
func (w *write) replace(ctx context.Context, f facet, obj api.Object) (api.Object, error) {
	req := w.req
	// Admission changes what it is given; a second attempt must start from the client's object. At one state only there
	// is a second attempt when other objects came between: that may start from what admission made before.
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

// unconditional refuses an update that does not say what it replaces, in the words of Kubernetes, which puts the
// resource where the kind should be.
func unconditional(req *api.Request) error {
	of := schema.GroupKind{Group: req.Kind.GVK.Group, Kind: req.Kind.Resource}
	at := field.NewPath("metadata", "resourceVersion")
	return apierrors.NewInvalid(of, req.Name, field.ErrorList{field.Invalid(at, uint64(0), "must be specified for an update")})
}

// otherUID refuses a write that names another object than that which has its name; have is "" where none exists.
func otherUID(req *api.Request, want, have types.UID) error {
	return apierrors.NewConflict(req.Kind.GroupResource(), req.Name,
		fmt.Errorf("Precondition failed: UID in precondition: %v, UID in object meta: %v", want, have))
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
// for subresources with rules of their own (eviction). change receives a copy of the stored object.
// The request's subresource is not interpreted; what change leaves equal is not written.
func (r *Registry) Modify(ctx context.Context, req *api.Request, a Admission, change func(obj api.Object) error) (api.Object, error) {
	return r.modify(ctx, req, a, func(cur current) (proposal, error) {
		next := cur.obj.DeepCopyObject().(api.Object)
		if err := change(next); err != nil {
			return proposal{}, err
		}
		return whole(next)
	})
}

// ModifyBy is Modify by a body of its own (a Binding): admission judges that as something that is created, and may
// change it; then change writes it into a copy of the stored object.
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
	case name == "status" && k.Ops.SetStatus != nil:
		f.prepare = func(obj, old api.Object) { keepStatus(k, obj, old) }
	case name == "finalize" && hasSpecFinalizers(k.New()):
		f.prepare = keepAllButSpecFinalizers
	default:
		return facet{}, apierrors.NewMethodNotSupported(k.GroupResource(), string(w.req.Verb)+" "+name)
	}
	return f, nil
}

// proposeBody lets a facet with a body of its own (scale) write into a copy of cur. A resourceVersion in the body is a
// precondition, as on the object itself. The body is the proposal's to change.
func (w *write) proposeBody(f facet, cur current, body runtime.Object) (proposal, error) {
	if m, ok := body.(interface{ GetResourceVersion() string }); ok {
		if v := m.GetResourceVersion(); v != "" && v != cur.obj.GetResourceVersion() {
			return proposal{}, modifiedConflict(w.req.Kind.GroupResource(), w.req.Name)
		}
	}
	next := cur.obj.DeepCopyObject().(api.Object)
	return proposal{obj: next, body: body, old: f.view(cur.obj), merge: f.merge, op: api.Update}, f.merge(next, body)
}

// updateStep makes the rules of an update around propose: the managers of what is proposed, admission's changes, then
// what no client may set, and the judgement of the whole.
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
		// A bind is a step of the apply that made the pod, not a wish of its own.
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

// settle gives a wanted object what it cannot choose, and its defaults, and removes the fields that Kubernetes drops.
func (w *write) settle(f facet, obj, old api.Object) {
	w.req.Kind.SetTypeMeta(obj)
	keepMeta(obj, old)
	obj.SetResourceVersion(old.GetResourceVersion())
	w.complete(f.name, obj)
	w.req.Kind.Answers.Drop(obj, old)
}

// admitted is the proposed object as the mutating stage leaves it.
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

// prepare takes back what a client may not set, whoever has set it. Who owns which field has been recorded.
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

// track records what the manager changed, unless server-side apply has done so. A write to a facet changes nothing else:
// nobody comes to own what it states besides.
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
