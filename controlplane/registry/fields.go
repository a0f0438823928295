package registry

import (
	"fmt"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/client-go/applyconfigurations"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"keelson.dev/keelson/controlplane/api"
)

// fieldTracker records which manager set which field, for server-side apply.
type fieldTracker struct {
	scheme *runtime.Scheme

	mu        sync.Mutex
	converter managedfields.TypeConverter // parses the schema: made when first needed
	managers  map[trackedFacet]*managedfields.FieldManager
	newcomers map[schema.GroupVersionKind]*newcomer // nil for types without a schema
}

type trackedFacet struct {
	gvk         schema.GroupVersionKind
	subresource string
}

func newFieldTracker(s *runtime.Scheme) *fieldTracker {
	return &fieldTracker{scheme: s, managers: make(map[trackedFacet]*managedfields.FieldManager),
		newcomers: make(map[schema.GroupVersionKind]*newcomer)}
}

// types is the schema of all types; call it under mu.
func (t *fieldTracker) types() managedfields.TypeConverter {
	if t.converter == nil {
		t.converter = applyconfigurations.NewTypeConverter(t.scheme)
	}
	return t.converter
}

func (t *fieldTracker) of(k *api.Kind, subresource string) (*managedfields.FieldManager, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	id := trackedFacet{k.GVK, subresource}
	if m := t.managers[id]; m != nil {
		return m, nil
	}
	gvk, types := k.GVK, t.types()
	if s := k.Subresources[subresource]; s != nil && s.View != nil {
		gvk, types = s.GVK, managedfields.NewDeducedTypeConverter() // the body stands in no schema, and has no lists
	}
	m, err := managedfields.NewDefaultFieldManager(types, sameVersion{t.scheme}, t.scheme, t.scheme, gvk, gvk.GroupVersion(), subresource,
		fieldpath.NewExcludeFilterSetMap(map[fieldpath.APIVersion]*fieldpath.Set{fieldpath.APIVersion(gvk.GroupVersion().String()): unwritable(k, subresource)}))
	if err != nil {
		return nil, fmt.Errorf("tracking fields of %s: %w", k.Resource, err)
	}
	t.managers[id] = m
	return m, nil
}

// unwritable are the fields that a write to a facet of a kind cannot set: whoever
// states them there owns nothing.
func unwritable(k *api.Kind, subresource string) *fieldpath.Set {
	switch {
	case subresource == "status":
		return fieldpath.NewSet(fieldpath.MakePathOrDie("spec"),
			fieldpath.MakePathOrDie("metadata", "ownerReferences"), fieldpath.MakePathOrDie("metadata", "finalizers"),
			fieldpath.MakePathOrDie("metadata", "deletionTimestamp"))
	case k.Subresources["status"] != nil:
		return fieldpath.NewSet(fieldpath.MakePathOrDie("status"))
	}
	return fieldpath.NewSet()
}

// sameVersion converts between the one version of every kind: typed objects are
// handed through, which saves the scheme's deep copies.
type sameVersion struct{ *runtime.Scheme }

// ConvertToVersion implements runtime.ObjectConvertor.
func (s sameVersion) ConvertToVersion(in runtime.Object, target runtime.GroupVersioner) (runtime.Object, error) {
	if _, loose := in.(runtime.Unstructured); loose {
		return s.Scheme.ConvertToVersion(in, target)
	}
	if k := in.GetObjectKind(); k.GroupVersionKind().Empty() { // one that the field manager has just made
		gvks, _, err := s.Scheme.ObjectKinds(in)
		if err != nil {
			return nil, err
		}
		k.SetGroupVersionKind(gvks[0])
	}
	return in, nil
}

// complete fills in the defaults before fields are tracked: who writes an object has set them too.
func (w *write) complete(subresource string, obj api.Object) {
	if subresource == "" && w.req.Kind.Default != nil {
		w.req.Kind.Default(obj)
	}
}

// trackCreate records the whole new object as set by the manager. What Keelson's
// own parts create is not tracked, which would cost them most of their time;
// the first apply to such an object takes note of what stood there before, as
// for objects that are older than tracking.
func (w *write) trackCreate(obj api.Object) {
	if isSystem(w.req.User) {
		obj.SetManagedFields(nil)
		return
	}
	if n := w.r.fields.newcomer(w.req.Kind); n != nil && len(obj.GetManagedFields()) == 0 {
		entries, err := n.managed(obj, w.manager, w.req.Kind.GVK.GroupVersion().String(), seconds(w.r.now()))
		if err == nil {
			obj.SetManagedFields(entries)
			return
		}
	}
	fm, err := w.r.fields.of(w.req.Kind, "")
	if err != nil {
		w.r.log.Error("fields are not tracked", "kind", w.req.Kind.GVK.String(), "error", err)
		return
	}
	empty := w.req.Kind.New()
	w.req.Kind.SetTypeMeta(empty)
	fm.UpdateNoErrors(empty, obj, w.manager)
}

// trackUpdate records what the manager changed. Objects that are not tracked
// stay so, and reports of Keelson's own parts (a status, a bind) are not recorded:
// an apply to the object itself cannot touch what they write.
func (w *write) trackUpdate(subresource string, obj, old api.Object) {
	untracked := len(old.GetManagedFields()) == 0 && len(obj.GetManagedFields()) == 0
	report := subresource == "status" || subresource == "binding"
	if untracked || report && isSystem(w.req.User) {
		obj.SetManagedFields(old.GetManagedFields())
		return
	}
	if s := w.req.Kind.Subresources[subresource]; s != nil && s.View != nil {
		w.trackFacet(s, subresource, obj, old)
		return
	}
	fm, err := w.r.fields.of(w.req.Kind, subresource)
	if err != nil {
		obj.SetManagedFields(old.GetManagedFields())
		w.r.log.Error("fields are not tracked", "kind", w.req.Kind.GVK.String(), "error", err)
		return
	}
	fm.UpdateNoErrors(old, obj, w.manager)
}

// isSystem says that a request comes from Keelson itself: controllers, scheduler, fleet.
func isSystem(u api.User) bool {
	switch u.Name {
	case api.UserController, api.UserScheduler, api.UserAPIServer:
		return true
	}
	return strings.HasPrefix(u.Name, api.NodeUserPrefix)
}
