// Package volumeexpansion grows the volumes of claims that ask for more. Volumes of drivers that the agents serve
// (controllers.Served) it has their driver grow, by the agent of a node that reaches them; those of other drivers are left
// to the resizer that comes with the driver, which keeps the claim's states until what is left is the nodes' part. That is
// asked of the agents of all nodes where pods use the volume, for every driver; while there is none the claim waits.
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

// Step is what to do next about a claim. At most one of Status, Grow and OnNodes is set.
type Step struct {
	Status *corev1.PersistentVolumeClaimStatus
	// Grow: the driver is to make the volume as large as the claim asks for. Every call can be repeated: what it answers is
	// noted afterwards, and until then the step is the same.
	Grow bool
	// OnNodes: what nodes have of the volume is to grow after it.
	OnNodes bool
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
	state := c.Status.AllocatedResourceStatuses[corev1.ResourceStorage]
	if v.Spec.CSI != nil && onNodes(c) && size.Cmp(has) > 0 && want.Cmp(size) <= 0 {
		return Step{OnNodes: true} // whoever has made the volume larger
	}
	switch {
	case v.Spec.CSI == nil || !served:
		if want.Cmp(size) <= 0 {
			return Step{}
		}
		return Step{Reason: "ExternalExpanding", Message: fmt.Sprintf("waiting for an external controller to expand volume %s to %s: %s", v.Name, want.String(), who(v))}
	case want.Cmp(has) <= 0:
		return settled(c, c.Status.Capacity) // it has enough, or what it asked for was taken back
	case state == corev1.PersistentVolumeClaimNodeResizeInfeasible && want.Cmp(size) <= 0:
		return Step{} // no node can do it: another size may be asked for
	case state != corev1.PersistentVolumeClaimControllerResizeInProgress && state != corev1.PersistentVolumeClaimControllerResizeInfeasible ||
		!equality.Semantic.DeepEqual(c.Status.AllocatedResources[corev1.ResourceStorage], want):
		return Step{Status: resizing(c, now), Reason: "Resizing", Message: fmt.Sprintf("volume %s grows to %s", v.Name, want.String())}
	}
	return Step{Grow: true}
}

// onNodes says that a claim waits for nodes.
func onNodes(c *corev1.PersistentVolumeClaim) bool {
	switch c.Status.AllocatedResourceStatuses[corev1.ResourceStorage] {
	case corev1.PersistentVolumeClaimNodeResizePending, corev1.PersistentVolumeClaimNodeResizeInProgress:
		return true
	case "": // a resizer from before there were such states
		return slices.ContainsFunc(c.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool {
			return c.Type == corev1.PersistentVolumeClaimFileSystemResizePending && c.Status == corev1.ConditionTrue
		})
	}
	return false
}

// Grown is the step after the driver has made a volume as large as it is now. byNodes says that nodes have to follow.
func Grown(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume, byNodes bool, now time.Time) Step {
	size := v.Spec.Capacity[corev1.ResourceStorage]
	if byNodes {
		s := c.Status.DeepCopy()
		state(s, corev1.PersistentVolumeClaimNodeResizePending)
		condition(s, corev1.PersistentVolumeClaimFileSystemResizePending, "Waiting for user to (re-)start a pod to finish file system resize of volume on node.", now)
		return Step{Status: s, Reason: "FileSystemResizeRequired", Message: fmt.Sprintf("volume %s has %s: what its node has of it grows after it", v.Name, size.String())}
	}
	step := settled(c, v.Spec.Capacity)
	step.Reason, step.Message = "VolumeResizeSuccessful", fmt.Sprintf("volume %s has %s", v.Name, size.String())
	return step
}

// Failed is the step after a driver said no, as far as its words change what the claim tells: to the control plane, or to
// a node. infeasible says that asking again for as much is in vain.
func Failed(c *corev1.PersistentVolumeClaim, byNode, infeasible bool, words string, now time.Time) Step {
	s := c.Status.DeepCopy()
	kind, never := corev1.PersistentVolumeClaimControllerResizeError, corev1.PersistentVolumeClaimControllerResizeInfeasible
	if byNode {
		kind, never = corev1.PersistentVolumeClaimNodeResizeError, corev1.PersistentVolumeClaimNodeResizeInfeasible
	}
	condition(s, kind, words, now)
	if infeasible {
		state(s, never)
	}
	if equality.Semantic.DeepEqual(*s, c.Status) {
		return Step{}
	}
	return Step{Status: s}
}

func state(s *corev1.PersistentVolumeClaimStatus, to corev1.ClaimResourceStatus) {
	if s.AllocatedResourceStatuses == nil {
		s.AllocatedResourceStatuses = map[corev1.ResourceName]corev1.ClaimResourceStatus{}
	}
	s.AllocatedResourceStatuses[corev1.ResourceStorage] = to
}

// condition has a condition be true, in the place of what else was said of the growth but that it goes on.
func condition(s *corev1.PersistentVolumeClaimStatus, kind corev1.PersistentVolumeClaimConditionType, words string, now time.Time) {
	keep := func(t corev1.PersistentVolumeClaimConditionType) bool {
		if kind == corev1.PersistentVolumeClaimNodeResizeError {
			return t == corev1.PersistentVolumeClaimFileSystemResizePending
		}
		return t == corev1.PersistentVolumeClaimResizing && kind == corev1.PersistentVolumeClaimControllerResizeError
	}
	next := corev1.PersistentVolumeClaimCondition{Type: kind, Status: corev1.ConditionTrue, Message: words, LastTransitionTime: metav1.NewTime(now)}
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
	state(s, corev1.PersistentVolumeClaimControllerResizeInProgress)
	condition(s, corev1.PersistentVolumeClaimResizing, "", now)
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
	switch c.Type {
	case corev1.PersistentVolumeClaimResizing, corev1.PersistentVolumeClaimFileSystemResizePending,
		corev1.PersistentVolumeClaimControllerResizeError, corev1.PersistentVolumeClaimNodeResizeError:
		return true
	}
	return false
}

func with(l corev1.ResourceList, size resource.Quantity) corev1.ResourceList {
	if l == nil {
		l = corev1.ResourceList{}
	}
	l[corev1.ResourceStorage] = size
	return l
}
