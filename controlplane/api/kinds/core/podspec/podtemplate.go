package podspec

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// DefaultPodTemplate sets the defaults of a pod template. Defaults for resources, host ports and
// service links are set only in pods, so that a template and its hash do not change.
func DefaultPodTemplate(t *corev1.PodTemplateSpec) { DefaultPodSpec(&t.Spec) }

// ContainersAndImages returns the names and the images of the containers, each joined by commas.
func ContainersAndImages(s *corev1.PodSpec) (containers, images string) {
	var c, i []string
	for _, x := range s.Containers {
		c, i = append(c, x.Name), append(i, x.Image)
	}
	return strings.Join(c, ","), strings.Join(i, ",")
}

// ValidatePodTemplate validates a template's metadata and pod spec.
func ValidatePodTemplate(t *corev1.PodTemplateSpec, at *field.Path) field.ErrorList {
	errs := metavalidation.ValidateLabels(t.Labels, at.Child("labels"))
	errs = append(errs, apivalidation.ValidateAnnotations(t.Annotations, at.Child("annotations"))...)
	errs = append(errs, validatePodAnnotations(t.Annotations, &t.Spec, at.Child("annotations"))...)
	errs = append(errs, validatePodSpec(&t.Spec, at.Child("spec"))...)
	if len(t.Spec.EphemeralContainers) > 0 {
		errs = append(errs, field.Forbidden(at.Child("spec", "ephemeralContainers"), "ephemeral containers not allowed in pod template"))
	}
	return errs
}

// ValidateLastingTemplate validates a template of pods that must have the restart policy Always.
// kind is the kind of the controller, for errors.
func ValidateLastingTemplate(kind string, t *corev1.PodTemplateSpec, at *field.Path) field.ErrorList {
	errs := ValidatePodTemplate(t, at)
	if p := t.Spec.RestartPolicy; p != corev1.RestartPolicyAlways && p != "" {
		errs = append(errs, field.NotSupported(at.Child("spec", "restartPolicy"), p,
			[]corev1.RestartPolicy{corev1.RestartPolicyAlways}))
	}
	if t.Spec.ActiveDeadlineSeconds != nil {
		errs = append(errs, field.Forbidden(at.Child("spec", "activeDeadlineSeconds"), "activeDeadlineSeconds in "+kind+" is not Supported"))
	}
	return errs
}

// ValidateTemplateMeta validates the metadata in a template.
func ValidateTemplateMeta(m *metav1.ObjectMeta, at *field.Path) field.ErrorList {
	errs := apivalidation.ValidateAnnotations(m.Annotations, at.Child("annotations"))
	return append(errs, metavalidation.ValidateLabels(m.Labels, at.Child("labels"))...)
}
