package podspec

import (
	"encoding/json"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Annotations of earlier Kubernetes versions that Kubernetes still validates. They have no effect.
const (
	seccompPodAnnotation       = corev1.SeccompPodAnnotationKey
	seccompContainerAnnotation = corev1.SeccompContainerAnnotationKeyPrefix
	seccompMismatch            = "seccomp type in annotation and field must match"
)

// validatePodAnnotations validates those annotations of a pod or a pod template that have a defined
// format.
func validatePodAnnotations(annotations map[string]string, s *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if value, mirror := annotations[corev1.MirrorPodAnnotationKey]; mirror && s.NodeName == "" {
		errs = append(errs, field.Invalid(fldPath.Key(corev1.MirrorPodAnnotationKey), value,
			"must set spec.nodeName if mirror pod annotation is set"))
	}
	if text := annotations[corev1.TolerationsAnnotationKey]; text != "" {
		var tolerations []corev1.Toleration
		if err := json.Unmarshal([]byte(text), &tolerations); err != nil {
			errs = append(errs, field.Invalid(fldPath, corev1.TolerationsAnnotationKey, err.Error()))
		} else {
			errs = append(errs, ValidateTolerations(tolerations, fldPath.Child(corev1.TolerationsAnnotationKey))...)
		}
	}
	if cost, ok := annotations[corev1.PodDeletionCost]; ok && !isDeletionCost(cost) {
		errs = append(errs, field.Invalid(fldPath.Key(corev1.PodDeletionCost), cost, "must be a 32bit integer"))
	}
	for _, key := range fieldrules.SortedKeys(annotations) {
		if key == seccompPodAnnotation || strings.HasPrefix(key, seccompContainerAnnotation) {
			errs = append(errs, validateSeccompAnnotation(annotations[key], fldPath.Child(key))...)
		}
	}
	return append(errs, validateApparmorAnnotations(annotations, s, fldPath)...)
}

// isDeletionCost reports whether the text is a 32-bit integer without a plus sign or leading
// zeros.
func isDeletionCost(text string) bool {
	n, err := strconv.ParseInt(text, 10, 32)
	return err == nil && (strconv.FormatInt(n, 10) == text || strings.HasPrefix(text, "-"))
}

func validateSeccompAnnotation(profile string, fldPath *field.Path) field.ErrorList {
	switch profile {
	case corev1.SeccompProfileRuntimeDefault, corev1.DeprecatedSeccompProfileDockerDefault,
		corev1.SeccompProfileNameUnconfined:
		return nil
	}
	if name, local := strings.CutPrefix(profile, corev1.SeccompLocalhostProfileNamePrefix); local {
		return fieldrules.ValidateDescending(name, fldPath)
	}
	return field.ErrorList{field.Invalid(fldPath, profile, "must be a valid seccomp profile")}
}

// validateSeccompMatch returns errors if the seccomp annotations of a new pod contradict the
// profiles in its security contexts.
func validateSeccompMatch(pod *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	spec := field.NewPath("spec")
	if c := pod.Spec.SecurityContext; c != nil {
		errs = append(errs, matchSeccomp(pod.Annotations, seccompPodAnnotation, c.SeccompProfile,
			spec.Child("securityContext", "seccompProfile"))...)
	}
	visitContainerSecurity(&pod.Spec, spec, func(name string, c *corev1.SecurityContext, fldPath *field.Path) {
		errs = append(errs, matchSeccomp(pod.Annotations, seccompContainerAnnotation+name, c.SeccompProfile,
			fldPath.Child("securityContext", "seccompProfile"))...)
	})
	return errs
}

func matchSeccomp(
	annotations map[string]string, key string, p *corev1.SeccompProfile, fldPath *field.Path,
) field.ErrorList {
	value, annotated := annotations[key]
	if p == nil || !annotated {
		return nil
	}
	same := true
	switch p.Type {
	case corev1.SeccompProfileTypeUnconfined:
		same = value == corev1.SeccompProfileNameUnconfined
	case corev1.SeccompProfileTypeRuntimeDefault:
		same = value == corev1.SeccompProfileRuntimeDefault || value == corev1.DeprecatedSeccompProfileDockerDefault
	case corev1.SeccompProfileTypeLocalhost:
		name, local := strings.CutPrefix(value, corev1.SeccompLocalhostProfileNamePrefix)
		if same = local; local && (p.LocalhostProfile == nil || *p.LocalhostProfile != name) {
			return field.ErrorList{field.Forbidden(fldPath.Child("localhostProfile"),
				"seccomp profile in annotation and field must match")}
		}
	}
	if !same {
		return field.ErrorList{field.Forbidden(fldPath.Child("type"), seccompMismatch)}
	}
	return nil
}

// validateMetaUpdate validates a change of those annotations that have a defined format. It does
// not return errors that the old pod also has.
func validateMetaUpdate(obj, old *corev1.Pod) field.ErrorList {
	fldPath := field.NewPath("metadata", "annotations")
	errs := append(validateMirrorUpdate(obj, old), validateApparmorUpdate(obj, old)...)
	had := validatePodAnnotations(old.Annotations, &old.Spec, fldPath)
	for _, e := range validatePodAnnotations(obj.Annotations, &obj.Spec, fldPath) {
		if !slices.ContainsFunc(had, func(h *field.Error) bool { return h.Error() == e.Error() }) {
			errs = append(errs, e)
		}
	}
	return errs
}
