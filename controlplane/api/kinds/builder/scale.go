package builder

import (
	"fmt"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// ScaleAccessors give access to the fields of an object that its scale subresource exposes.
type ScaleAccessors struct {
	Replicas func(api.Object) **int32
	Current  func(api.Object) int32
	Selector func(api.Object) *metav1.LabelSelector
}

// AddScale adds the subresource "scale" to a kind.
func AddScale(k *api.Kind, accessors ScaleAccessors) {
	gvk := autoscalingv1.SchemeGroupVersion.WithKind("Scale")
	AddSubresource(k, "scale", &api.Subresource{
		GVK:   gvk,
		New:   func() runtime.Object { return &autoscalingv1.Scale{} },
		Verbs: []string{"get", "patch", "update"},
		View: func(o api.Object) runtime.Object {
			out := &autoscalingv1.Scale{
				ObjectMeta: metav1.ObjectMeta{Name: o.GetName(), Namespace: o.GetNamespace(), UID: o.GetUID(),
					ResourceVersion: o.GetResourceVersion(), CreationTimestamp: o.GetCreationTimestamp()},
				Spec:   autoscalingv1.ScaleSpec{Replicas: ptr.Deref(*accessors.Replicas(o), 0)},
				Status: autoscalingv1.ScaleStatus{Replicas: accessors.Current(o)},
			}
			out.SetGroupVersionKind(gvk)
			if sel, err := metav1.LabelSelectorAsSelector(accessors.Selector(o)); err == nil {
				out.Status.Selector = sel.String()
			}
			return out
		},
		Merge: func(o api.Object, body runtime.Object) error {
			scale, ok := body.(*autoscalingv1.Scale)
			if !ok {
				return apierrors.NewBadRequest(fmt.Sprintf("expected a Scale for %s %q, got %T", k.Resource,
					o.GetName(), body))
			}
			if errs := fieldrules.ValidateNonNegative(scale.Spec.Replicas,
				field.NewPath("spec", "replicas")); len(errs) > 0 {
				return apierrors.NewInvalid(gvk.GroupKind(), o.GetName(), errs)
			}
			if rv := scale.ResourceVersion; rv != "" && rv != o.GetResourceVersion() {
				return apierrors.NewConflict(k.GroupResource(), o.GetName(),
					fmt.Errorf("the object has been modified; please apply your changes to the latest "+
						"version and try again"))
			}
			n := scale.Spec.Replicas
			if p := accessors.Replicas(o); *p == nil || **p != n {
				*p = &n
				o.SetGeneration(o.GetGeneration() + 1)
			}
			return nil
		},
	})
}
