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

// Resource is how a resource of custom objects is called and what it has.
type Resource struct {
	Group      string
	Kind       string
	Plural     string
	Singular   string
	ShortNames []string
	Categories []string
	Namespaced bool
}

// NewStorage is where the objects of a resource lie, below its group. hub is the version in which they are written,
// known are those in which they may have been written before.
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

// NewKind starts the kind of a served version of a resource. What follows from its schema, and the conversion where the
// version is not that of the hub, are the caller's to add. With status, the object and its status are written apart.
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
		// A strategic merge needs a Go type, which says how lists are merged.
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

// keepAllButStatus lets a write to the status change that and nothing else, the metadata included.
func keepAllButStatus(obj, old api.Object) {
	o, was := obj.(*Object), old.(*Object)
	status, managed, rv := o.Content[statusField], o.ManagedFields, o.ResourceVersion
	was.ObjectMeta.DeepCopyInto(&o.ObjectMeta)
	o.ManagedFields, o.ResourceVersion = managed, rv
	o.Content = was.Content
	o.Set(statusField, status)
}

// validateMetaUpdate judges what may change of metadata. That a body may leave its resourceVersion out is the
// registry's business.
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
