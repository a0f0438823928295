package podspec

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

func validatePod(p *corev1.Pod) field.ErrorList {
	errs := validatePodSpec(&p.Spec, field.NewPath("spec"))
	errs = append(errs, ValidateOwnClaims(p, field.NewPath("spec", "volumes"))...)
	errs = append(errs, validatePodAnnotations(p.Annotations, &p.Spec, field.NewPath("metadata", "annotations"))...)
	if _, mirror := p.Annotations[corev1.MirrorPodAnnotationKey]; mirror && len(p.Spec.ResourceClaims) > 0 {
		errs = append(errs, field.Forbidden(field.NewPath(""), "static pods do not support resource claims"))
	}
	return append(errs, validateOnlyPod(&p.Spec, field.NewPath("spec"))...)
}

// validateOnlyPod returns errors for fields that are valid in templates and not in pods.
func validateOnlyPod(s *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, list := range []struct {
		name       string
		containers []corev1.Container
	}{{"containers", s.Containers}, {"initContainers", s.InitContainers}} {
		for i := range list.containers {
			errs = append(errs, validateTrimmed(list.containers[i].Image, at.Child(list.name).Index(i).Child("image"))...)
		}
	}
	for i := range s.EphemeralContainers {
		errs = append(errs, validateTrimmed(s.EphemeralContainers[i].Image, at.Child("ephemeralContainers").Index(i).Child("image"))...)
	}
	for i := range s.Volumes {
		if s.ServiceAccountName != "" || s.Volumes[i].Projected == nil {
			continue
		}
		for j, source := range s.Volumes[i].Projected.Sources {
			if source.ServiceAccountToken != nil {
				errs = append(errs, field.Forbidden(at.Child("volumes").Index(i).Child("projected", "sources").Index(j).Child("serviceAccountToken"),
					"must not be specified when serviceAccountName is not set"))
			}
		}
	}
	return errs
}

func validateTrimmed(image string, at *field.Path) field.ErrorList {
	if strings.TrimSpace(image) != image {
		return field.ErrorList{field.Invalid(at, image, "must not have leading or trailing whitespace")}
	}
	return nil
}

func mirrorAnnotation() *field.Path {
	return field.NewPath("metadata", "annotations").Key(corev1.MirrorPodAnnotationKey)
}

// validateMirrorUpdate returns an error if a pod becomes or stops being a mirror pod. Mirror pods
// get no access to other objects and may not reference any.
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

// PodUpdateRule is the message of an update that changes immutable fields of a pod.
const PodUpdateRule = "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`," +
	"`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations)," +
	"`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"

// validatePodUpdate returns errors for changes of immutable fields. Most fields are immutable,
// because the pod's containers are running.
func validatePodUpdate(obj, old *corev1.Pod) field.ErrorList {
	spec := field.NewPath("spec")
	errs := append(validateMirrorUpdate(obj, old), validateApparmorUpdate(obj, old)...)
	meta := len(errs)
	if len(obj.Spec.Containers) != len(old.Spec.Containers) {
		errs = append(errs, field.Forbidden(spec.Child("containers"), "pod updates may not add or remove containers"))
	}
	if len(obj.Spec.InitContainers) != len(old.Spec.InitContainers) {
		errs = append(errs, field.Forbidden(spec.Child("initContainers"), "pod updates may not add or remove containers"))
	}
	if len(errs) > meta {
		return errs
	}
	errs = append(errs, validateDeadlineUpdate(obj.Spec.ActiveDeadlineSeconds, old.Spec.ActiveDeadlineSeconds, spec.Child("activeDeadlineSeconds"))...)
	errs = append(errs, validateTolerationUpdate(obj.Spec.Tolerations, old.Spec.Tolerations, spec.Child("tolerations"))...)
	errs = append(errs, validateGateUpdate(obj, old, spec.Child("schedulingGates"))...)

	// Mutable fields are copied from old; any remaining difference is an error.
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
	if fieldrules.Deref(old.Spec.TerminationGracePeriodSeconds) < 0 && fieldrules.Deref(now.TerminationGracePeriodSeconds) == 1 {
		now.TerminationGracePeriodSeconds = old.Spec.TerminationGracePeriodSeconds
	}
	if old.Spec.NodeName == "" { // F90: binding by patch
		now.NodeName = ""
	}
	if changed := ChangedFields(*now, old.Spec, "spec."); len(changed) > 0 {
		errs = append(errs, field.Forbidden(spec, PodUpdateRule+"\nchanged: "+strings.Join(changed, ", ")))
	}
	return errs
}

func validateDeadlineUpdate(now, was *int64, at *field.Path) field.ErrorList {
	switch {
	case now != nil && (*now < 0 || *now > math.MaxInt32):
		return field.ErrorList{field.Invalid(at, *now, utilvalidation.InclusiveRangeError(0, math.MaxInt32))}
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
		// TolerationSeconds may change, which controls the eviction from a failed node.
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
		last := !slices.Contains(obj.Spec.SchedulingGates[i+1:], g)
		if last && !slices.Contains(old.Spec.SchedulingGates, g) {
			errs = append(errs, field.Forbidden(at.Index(i).Child("name"), fmt.Sprintf("only deletion is allowed, but found new scheduling gate '%s'", g.Name)))
		}
	}
	return errs
}

func validateEphemeralUpdate(obj, old *corev1.Pod) field.ErrorList {
	at := field.NewPath("spec", "ephemeralContainers")
	var errs field.ErrorList
	now := map[string]corev1.EphemeralContainer{}
	for i, c := range obj.Spec.EphemeralContainers {
		now[c.Name] = c
		if !slices.ContainsFunc(old.Spec.EphemeralContainers,
			func(o corev1.EphemeralContainer) bool { return o.Name == c.Name }) {
			// Agents would never start it, and 'kubectl debug' would wait forever.
			errs = append(errs, field.Forbidden(at.Index(i), "nodes of this cluster run no ephemeral containers; 'kubectl debug --copy-to' debugs a copy of the pod instead"))
		}
	}
	for _, c := range old.Spec.EphemeralContainers {
		switch n, ok := now[c.Name]; {
		case !ok:
			errs = append(errs, field.Forbidden(at, fmt.Sprintf("existing ephemeral containers %q may not be removed\n", c.Name)))
		case !fieldrules.SemanticEqual(n, c):
			errs = append(errs, field.Forbidden(at, fmt.Sprintf("existing ephemeral containers %q may not be changed\nchanged: %s",
				c.Name, strings.Join(ChangedFields(n.EphemeralContainerCommon, c.EphemeralContainerCommon, ""), ", "))))
		}
	}
	return errs
}

// ChangedFields returns the JSON names of the top-level fields in which two values differ, with the
// prefix.
func ChangedFields[T any](now, was T, prefix string) []string {
	a, b := reflect.ValueOf(now), reflect.ValueOf(was)
	var out []string
	for i := range a.NumField() {
		if !fieldrules.SemanticEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
			out = append(out, prefix+name)
		}
	}
	return out
}
