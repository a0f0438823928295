// Package volumeexpansion grows the volumes of claims that ask for more. Volumes of drivers that the agents serve
// (controllers.Served) it has their driver grow, by the agent of a node that reaches them; those of other drivers are left
// to the resizer that comes with the driver, which keeps the claim's states.
package volumeexpansion

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Step is what to do next about a claim. At most one of Status and Volume is set.
type Step struct {
	Status *corev1.PersistentVolumeClaimStatus
	Volume *corev1.PersistentVolume // as it is to be written once its driver has grown it
	// Event is told of once what is written has been written.
	Reason, Message string
}

// Plan decides the next step of a claim with the volume that it is bound to; nil where there is none. served says that
// the volume's driver is.
func Plan(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume, served bool, now time.Time) Step {
	if v == nil || c.DeletionTimestamp != nil || c.Status.Phase != corev1.ClaimBound || c.Spec.VolumeName != v.Name ||
		v.Spec.ClaimRef == nil || v.Spec.ClaimRef.UID != c.UID {
		return Step{}
	}
	want, has, size := c.Spec.Resources.Requests[corev1.ResourceStorage], c.Status.Capacity[corev1.ResourceStorage], v.Spec.Capacity[corev1.ResourceStorage]
	if v.Spec.CSI == nil || !served {
		if want.Cmp(size) <= 0 {
			return Step{}
		}
		return Step{Reason: "ExternalExpanding", Message: fmt.Sprintf("waiting for an external controller to expand volume %s to %s: %s", v.Name, want.String(), who(v))}
	}
	switch {
	case want.Cmp(has) <= 0:
		return settled(c, c.Status.Capacity) // it has enough, or what it asked for was taken back
	case c.Status.AllocatedResourceStatuses[corev1.ResourceStorage] != corev1.PersistentVolumeClaimControllerResizeInProgress ||
		!equality.Semantic.DeepEqual(c.Status.AllocatedResources[corev1.ResourceStorage], want):
		return Step{Status: resizing(c, now), Reason: "Resizing", Message: fmt.Sprintf("volume %s grows to %s", v.Name, want.String())}
	case size.Cmp(want) < 0:
		next := v.DeepCopy()
		next.Spec.Capacity[corev1.ResourceStorage] = want
		return Step{Volume: next}
	}
	step := settled(c, v.Spec.Capacity)
	step.Reason, step.Message = "VolumeResizeSuccessful", fmt.Sprintf("volume %s has %s", v.Name, size.String())
	return step
}

// who is to grow a volume that this cluster does not.
func who(v *corev1.PersistentVolume) string {
	if v.Spec.CSI != nil {
		return "that of CSI driver " + v.Spec.CSI.Driver
	}
	return "nothing in this cluster grows volumes of its kind"
}

// resizing is the claim's status while its volume grows.
func resizing(c *corev1.PersistentVolumeClaim, now time.Time) *corev1.PersistentVolumeClaimStatus {
	s := c.Status.DeepCopy()
	s.AllocatedResources = with(s.AllocatedResources, c.Spec.Resources.Requests[corev1.ResourceStorage])
	if s.AllocatedResourceStatuses == nil {
		s.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{}
	}
	s.AllocatedResourceStatuses[corev1.ResourceStorage] = corev1.PersistentVolumeClaimControllerResizeInProgress
	if !slices.ContainsFunc(s.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool {
		return c.Type == corev1.PersistentVolumeClaimResizing && c.Status == corev1.ConditionTrue
	}) {
		s.Conditions = append(slices.DeleteFunc(s.Conditions, ofResizing), corev1.PersistentVolumeClaimCondition{
			Type: corev1.PersistentVolumeClaimResizing, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now)})
	}
	return s
}

// settled takes away what the status says of a volume that grows, for one that has a capacity.
func settled(c *corev1.PersistentVolumeClaim, capacity corev1.ResourceList) Step {
	s := c.Status.DeepCopy()
	s.Capacity = with(s.Capacity, capacity[corev1.ResourceStorage])
	delete(s.AllocatedResourceStatuses, corev1.ResourceStorage)
	if len(s.AllocatedResourceStatuses) == 0 {
		s.AllocatedResourceStatuses = nil
	}
	if _, ok := s.AllocatedResources[corev1.ResourceStorage]; ok {
		s.AllocatedResources[corev1.ResourceStorage] = c.Spec.Resources.Requests[corev1.ResourceStorage]
	}
	s.Conditions = slices.DeleteFunc(s.Conditions, ofResizing)
	if equality.Semantic.DeepEqual(*s, c.Status) {
		return Step{}
	}
	return Step{Status: s}
}

func ofResizing(c corev1.PersistentVolumeClaimCondition) bool {
	return c.Type == corev1.PersistentVolumeClaimResizing || c.Type == corev1.PersistentVolumeClaimFileSystemResizePending
}

func with(l corev1.ResourceList, size resource.Quantity) corev1.ResourceList {
	if l == nil {
		l = corev1.ResourceList{}
	}
	l[corev1.ResourceStorage] = size
	return l
}
