// Package volumeattributes gives the volumes of claims the attributes of the VolumeAttributesClass that their claims name.
// Volumes of drivers that the agents serve (controllers.Served) it has their driver change, by the agent of a node that
// reaches them; those of other drivers are left to the resizer that comes with the driver.
//
// What a driver is asked for stands in the claim's status before it is asked: who leads next asks for the same again, and
// goes on to what the claim names by then only once the driver has answered.
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

	"keelson.dev/keelson/controlplane/controllers"
)

// infeasibleFor is how long a class is not asked for again that a driver has said it cannot apply.
const infeasibleFor = 5 * time.Minute

// Step is what to do next about a claim. At most one of Status and Modify is set.
type Step struct {
	Status *corev1.PersistentVolumeClaimStatus
	// Modify: the driver is to give the volume the attributes of this class. Every call can be repeated.
	Modify *storagev1.VolumeAttributesClass
	// After is when to look again.
	After time.Duration
	// Event is told of once what is written has been written; without a Status it says what is waited for.
	Warning         bool
	Reason, Message string
}

// Plan decides the next step of a claim with the volume that it is bound to; nil where there is none. classes finds
// VolumeAttributesClasses, served says that the volume's driver is.
func Plan(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume, classes func(name string) *storagev1.VolumeAttributesClass, served bool, now time.Time) Step {
	if v == nil || c.DeletionTimestamp != nil || c.Status.Phase != corev1.ClaimBound || c.Spec.VolumeName != v.Name ||
		v.Spec.ClaimRef == nil || v.Spec.ClaimRef.UID != c.UID {
		return Step{}
	}
	want, has, state := ptr.Deref(c.Spec.VolumeAttributesClassName, ""), ptr.Deref(c.Status.CurrentVolumeAttributesClassName, ""), c.Status.ModifyVolumeStatus
	switch {
	case state == nil && (want == has || want == ""):
		return Step{}
	case v.Spec.CSI == nil:
		return Step{Warning: true, Reason: "VolumeModifyFailed", Message: fmt.Sprintf("volume %s is of no CSI driver: nothing gives it the attributes of VolumeAttributesClass %q", v.Name, want)}
	case !served:
		return Step{Reason: "ExternalModifying", Message: fmt.Sprintf("waiting for an external controller to give volume %s the attributes of VolumeAttributesClass %q: that of CSI driver %s", v.Name, want, v.Spec.CSI.Driver)}
	}
	asked := state != nil && state.Status == corev1.PersistentVolumeClaimModifyVolumeInProgress
	if asked && !answered(c) {
		// What the driver was asked for may be under way: first that, then what the claim names by now.
		if class := classes(state.TargetVolumeAttributesClassName); class != nil {
			return Step{Modify: class}
		}
	}
	never := state != nil && state.Status == corev1.PersistentVolumeClaimModifyVolumePending // was a driver asked
	if want == "" || want == has && never {
		return settled(c, c.Status.CurrentVolumeAttributesClassName, "VolumeModifyCanceled", fmt.Sprintf("volume %s stays as it is", v.Name))
	}
	class := classes(want)
	if class == nil {
		return pending(c, want)
	}
	known := state != nil && state.TargetVolumeAttributesClassName == want
	refusedBefore := known && state.Status == corev1.PersistentVolumeClaimModifyVolumeInfeasible
	left := infeasibleFor - now.Sub(since(c))
	switch {
	case class.DriverName != v.Spec.CSI.Driver && refusedBefore:
		return Step{}
	case class.DriverName != v.Spec.CSI.Driver:
		return refused(c, want, controllers.WrongAttributes(class, v.Spec.CSI.Driver), codes.InvalidArgument, now)
	case refusedBefore && left > 0:
		return Step{After: left}
	case known && asked:
		return Step{Modify: class}
	}
	return begun(c, v.Name, want, now)
}

// begun is the step before a driver is asked for the attributes of a class.
func begun(c *corev1.PersistentVolumeClaim, volume, class string, now time.Time) Step {
	s := c.Status.DeepCopy()
	s.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{TargetVolumeAttributesClassName: class, Status: corev1.PersistentVolumeClaimModifyVolumeInProgress}
	s.Conditions = slices.DeleteFunc(s.Conditions, ofModifying)
	condition(s, corev1.PersistentVolumeClaimVolumeModifyingVolume, "", fmt.Sprintf("Modifying volume to %q is in progress.", class), now)
	return Step{Status: s, Reason: "VolumeModify", Message: fmt.Sprintf("volume %s gets the attributes of VolumeAttributesClass %s", volume, class)}
}

// pending is the step of a claim whose class is not there.
func pending(c *corev1.PersistentVolumeClaim, class string) Step {
	step := Step{Warning: true, Reason: "VolumeModifyFailed", Message: fmt.Sprintf("VolumeAttributesClass %q does not exist: make it, or have the claim name another", class)}
	s := c.Status.DeepCopy()
	s.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{TargetVolumeAttributesClassName: class, Status: corev1.PersistentVolumeClaimModifyVolumePending}
	s.Conditions = slices.DeleteFunc(s.Conditions, ofModifying)
	if !equality.Semantic.DeepEqual(*s, c.Status) {
		step.Status = s
	}
	return step
}

// Modified is the step after a driver has given a volume the attributes of a class.
func Modified(c *corev1.PersistentVolumeClaim, volume, class string) Step {
	return settled(c, &class, "VolumeModifySuccessful", fmt.Sprintf("volume %s has the attributes of VolumeAttributesClass %s", volume, class))
}

// Failed is the step after a driver said no to a class, or did not say.
func Failed(c *corev1.PersistentVolumeClaim, class string, err error, code codes.Code, now time.Time) Step {
	switch code {
	case codes.InvalidArgument, codes.Unimplemented:
		return refused(c, class, err, code, now)
	}
	s := c.Status.DeepCopy()
	words := fmt.Sprintf("Modifying volume to %q is still in progress.", class)
	if final(code) {
		words = fmt.Sprintf("Modifying volume to %q failed. Waiting for retry.", class)
	}
	condition(s, corev1.PersistentVolumeClaimVolumeModifyingVolume, "", words, now)
	condition(s, corev1.PersistentVolumeClaimVolumeModifyVolumeError, code.String(), controllers.Words(err), now)
	return told(c, s, class, err)
}

// refused is the step of a claim whose class cannot be had, as it is.
func refused(c *corev1.PersistentVolumeClaim, class string, err error, code codes.Code, now time.Time) Step {
	s := c.Status.DeepCopy()
	s.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{TargetVolumeAttributesClassName: class, Status: corev1.PersistentVolumeClaimModifyVolumeInfeasible}
	s.Conditions = slices.DeleteFunc(s.Conditions, ofModifying)
	condition(s, corev1.PersistentVolumeClaimVolumeModifyVolumeError, code.String(), controllers.Words(err), now)
	return told(c, s, class, err)
}

func told(c *corev1.PersistentVolumeClaim, s *corev1.PersistentVolumeClaimStatus, class string, err error) Step {
	step := Step{Warning: true, Reason: "VolumeModifyFailed", Message: fmt.Sprintf("VolumeAttributesClass %s is not applied: %s", class, controllers.Words(err))}
	if !equality.Semantic.DeepEqual(*s, c.Status) {
		step.Status = s
	}
	return step
}

// settled takes away what the status says of a volume that is being changed.
func settled(c *corev1.PersistentVolumeClaim, has *string, reason, message string) Step {
	s := c.Status.DeepCopy()
	s.ModifyVolumeStatus, s.CurrentVolumeAttributesClassName = nil, has
	s.Conditions = slices.DeleteFunc(s.Conditions, ofModifying)
	return Step{Status: s, Reason: reason, Message: message}
}

// answered says that the last answer of the driver about a claim that is being changed was final: nothing is under way.
func answered(c *corev1.PersistentVolumeClaim) bool {
	return slices.ContainsFunc(c.Status.Conditions, func(e corev1.PersistentVolumeClaimCondition) bool {
		if e.Type != corev1.PersistentVolumeClaimVolumeModifyVolumeError || e.Status != corev1.ConditionTrue {
			return false
		}
		for code := codes.OK; code <= codes.Unauthenticated; code++ {
			if code.String() == e.Reason {
				return final(code)
			}
		}
		return false
	})
}

// final says of a code that what it answers is not under way any more.
func final(code codes.Code) bool {
	switch code {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.ResourceExhausted, codes.Aborted, codes.Unknown, codes.Internal:
		return false
	}
	return true
}

// since is when a claim was last told of a failure.
func since(c *corev1.PersistentVolumeClaim) time.Time {
	for _, e := range c.Status.Conditions {
		if e.Type == corev1.PersistentVolumeClaimVolumeModifyVolumeError {
			return e.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

func ofModifying(c corev1.PersistentVolumeClaimCondition) bool {
	return c.Type == corev1.PersistentVolumeClaimVolumeModifyVolumeError || c.Type == corev1.PersistentVolumeClaimVolumeModifyingVolume
}

// condition has a condition be true; one that says the same already stays as it is.
func condition(s *corev1.PersistentVolumeClaimStatus, kind corev1.PersistentVolumeClaimConditionType, reason, words string, now time.Time) {
	next := corev1.PersistentVolumeClaimCondition{Type: kind, Status: corev1.ConditionTrue, Reason: reason, Message: words, LastTransitionTime: metav1.NewTime(now)}
	i := slices.IndexFunc(s.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool { return c.Type == kind })
	switch {
	case i < 0:
		s.Conditions = append(s.Conditions, next)
	case s.Conditions[i].Status != next.Status || s.Conditions[i].Reason != reason || s.Conditions[i].Message != words:
		s.Conditions[i] = next
	}
}
