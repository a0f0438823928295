package registry

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/managedfields"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/fieldowners"
	"keelson.dev/keelson/controlplane/registry/objectmeta"
	"keelson.dev/keelson/controlplane/registry/watchcache"
)

// setDefaults sets the default values of obj, unless the write is for a subresource. It must be
// called before the owned fields are recorded, because a writer also owns the fields with default
// values.
func (w *write) setDefaults(subresource string, obj api.Object) {
	if subresource == "" && w.req.Kind.Writes.Default != nil {
		w.req.Kind.Writes.Default(obj)
	}
}

// ownerTracker records in managedFields which fields a write sets.
type ownerTracker struct{ w *write }

func (w *write) fieldOwners() ownerTracker { return ownerTracker{w} }

// fieldManager returns the managedfields.FieldManager for writes to a subresource of the written
// kind. "" means the object itself.
func (o ownerTracker) fieldManager(subresource string) (*managedfields.FieldManager, error) {
	return o.w.registry.fields.Manager(&o.w.served.Fields, o.w.served.Kind, subresource)
}

// trackCreate records the manager of the write as the owner of all fields of the new object.
// Objects created by Keelson's own components are not tracked, because that would take most of the
// time of their creation. The first apply to such an object records the existing fields, as in
// Kubernetes for objects that were created without tracking.
func (o ownerTracker) trackCreate(obj api.Object) {
	w := o.w
	if fieldowners.IsSystemUser(w.req.User) {
		obj.SetManagedFields(nil)
		return
	}
	if n := w.registry.fields.NewObjects(&w.served.Fields, w.served.Kind); n != nil &&
		len(obj.GetManagedFields()) == 0 {
		entries, err := n.Entries(obj, w.manager, w.req.Kind.GVK.GroupVersion().String(),
			objectmeta.ToSeconds(w.registry.currentTime()))
		if err == nil {
			obj.SetManagedFields(entries)
			return
		}
	}
	fm, err := o.fieldManager("")
	if err != nil {
		w.registry.options.Log.Error("field ownership is not recorded", "kind", w.req.Kind.GVK.String(), "error", err)
		return
	}
	empty := w.req.Kind.Type.New()
	w.req.Kind.SetTypeMeta(empty)
	fm.UpdateNoErrors(empty, obj, w.manager)
}

// trackUpdate records in the managedFields of obj which fields the write changed. Objects without
// managedFields stay untracked. Status and binding writes of Keelson's own components are not
// recorded, because an apply to the object cannot change these fields.
func (o ownerTracker) trackUpdate(subresource string, obj, stored api.Object) {
	w := o.w
	if !o.isTracked(subresource, obj, stored) {
		obj.SetManagedFields(stored.GetManagedFields())
		return
	}
	if s := w.req.Kind.Subresources[subresource]; s != nil && s.View != nil {
		o.trackSubresource(s, subresource, obj, stored)
		return
	}
	fm, err := o.fieldManager(subresource)
	if err != nil {
		obj.SetManagedFields(stored.GetManagedFields())
		w.registry.options.Log.Error("field ownership is not recorded", "kind", w.req.Kind.GVK.String(), "error", err)
		return
	}
	fm.UpdateNoErrors(stored, obj, w.manager)
}

// isTracked reports whether a write to a subresource of an object is recorded in its managedFields.
// trackUpdate lists the exceptions.
func (o ownerTracker) isTracked(subresource string, obj, old api.Object) bool {
	untracked := len(old.GetManagedFields()) == 0 && len(obj.GetManagedFields()) == 0
	report := subresource == "status" || subresource == "binding"
	return !untracked && !(report && fieldowners.IsSystemUser(o.w.req.User))
}

// trackSubresource records in the managedFields of the parent object obj that the write changed a
// field through the subresource s, which has its own type (scale). old is the stored parent object.
// Failures are logged only.
func (o ownerTracker) trackSubresource(s *api.Subresource, subresource string, obj, old api.Object) {
	w := o.w
	obj.SetManagedFields(old.GetManagedFields())
	track := func() error {
		fm, err := o.fieldManager(subresource)
		if err != nil {
			return err
		}
		before, err := fieldowners.SubresourceBody(w.req.Kind, s, old)
		if err != nil {
			return err
		}
		after, err := fieldowners.SubresourceBody(w.req.Kind, s, obj)
		if err != nil {
			return err
		}
		fm.UpdateNoErrors(before, after, w.manager)
		return fieldowners.SetParentEntries(w.req.Kind, s, obj, old.GetManagedFields(), after)
	}
	if err := track(); err != nil {
		w.registry.options.Log.Error("field ownership is not recorded", "kind", w.req.Kind.GVK.String(), "subresource",
			subresource, "error", err)
	}
}

// encodeObject returns the bytes to store for an object in the hub version. Its managedFields are
// written in the compact encoding if that is allowed. stored is the replaced entry, or nil: its
// managedFields in an unknown encoding are kept.
func (o ownerTracker) encodeObject(obj api.Object, stored *watchcache.Entry) ([]byte, error) {
	var unknown []metav1.ManagedFieldsEntry
	if stored != nil && stored.Unknown != nil {
		unknown = *stored.Unknown
	}
	shown := obj.GetManagedFields()
	obj.SetManagedFields(fieldowners.StoredEntries(shown, o.w.registry.compactFieldsAllowed(), unknown))
	defer obj.SetManagedFields(shown)
	return o.w.served.Codec().Encode(obj)
}
