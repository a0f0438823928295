package registry

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/objectmeta"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/raftstore"
)

// maxNameAttempts is the maximum number of names that are generated for an object with
// generateName, until a name is free.
const maxNameAttempts = 8

// Create stores a new object and returns it. The request names the kind, subresource, name and
// options (dry run, field manager). The returned object is shared: copy it before changing it.
func (r *Registry) Create(ctx context.Context, req *api.Request, a Admission) (runtime.Object, error) {
	obj, ok := req.Object.(api.Object)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("a %T cannot be stored", req.Object))
	}
	w, err := r.newWrite(ctx, req, a, req.Create.DryRun, req.Create.FieldManager)
	if err != nil {
		return nil, err
	}
	return w.createObject(ctx, obj, w.fieldOwners().trackCreate)
}

// createObject stores obj as a new object and returns the stored object. It calls track to record
// the field managers before admission modifies the object.
func (w *write) createObject(ctx context.Context, obj api.Object, track func(api.Object)) (api.Object, error) {
	ctx, cancel := w.registry.cache.WithTimeout(ctx)
	defer cancel()
	if err := w.checkNew(obj); err != nil {
		return nil, err
	}
	if err := w.registry.cache.WaitFor(ctx, 0); err != nil {
		return nil, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
	}
	generated := obj.GetName() == ""
	pristine := obj.DeepCopyObject().(api.Object) // admission modifies obj
	for attempt := 1; ; attempt++ {
		if generated {
			w.generateName(obj)
		}
		stored, err := w.tryCreate(ctx, obj, track, generated)
		var conflict *raftstore.ConflictError
		if !errors.As(err, &conflict) {
			return stored, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
		}
		if conflict.Key == w.fullKey() {
			switch {
			case !generated:
				return nil, apierrors.NewAlreadyExists(w.req.Kind.GroupResource(), obj.GetName())
			case attempt == maxNameAttempts:
				return nil, apierrors.NewGenerateNameConflict(w.req.Kind.GroupResource(), obj.GetName(), 1)
			}
		}
		if err := w.waitForConflict(ctx, conflict); err != nil {
			return nil, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
		}
		obj = pristine.DeepCopyObject().(api.Object)
	}
}

// checkNew returns an error if obj cannot be created by the request. It sets a missing namespace of
// obj to that of the request.
func (w *write) checkNew(obj api.Object) error {
	k := w.req.Kind
	if obj.GetResourceVersion() != "" {
		return apierrors.NewBadRequest("resourceVersion should not be set on objects to be created")
	}
	if err := w.checkNamespace(obj); err != nil {
		return err
	}
	if obj.GetName() == "" {
		if obj.GetGenerateName() == "" {
			return apierrors.NewInvalid(k.GVK.GroupKind(), "", field.ErrorList{
				field.Required(field.NewPath("metadata", "name"), "name or generateName is required")})
		}
		return nil
	}
	if reason := storedform.WhyInvalidName(obj.GetName()); reason != "" {
		return apierrors.NewInvalid(k.GVK.GroupKind(), obj.GetName(), field.ErrorList{
			field.Invalid(field.NewPath("metadata", "name"), obj.GetName(), reason)})
	}
	if w.req.Name != "" && w.req.Name != obj.GetName() {
		return newNameMismatch(obj.GetName(), w.req.Name)
	}
	w.setName(obj.GetName())
	return nil
}

// checkNamespace sets a missing namespace of obj to that of the request. It returns an error if obj
// has another namespace.
func (w *write) checkNamespace(obj api.Object) error {
	if !w.req.Kind.Namespaced {
		obj.SetNamespace("")
		return nil
	}
	if obj.GetNamespace() == "" {
		obj.SetNamespace(w.req.Namespace)
	}
	if obj.GetNamespace() != w.req.Namespace {
		return apierrors.NewBadRequest("the namespace of the provided object does not match the namespace " +
			"sent on the request")
	}
	if w.req.Namespace == "" {
		return apierrors.NewBadRequest("namespace is required for a namespaced resource")
	}
	return nil
}

func newNameMismatch(object, url string) error {
	return apierrors.NewBadRequest(fmt.Sprintf("the name of the object (%s) does not match the name on the URL (%s)",
		object, url))
}

func (w *write) setName(name string) {
	w.req.Name = name
	w.key = storedform.ObjectKey(w.req.Kind, w.req.Namespace, name)
}

// generateName sets the name of obj to its generateName and a random suffix. It prefers a name that
// no cached object has. The commit may still conflict with another object of that name.
func (w *write) generateName(obj api.Object) {
	for range maxNameAttempts {
		name := objectmeta.GenerateName(obj.GetGenerateName(), w.registry.randomSuffix(objectmeta.SuffixLength))
		obj.SetName(name)
		w.setName(name)
		if w.served.Current(w.key) == nil {
			return
		}
	}
}

func (w *write) tryCreate(ctx context.Context, obj api.Object, track func(api.Object), generated bool) (
	api.Object, error,
) {
	k := w.req.Kind
	k.SetTypeMeta(obj)
	objectmeta.InitMeta(obj, w.registry.newUID(), w.registry.currentTime())
	if k.Writes.OwnedDefault != nil {
		k.Writes.OwnedDefault(obj)
	} else {
		w.setDefaults("", obj)
	}
	k.Schema.Answers.Drop(obj, nil)
	track(obj) // fields set by admission have no owner, so that an apply does not remove them
	w.setDefaults("", obj)
	a := w.startAttempt(api.Create, obj, nil)
	if generated {
		a.Name = ""
	}
	if w.admission != nil {
		if err := w.runMutation(ctx, a); err != nil {
			return nil, err
		}
		obj = a.Whole
		k.SetTypeMeta(obj)
		w.setDefaults("", obj)
		k.Schema.Answers.Drop(obj, nil)
	}
	if k.Validation.CreateWarnings != nil && api.CollectsWarnings(ctx) {
		for _, text := range k.Validation.CreateWarnings(obj) {
			api.Warn(ctx, text)
		}
	}
	if k.Writes.PrepareCreate != nil {
		k.Writes.PrepareCreate(obj)
		w.setDefaults("", obj) // the status that PrepareCreate has set
	}
	a.Finish()
	if w.admission != nil {
		if err := w.admission.Validate(ctx, a); err != nil {
			return nil, err
		}
	}
	objectmeta.SetTraceOnCreate(obj, w.req.Client.TraceParent)
	if w.dryRun {
		if _, err := w.registry.cache.Refresh(ctx); err != nil {
			return nil, err
		}
		if e, bad := w.served.Lookup(w.key); e != nil || bad != nil {
			return nil, apierrors.NewAlreadyExists(k.GroupResource(), obj.GetName())
		}
		return w.commitPut(ctx, obj, nil, current{})
	}
	value, err := w.encodeStored(ctx, obj, nil)
	if err != nil {
		return nil, err
	}
	return w.commitPut(ctx, obj, value, current{})
}
