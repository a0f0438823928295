package kindstest

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// ValidateAttempt validates an attempt with the validation of its kind only. It is the validating
// stage of a registry without an API server.
func ValidateAttempt(ctx context.Context, attempt *api.Attempt) error {
	obj, old := attempt.Whole, attempt.Stored
	if obj == nil {
		return nil
	}
	k := attempt.Kind
	var errs field.ErrorList
	if k.Validation.Check != nil {
		errs = k.Validation.Check(ctx, attempt.Facet, obj, old)
	} else {
		errs = k.ValidateObject(obj, old)
	}
	if old != nil && k.Validation.Check == nil {
		check := k.Validation.Update
		if sub := k.Subresources[attempt.Facet]; sub != nil && sub.ValidateUpdate != nil {
			check = sub.ValidateUpdate
		}
		if check != nil {
			errs = append(errs, check(obj, old)...)
		}
	}
	refused, _ := k.Schema.Answers.FindIneffective(obj, old)
	errs = append(errs, refused...)
	if len(errs) > 0 {
		return apierrors.NewInvalid(k.GVK.GroupKind(), obj.GetName(), errs)
	}
	return nil
}
