package registry

import (
	"fmt"
	"reflect"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// typedList builds the kind's list type. The item structs are copied, what hangs
// below them is shared; items carry no apiVersion and kind, as in Kubernetes.
func typedList(k *api.Kind, lm metav1.ListMeta, items []api.Object) (runtime.Object, error) {
	list := k.NewList()
	m, err := meta.ListAccessor(list)
	if err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("listing %s: %w", k.Resource, err))
	}
	m.SetResourceVersion(lm.ResourceVersion)
	m.SetContinue(lm.Continue)
	m.SetRemainingItemCount(lm.RemainingItemCount)
	list.GetObjectKind().SetGroupVersionKind(k.ListGVK())
	field := reflect.ValueOf(list).Elem().FieldByName("Items")
	if !field.IsValid() || field.Kind() != reflect.Slice {
		return nil, apierrors.NewInternalError(fmt.Errorf("listing %s: %T has no items", k.Resource, list))
	}
	out := reflect.MakeSlice(field.Type(), len(items), len(items))
	for i, o := range items {
		el := out.Index(i)
		el.Set(reflect.ValueOf(o).Elem())
		el.Addr().Interface().(runtime.Object).GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	}
	field.Set(out)
	return list, nil
}
