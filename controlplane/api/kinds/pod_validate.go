package kinds

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func validatePod(p *corev1.Pod) field.ErrorList {
	errs := validatePodSpec(&p.Spec, field.NewPath("spec"))
	errs = append(errs, validateOwnClaims(p, field.NewPath("spec", "volumes"))...)
	errs = append(errs, validateApparmorAnnotations(p.Annotations, &p.Spec, field.NewPath("metadata", "annotations"))...)
	if value, mirror := p.Annotations[corev1.MirrorPodAnnotationKey]; mirror && p.Spec.NodeName == "" {
		errs = append(errs, field.Invalid(mirrorAnnotation(), value,
			"must set spec.nodeName if mirror pod annotation is set"))
	}
	return errs
}

func mirrorAnnotation() *field.Path {
	return field.NewPath("metadata", "annotations").Key(corev1.MirrorPodAnnotationKey)
}

// validateMirrorUpdate keeps a pod what it was made as: nothing is granted through mirror pods,
// and they may refer to nothing.
func validateMirrorUpdate(obj, old *corev1.Pod) field.ErrorList {
	now, is := obj.Annotations[corev1.MirrorPodAnnotationKey]
	before, was := old.Annotations[corev1.MirrorPodAnnotationKey]
	switch {
	case is && !was:
		return field.ErrorList{field.Forbidden(mirrorAnnotation(), "may not add mirror pod annotation")}
	case was && (!is || now != before):
		return field.ErrorList{field.Forbidden(mirrorAnnotation(), "may not remove or update mirror pod annotation")}
	}
	return nil
}

const podUpdateRule = "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`," +
	"`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations)," +
	"`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)," +
	"`spec.nodeName` (once), `spec.schedulingGates` (only removals)"

// validatePodUpdate lets little of a pod change: its containers are running.
func validatePodUpdate(obj, old *corev1.Pod) field.ErrorList {
	spec := field.NewPath("spec")
	errs := append(validateMirrorUpdate(obj, old), validateApparmorUpdate(obj, old)...)
	if len(obj.Spec.Containers) != len(old.Spec.Containers) {
		errs = append(errs, field.Forbidden(spec.Child("containers"), "pod updates may not add or remove containers"))
	}
	if len(obj.Spec.InitContainers) != len(old.Spec.InitContainers) {
		errs = append(errs, field.Forbidden(spec.Child("initContainers"), "pod updates may not add or remove containers"))
	}
	if len(errs) > 0 {
		return errs
	}
	errs = append(errs, validateDeadlineUpdate(obj.Spec.ActiveDeadlineSeconds, old.Spec.ActiveDeadlineSeconds, spec.Child("activeDeadlineSeconds"))...)
	errs = append(errs, validateTolerationUpdate(obj.Spec.Tolerations, old.Spec.Tolerations, spec.Child("tolerations"))...)
	errs = append(errs, validateGateUpdate(obj, old, spec.Child("schedulingGates"))...)

	// What may change is made equal; whatever differs then may not.
	now := obj.Spec.DeepCopy()
	for i := range now.Containers {
		now.Containers[i].Image = old.Spec.Containers[i].Image
	}
	for i := range now.InitContainers {
		now.InitContainers[i].Image = old.Spec.InitContainers[i].Image
	}
	now.ActiveDeadlineSeconds = old.Spec.ActiveDeadlineSeconds
	now.Tolerations = old.Spec.Tolerations
	now.SchedulingGates = old.Spec.SchedulingGates
	if len(old.Spec.SchedulingGates) > 0 {
		errs = append(errs, narrowPlacement(now, &old.Spec, spec)...)
	}
	if val(old.Spec.TerminationGracePeriodSeconds) < 0 && val(now.TerminationGracePeriodSeconds) == 1 {
		now.TerminationGracePeriodSeconds = old.Spec.TerminationGracePeriodSeconds
	}
	if old.Spec.NodeName == "" { // F90: binding by patch
		now.NodeName = ""
	}
	if changed := changedFields(*now, old.Spec); len(changed) > 0 {
		errs = append(errs, field.Forbidden(spec, podUpdateRule+"; changed: "+strings.Join(changed, ", ")))
	}
	return errs
}

func validateDeadlineUpdate(now, was *int64, at *field.Path) field.ErrorList {
	switch {
	case was == nil:
		return nil
	case now == nil:
		return field.ErrorList{field.Invalid(at, now, "must not update from a positive integer to nil value")}
	case *now > *was:
		return field.ErrorList{field.Invalid(at, *now, "must be less than or equal to previous value")}
	}
	return nil
}

func validateTolerationUpdate(now, was []corev1.Toleration, at *field.Path) field.ErrorList {
	for _, t := range was {
		// Seconds may change: that is what a node's trouble is answered with.
		kept := slices.ContainsFunc(now, func(n corev1.Toleration) bool {
			n.TolerationSeconds, t.TolerationSeconds = nil, nil
			return n == t
		})
		if !kept {
			return field.ErrorList{field.Forbidden(at, "existing toleration can not be modified except its tolerationSeconds")}
		}
	}
	return nil
}

func validateGateUpdate(obj, old *corev1.Pod, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, g := range obj.Spec.SchedulingGates {
		if !slices.Contains(old.Spec.SchedulingGates, g) {
			errs = append(errs, field.Forbidden(at.Index(i), fmt.Sprintf("only deletion is allowed, but found new scheduling gate '%s'", g.Name)))
		}
	}
	return errs
}

func validateEphemeralUpdate(obj, old *corev1.Pod) field.ErrorList {
	at := field.NewPath("spec", "ephemeralContainers")
	errs := validatePodSpec(&obj.Spec, field.NewPath("spec"))
	now := map[string]corev1.EphemeralContainer{}
	for i, c := range obj.Spec.EphemeralContainers {
		now[c.Name] = c
		if !slices.ContainsFunc(old.Spec.EphemeralContainers, func(o corev1.EphemeralContainer) bool { return o.Name == c.Name }) {
			// Agents would never start it, and 'kubectl debug' would wait for ever.
			errs = append(errs, field.Forbidden(at.Index(i), "nodes of this cluster run no ephemeral containers; 'kubectl debug --copy-to' debugs a copy of the pod instead"))
		}
	}
	for i, c := range old.Spec.EphemeralContainers {
		switch n, ok := now[c.Name]; {
		case !ok:
			errs = append(errs, field.Forbidden(at.Index(i), fmt.Sprintf("existing ephemeral containers %q may not be removed", c.Name)))
		case !semanticEqual(n, c):
			errs = append(errs, field.Forbidden(at.Index(i), fmt.Sprintf("existing ephemeral containers %q may not be changed", c.Name)))
		}
	}
	return errs
}

func validatePodStatusUpdate(obj, old *corev1.Pod) field.ErrorList {
	at := field.NewPath("status")
	var errs field.ErrorList
	if was := old.Status.QOSClass; was != "" && obj.Status.QOSClass != was {
		errs = append(errs, field.Invalid(at.Child("qosClass"), obj.Status.QOSClass, "field is immutable"))
	}
	if was := old.Status.Phase; (was == corev1.PodSucceeded || was == corev1.PodFailed) && obj.Status.Phase != was &&
		obj.Status.Phase != corev1.PodFailed && obj.Status.Phase != corev1.PodSucceeded {
		errs = append(errs, field.Invalid(at.Child("phase"), obj.Status.Phase, fmt.Sprintf("a pod that has %s cannot run again", was)))
	}
	for i, ip := range obj.Status.PodIPs {
		errs = append(errs, validation.IsValidIP(at.Child("podIPs").Index(i), ip.IP)...)
	}
	return append(errs, validateClaimStatuses(obj, at.Child("resourceClaimStatuses"))...)
}

// changedFields names the top-level fields of two values of one type that differ, as in JSON.
func changedFields[T any](now, was T) []string {
	a, b := reflect.ValueOf(now), reflect.ValueOf(was)
	var out []string
	for i := range a.NumField() {
		if !semanticEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
			out = append(out, "spec."+name)
		}
	}
	return out
}
