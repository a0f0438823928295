package policy

import (
	"fmt"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
)

// PodScale is the number of pods that the controller of a pod requests, with the controller's
// identity.
type PodScale struct {
	Controller types.UID
	Replicas   int
}

// ExpectedPods returns how many pods a budget expects, given the pods that it selects. If
// minAvailable is a number, these are the selected pods themselves. Otherwise they are the replicas
// that the controllers of the pods request. unmanaged are then the names of the pods without a
// controller, which are not counted.
//
// scale returns the scale of a pod's controller, or nil if the controller does not exist.
func ExpectedPods(b *policyv1.PodDisruptionBudget, pods []*corev1.Pod,
	scale func(namespace string, controller *metav1.OwnerReference) (*PodScale, error)) (
	expected int, unmanaged []string, err error) {
	switch {
	case b.Spec.MinAvailable != nil && b.Spec.MinAvailable.Type == intstr.Int:
		return len(pods), nil, nil
	case b.Spec.MinAvailable == nil && b.Spec.MaxUnavailable == nil:
		return 0, nil, nil
	}
	references, controllers := map[types.UID]bool{}, map[types.UID]bool{}
	for _, p := range pods {
		ref := metav1.GetControllerOfNoCopy(p)
		if ref == nil {
			unmanaged = append(unmanaged, p.Name)
			continue
		}
		if references[ref.UID] {
			continue
		}
		references[ref.UID] = true
		s, err := scale(p.Namespace, ref)
		if err != nil {
			return 0, unmanaged, err
		}
		if s == nil {
			return 0, unmanaged, fmt.Errorf("found no controllers for pod %q", p.Name)
		}
		if !controllers[s.Controller] {
			controllers[s.Controller] = true
			expected += s.Replicas
		}
	}
	return expected, unmanaged, nil
}

// ScaleKind returns the kind of a pod's controller, in the version that the owner reference
// contains. It returns an error if the kind is not served or has no subresource "scale".
func ScaleKind(kinds *api.Kinds, controller *metav1.OwnerReference) (*api.Kind, error) {
	gv, err := schema.ParseGroupVersion(controller.APIVersion)
	if err != nil {
		return nil, err
	}
	k := kinds.ByGVK(gv.WithKind(controller.Kind))
	switch {
	case k == nil:
		return nil, fmt.Errorf("no matches for kind %q in version %q", controller.Kind, controller.APIVersion)
	case k.Subresources["scale"] == nil || !k.Namespaced:
		return nil, fmt.Errorf("%s does not implement the scale subresource", k.GroupResource())
	}
	return k, nil
}

// NewPodScale returns the PodScale of a controller. It returns nil if scale belongs to another
// object with the same name but another UID than in the owner reference.
func NewPodScale(scale *autoscalingv1.Scale, controller *metav1.OwnerReference) *PodScale {
	if scale.UID != controller.UID {
		return nil
	}
	return &PodScale{Controller: scale.UID, Replicas: int(scale.Spec.Replicas)}
}

// DesiredHealthy returns how many of the expected pods must be healthy according to a budget.
func DesiredHealthy(budget *policyv1.PodDisruptionBudget, expected int) (int, error) {
	switch {
	case budget.Spec.MinAvailable != nil:
		return intstr.GetScaledValueFromIntOrPercent(budget.Spec.MinAvailable, expected, true)
	case budget.Spec.MaxUnavailable != nil:
		away, err := intstr.GetScaledValueFromIntOrPercent(budget.Spec.MaxUnavailable, expected, true)
		return max(0, expected-away), err
	}
	return 0, nil
}
