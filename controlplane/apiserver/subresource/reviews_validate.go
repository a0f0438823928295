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

func judgeSelf(o *authorizationv1.SelfSubjectAccessReview) field.ErrorList {
	errs := judgeAttributes(o.Spec.ResourceAttributes, o.Spec.NonResourceAttributes)
	errs = append(errs, judgeSelectors(o.Spec.ResourceAttributes)...)
	return append(errs, judgeMeta(o.ObjectMeta, "", "must be empty")...)
}

func judgeSubject(s *authorizationv1.SubjectAccessReviewSpec) field.ErrorList {
	errs := judgeAttributes(s.ResourceAttributes, s.NonResourceAttributes)
	if s.User == "" && len(s.Groups) == 0 {
		errs = append(errs, field.Invalid(field.NewPath("spec", "user"), s.User, "at least one of user or group must be specified"))
	}
	return append(errs, judgeSelectors(s.ResourceAttributes)...)
}

// judgeLocal validates a LocalSubjectAccessReview. It must be about resources in the namespace of
// the request.
func judgeLocal(o *authorizationv1.LocalSubjectAccessReview, namespace string) field.ErrorList {
	errs := append(judgeSubject(&o.Spec), judgeMeta(o.ObjectMeta, o.Namespace, "must be empty except for namespace")...)
	spec := field.NewPath("spec")
	if res := o.Spec.ResourceAttributes; res != nil && res.Namespace != namespace {
		errs = append(errs, field.Invalid(spec.Child("resourceAttributes", "namespace"), res.Namespace, "must match metadata.namespace"))
	}
	if path := o.Spec.NonResourceAttributes; path != nil {
		errs = append(errs, field.Invalid(spec.Child("nonResourceAttributes"), path, "disallowed on this kind of request"))
	}
	return errs
}

func judgeAttributes(res *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes) field.ErrorList {
	if (res != nil) != (path != nil) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("spec"), path,
		"exactly one of nonResourceAttributes or resourceAttributes must be specified")}
}

// judgeMeta returns an error with the text sentence if a review has metadata other than the given
// namespace. Reviews are not stored. managedFields are ignored, because clients that apply send
// them.
func judgeMeta(meta metav1.ObjectMeta, namespace, sentence string) field.ErrorList {
	empty := metav1.ObjectMeta{Namespace: namespace, ManagedFields: meta.ManagedFields}
	if equality.Semantic.DeepEqual(empty, meta) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata"), meta, sentence)}
}

// judgeSelectors validates the selectors of a review. It accepts unknown operators: as in
// Kubernetes, requests of newer clients are then evaluated without this requirement.
func judgeSelectors(res *authorizationv1.ResourceAttributes) (errs field.ErrorList) {
	if res == nil {
		return nil
	}
	at := field.NewPath("spec", "resourceAttributes")
	if s := res.FieldSelector; s != nil {
		at := at.Child("fieldSelector")
		errs = append(errs, eitherForm(s.RawSelector, len(s.Requirements), at)...)
		lenient := validation.FieldSelectorValidationOptions{AllowUnknownOperatorInRequirement: true}
		for i, r := range s.Requirements {
			errs = append(errs, validation.ValidateFieldSelectorRequirement(r, lenient, at.Child("requirements").Index(i))...)
		}
	}
	if s := res.LabelSelector; s != nil {
		at := at.Child("labelSelector")
		errs = append(errs, eitherForm(s.RawSelector, len(s.Requirements), at)...)
		lenient := validation.LabelSelectorValidationOptions{AllowUnknownOperatorInRequirement: true}
		for i, r := range s.Requirements {
			errs = append(errs, validation.ValidateLabelSelectorRequirement(r, lenient, at.Child("requirements").Index(i))...)
		}
	}
	return errs
}

// eitherForm returns an error unless a selector has either a raw text or requirements.
func eitherForm(raw string, requirements int, at *field.Path) field.ErrorList {
	switch {
	case raw != "" && requirements > 0:
		return field.ErrorList{field.Invalid(at.Child("rawSelector"), raw, "may not specified at the same time as requirements")}
	case raw == "" && requirements == 0:
		return field.ErrorList{field.Required(at.Child("requirements"),
			fmt.Sprintf("when %s is specified, requirements or rawSelector is required", at))}
	}
	return nil
}

func invalidReview(kind string, errs field.ErrorList) error {
	if len(errs) == 0 {
		return nil
	}
	return apierrors.NewInvalid(authorizationv1.SchemeGroupVersion.WithKind(kind).GroupKind(), "", errs)
}
