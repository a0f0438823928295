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

// namesSet reports whether an owner reference names the set, with its UID or with that of a deleted
// set of its name.
func namesSet(r *metav1.OwnerReference, set *appsv1.StatefulSet) bool {
	return r.APIVersion == kind.GroupVersion().String() && r.Kind == kind.Kind && r.Name == set.Name
}

// namesPod reports whether an owner reference names the pod, with any UID.
func namesPod(r *metav1.OwnerReference, pod string) bool {
	return r.APIVersion == podKind.GroupVersion().String() && r.Kind == podKind.Kind && r.Name == pod
}

// isStaleClaim reports whether the garbage collector deletes a claim because of a deleted owner, so
// that no pod of the name may be created before the claim is gone. The owner is a deleted
// StatefulSet of the set's name or, while the policy is to delete claims when the set is scaled
// down, a deleted pod of the pod's name.
func isStaleClaim(set *appsv1.StatefulSet, pod string, c *corev1.PersistentVolumeClaim) bool {
	for i := range c.OwnerReferences {
		r := &c.OwnerReferences[i]
		if namesSet(r, set) && r.UID != set.UID || namesPod(r, pod) && deletesWhenScaled(set) {
			return true
		}
	}
	return false
}

// otherController returns the reference to the controller of a claim that is neither the set nor
// the pod, or nil. A set of the same name with another UID is such a controller.
func otherController(set *appsv1.StatefulSet, pod string, c *corev1.PersistentVolumeClaim) *metav1.OwnerReference {
	for i := range c.OwnerReferences {
		r := &c.OwnerReferences[i]
		if namesSet(r, set) && r.UID != set.UID || ptr.Deref(r.Controller, false) && !namesSet(r, set) && !namesPod(r, pod) {
			return r
		}
	}
	return nil
}

// claimOwners returns the owner references that a claim of a pod must have by the set's retention
// policy, and whether they differ from those that it has. condemned is the pod if the set is scaled
// down below it, otherwise nil.
//
// The controller is the set (whenDeleted: Delete), the condemned pod (whenScaled: Delete), or
// neither of the two. A claim that another controller manages keeps no reference to the set or the
// pod.
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
