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

// Annotations of old versions that Kubernetes still validates. They have no effect.
const (
	seccompPodAnnotation       = corev1.SeccompPodAnnotationKey
	seccompContainerAnnotation = corev1.SeccompContainerAnnotationKeyPrefix
	seccompMismatch            = "seccomp type in annotation and field must match"
)

// validatePodAnnotations validates the annotations with a meaning, of a pod or a template.
func validatePodAnnotations(annotations map[string]string, s *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if value, mirror := annotations[corev1.MirrorPodAnnotationKey]; mirror && s.NodeName == "" {
		errs = append(errs, field.Invalid(at.Key(corev1.MirrorPodAnnotationKey), value,
			"must set spec.nodeName if mirror pod annotation is set"))
	}
	if text := annotations[corev1.TolerationsAnnotationKey]; text != "" {
		var tolerations []corev1.Toleration
		if err := json.Unmarshal([]byte(text), &tolerations); err != nil {
			errs = append(errs, field.Invalid(at, corev1.TolerationsAnnotationKey, err.Error()))
		} else {
			errs = append(errs, ValidateTolerations(tolerations, at.Child(corev1.TolerationsAnnotationKey))...)
		}
	}
	if cost, ok := annotations[corev1.PodDeletionCost]; ok && !validDeletionCost(cost) {
		errs = append(errs, field.Invalid(at.Key(corev1.PodDeletionCost), cost, "must be a 32bit integer"))
	}
	for _, key := range fieldrules.SortedKeys(annotations) {
		if key == seccompPodAnnotation || strings.HasPrefix(key, seccompContainerAnnotation) {
			errs = append(errs, validateSeccompAnnotation(annotations[key], at.Child(key))...)
		}
	}
	return append(errs, validateApparmorAnnotations(annotations, s, at)...)
}

// validDeletionCost reports whether the text is a 32-bit integer without a plus sign or leading
// zeros.
func validDeletionCost(text string) bool {
	n, err := strconv.ParseInt(text, 10, 32)
	return err == nil && (strconv.FormatInt(n, 10) == text || strings.HasPrefix(text, "-"))
}

func validateSeccompAnnotation(profile string, at *field.Path) field.ErrorList {
	switch profile {
	case corev1.SeccompProfileRuntimeDefault, corev1.DeprecatedSeccompProfileDockerDefault, corev1.SeccompProfileNameUnconfined:
		return nil
	}
	if name, local := strings.CutPrefix(profile, corev1.SeccompLocalhostProfileNamePrefix); local {
		return fieldrules.ValidateDescending(name, at)
	}
	return field.ErrorList{field.Invalid(at, profile, "must be a valid seccomp profile")}
}

// validateSeccompMatch returns errors if the seccomp annotations of a new pod contradict its
// profiles.
func validateSeccompMatch(p *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	spec := field.NewPath("spec")
	if c := p.Spec.SecurityContext; c != nil {
		errs = append(errs, matchSeccomp(p.Annotations, seccompPodAnnotation, c.SeccompProfile, spec.Child("securityContext", "seccompProfile"))...)
	}
	eachContainer(&p.Spec, spec, func(name string, c *corev1.SecurityContext, at *field.Path) {
		errs = append(errs, matchSeccomp(p.Annotations, seccompContainerAnnotation+name, c.SeccompProfile,
			at.Child("securityContext", "seccompProfile"))...)
	})
	return errs
}

func matchSeccomp(annotations map[string]string, key string, p *corev1.SeccompProfile, at *field.Path) field.ErrorList {
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
			return field.ErrorList{field.Forbidden(at.Child("localhostProfile"), "seccomp profile in annotation and field must match")}
		}
	}
	if !same {
		return field.ErrorList{field.Forbidden(at.Child("type"), seccompMismatch)}
	}
	return nil
}

// validateMetaUpdate validates a change of the annotations with a meaning. Errors that the old pod
// has already are not returned.
func validateMetaUpdate(obj, old *corev1.Pod) field.ErrorList {
	at := field.NewPath("metadata", "annotations")
	errs := append(validateMirrorUpdate(obj, old), validateApparmorUpdate(obj, old)...)
	had := validatePodAnnotations(old.Annotations, &old.Spec, at)
	for _, e := range validatePodAnnotations(obj.Annotations, &obj.Spec, at) {
		if !slices.ContainsFunc(had, func(h *field.Error) bool { return h.Error() == e.Error() }) {
			errs = append(errs, e)
		}
	}
	return errs
}
