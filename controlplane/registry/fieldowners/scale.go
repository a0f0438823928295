package fieldowners

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"keelson.dev/keelson/controlplane/api"
)

// A subresource with its own type (scale) shows one field of its parent object: the number of
// replicas. The ownership of that field is stored in the managedFields of the parent object. It is
// translated to and from the managedFields of the Scale.

// replicasPath returns the path of the number of replicas in the parent object of a scale
// subresource, by API version.
func replicasPath(k *api.Kind, s *api.Subresource) managedfields.ResourcePathMappings {
	at := fieldpath.MakePathOrDie("spec", "replicas")
	if s.Replicas != nil {
		at = nil
		for _, name := range s.Replicas {
			at = append(at, fieldpath.PathElement{FieldName: &name})
		}
	}
	return managedfields.ResourcePathMappings{k.GVK.GroupVersion().String(): at}
}

// SubresourceBody returns the subresource object (a Scale) of the parent object obj. Its
// managedFields are translated from those of obj.
func SubresourceBody(k *api.Kind, s *api.Subresource, obj api.Object) (api.Object, error) {
	body, ok := s.View(obj).DeepCopyObject().(api.Object)
	if !ok {
		return nil, fmt.Errorf("a %T has no managedFields", s.View(obj))
	}
	entries, err := managedfields.NewScaleHandler(obj.GetManagedFields(), k.GVK.GroupVersion(),
		replicasPath(k, s)).ToSubresource()
	if err != nil {
		return nil, fmt.Errorf("reading managedFields: %w", err)
	}
	body.SetManagedFields(entries)
	return body, nil
}

// SetParentEntries sets the managedFields of the parent object obj after a write of its
// subresource. They are the managedFields previous, which obj had before the write, updated with
// those of the written subresource object body.
func SetParentEntries(
	k *api.Kind, s *api.Subresource, obj api.Object, previous []metav1.ManagedFieldsEntry, body api.Object,
) error {
	entries, err := managedfields.NewScaleHandler(previous, k.GVK.GroupVersion(), replicasPath(k, s)).ToParent(
		body.GetManagedFields())
	if err != nil {
		return fmt.Errorf("writing managedFields: %w", err)
	}
	obj.SetManagedFields(entries)
	return nil
}
