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

// Resource describes a resource of custom objects: its names and its scope.
type Resource struct {
	Group      string
	Kind       string
	Plural     string
	Singular   string
	ShortNames []string
	Categories []string
	Namespaced bool
}

// NewStorage returns the storage of a resource, with a key prefix for its API group. Objects are
// written in hubVersion. knownVersions are the other versions in which stored objects may exist.
func NewStorage(resource Resource, hubVersion string, knownVersions ...string) *api.Storage {
	version := func(v string) api.Version {
		gvk := schema.GroupVersionKind{Group: resource.Group, Version: v, Kind: resource.Kind}
		return api.Version{GVK: gvk, New: New, Shallow: api.ShallowOf[Object, *Object]}
	}
	prefix := api.StorageRoot + resource.Group + "/" + resource.Plural + "/"
	s := &api.Storage{Prefix: prefix, Namespaced: resource.Namespaced, Hub: version(hubVersion)}
	for _, v := range knownVersions {
		s.Known = append(s.Known, version(v))
	}
	return s
}

// NewKind returns the kind of one served version of a resource. The caller adds the parts that
// depend on the schema, and the conversion if the version is not the hub. hasStatus makes status a
// subresource, so that the object and its status are written separately.
func NewKind(resource Resource, version string, hasStatus bool, storage *api.Storage) *api.Kind {
	k := &api.Kind{
		GVK:        schema.GroupVersionKind{Group: resource.Group, Version: version, Kind: resource.Kind},
		Resource:   resource.Plural,
		Namespaced: resource.Namespaced,
		Naming: api.KindNaming{Singular: resource.Singular, ShortNames: resource.ShortNames,
			Categories: resource.Categories},
		Type:    api.GoType{New: New, NewList: NewList, Ops: Ops(hasStatus)},
		Storage: storage,
		Writes:  api.WriteRules{Conditional: true},
		Validation: api.Validation{
			Object: func(o api.Object) field.ErrorList {
				fldPath := field.NewPath("metadata")
				return validation.ValidateObjectMetaAccessor(o, resource.Namespaced, validation.NameIsDNSSubdomain,
					fldPath)
			},
			Update: validateMetaUpdate,
		},
		Schema: api.KindSchema{
			// A strategic merge patch needs a Go type, which defines how lists are merged.
			PatchTypes: []patch.PatchType{patch.JSONPatchType, patch.MergePatchType, patch.ApplyYAMLPatchType},
			Types: func() managedfields.TypeConverter {
				return NewTypeConverter(managedfields.NewDeducedTypeConverter())
			},
		},
		Lists: api.ListRules{
			Columns: []metav1.TableColumnDefinition{
				{Name: "Name", Type: "string", Format: "name", Description: metav1.ObjectMeta{}.SwaggerDoc()["name"]},
				{Name: "Age", Type: "string", Description: metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"]},
			},
			Row: func(o api.Object, now time.Time) []any { return []any{o.GetName(), objectAge(o, now)} },
		},
	}
	k.Writes.PrepareCreate = func(o api.Object) {
		if hasStatus {
			k.Type.Ops.SetStatus(o, nil)
		}
		o.SetGeneration(1)
	}
	if hasStatus {
		k.Writes.PrepareUpdate = func(obj, old api.Object) { k.Type.Ops.SetStatus(obj, old) }
		k.Subresources = map[string]*api.Subresource{"status": {
			Verbs: []string{"get", "patch", "update"}, PrepareUpdate: keepAllButStatus,
			ValidateUpdate: validateMetaUpdate,
		}}
	}
	return k
}

// keepAllButStatus resets everything in obj but the status, including the metadata, to the values
// in stored. The managedFields and the resourceVersion of obj are kept. It is the update rule of
// the status subresource.
func keepAllButStatus(obj, stored api.Object) {
	o, previous := obj.(*Object), stored.(*Object)
	status, managed, rv := o.Content[statusField], o.ManagedFields, o.ResourceVersion
	previous.ObjectMeta.DeepCopyInto(&o.ObjectMeta)
	o.ManagedFields, o.ResourceVersion = managed, rv
	o.Content = previous.Content
	o.Set(statusField, status)
}

// validateMetaUpdate validates a change of the metadata. It accepts an omitted resourceVersion,
// which the registry checks.
func validateMetaUpdate(obj, old api.Object) field.ErrorList {
	var errs field.ErrorList
	for _, e := range validation.ValidateObjectMetaAccessorUpdate(obj, old, field.NewPath("metadata")) {
		if e.Field != "metadata.resourceVersion" {
			errs = append(errs, e)
		}
	}
	return errs
}

func objectAge(o api.Object, now time.Time) string {
	made := o.GetCreationTimestamp()
	if made.IsZero() {
		return "<unknown>"
	}
	return duration.HumanDuration(now.Sub(made.Time))
}
