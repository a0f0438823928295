package authz

import (
	"errors"
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"keelson.dev/keelson/controlplane/api"
)

// reviewOf returns the attributes as the spec of a SubjectAccessReview.
func reviewOf(a *Attributes) authorizationv1.SubjectAccessReviewSpec {
	s := authorizationv1.SubjectAccessReviewSpec{User: a.User.Name, UID: a.User.UID, Groups: a.User.Groups}
	for k, v := range a.User.Extra {
		if s.Extra == nil {
			s.Extra = make(map[string]authorizationv1.ExtraValue, len(a.User.Extra))
		}
		s.Extra[k] = v
	}
	if a.Resource == "" {
		s.NonResourceAttributes = &authorizationv1.NonResourceAttributes{Path: a.Path, Verb: a.Verb}
		return s
	}
	s.ResourceAttributes = &authorizationv1.ResourceAttributes{
		Namespace: a.Namespace, Verb: a.Verb, Group: a.APIGroup, Version: a.APIVersion,
		Resource: a.Resource, Subresource: a.Subresource, Name: a.Name,
	}
	if r := fieldRequirements(a.FieldSelector); len(r) > 0 {
		s.ResourceAttributes.FieldSelector = &authorizationv1.FieldSelectorAttributes{Requirements: r}
	}
	if r := labelRequirements(a.LabelSelector); len(r) > 0 {
		s.ResourceAttributes.LabelSelector = &authorizationv1.LabelSelectorAttributes{Requirements: r}
	}
	return s
}

// fieldRequirements converts a field selector for a SubjectAccessReview. It omits operators that a
// review cannot express. The review then covers more objects than requested, never fewer.
func fieldRequirements(sel fields.Selector) []metav1.FieldSelectorRequirement {
	if sel == nil {
		return nil
	}
	var out []metav1.FieldSelectorRequirement
	for _, r := range sel.Requirements() {
		op := metav1.FieldSelectorOpIn
		switch r.Operator {
		case selection.Equals, selection.DoubleEquals, selection.In:
		case selection.NotEquals, selection.NotIn:
			op = metav1.FieldSelectorOpNotIn
		default:
			continue
		}
		out = append(out, metav1.FieldSelectorRequirement{Key: r.Field, Operator: op, Values: []string{r.Value}})
	}
	return out
}

func labelRequirements(written string) []metav1.LabelSelectorRequirement {
	if written == "" {
		return nil
	}
	all, err := labels.ParseToRequirements(written)
	if err != nil {
		return nil
	}
	var out []metav1.LabelSelectorRequirement
	for _, r := range all {
		one := metav1.LabelSelectorRequirement{Key: r.Key()}
		switch r.Operator() {
		case selection.Equals, selection.DoubleEquals, selection.In:
			one.Operator = metav1.LabelSelectorOpIn
		case selection.NotEquals, selection.NotIn:
			one.Operator = metav1.LabelSelectorOpNotIn
		case selection.Exists:
			one.Operator = metav1.LabelSelectorOpExists
		case selection.DoesNotExist:
			one.Operator = metav1.LabelSelectorOpDoesNotExist
		default:
			continue
		}
		if r.Values().Len() > 0 {
			one.Values = r.Values().List()
		}
		out = append(out, one)
	}
	return out
}

// OfReview returns the attributes in the spec of an access review. Invalid selector requirements
// are omitted and listed in the error. The attributes then cover more objects than requested, never
// fewer.
func OfReview(
	u api.User, res *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes,
) (*Attributes, error) {
	a := &Attributes{User: u}
	if path != nil {
		a.Path, a.Verb = path.Path, path.Verb
		return a, nil
	}
	a.Verb, a.Namespace, a.APIGroup, a.APIVersion = res.Verb, res.Namespace, res.Group, res.Version
	a.Resource, a.Subresource, a.Name = res.Resource, res.Subresource, res.Name
	var errs []error
	if f := res.FieldSelector; f != nil {
		sel, err := fieldSelector(f)
		a.FieldSelector, errs = sel, append(errs, err)
	}
	if l := res.LabelSelector; l != nil {
		sel, err := labelSelector(l)
		a.LabelSelector, errs = sel, append(errs, err)
	}
	return a, errors.Join(errs...)
}

func fieldSelector(attributes *authorizationv1.FieldSelectorAttributes) (fields.Selector, error) {
	if attributes.RawSelector != "" {
		sel, err := fields.ParseSelector(attributes.RawSelector)
		if err != nil {
			return nil, fmt.Errorf("spec.resourceAttributes.fieldSelector.rawSelector: %w", err)
		}
		return sel, nil
	}
	var all []fields.Selector
	var errs []error
	for i, r := range attributes.Requirements {
		switch {
		case r.Operator == metav1.FieldSelectorOpIn && len(r.Values) == 1:
			all = append(all, fields.OneTermEqualSelector(r.Key, r.Values[0]))
		case r.Operator == metav1.FieldSelectorOpNotIn && len(r.Values) == 1:
			all = append(all, fields.OneTermNotEqualSelector(r.Key, r.Values[0]))
		default:
			errs = append(errs, fmt.Errorf(
				"spec.resourceAttributes.fieldSelector.requirements[%d]: %s with %d values: want In or NotIn with one",
				i, r.Operator, len(r.Values)))
		}
	}
	if len(all) == 0 {
		return nil, errors.Join(errs...)
	}
	return fields.AndSelectors(all...), errors.Join(errs...)
}

func labelSelector(l *authorizationv1.LabelSelectorAttributes) (string, error) {
	if l.RawSelector != "" {
		if _, err := labels.Parse(l.RawSelector); err != nil {
			return "", fmt.Errorf("spec.resourceAttributes.labelSelector.rawSelector: %w", err)
		}
		return l.RawSelector, nil
	}
	sel, err := metav1.LabelSelectorAsSelector(&metav1.LabelSelector{MatchExpressions: l.Requirements})
	if err != nil {
		return "", fmt.Errorf("spec.resourceAttributes.labelSelector.requirements: %w", err)
	}
	return sel.String(), nil
}
