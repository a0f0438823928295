// Package volumeattributes modifies volumes when a PersistentVolumeClaim names another
// VolumeAttributesClass. For drivers that the agents serve (engine.IsServedByAgent) it calls
// the driver through the agent of a node that can reach the volume. For other drivers, the resizer
// of the driver does this.
//
// The target class is stored in the claim's status before the driver is called. A new leader
// repeats the call for that class. If the claim names yet another class, that class is applied only
// after the driver has responded.
package volumeattributes

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/controllers/engine"
)

// infeasibleFor is the retry delay after a driver has reported that it cannot apply a
// VolumeAttributesClass.
const infeasibleFor = 5 * time.Minute

// Step is the next step for a claim: a status to write, or a call of the driver. At most one of
// Status and Modify is set.
type Step struct {
	Status *corev1.PersistentVolumeClaimStatus
	// Modify is the class that the driver must apply to the volume. The call may be repeated.
	Modify *storagev1.VolumeAttributesClass
	// After is the delay until PlanModification must be called again; 0 means never.
	After time.Duration
	// Warning, Reason and Message are an event to record after the write of Status. Without a
	// Status, the event reports what the claim waits for.
	Warning         bool
	Reason, Message string
}

// PlanModification returns the next step of claim c. v is the volume to which c is bound, or nil.
// classes returns a VolumeAttributesClass by name, or nil. served reports whether this controller
// modifies volumes of the driver.
func PlanModification(
	c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume,
	classes func(name string) *storagev1.VolumeAttributesClass, served bool, now time.Time,
) Step {
	if v == nil || c.DeletionTimestamp != nil || c.Status.Phase != corev1.ClaimBound || c.Spec.VolumeName != v.Name ||
		v.Spec.ClaimRef == nil || v.Spec.ClaimRef.UID != c.UID {
		return Step{}
	}
	want, has, state := ptr.Deref(c.Spec.VolumeAttributesClassName, ""),
		ptr.Deref(c.Status.CurrentVolumeAttributesClassName, ""), c.Status.ModifyVolumeStatus
	switch {
	case state == nil && (want == has || want == ""):
		return Step{}
	case v.Spec.CSI == nil:
		return Step{Warning: true, Reason: "VolumeModifyFailed",
			Message: fmt.Sprintf("volume %s does not belong to a CSI driver: VolumeAttributesClass %q cannot be "+
				"applied", v.Name, want)}
	case !served:
		return Step{Reason: "ExternalModifying",
			Message: fmt.Sprintf("waiting for an external controller to apply to volume %s VolumeAttributesClass %q: "+
				"the controller of CSI driver %s", v.Name, want, v.Spec.CSI.Driver)}
	}
	asked := state != nil && state.Status == corev1.PersistentVolumeClaimModifyVolumeInProgress
	if asked && !hasFinalAnswer(c) {
		// The call for the stored class may still be in progress: finish it before applying the
		// class that the claim names now.
		if class := classes(state.TargetVolumeAttributesClassName); class != nil {
			return Step{Modify: class}
		}
	}
	// the driver was not called for the stored class
	never := state != nil && state.Status == corev1.PersistentVolumeClaimModifyVolumePending
	if want == "" || want == has && never {
		return settledStep(c, c.Status.CurrentVolumeAttributesClassName, "VolumeModifyCanceled",
			fmt.Sprintf("the modification of volume %s is canceled", v.Name))
	}
	class := classes(want)
	if class == nil {
		return pendingStep(c, want)
	}
	known := state != nil && state.TargetVolumeAttributesClassName == want
	refusedBefore := known && state.Status == corev1.PersistentVolumeClaimModifyVolumeInfeasible
	left := infeasibleFor - now.Sub(lastFailureTime(c))
	switch {
	case class.DriverName != v.Spec.CSI.Driver && refusedBefore:
		return Step{}
	case class.DriverName != v.Spec.CSI.Driver:
		return refusedStep(c, want, engine.ClassDriverMismatch(class, v.Spec.CSI.Driver), codes.InvalidArgument, now)
	case refusedBefore && left > 0:
		return Step{After: left}
	case known && asked:
		return Step{Modify: class}
	}
	return startedStep(c, v.Name, want, now)
}

// startedStep returns the step that stores the target class before the driver is called.
func startedStep(c *corev1.PersistentVolumeClaim, volume, class string, now time.Time) Step {
	s := c.Status.DeepCopy()
	s.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{TargetVolumeAttributesClassName: class,
		Status: corev1.PersistentVolumeClaimModifyVolumeInProgress}
	s.Conditions = slices.DeleteFunc(s.Conditions, ofModifying)
	setTrueCondition(s, corev1.PersistentVolumeClaimVolumeModifyingVolume, "",
		fmt.Sprintf("Modifying volume to %q is in progress.", class), now)
	return Step{Status: s, Reason: "VolumeModify",
		Message: fmt.Sprintf("volume %s gets the attributes of VolumeAttributesClass %s", volume, class)}
}

// pendingStep returns the step of a claim that names a class that does not exist.
func pendingStep(c *corev1.PersistentVolumeClaim, class string) Step {
	step := Step{Warning: true, Reason: "VolumeModifyFailed",
		Message: fmt.Sprintf("VolumeAttributesClass %q does not exist: create it, or set another class in the claim",
			class)}
	s := c.Status.DeepCopy()
	s.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{TargetVolumeAttributesClassName: class,
		Status: corev1.PersistentVolumeClaimModifyVolumePending}
	s.Conditions = slices.DeleteFunc(s.Conditions, ofModifying)
	if !equality.Semantic.DeepEqual(*s, c.Status) {
		step.Status = s
	}
	return step
}

// Modified returns the step of claim c after the driver has applied a class to its volume.
func Modified(c *corev1.PersistentVolumeClaim, volume, class string) Step {
	return settledStep(c, &class, "VolumeModifySuccessful",
		fmt.Sprintf("volume %s has the attributes of VolumeAttributesClass %s", volume, class))
}

// Failed returns the step of claim c after a call of the driver for class has failed, or its result
// is unknown. code is the gRPC code of err.
func Failed(c *corev1.PersistentVolumeClaim, class string, err error, code codes.Code, now time.Time) Step {
	switch code {
	case codes.InvalidArgument, codes.Unimplemented:
		return refusedStep(c, class, err, code, now)
	}
	s := c.Status.DeepCopy()
	words := fmt.Sprintf("Modifying volume to %q is still in progress.", class)
	if isFinalCode(code) {
		words = fmt.Sprintf("Modifying volume to %q failed. Waiting for retry.", class)
	}
	setTrueCondition(s, corev1.PersistentVolumeClaimVolumeModifyingVolume, "", words, now)
	setTrueCondition(s, corev1.PersistentVolumeClaimVolumeModifyVolumeError, code.String(),
		engine.DriverErrorText(err), now)
	return failureStep(c, s, class, err)
}

// refusedStep returns the step of claim c after the driver has refused to apply class to the
// volume. The step sets the status of the modification to Infeasible and records err, which has the
// gRPC code code, in a condition and an event.
func refusedStep(c *corev1.PersistentVolumeClaim, class string, err error, code codes.Code, now time.Time) Step {
	s := c.Status.DeepCopy()
	s.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{TargetVolumeAttributesClassName: class,
		Status: corev1.PersistentVolumeClaimModifyVolumeInfeasible}
	s.Conditions = slices.DeleteFunc(s.Conditions, ofModifying)
	setTrueCondition(s, corev1.PersistentVolumeClaimVolumeModifyVolumeError, code.String(),
		engine.DriverErrorText(err), now)
	return failureStep(c, s, class, err)
}

func failureStep(c *corev1.PersistentVolumeClaim, s *corev1.PersistentVolumeClaimStatus, class string, err error) Step {
	step := Step{Warning: true, Reason: "VolumeModifyFailed",
		Message: fmt.Sprintf("VolumeAttributesClass %s could not be applied: %s", class, engine.DriverErrorText(err))}
	if !equality.Semantic.DeepEqual(*s, c.Status) {
		step.Status = s
	}
	return step
}

// settledStep returns the step that ends a modification: it sets class as the current class of
// claim c, and removes the status and conditions of the modification.
func settledStep(c *corev1.PersistentVolumeClaim, class *string, reason, message string) Step {
	s := c.Status.DeepCopy()
	s.ModifyVolumeStatus, s.CurrentVolumeAttributesClassName = nil, class
	s.Conditions = slices.DeleteFunc(s.Conditions, ofModifying)
	return Step{Status: s, Reason: reason, Message: message}
}

// hasFinalAnswer reports whether the last error of the driver, in the conditions of claim c, means
// that no modification is in progress any more.
func hasFinalAnswer(c *corev1.PersistentVolumeClaim) bool {
	return slices.ContainsFunc(c.Status.Conditions, func(e corev1.PersistentVolumeClaimCondition) bool {
		if e.Type != corev1.PersistentVolumeClaimVolumeModifyVolumeError || e.Status != corev1.ConditionTrue {
			return false
		}
		for code := codes.OK; code <= codes.Unauthenticated; code++ {
			if code.String() == e.Reason {
				return isFinalCode(code)
			}
		}
		return false
	})
}

// isFinalCode reports whether an error with this gRPC code means that the call is not in progress
// any more.
func isFinalCode(code codes.Code) bool {
	switch code {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.ResourceExhausted, codes.Aborted,
		codes.Unknown, codes.Internal:
		return false
	}
	return true
}

// lastFailureTime returns the time of the last failed modification in the conditions of claim c, or
// the zero time.
func lastFailureTime(c *corev1.PersistentVolumeClaim) time.Time {
	for _, e := range c.Status.Conditions {
		if e.Type == corev1.PersistentVolumeClaimVolumeModifyVolumeError {
			return e.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

func ofModifying(c corev1.PersistentVolumeClaimCondition) bool {
	return c.Type == corev1.PersistentVolumeClaimVolumeModifyVolumeError ||
		c.Type == corev1.PersistentVolumeClaimVolumeModifyingVolume
}

// setTrueCondition sets the condition of this type to True. If it already has the same reason and
// message, it is not changed.
func setTrueCondition(
	s *corev1.PersistentVolumeClaimStatus, kind corev1.PersistentVolumeClaimConditionType,
	reason, words string, now time.Time,
) {
	next := corev1.PersistentVolumeClaimCondition{Type: kind, Status: corev1.ConditionTrue, Reason: reason,
		Message: words, LastTransitionTime: metav1.NewTime(now)}
	i := slices.IndexFunc(s.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool { return c.Type == kind })
	switch {
	case i < 0:
		s.Conditions = append(s.Conditions, next)
	case s.Conditions[i].Status != next.Status || s.Conditions[i].Reason != reason || s.Conditions[i].Message != words:
		s.Conditions[i] = next
	}
}
