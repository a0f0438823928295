package registry

import (
	"context"
	"fmt"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	kinds  *api.Kinds

	once      sync.Once
	converter managedfields.TypeConverter // created on first use, because it parses the schema
}

// tracked holds the field managers of one kind.
type tracked struct {
	mu       sync.Mutex
	managers map[string]*managedfields.FieldManager // by subresource
	newcomer *newcomer
	asked    bool // newcomer was created, or is nil because the type has no schema
}

func newFieldTracker(s *runtime.Scheme, kinds *api.Kinds) *fieldTracker {
	return &fieldTracker{scheme: s, kinds: kinds}
}

func (t *fieldTracker) typesOf(k *api.Kind) managedfields.TypeConverter {
	if k.Types != nil {
		return k.Types()
	}
	return t.types()
}

// Types returns the schema of a kind's objects, which server-side apply uses to merge.
func (r *Registry) Types(k *api.Kind) managedfields.TypeConverter { return r.fields.typesOf(k) }

// types returns the schema of all built-in types.
func (t *fieldTracker) types() managedfields.TypeConverter {
	t.once.Do(func() { t.converter = applyconfigurations.NewTypeConverter(t.scheme) })
	return t.converter
}

func (t *fieldTracker) of(of *served, subresource string) (*managedfields.FieldManager, error) {
	k := of.kind
	of.tracked.mu.Lock()
	defer of.tracked.mu.Unlock()
	if m := of.tracked.managers[subresource]; m != nil {
		return m, nil
	}
	gvk, types := k.GVK, t.typesOf(k)
	if s := k.Subresources[subresource]; s != nil && s.View != nil {
		gvk, types = s.GVK, managedfields.NewDeducedTypeConverter() // the body is in no schema, and has no lists
	}
	gv := gvk.GroupVersion()
	reset := map[fieldpath.APIVersion]*fieldpath.Set{fieldpath.APIVersion(gv.String()): unwritable(k, subresource)}
	m, err := managedfields.NewDefaultFieldManager(types, versions{t.scheme, t.kinds}, t.scheme, maker{t.scheme, k},
		gvk, gv, subresource, fieldpath.NewExcludeFilterSetMap(reset))
	if err != nil {
		return nil, fmt.Errorf("tracking fields of %s: %w", k.Resource, err)
	}
	if of.tracked.managers == nil {
		of.tracked.managers = make(map[string]*managedfields.FieldManager)
	}
	of.tracked.managers[subresource] = m
	return m, nil
}

// unwritable returns the fields that a write to a subresource of a kind cannot set. Such a write
// does not own them.
func unwritable(k *api.Kind, subresource string) *fieldpath.Set {
	switch {
	case subresource == "status":
		out := fieldpath.NewSet(fieldpath.MakePathOrDie("spec"), fieldpath.MakePathOrDie("metadata", "deletionTimestamp"))
		for _, name := range fixedMetadata(k) {
			out.Insert(fieldpath.MakePathOrDie("metadata", name))
		}
		return out
	case k.Subresources["status"] != nil:
		return fieldpath.NewSet(fieldpath.MakePathOrDie("status"))
	}
	return fieldpath.NewSet()
}

// fixedMetadata returns the metadata fields that a status update does not change, by the kind's own
// rule. Some kinds allow label changes with the status.
func fixedMetadata(k *api.Kind) (out []string) {
	rule := func(obj, old api.Object) { keepStatus(k, obj, old) }
	if s := k.Subresources["status"]; s != nil && s.PrepareUpdate != nil {
		rule = s.PrepareUpdate
	}
	obj, old := k.New(), k.New()
	some := map[string]string{"a": "b"}
	obj.SetLabels(some)
	obj.SetAnnotations(some)
	obj.SetFinalizers([]string{"example.com/a"})
	obj.SetOwnerReferences([]metav1.OwnerReference{{Name: "a"}})
	rule(obj, old)
	for name, left := range map[string]int{
		"labels": len(obj.GetLabels()), "annotations": len(obj.GetAnnotations()),
		"finalizers": len(obj.GetFinalizers()), "ownerReferences": len(obj.GetOwnerReferences()),
	} {
		if left == 0 {
			out = append(out, name)
		}
	}
	return out
}

// maker creates empty objects of its kind. Objects of other types come from the scheme.
type maker struct {
	*runtime.Scheme
	kind *api.Kind
}

// New implements runtime.ObjectCreater.
func (m maker) New(gvk schema.GroupVersionKind) (runtime.Object, error) {
	if gvk != m.kind.GVK {
		return m.Scheme.New(gvk)
	}
	obj := m.kind.New()
	m.kind.SetTypeMeta(obj)
	return obj, nil
}

// versions converts between the versions of a storage. An object in the wanted version is returned
// as it is, which avoids the scheme's deep copies.
type versions struct {
	*runtime.Scheme
	kinds *api.Kinds
}

// ConvertToVersion implements runtime.ObjectConvertor.
func (v versions) ConvertToVersion(in runtime.Object, target runtime.GroupVersioner) (runtime.Object, error) {
	if _, loose := in.(runtime.Unstructured); loose {
		return v.Scheme.ConvertToVersion(in, target)
	}
	if k := in.GetObjectKind(); k.GroupVersionKind().Empty() { // created by the field manager without a type
		gvks, _, err := v.Scheme.ObjectKinds(in)
		if err != nil {
			return nil, err
		}
		k.SetGroupVersionKind(gvks[0])
	}
	gvk := in.GetObjectKind().GroupVersionKind()
	obj, isObject := in.(api.Object)
	wanted, one := target.(schema.GroupVersion)
	if !one || !isObject || wanted == gvk.GroupVersion() {
		return in, nil
	}
	table := v.kinds.Table()
	from := table.ByGVK(gvk)
	if from == nil || from.Virtual {
		return in, nil // a subresource's body, which has one version
	}
	for _, to := range table.All() {
		if to.Storage == from.Storage && to.GVK.GroupVersion() == wanted {
			return convert(from, to, obj)
		}
	}
	// The field manager drops the ownership of fields in a version that is not served.
	return nil, runtime.NewNotRegisteredGVKErrForTarget("the table of kinds", gvk, target)
}

// convert converts an object of one kind to another kind of the same storage.
func convert(from, to *api.Kind, obj api.Object) (api.Object, error) {
	ctx, hub := context.Background(), from.Storage.Hub.GVK
	if from.GVK != hub {
		var err error
		if obj, err = from.Conversion.To(ctx, obj); err != nil {
			return nil, fmt.Errorf("converting from %s to %s: %w", from.GVK, hub, err)
		}
		obj.GetObjectKind().SetGroupVersionKind(hub)
	}
	if to.GVK == hub {
		return obj, nil
	}
	out, err := to.Conversion.From(ctx, []api.Object{obj})
	if err != nil {
		return nil, fmt.Errorf("converting from %s to %s: %w", hub, to.GVK, err)
	}
	to.SetTypeMeta(out[0])
	return out[0], nil
}

// complete sets the defaults before fields are tracked: a writer owns the defaulted fields too.
func (w *write) complete(subresource string, obj api.Object) {
	if subresource == "" && w.req.Kind.Default != nil {
		w.req.Kind.Default(obj)
	}
}

// trackCreate records the manager as owner of all fields of the new object. Objects created by
// Keelson's own components are not tracked, because that would take most of their time. The first
// apply to such an object records the existing fields, as for objects that are older than tracking.
func (w *write) trackCreate(obj api.Object) {
	if isSystem(w.req.User) {
		obj.SetManagedFields(nil)
		return
	}
	if n := w.r.fields.newcomer(w.served); n != nil && len(obj.GetManagedFields()) == 0 {
		entries, err := n.managed(obj, w.manager, w.req.Kind.GVK.GroupVersion().String(), seconds(w.r.now()))
		if err == nil {
			obj.SetManagedFields(entries)
			return
		}
	}
	fm, err := w.r.fields.of(w.served, "")
	if err != nil {
		w.r.log.Error("fields are not tracked", "kind", w.req.Kind.GVK.String(), "error", err)
		return
	}
	empty := w.req.Kind.New()
	w.req.Kind.SetTypeMeta(empty)
	fm.UpdateNoErrors(empty, obj, w.manager)
}

// trackUpdate records the fields that the manager changed. Untracked objects stay untracked. Status
// and binding writes of Keelson's own components are not recorded, because an apply to the object
// cannot change these fields.
func (w *write) trackUpdate(subresource string, obj, old api.Object) {
	if !w.tracks(subresource, obj, old) {
		obj.SetManagedFields(old.GetManagedFields())
		return
	}
	if s := w.req.Kind.Subresources[subresource]; s != nil && s.View != nil {
		w.trackFacet(s, subresource, obj, old)
		return
	}
	fm, err := w.r.fields.of(w.served, subresource)
	if err != nil {
		obj.SetManagedFields(old.GetManagedFields())
		w.r.log.Error("fields are not tracked", "kind", w.req.Kind.GVK.String(), "error", err)
		return
	}
	fm.UpdateNoErrors(old, obj, w.manager)
}

// tracks reports whether a write changes the managedFields.
func (w *write) tracks(subresource string, obj, old api.Object) bool {
	untracked := len(old.GetManagedFields()) == 0 && len(obj.GetManagedFields()) == 0
	report := subresource == "status" || subresource == "binding"
	return !untracked && !(report && isSystem(w.req.User))
}

// isSystem reports whether a request comes from a Keelson component: controllers, scheduler or
// nodes.
func isSystem(u api.User) bool {
	switch u.Name {
	case api.UserController, api.UserScheduler, api.UserAPIServer:
		return true
	}
	return strings.HasPrefix(u.Name, api.NodeUserPrefix)
}
