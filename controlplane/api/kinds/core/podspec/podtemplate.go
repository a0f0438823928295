package podspec

import (
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// DefaultPodTemplate sets the defaults of a pod template. It does not set the defaults for
// resources, host ports and service links. They are set only in pods, so that a template and its
// hash do not change.
func DefaultPodTemplate(t *corev1.PodTemplateSpec) { DefaultPodSpec(&t.Spec) }

// specTemplatePath is the path of the pod template of most workloads.
var specTemplatePath = field.NewPath("spec", "template")

// PodTemplateOf returns the pod template of a workload and the path of the template's field. The
// template is nil for a ReplicationController without a template and for objects of other kinds.
func PodTemplateOf(obj api.Object) (*corev1.PodTemplateSpec, *field.Path) {
	switch o := obj.(type) {
	case *corev1.PodTemplate:
		return &o.Template, field.NewPath("template")
	case *corev1.ReplicationController:
		return o.Spec.Template, specTemplatePath
	case *appsv1.Deployment:
		return &o.Spec.Template, specTemplatePath
	case *appsv1.ReplicaSet:
		return &o.Spec.Template, specTemplatePath
	case *appsv1.DaemonSet:
		return &o.Spec.Template, specTemplatePath
	case *appsv1.StatefulSet:
		return &o.Spec.Template, specTemplatePath
	case *batchv1.Job:
		return &o.Spec.Template, specTemplatePath
	case *batchv1.CronJob:
		return &o.Spec.JobTemplate.Spec.Template, field.NewPath("spec", "jobTemplate", "spec", "template")
	}
	return nil, nil
}

// ContainersAndImages returns the names and the images of the containers, each joined by commas.
func ContainersAndImages(s *corev1.PodSpec) (containers, images string) {
	var c, i []string
	for _, x := range s.Containers {
		c, i = append(c, x.Name), append(i, x.Image)
	}
	return strings.Join(c, ","), strings.Join(i, ",")
}

// ValidatePodTemplate validates a template's metadata and pod spec.
func ValidatePodTemplate(t *corev1.PodTemplateSpec, fldPath *field.Path) field.ErrorList {
	errs := metavalidation.ValidateLabels(t.Labels, fldPath.Child("labels"))
	errs = append(errs, apivalidation.ValidateAnnotations(t.Annotations, fldPath.Child("annotations"))...)
	errs = append(errs, validatePodAnnotations(t.Annotations, &t.Spec, fldPath.Child("annotations"))...)
	errs = append(errs, validatePodSpec(&t.Spec, fldPath.Child("spec"))...)
	if len(t.Spec.EphemeralContainers) > 0 {
		errs = append(errs, field.Forbidden(fldPath.Child("spec", "ephemeralContainers"),
			"ephemeral containers not allowed in pod template"))
	}
	return errs
}

// ValidateLastingTemplate validates a pod template of a controller that keeps its pods running: the
// restart policy must be Always. kind is the kind of the controller, for errors.
func ValidateLastingTemplate(kind string, t *corev1.PodTemplateSpec, fldPath *field.Path) field.ErrorList {
	errs := ValidatePodTemplate(t, fldPath)
	if p := t.Spec.RestartPolicy; p != corev1.RestartPolicyAlways && p != "" {
		errs = append(errs, field.NotSupported(fldPath.Child("spec", "restartPolicy"), p,
			[]corev1.RestartPolicy{corev1.RestartPolicyAlways}))
	}
	if t.Spec.ActiveDeadlineSeconds != nil {
		errs = append(errs, field.Forbidden(fldPath.Child("spec", "activeDeadlineSeconds"),
			"activeDeadlineSeconds in "+kind+" is not Supported"))
	}
	return errs
}

// ValidateTemplateMeta validates the metadata in a pod template.
func ValidateTemplateMeta(meta *metav1.ObjectMeta, fldPath *field.Path) field.ErrorList {
	errs := apivalidation.ValidateAnnotations(meta.Annotations, fldPath.Child("annotations"))
	return append(errs, metavalidation.ValidateLabels(meta.Labels, fldPath.Child("labels"))...)
}
