package fieldowners

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
	"keelson.dev/keelson/controlplane/registry/objectmeta"
)

// Tracker provides the field managers of all kinds. They record in managedFields which manager set
// which field, for server-side apply. It is safe for concurrent use.
type Tracker struct {
	scheme *runtime.Scheme
	kinds  *api.Kinds

	once      sync.Once
	converter managedfields.TypeConverter // created on first use, because it parses the schema
}

// KindState caches the field managers of one kind. The zero value is ready for use.
type KindState struct {
	mu              sync.Mutex
	managers        map[string]*managedfields.FieldManager // by subresource
	newObjects      *NewObjectTracker
	newObjectsKnown bool // newObjects was created, or is nil because the type has no schema
}

// NewTracker returns a Tracker of the given kinds. scheme must be the result of api.Scheme.
func NewTracker(scheme *runtime.Scheme, kinds *api.Kinds) *Tracker {
	return &Tracker{scheme: scheme, kinds: kinds}
}

// Types returns the type converter of a kind: the schema of its objects, by which server-side apply
// merges.
func (t *Tracker) Types(k *api.Kind) managedfields.TypeConverter {
	if k.Schema.Types != nil {
		return k.Schema.Types()
	}
	return t.builtinTypes()
}

// builtinTypes returns the type converter with the schema of all built-in types.
func (t *Tracker) builtinTypes() managedfields.TypeConverter {
	t.once.Do(func() { t.converter = applyconfigurations.NewTypeConverter(t.scheme) })
	return t.converter
}

// Manager returns the field manager for writes to a subresource of a kind. An empty subresource
// means the object itself. state must be the KindState of the kind.
func (t *Tracker) Manager(state *KindState, k *api.Kind, subresource string) (*managedfields.FieldManager, error) {
	state.mu.Lock()
	defer state.mu.Unlock()
	if m := state.managers[subresource]; m != nil {
		return m, nil
	}
	gvk, types := k.GVK, t.Types(k)
	if s := k.Subresources[subresource]; s != nil && s.View != nil {
		// The schema has no type for the body, and the body has no lists.
		gvk, types = s.GVK, managedfields.NewDeducedTypeConverter()
	}
	gv := gvk.GroupVersion()
	owned := map[fieldpath.APIVersion]fieldpath.Filter{fieldpath.APIVersion(gv.String()): ownedFields(k, subresource)}
	m, err := managedfields.NewDefaultFieldManager(types, versionConverter{t.scheme, t.kinds}, t.scheme,
		objectCreator{t.scheme, k},
		gvk, gv, subresource, owned)
	if err != nil {
		return nil, fmt.Errorf("tracking fields of %s: %w", k.Resource, err)
	}
	if state.managers == nil {
		state.managers = make(map[string]*managedfields.FieldManager)
	}
	state.managers[subresource] = m
	return m, nil
}

// ownedFields returns a filter of the fields that the manager of a write to a subresource of a kind
// may own.
func ownedFields(k *api.Kind, subresource string) fieldpath.Filter {
	s := k.Subresources[subresource]
	if s == nil || len(s.OwnedFields) == 0 {
		return fieldpath.NewExcludeSetFilter(unwritableFields(k, subresource))
	}
	var matchers []*fieldpath.SetMatcher
	for _, path := range s.OwnedFields {
		var names []any
		for name := range strings.SplitSeq(path, ".") {
			names = append(names, name)
		}
		matchers = append(matchers, fieldpath.MakePrefixMatcherOrDie(names...))
	}
	return fieldpath.NewIncludeMatcherFilter(matchers...)
}

// unwritableFields returns the fields that a write to a subresource of a kind cannot set. The
// manager of such a write does not own them.
func unwritableFields(k *api.Kind, subresource string) *fieldpath.Set {
	switch {
	case subresource == "status":
		out := fieldpath.NewSet(fieldpath.MakePathOrDie("spec"),
			fieldpath.MakePathOrDie("metadata", "deletionTimestamp"))
		for _, name := range metadataFixedByStatus(k) {
			out.Insert(fieldpath.MakePathOrDie("metadata", name))
		}
		return out
	case k.Subresources["status"] != nil:
		return fieldpath.NewSet(fieldpath.MakePathOrDie("status"))
	}
	return fieldpath.NewSet()
}

// metadataFixedByStatus returns the metadata fields that a status update cannot change, according
// to the update rule of the kind's status. Some kinds allow label changes with the status.
func metadataFixedByStatus(k *api.Kind) (out []string) {
	rule := func(obj, old api.Object) { objectmeta.KeepAllButStatus(k, obj, old) }
	if s := k.Subresources["status"]; s != nil && s.PrepareUpdate != nil {
		rule = s.PrepareUpdate
	}
	obj, old := k.Type.New(), k.Type.New()
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

// objectCreator creates empty objects for a field manager. Objects of its own kind are created by
// the kind, objects of other types by the scheme.
type objectCreator struct {
	*runtime.Scheme
	kind *api.Kind
}

// New implements runtime.ObjectCreater.
func (m objectCreator) New(gvk schema.GroupVersionKind) (runtime.Object, error) {
	if gvk != m.kind.GVK {
		return m.Scheme.New(gvk)
	}
	obj := m.kind.Type.New()
	m.kind.SetTypeMeta(obj)
	return obj, nil
}

// versionConverter converts objects between the API versions of one storage, for a field manager.
// An object that already has the wanted version is returned unchanged, which avoids the scheme's
// deep copies.
type versionConverter struct {
	*runtime.Scheme
	kinds *api.Kinds
}

// ConvertToVersion implements runtime.ObjectConvertor.
func (v versionConverter) ConvertToVersion(in runtime.Object, target runtime.GroupVersioner) (runtime.Object, error) {
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
	wanted, isVersion := target.(schema.GroupVersion)
	if !isVersion || !isObject || wanted == gvk.GroupVersion() {
		return in, nil
	}
	table := v.kinds.Table()
	kind := table.ByGVK(gvk)
	if kind == nil || kind.Serving.Virtual {
		return in, nil // a subresource's body, which has one version
	}
	for _, k := range table.All() {
		if k.Storage == kind.Storage && k.GVK.GroupVersion() == wanted {
			return convertVersion(kind, k, obj)
		}
	}
	// The field manager drops the ownership of fields in a version that is not served.
	return nil, runtime.NewNotRegisteredGVKErrForTarget("the table of kinds", gvk, target)
}

// convertVersion returns an object of the kind source, converted to the kind target. Both kinds are
// versions of the same stored objects.
func convertVersion(source, target *api.Kind, obj api.Object) (api.Object, error) {
	ctx, hub := context.Background(), source.Storage.Hub.GVK
	if source.GVK != hub {
		var err error
		if obj, err = source.Conversion.To(ctx, obj); err != nil {
			return nil, fmt.Errorf("converting from %s to %s: %w", source.GVK, hub, err)
		}
		obj.GetObjectKind().SetGroupVersionKind(hub)
	}
	if target.GVK == hub {
		return obj, nil
	}
	out, err := target.Conversion.From(ctx, []api.Object{obj})
	if err != nil {
		return nil, fmt.Errorf("converting from %s to %s: %w", hub, target.GVK, err)
	}
	target.SetTypeMeta(out[0])
	return out[0], nil
}

// IsSystemUser reports whether a user is a component of Keelson: a controller, the scheduler or a
// node.
func IsSystemUser(u api.User) bool {
	switch u.Name {
	case api.UserController, api.UserScheduler, api.UserAPIServer:
		return true
	}
	return strings.HasPrefix(u.Name, api.NodeUserPrefix)
}
