package crd

import (
	"fmt"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
)

// scaleOf returns the scale subresource with the field paths that a definition specifies.
func scaleOf(s *apiextensionsv1.CustomResourceSubresourceScale) *api.Subresource {
	gvk := autoscalingv1.SchemeGroupVersion.WithKind("Scale")
	return &api.Subresource{
		GVK:      gvk,
		New:      func() runtime.Object { return &autoscalingv1.Scale{} },
		Verbs:    []string{"get", "patch", "update"},
		Replicas: splitPath(s.SpecReplicasPath),
		View: func(o api.Object) runtime.Object {
			content := o.(*custom.Object).Content
			out := &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{
				Name: o.GetName(), Namespace: o.GetNamespace(), UID: o.GetUID(),
				ResourceVersion:   o.GetResourceVersion(),
				CreationTimestamp: o.GetCreationTimestamp(),
			}}
			out.SetGroupVersionKind(gvk)
			// Validation ensures that the values are replica counts.
			wanted, _, _ := unstructured.NestedInt64(content, splitPath(s.SpecReplicasPath)...)
			there, _, _ := unstructured.NestedInt64(content, splitPath(s.StatusReplicasPath)...)
			out.Spec.Replicas, out.Status.Replicas = int32(wanted), int32(there)
			if s.LabelSelectorPath != nil {
				out.Status.Selector, _, _ = unstructured.NestedString(content, splitPath(*s.LabelSelectorPath)...)
			}
			return out
		},
		Merge: func(o api.Object, body runtime.Object) error {
			scale, ok := body.(*autoscalingv1.Scale)
			if !ok {
				return apierrors.NewBadRequest(fmt.Sprintf("wrong object passed to Scale update: %v", body))
			}
			if scale.Spec.Replicas < 0 {
				return apierrors.NewBadRequest(fmt.Sprintf(
					"Scale.autoscaling %q is invalid: spec.replicas: Invalid value: %d: "+
						"must be greater than or equal to 0", o.GetName(), scale.Spec.Replicas))
			}
			obj := o.(*custom.Object) // a private copy
			if obj.Content == nil {
				obj.Content = map[string]any{}
			}
			if err := unstructured.SetNestedField(obj.Content, int64(scale.Spec.Replicas),
				splitPath(s.SpecReplicasPath)...); err != nil {
				return apierrors.NewBadRequest(err.Error())
			}
			return nil
		},
	}
}
