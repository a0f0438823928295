package watchcache

import (
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// TypedList returns a list of the kind's list type with the given items. It copies the item
// structs; nested data is shared. Items have no apiVersion and kind, as in Kubernetes.
func TypedList(k *api.Kind, listMeta metav1.ListMeta, items []api.Object) (runtime.Object, error) {
	list := k.Type.Ops.List(items)
	m, err := meta.ListAccessor(list)
	if err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("listing %s: %w", k.Resource, err))
	}
	m.SetResourceVersion(listMeta.ResourceVersion)
	m.SetContinue(listMeta.Continue)
	m.SetRemainingItemCount(listMeta.RemainingItemCount)
	list.GetObjectKind().SetGroupVersionKind(k.ListGVK())
	return list, nil
}
