// Package volumeexpansion expands the volumes of PersistentVolumeClaims that request more storage.
// For drivers that the agents serve (engine.IsServedByAgent) it calls the driver through the
// agent of a node that can reach the volume. For other drivers, the resizer of the driver does that
// part and maintains the claim's status. Then, for every driver, this controller requests the
// expansion on nodes from the agents of all nodes with pods that use the volume. If there is no
// such node, the claim waits.
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

// Step is the next step for a claim: a status to write, or an expansion. At most one of Status,
// Grow and OnNodes is set.
type Step struct {
	Status *corev1.PersistentVolumeClaimStatus
	// Grow means that the driver must expand the volume to the requested size. The call may be
	// repeated, because its result is stored only afterwards.
	Grow bool
	// OnNodes means that the nodes that have the volume mounted must expand it.
	OnNodes bool
	// Reason and Message are an event to record after the writes.
	Reason, Message string
}

// PlanExpansion returns the next step of claim c. v is the volume to which c is bound, or nil.
// served reports whether this controller expands volumes of the driver.
func PlanExpansion(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume, served bool, now time.Time) Step {
	if v == nil || c.DeletionTimestamp != nil || c.Status.Phase != corev1.ClaimBound || c.Spec.VolumeName != v.Name ||
		v.Spec.ClaimRef == nil || v.Spec.ClaimRef.UID != c.UID {
		return Step{}
	}
	want, has, size := c.Spec.Resources.Requests[corev1.ResourceStorage], c.Status.Capacity[corev1.ResourceStorage],
		v.Spec.Capacity[corev1.ResourceStorage]
	state := c.Status.AllocatedResourceStatuses[corev1.ResourceStorage]
	if v.Spec.CSI != nil && onNodes(c) && size.Cmp(has) > 0 && want.Cmp(size) <= 0 {
		return Step{OnNodes: true} // regardless of which controller expanded the volume
	}
	switch {
	case v.Spec.CSI == nil || !served:
		if want.Cmp(size) <= 0 {
			return Step{}
		}
		return Step{Reason: "ExternalExpanding",
			Message: fmt.Sprintf("waiting for an external controller to expand volume %s to %s: %s", v.Name,
				want.String(), responsibleResizer(v))}
	case want.Cmp(has) <= 0:
		return settledStep(c, c.Status.Capacity) // the claim has enough storage, or the request was reduced
	case state == corev1.PersistentVolumeClaimNodeResizeInfeasible && want.Cmp(size) <= 0:
		return Step{} // no node can expand the volume, until a user requests another size
	case state != corev1.PersistentVolumeClaimControllerResizeInProgress &&
		state != corev1.PersistentVolumeClaimControllerResizeInfeasible ||
		!equality.Semantic.DeepEqual(c.Status.AllocatedResources[corev1.ResourceStorage], want):
		return Step{Status: resizingStatus(c, now), Reason: "Resizing",
			Message: fmt.Sprintf("expanding volume %s to %s", v.Name, want.String())}
	}
	return Step{Grow: true}
}

// onNodes reports whether claim c waits for the expansion of its volume on nodes.
func onNodes(c *corev1.PersistentVolumeClaim) bool {
	switch c.Status.AllocatedResourceStatuses[corev1.ResourceStorage] {
	case corev1.PersistentVolumeClaimNodeResizePending, corev1.PersistentVolumeClaimNodeResizeInProgress:
		return true
	case "": // a resizer of a release that does not set allocatedResourceStatuses
		return slices.ContainsFunc(c.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool {
			return c.Type == corev1.PersistentVolumeClaimFileSystemResizePending && c.Status == corev1.ConditionTrue
		})
	}
	return false
}

// Grown returns the step of claim c after the driver has expanded volume v to the size in its spec.
// byNodes reports that nodes must expand it too.
func Grown(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume, byNodes bool, now time.Time) Step {
	size := v.Spec.Capacity[corev1.ResourceStorage]
	if byNodes {
		s := c.Status.DeepCopy()
		setResourceStatus(s, corev1.PersistentVolumeClaimNodeResizePending)
		setTrueCondition(s, corev1.PersistentVolumeClaimFileSystemResizePending,
			"Waiting for user to (re-)start a pod to finish file system resize of volume on node.", now)
		return Step{Status: s, Reason: "FileSystemResizeRequired",
			Message: fmt.Sprintf("volume %s has %s: it is expanded on its node next", v.Name, size.String())}
	}
	step := settledStep(c, v.Spec.Capacity)
	step.Reason, step.Message = "VolumeResizeSuccessful", fmt.Sprintf("volume %s has %s", v.Name, size.String())
	return step
}

// Failed returns the step of claim c after a call of the driver failed, or the zero Step if its
// status does not change. byNode selects the conditions of the expansion on nodes. infeasible means
// that the same request will always fail. words is the message of the condition.
func Failed(c *corev1.PersistentVolumeClaim, byNode, infeasible bool, words string, now time.Time) Step {
	s := c.Status.DeepCopy()
	kind, never := corev1.PersistentVolumeClaimControllerResizeError,
		corev1.PersistentVolumeClaimControllerResizeInfeasible
	if byNode {
		kind, never = corev1.PersistentVolumeClaimNodeResizeError, corev1.PersistentVolumeClaimNodeResizeInfeasible
	}
	setTrueCondition(s, kind, words, now)
	if infeasible {
		setResourceStatus(s, never)
	}
	if equality.Semantic.DeepEqual(*s, c.Status) {
		return Step{}
	}
	return Step{Status: s}
}

func setResourceStatus(s *corev1.PersistentVolumeClaimStatus, to corev1.ClaimResourceStatus) {
	if s.AllocatedResourceStatuses == nil {
		s.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{}
	}
	s.AllocatedResourceStatuses[corev1.ResourceStorage] = to
}

// setTrueCondition sets the condition of this type to True. It removes the other conditions of an
// expansion, except the condition that an expansion is in progress.
func setTrueCondition(
	s *corev1.PersistentVolumeClaimStatus, kind corev1.PersistentVolumeClaimConditionType, words string, now time.Time,
) {
	keep := func(t corev1.PersistentVolumeClaimConditionType) bool {
		if kind == corev1.PersistentVolumeClaimNodeResizeError {
			return t == corev1.PersistentVolumeClaimFileSystemResizePending
		}
		return t == corev1.PersistentVolumeClaimResizing && kind == corev1.PersistentVolumeClaimControllerResizeError
	}
	next := corev1.PersistentVolumeClaimCondition{Type: kind, Status: corev1.ConditionTrue, Message: words,
		LastTransitionTime: metav1.NewTime(now)}
	var out []corev1.PersistentVolumeClaimCondition
	for _, c := range s.Conditions {
		switch {
		case c.Type == kind && c.Status == corev1.ConditionTrue && c.Message == words:
			next = c
		case !ofResizing(c) || keep(c.Type):
			out = append(out, c)
		}
	}
	s.Conditions = append(out, next)
}

// responsibleResizer returns a text that names the controller which must expand volume v. It is
// called only if this controller does not expand v.
func responsibleResizer(v *corev1.PersistentVolume) string {
	if v.Spec.CSI != nil {
		return "that of CSI driver " + v.Spec.CSI.Driver
	}
	return "this cluster cannot expand volumes of its kind"
}

// resizingStatus returns the status of claim c while the driver expands its volume.
func resizingStatus(c *corev1.PersistentVolumeClaim, now time.Time) *corev1.PersistentVolumeClaimStatus {
	s := c.Status.DeepCopy()
	s.AllocatedResources = withSize(s.AllocatedResources, c.Spec.Resources.Requests[corev1.ResourceStorage])
	setResourceStatus(s, corev1.PersistentVolumeClaimControllerResizeInProgress)
	setTrueCondition(s, corev1.PersistentVolumeClaimResizing, "", now)
	return s
}

// settledStep returns the step that ends an expansion: it sets the capacity of claim c, and removes
// the status and conditions of the expansion.
func settledStep(c *corev1.PersistentVolumeClaim, capacity corev1.ResourceList) Step {
	s := c.Status.DeepCopy()
	s.Capacity = withSize(s.Capacity, capacity[corev1.ResourceStorage])
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
	switch c.Type {
	case corev1.PersistentVolumeClaimResizing, corev1.PersistentVolumeClaimFileSystemResizePending,
		corev1.PersistentVolumeClaimControllerResizeError, corev1.PersistentVolumeClaimNodeResizeError:
		return true
	}
	return false
}

func withSize(l corev1.ResourceList, size resource.Quantity) corev1.ResourceList {
	if l == nil {
		l = corev1.ResourceList{}
	}
	l[corev1.ResourceStorage] = size
	return l
}
