package registry

import (
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// typedList returns the kind's list type. It copies the item structs; nested data is shared. Items
// have no apiVersion and kind, as in Kubernetes.
func typedList(k *api.Kind, lm metav1.ListMeta, items []api.Object) (runtime.Object, error) {
	list := k.Ops.List(items)
	m, err := meta.ListAccessor(list)
	if err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("listing %s: %w", k.Resource, err))
	}
	m.SetResourceVersion(lm.ResourceVersion)
	m.SetContinue(lm.Continue)
	m.SetRemainingItemCount(lm.RemainingItemCount)
	list.GetObjectKind().SetGroupVersionKind(k.ListGVK())
	return list, nil
}
