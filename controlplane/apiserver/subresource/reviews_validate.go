package subresource

import (
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func validateSelfReview(o *authorizationv1.SelfSubjectAccessReview) field.ErrorList {
	errs := validateReviewAttributes(o.Spec.ResourceAttributes, o.Spec.NonResourceAttributes)
	errs = append(errs, validateReviewSelectors(o.Spec.ResourceAttributes)...)
	return append(errs, validateReviewMeta(o.ObjectMeta, "", "must be empty")...)
}

func validateSubjectReview(s *authorizationv1.SubjectAccessReviewSpec) field.ErrorList {
	errs := validateReviewAttributes(s.ResourceAttributes, s.NonResourceAttributes)
	if s.User == "" && len(s.Groups) == 0 {
		errs = append(errs, field.Invalid(field.NewPath("spec", "user"), s.User,
			"at least one of user or group must be specified"))
	}
	return append(errs, validateReviewSelectors(s.ResourceAttributes)...)
}

// validateLocalReview validates a LocalSubjectAccessReview. It must be about resources in the
// namespace of the request.
func validateLocalReview(o *authorizationv1.LocalSubjectAccessReview, namespace string) field.ErrorList {
	errs := append(validateSubjectReview(&o.Spec),
		validateReviewMeta(o.ObjectMeta, o.Namespace, "must be empty except for namespace")...)
	spec := field.NewPath("spec")
	if res := o.Spec.ResourceAttributes; res != nil && res.Namespace != namespace {
		errs = append(errs, field.Invalid(spec.Child("resourceAttributes", "namespace"), res.Namespace,
			"must match metadata.namespace"))
	}
	if path := o.Spec.NonResourceAttributes; path != nil {
		errs = append(errs, field.Invalid(spec.Child("nonResourceAttributes"), path,
			"disallowed on this kind of request"))
	}
	return errs
}

func validateReviewAttributes(
	res *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes,
) field.ErrorList {
	if (res != nil) != (path != nil) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("spec"), path,
		"exactly one of nonResourceAttributes or resourceAttributes must be specified")}
}

// validateReviewMeta returns an error if a review has metadata other than the given namespace,
// because reviews are not stored. sentence is the text of the error. It ignores managedFields,
// because clients that use server-side apply send them.
func validateReviewMeta(meta metav1.ObjectMeta, namespace, sentence string) field.ErrorList {
	empty := metav1.ObjectMeta{Namespace: namespace, ManagedFields: meta.ManagedFields}
	if equality.Semantic.DeepEqual(empty, meta) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata"), meta, sentence)}
}

// validateReviewSelectors validates the selectors of a review. It accepts unknown operators. As in
// Kubernetes, a requirement with an unknown operator is ignored, so that newer clients can use it.
func validateReviewSelectors(res *authorizationv1.ResourceAttributes) (errs field.ErrorList) {
	if res == nil {
		return nil
	}
	at := field.NewPath("spec", "resourceAttributes")
	if s := res.FieldSelector; s != nil {
		at := at.Child("fieldSelector")
		errs = append(errs, requireOneForm(s.RawSelector, len(s.Requirements), at)...)
		lenient := validation.FieldSelectorValidationOptions{AllowUnknownOperatorInRequirement: true}
		for i, r := range s.Requirements {
			errs = append(errs, validation.ValidateFieldSelectorRequirement(r, lenient,
				at.Child("requirements").Index(i))...)
		}
	}
	if s := res.LabelSelector; s != nil {
		at := at.Child("labelSelector")
		errs = append(errs, requireOneForm(s.RawSelector, len(s.Requirements), at)...)
		lenient := validation.LabelSelectorValidationOptions{AllowUnknownOperatorInRequirement: true}
		for i, r := range s.Requirements {
			errs = append(errs, validation.ValidateLabelSelectorRequirement(r, lenient,
				at.Child("requirements").Index(i))...)
		}
	}
	return errs
}

// requireOneForm returns an error unless a selector has either a rawSelector text or requirements.
func requireOneForm(raw string, requirements int, path *field.Path) field.ErrorList {
	switch {
	case raw != "" && requirements > 0:
		return field.ErrorList{field.Invalid(path.Child("rawSelector"), raw,
			"may not specified at the same time as requirements")}
	case raw == "" && requirements == 0:
		return field.ErrorList{field.Required(path.Child("requirements"),
			fmt.Sprintf("when %s is specified, requirements or rawSelector is required", path))}
	}
	return nil
}

func invalidReview(kind string, errs field.ErrorList) error {
	if len(errs) == 0 {
		return nil
	}
	return apierrors.NewInvalid(authorizationv1.SchemeGroupVersion.WithKind(kind).GroupKind(), "", errs)
}
