package custom

import (
	"time"

	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	patch "k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// Resource is a resource of custom objects: its names and its scope.
type Resource struct {
	Group      string
	Kind       string
	Plural     string
	Singular   string
	ShortNames []string
	Categories []string
	Namespaced bool
}

// NewStorage returns the storage of a resource, under a prefix of its group. hub is the version in
// which objects are written. known are the versions in which earlier objects may have been written.
func NewStorage(r Resource, hub string, known ...string) *api.Storage {
	version := func(v string) api.Version {
		gvk := schema.GroupVersionKind{Group: r.Group, Version: v, Kind: r.Kind}
		return api.Version{GVK: gvk, New: New, Shallow: api.ShallowOf[Object, *Object]}
	}
	prefix := api.StorageRoot + r.Group + "/" + r.Plural + "/"
	s := &api.Storage{Prefix: prefix, Namespaced: r.Namespaced, Hub: version(hub)}
	for _, v := range known {
		s.Known = append(s.Known, version(v))
	}
	return s
}

// NewKind returns the kind of one served version of a resource, to which the caller adds the parts
// that depend on the schema. The caller also adds the conversion if the version is not the hub.
// With status, the object and its status are written separately.
func NewKind(r Resource, version string, status bool, s *api.Storage) *api.Kind {
	k := &api.Kind{
		GVK:        schema.GroupVersionKind{Group: r.Group, Version: version, Kind: r.Kind},
		Resource:   r.Plural,
		Singular:   r.Singular,
		ShortNames: r.ShortNames,
		Categories: r.Categories,
		Namespaced: r.Namespaced,
		New:        New,
		NewList:    NewList,
		Ops:        Ops(status),
		Storage:    s,

		Conditional: true,
		// A strategic merge patch needs a Go type, which defines how lists are merged.
		PatchTypes: []patch.PatchType{patch.JSONPatchType, patch.MergePatchType, patch.ApplyYAMLPatchType},
		Types:      func() managedfields.TypeConverter { return Types(managedfields.NewDeducedTypeConverter()) },
		Columns: []metav1.TableColumnDefinition{
			{Name: "Name", Type: "string", Format: "name", Description: metav1.ObjectMeta{}.SwaggerDoc()["name"]},
			{Name: "Age", Type: "string", Description: metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"]},
		},
		Row: func(o api.Object, now time.Time) []any { return []any{o.GetName(), age(o, now)} },
		Validate: func(o api.Object) field.ErrorList {
			at := field.NewPath("metadata")
			return validation.ValidateObjectMetaAccessor(o, r.Namespaced, validation.NameIsDNSSubdomain, at)
		},
		ValidateUpdate: validateMetaUpdate,
	}
	k.PrepareCreate = func(o api.Object) {
		if status {
			k.Ops.SetStatus(o, nil)
		}
		o.SetGeneration(1)
	}
	if status {
		k.PrepareUpdate = func(obj, old api.Object) { k.Ops.SetStatus(obj, old) }
		k.Subresources = map[string]*api.Subresource{"status": {
			Verbs: []string{"get", "patch", "update"}, PrepareUpdate: keepAllButStatus, ValidateUpdate: validateMetaUpdate,
		}}
	}
	return k
}

// keepAllButStatus resets everything in obj except the status to old, including the metadata, for a
// write of the status.
func keepAllButStatus(obj, old api.Object) {
	o, was := obj.(*Object), old.(*Object)
	status, managed, rv := o.Content[statusField], o.ManagedFields, o.ResourceVersion
	was.ObjectMeta.DeepCopyInto(&o.ObjectMeta)
	o.ManagedFields, o.ResourceVersion = managed, rv
	o.Content = was.Content
	o.Set(statusField, status)
}

// validateMetaUpdate validates a change of the metadata. The registry handles an omitted
// resourceVersion.
func validateMetaUpdate(obj, old api.Object) field.ErrorList {
	var errs field.ErrorList
	for _, e := range validation.ValidateObjectMetaAccessorUpdate(obj, old, field.NewPath("metadata")) {
		if e.Field != "metadata.resourceVersion" {
			errs = append(errs, e)
		}
	}
	return errs
}

func age(o api.Object, now time.Time) string {
	made := o.GetCreationTimestamp()
	if made.IsZero() {
		return "<unknown>"
	}
	return duration.HumanDuration(now.Sub(made.Time))
}
