package statefulset

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

var podKind = corev1.SchemeGroupVersion.WithKind("Pod")

func deletesWhenScaled(set *appsv1.StatefulSet) bool {
	p := set.Spec.PersistentVolumeClaimRetentionPolicy
	return p != nil && p.WhenScaled == appsv1.DeletePersistentVolumeClaimRetentionPolicyType
}

func deletesWithSet(set *appsv1.StatefulSet) bool {
	p := set.Spec.PersistentVolumeClaimRetentionPolicy
	return p != nil && p.WhenDeleted == appsv1.DeletePersistentVolumeClaimRetentionPolicyType
}

// namesSet reports whether owner reference r refers to the StatefulSet, with its UID or with the
// UID of a deleted StatefulSet of the same name.
func namesSet(r *metav1.OwnerReference, set *appsv1.StatefulSet) bool {
	return r.APIVersion == kind.GroupVersion().String() && r.Kind == kind.Kind && r.Name == set.Name
}

// namesPod reports whether owner reference r refers to a pod with this name, with any UID.
func namesPod(r *metav1.OwnerReference, pod string) bool {
	return r.APIVersion == podKind.GroupVersion().String() && r.Kind == podKind.Kind && r.Name == pod
}

// isStaleClaim reports whether the garbage collector will delete claim c because its owner was
// deleted. The pod must then not be created before c no longer exists. The owner is a deleted
// StatefulSet with the name of set. While the policy deletes claims on a scale-down, it may also be
// a deleted pod with this name.
func isStaleClaim(set *appsv1.StatefulSet, pod string, c *corev1.PersistentVolumeClaim) bool {
	for i := range c.OwnerReferences {
		r := &c.OwnerReferences[i]
		if namesSet(r, set) && r.UID != set.UID || namesPod(r, pod) && deletesWhenScaled(set) {
			return true
		}
	}
	return false
}

// otherController returns the reference of claim c to a controller that is neither the set nor the
// pod. It returns nil if none exists. A set of the same name with another UID counts as another
// controller.
func otherController(set *appsv1.StatefulSet, pod string, c *corev1.PersistentVolumeClaim) *metav1.OwnerReference {
	for i := range c.OwnerReferences {
		r := &c.OwnerReferences[i]
		if namesSet(r, set) && r.UID != set.UID ||
			ptr.Deref(r.Controller, false) && !namesSet(r, set) && !namesPod(r, pod) {
			return r
		}
	}
	return nil
}

// claimOwners returns the owner references that claim c of a pod must have according to the
// retention policy of the set. changed reports whether they differ from the current references.
// condemned is the pod that a scale-down is about to delete, or nil.
//
// The controller of the claim is the condemned pod if whenScaled is Delete. Otherwise it is the
// set, provided that whenDeleted is Delete. In all other cases, the claim has no reference to the
// set or the pod; nor has a claim that another controller manages.
func claimOwners(set *appsv1.StatefulSet, pod string, condemned *corev1.Pod, c *corev1.PersistentVolumeClaim) (
	refs []metav1.OwnerReference, changed bool) {
	var want *metav1.OwnerReference
	switch {
	case otherController(set, pod, c) != nil:
	case condemned != nil && deletesWhenScaled(set):
		want = metav1.NewControllerRef(condemned, podKind)
	case deletesWithSet(set):
		want = metav1.NewControllerRef(set, kind)
	}
	for i := range c.OwnerReferences {
		r := &c.OwnerReferences[i]
		switch {
		case r.UID == set.UID, namesPod(r, pod):
			if want == nil || r.UID != want.UID || !ptr.Deref(r.Controller, false) {
				changed = true
				continue
			}
			want = nil
		}
		refs = append(refs, *r)
	}
	if want != nil {
		refs, changed = append(refs, *want), true
	}
	return refs, changed
}
