package registry

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// maxNameAttempts is how many generated names are tried.
const maxNameAttempts = 8

// Create stores a new object. The request names the kind, subresource, name and options (dry run,
// field manager). The returned object is shared: copy it before changing it.
func (r *Registry) Create(ctx context.Context, req *api.Request, a Admission) (runtime.Object, error) {
	obj, ok := req.Object.(api.Object)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("a %T cannot be stored", req.Object))
	}
	w, err := r.newWrite(ctx, req, a, req.Create.DryRun, req.Create.FieldManager)
	if err != nil {
		return nil, err
	}
	return w.create(ctx, obj, w.trackCreate)
}

// create stores a new object. track records the field managers before admission.
func (w *write) create(ctx context.Context, obj api.Object, track func(api.Object)) (api.Object, error) {
	ctx, cancel := w.r.bounded(ctx)
	defer cancel()
	if err := w.checkNew(obj); err != nil {
		return nil, err
	}
	if err := w.r.cache.waitFor(ctx, 0); err != nil {
		return nil, statusError(err, describe(w.req))
	}
	generated := obj.GetName() == ""
	pristine := obj.DeepCopyObject().(api.Object) // admission modifies obj
	for try := 1; ; try++ {
		if generated {
			w.generateName(obj)
		}
		stored, err := w.tryCreate(ctx, obj, track, generated)
		var conflict *raftstore.ConflictError
		if !errors.As(err, &conflict) {
			return stored, statusError(err, describe(w.req))
		}
		if conflict.Key == w.fullKey() {
			switch {
			case !generated:
				return nil, apierrors.NewAlreadyExists(w.req.Kind.GroupResource(), obj.GetName())
			case try == maxNameAttempts:
				return nil, apierrors.NewGenerateNameConflict(w.req.Kind.GroupResource(), obj.GetName(), 1)
			}
		}
		if err := w.retry(ctx, conflict); err != nil {
			return nil, statusError(err, describe(w.req))
		}
		obj = pristine.DeepCopyObject().(api.Object)
	}
}

// checkNew rejects an object that cannot be created, and sets its namespace from the request.
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
	if why := badPathSegment(obj.GetName()); why != "" {
		return apierrors.NewInvalid(k.GVK.GroupKind(), obj.GetName(), field.ErrorList{
			field.Invalid(field.NewPath("metadata", "name"), obj.GetName(), why)})
	}
	if w.req.Name != "" && w.req.Name != obj.GetName() {
		return nameMismatch(obj.GetName(), w.req.Name)
	}
	w.setName(obj.GetName())
	return nil
}

// checkNamespace sets a missing namespace from the request and rejects a different one.
func (w *write) checkNamespace(obj api.Object) error {
	if !w.req.Kind.Namespaced {
		obj.SetNamespace("")
		return nil
	}
	if obj.GetNamespace() == "" {
		obj.SetNamespace(w.req.Namespace)
	}
	if obj.GetNamespace() != w.req.Namespace {
		return apierrors.NewBadRequest("the namespace of the provided object does not match the namespace sent on the request")
	}
	if w.req.Namespace == "" {
		return apierrors.NewBadRequest("namespace is required for a namespaced resource")
	}
	return nil
}

func nameMismatch(object, url string) error {
	return apierrors.NewBadRequest(fmt.Sprintf("the name of the object (%s) does not match the name on the URL (%s)", object, url))
}

func (w *write) setName(name string) {
	w.req.Name = name
	w.key = objectKey(w.req.Kind, w.req.Namespace, name)
}

// generateName sets a generated name that is free in the cache. The commit may still conflict.
func (w *write) generateName(obj api.Object) {
	for range maxNameAttempts {
		name := generatedName(obj.GetGenerateName(), w.r.randomSuffix(suffixLength))
		obj.SetName(name)
		w.setName(name)
		if w.get(w.key) == nil {
			return
		}
	}
}

func (w *write) tryCreate(ctx context.Context, obj api.Object, track func(api.Object), generated bool) (api.Object, error) {
	k := w.req.Kind
	k.SetTypeMeta(obj)
	w.r.initMeta(obj)
	if k.OwnedDefault != nil {
		k.OwnedDefault(obj)
	} else {
		w.complete("", obj)
	}
	k.Answers.Drop(obj, nil)
	track(obj) // fields set by admission have no owner, so that an apply does not remove them
	w.complete("", obj)
	a := w.begin(api.Create, obj, nil)
	if generated {
		a.Name = ""
	}
	if w.a != nil {
		if err := w.mutate(ctx, a); err != nil {
			return nil, err
		}
		obj = a.Whole
		k.SetTypeMeta(obj)
		w.complete("", obj)
		k.Answers.Drop(obj, nil)
	}
	if k.CreateWarnings != nil && api.CollectsWarnings(ctx) {
		for _, text := range k.CreateWarnings(obj) {
			api.Warn(ctx, text)
		}
	}
	if k.PrepareCreate != nil {
		k.PrepareCreate(obj)
		w.complete("", obj) // default the status that PrepareCreate has set
	}
	a.Finish()
	if w.a != nil {
		if err := w.a.Validate(ctx, a); err != nil {
			return nil, err
		}
	}
	traceOnCreate(obj, w.req.TraceParent)
	if w.dryRun {
		if _, err := w.r.fresh(ctx); err != nil {
			return nil, err
		}
		if e, bad := w.find(w.key); e != nil || bad != nil {
			return nil, apierrors.NewAlreadyExists(k.GroupResource(), obj.GetName())
		}
		return w.commitPut(ctx, obj, nil, current{})
	}
	value, err := w.encode(ctx, obj, nil)
	if err != nil {
		return nil, err
	}
	return w.commitPut(ctx, obj, value, current{})
}
