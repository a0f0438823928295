package podspec

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const apparmorPrefix = corev1.DeprecatedAppArmorBetaContainerAnnotationKeyPrefix

// apparmorProfile returns the AppArmor profile that an annotation's value specifies. It returns nil
// if the value is invalid.
func apparmorProfile(value string) *corev1.AppArmorProfile {
	switch value {
	case corev1.DeprecatedAppArmorBetaProfileNameUnconfined:
		return &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeUnconfined}
	case corev1.DeprecatedAppArmorBetaProfileRuntimeDefault:
		return &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeRuntimeDefault}
	}
	name, local := strings.CutPrefix(value, corev1.DeprecatedAppArmorBetaProfileNamePrefix)
	if !local || name == "" {
		return nil
	}
	return &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeLocalhost, LocalhostProfile: &name}
}

// isWindows reports whether spec.os.name of a pod is windows.
func isWindows(spec *corev1.PodSpec) bool { return spec.OS != nil && spec.OS.Name == corev1.Windows }

// podApparmor returns the AppArmor profile of a pod's security context, or nil.
func podApparmor(spec *corev1.PodSpec) *corev1.AppArmorProfile {
	if spec.SecurityContext == nil {
		return nil
	}
	return spec.SecurityContext.AppArmorProfile
}

// visitAnnotatedContainers calls f for each container that has an AppArmor annotation, but no
// AppArmor profile in its security context. context points to that security context, and f may set
// it.
func visitAnnotatedContainers(p *corev1.Pod, f func(name string, context **corev1.SecurityContext,
	profile *corev1.AppArmorProfile)) {
	if isWindows(&p.Spec) {
		return
	}
	visit := func(name string, context **corev1.SecurityContext) {
		value, annotated := p.Annotations[apparmorPrefix+name]
		if !annotated || *context != nil && (*context).AppArmorProfile != nil {
			return
		}
		profile := apparmorProfile(value)
		if len(validateAppArmor(profile, nil)) > 0 {
			profile = nil
		}
		f(name, context, profile)
	}
	for i := range p.Spec.InitContainers {
		visit(p.Spec.InitContainers[i].Name, &p.Spec.InitContainers[i].SecurityContext)
	}
	for i := range p.Spec.Containers {
		visit(p.Spec.Containers[i].Name, &p.Spec.Containers[i].SecurityContext)
	}
}

// syncAppArmor copies the AppArmor annotations of a new pod to the containers without an AppArmor
// profile in their security context.
func syncAppArmor(pod *corev1.Pod) {
	visitAnnotatedContainers(pod, func(_ string, context **corev1.SecurityContext, profile *corev1.AppArmorProfile) {
		if profile == nil || fieldrules.SemanticEqual(profile, podApparmor(&pod.Spec)) {
			return
		}
		if *context == nil {
			*context = &corev1.SecurityContext{}
		}
		(*context).AppArmorProfile = profile
	})
}

// AppArmorWarnings returns the warnings for those annotations of a new pod that syncAppArmor copies
// or cannot copy.
func AppArmorWarnings(pod *corev1.Pod) (out []string) {
	visitAnnotatedContainers(pod, func(name string, _ **corev1.SecurityContext, profile *corev1.AppArmorProfile) {
		if profile == nil || !fieldrules.SemanticEqual(profile, podApparmor(&pod.Spec)) {
			out = append(out, apparmorWarning(field.NewPath("metadata", "annotations"), name))
		}
	})
	return out
}

func apparmorWarning(annotations *field.Path, container string) string {
	return fmt.Sprintf(`%s: deprecated since v1.30; use the "appArmorProfile" field instead`,
		annotations.Key(apparmorPrefix+container))
}

// validateApparmorAnnotations validates the AppArmor annotations of a pod or a template.
func validateApparmorAnnotations(
	annotations map[string]string, s *corev1.PodSpec, fldPath *field.Path,
) field.ErrorList {
	var errs field.ErrorList
	for _, key := range fieldrules.SortedKeys(annotations) {
		name, is := strings.CutPrefix(key, apparmorPrefix)
		if !is {
			continue
		}
		found := false
		visitContainerSecurity(s, nil, func(c string, _ *corev1.SecurityContext, _ *field.Path) {
			found = found || c == name
		})
		if !found {
			errs = append(errs, field.Invalid(fldPath.Key(key), name, "container not found"))
		}
		value := annotations[key]
		if value != "" && !strings.HasPrefix(value,
			corev1.DeprecatedAppArmorBetaProfileNamePrefix) && apparmorProfile(value) == nil {
			errs = append(errs, field.Invalid(fldPath.Key(key), value,
				fmt.Sprintf("invalid AppArmor profile name: %q", value)))
		}
	}
	return errs
}

// validateApparmorMatch returns errors if the AppArmor annotations of a new pod contradict the
// profiles in its security contexts.
func validateApparmorMatch(pod *corev1.Pod) field.ErrorList {
	if isWindows(&pod.Spec) {
		return nil
	}
	var errs field.ErrorList
	visitContainerSecurity(&pod.Spec, field.NewPath("spec"),
		func(name string, c *corev1.SecurityContext, fldPath *field.Path) {
			profile := c.AppArmorProfile
			if profile == nil {
				profile = podApparmor(&pod.Spec)
			}
			value, annotated := pod.Annotations[apparmorPrefix+name]
			if profile == nil || !annotated {
				return
			}
			fldPath = fldPath.Child("securityContext", "appArmorProfile")
			local, isLocal := strings.CutPrefix(value, corev1.DeprecatedAppArmorBetaProfileNamePrefix)
			same := true
			switch profile.Type {
			case corev1.AppArmorProfileTypeUnconfined:
				same = value == corev1.DeprecatedAppArmorBetaProfileNameUnconfined
			case corev1.AppArmorProfileTypeRuntimeDefault:
				same = value == corev1.DeprecatedAppArmorBetaProfileRuntimeDefault
			case corev1.AppArmorProfileTypeLocalhost:
				same = isLocal
				if isLocal && (profile.LocalhostProfile == nil || *profile.LocalhostProfile != local) {
					errs = append(errs, field.Forbidden(fldPath.Child("localhostProfile"),
						"apparmor profile in annotation and field must match"))
				}
			}
			if !same {
				errs = append(errs, field.Forbidden(fldPath.Child("type"),
					"apparmor type in annotation and field must match"))
			}
		})
	return errs
}

// validateApparmorUpdate returns errors for changes of a pod's AppArmor annotations.
func validateApparmorUpdate(obj, old *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	fldPath := field.NewPath("metadata", "annotations")
	for _, key := range fieldrules.SortedKeys(old.Annotations) {
		if updated, kept := obj.Annotations[key]; strings.HasPrefix(key, apparmorPrefix) &&
			(!kept || updated != old.Annotations[key]) {
			errs = append(errs, field.Forbidden(fldPath.Key(key), "may not remove or update AppArmor annotations"))
		}
	}
	for _, key := range fieldrules.SortedKeys(obj.Annotations) {
		if _, had := old.Annotations[key]; strings.HasPrefix(key, apparmorPrefix) && !had {
			errs = append(errs, field.Forbidden(fldPath.Key(key), "may not add AppArmor annotations"))
		}
	}
	return errs
}
