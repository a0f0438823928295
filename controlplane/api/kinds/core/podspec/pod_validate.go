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
	"k8s.io/utils/ptr"

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

// validateOnlyPod returns errors for fields that are valid in pod templates but not in pods.
func validateOnlyPod(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, list := range []struct {
		name       string
		containers []corev1.Container
	}{{"containers", spec.Containers}, {"initContainers", spec.InitContainers}} {
		for i := range list.containers {
			errs = append(errs, validateTrimmed(list.containers[i].Image,
				fldPath.Child(list.name).Index(i).Child("image"))...)
		}
	}
	for i := range spec.EphemeralContainers {
		errs = append(errs, validateTrimmed(spec.EphemeralContainers[i].Image,
			fldPath.Child("ephemeralContainers").Index(i).Child("image"))...)
	}
	for i := range spec.Volumes {
		if spec.ServiceAccountName != "" || spec.Volumes[i].Projected == nil {
			continue
		}
		for j, source := range spec.Volumes[i].Projected.Sources {
			if source.ServiceAccountToken != nil {
				errs = append(errs,
					field.Forbidden(fldPath.Child("volumes").Index(i).Child("projected", "sources").Index(j).Child(
						"serviceAccountToken"),
						"must not be specified when serviceAccountName is not set"))
			}
		}
	}
	return errs
}

func validateTrimmed(image string, fldPath *field.Path) field.ErrorList {
	if strings.TrimSpace(image) != image {
		return field.ErrorList{field.Invalid(fldPath, image, "must not have leading or trailing whitespace")}
	}
	return nil
}

func mirrorAnnotationPath() *field.Path {
	return field.NewPath("metadata", "annotations").Key(corev1.MirrorPodAnnotationKey)
}

// validateMirrorUpdate returns an error if a pod becomes or stops being a mirror pod. Mirror pods
// have no access to other objects, and must not reference any.
func validateMirrorUpdate(obj, old *corev1.Pod) field.ErrorList {
	updated, is := obj.Annotations[corev1.MirrorPodAnnotationKey]
	before, previous := old.Annotations[corev1.MirrorPodAnnotationKey]
	switch {
	case is && !previous:
		return field.ErrorList{field.Forbidden(mirrorAnnotationPath(), "may not add mirror pod annotation")}
	case previous && (!is || updated != before):
		return field.ErrorList{field.Forbidden(mirrorAnnotationPath(),
			"may not remove or update mirror pod annotation")}
	}
	return nil
}

// PodUpdateRule is the error message for an update that changes immutable fields of a pod.
const PodUpdateRule = "pod updates may not change fields other than " +
	"`spec.containers[*].image`,`spec.initContainers[*].image`," +
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
		errs = append(errs, field.Forbidden(spec.Child("initContainers"),
			"pod updates may not add or remove containers"))
	}
	if len(errs) > meta {
		return errs
	}
	errs = append(errs, validateDeadlineUpdate(obj.Spec.ActiveDeadlineSeconds, old.Spec.ActiveDeadlineSeconds,
		spec.Child("activeDeadlineSeconds"))...)
	errs = append(errs, validateTolerationUpdate(obj.Spec.Tolerations, old.Spec.Tolerations,
		spec.Child("tolerations"))...)
	errs = append(errs, validateGateUpdate(obj, old, spec.Child("schedulingGates"))...)

	// Mutable fields are copied from old; any remaining difference is an error.
	updated := obj.Spec.DeepCopy()
	for i := range updated.Containers {
		updated.Containers[i].Image = old.Spec.Containers[i].Image
	}
	for i := range updated.InitContainers {
		updated.InitContainers[i].Image = old.Spec.InitContainers[i].Image
	}
	updated.ActiveDeadlineSeconds = old.Spec.ActiveDeadlineSeconds
	updated.Tolerations = old.Spec.Tolerations
	updated.SchedulingGates = old.Spec.SchedulingGates
	if len(old.Spec.SchedulingGates) > 0 {
		errs = append(errs, validateGatedPlacement(updated, &old.Spec, spec)...)
	}
	if ptr.Deref(old.Spec.TerminationGracePeriodSeconds, 0) < 0 &&
		ptr.Deref(updated.TerminationGracePeriodSeconds, 0) == 1 {
		updated.TerminationGracePeriodSeconds = old.Spec.TerminationGracePeriodSeconds
	}
	if old.Spec.NodeName == "" { // an update may bind the pod by setting nodeName
		updated.NodeName = ""
	}
	if changed := ChangedFields(*updated, old.Spec, "spec."); len(changed) > 0 {
		errs = append(errs, field.Forbidden(spec, PodUpdateRule+"\nchanged: "+strings.Join(changed, ", ")))
	}
	return errs
}

func validateDeadlineUpdate(updated, old *int64, fldPath *field.Path) field.ErrorList {
	switch {
	case updated != nil && (*updated < 0 || *updated > math.MaxInt32):
		return field.ErrorList{field.Invalid(fldPath, *updated, utilvalidation.InclusiveRangeError(0, math.MaxInt32))}
	case old == nil:
		return nil
	case updated == nil:
		return field.ErrorList{field.Invalid(fldPath, updated, "must not update from a positive integer to nil value")}
	case *updated > *old:
		return field.ErrorList{field.Invalid(fldPath, *updated, "must be less than or equal to previous value")}
	}
	return nil
}

func validateTolerationUpdate(updated, old []corev1.Toleration, fldPath *field.Path) field.ErrorList {
	for _, t := range old {
		// TolerationSeconds may change. It controls the eviction from a failed node.
		kept := slices.ContainsFunc(updated, func(n corev1.Toleration) bool {
			n.TolerationSeconds, t.TolerationSeconds = nil, nil
			return n == t
		})
		if !kept {
			return field.ErrorList{field.Forbidden(fldPath,
				"existing toleration can not be modified except its tolerationSeconds")}
		}
	}
	return nil
}

func validateGateUpdate(obj, old *corev1.Pod, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, g := range obj.Spec.SchedulingGates {
		last := !slices.Contains(obj.Spec.SchedulingGates[i+1:], g)
		if last && !slices.Contains(old.Spec.SchedulingGates, g) {
			errs = append(errs, field.Forbidden(fldPath.Index(i).Child("name"),
				fmt.Sprintf("only deletion is allowed, but found new scheduling gate '%s'", g.Name)))
		}
	}
	return errs
}

func ephemeralContainersPath() *field.Path { return field.NewPath("spec", "ephemeralContainers") }

// forbidEphemeralContainers returns an error if a new pod has ephemeral containers. They are added
// through the subresource only.
func forbidEphemeralContainers(pod *corev1.Pod) field.ErrorList {
	if len(pod.Spec.EphemeralContainers) == 0 {
		return nil
	}
	return field.ErrorList{field.Forbidden(ephemeralContainersPath(), "cannot be set on create")}
}

// validateEphemeralUpdate returns an error for each ephemeral container of the stored pod that an
// update removes or changes. Their order may change.
func validateEphemeralUpdate(obj, old *corev1.Pod) field.ErrorList {
	fldPath := ephemeralContainersPath()
	var errs field.ErrorList
	updated := map[string]corev1.EphemeralContainer{}
	for _, c := range obj.Spec.EphemeralContainers {
		updated[c.Name] = c
	}
	for _, c := range old.Spec.EphemeralContainers {
		switch n, ok := updated[c.Name]; {
		case !ok:
			errs = append(errs, field.Forbidden(fldPath,
				fmt.Sprintf("existing ephemeral containers %q may not be removed\n", c.Name)))
		case !fieldrules.SemanticEqual(n, c):
			changed := ChangedFields(n.EphemeralContainerCommon, c.EphemeralContainerCommon, "")
			if n.TargetContainerName != c.TargetContainerName {
				changed = append(changed, "targetContainerName")
			}
			errs = append(errs, field.Forbidden(fldPath,
				fmt.Sprintf("existing ephemeral containers %q may not be changed\nchanged: %s", c.Name,
					strings.Join(changed, ", "))))
		}
	}
	return errs
}

// ChangedFields returns the JSON names of the top-level fields in which two structs differ, each
// with the prefix before it.
func ChangedFields[T any](updated, old T, prefix string) []string {
	a, b := reflect.ValueOf(updated), reflect.ValueOf(old)
	var out []string
	for i := range a.NumField() {
		if !fieldrules.SemanticEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
			out = append(out, prefix+name)
		}
	}
	return out
}
