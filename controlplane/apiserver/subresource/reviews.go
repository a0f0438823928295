package subresource

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// Answer performs a create of a virtual kind: the question comes back with its answer.
func (v *Verbs) Answer(ctx context.Context, r *api.Request) (runtime.Object, error) {
	switch o := r.Object.(type) {
	case *authenticationv1.TokenReview:
		return v.tokenReview(ctx, o.DeepCopy())
	case *authenticationv1.SelfSubjectReview:
		out := o.DeepCopy()
		out.Status.UserInfo = userInfo(r.User)
		out.CreationTimestamp = metav1.NewTime(v.Clock())
		return out, nil
	case *authorizationv1.SubjectAccessReview:
		return v.subjectReview(ctx, o.DeepCopy())
	case *authorizationv1.LocalSubjectAccessReview:
		return v.localReview(ctx, r, o.DeepCopy())
	case *authorizationv1.SelfSubjectAccessReview:
		out := o.DeepCopy()
		if err := oneOf(out.Spec.ResourceAttributes, out.Spec.NonResourceAttributes, "SelfSubjectAccessReview"); err != nil {
			return nil, err
		}
		out.Status = v.status(ctx, r.User, out.Spec.ResourceAttributes, out.Spec.NonResourceAttributes)
		return out, nil
	case *authorizationv1.SelfSubjectRulesReview:
		return v.rulesReview(r.User, o.DeepCopy())
	}
	return nil, apierrors.NewMethodNotSupported(r.Kind.GroupResource(), string(r.Verb))
}

func (v *Verbs) tokenReview(ctx context.Context, o *authenticationv1.TokenReview) (runtime.Object, error) {
	if o.Spec.Token == "" {
		return nil, apierrors.NewBadRequest("token is required for TokenReview in authentication")
	}
	o.CreationTimestamp = metav1.Time{}
	u, audiences, err := v.Review(ctx, o.Spec.Token, o.Spec.Audiences)
	if err != nil {
		o.Status = authenticationv1.TokenReviewStatus{Error: err.Error()}
		return o, nil
	}
	o.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: userInfo(u), Audiences: audiences}
	return o, nil
}

func userInfo(u api.User) authenticationv1.UserInfo {
	out := authenticationv1.UserInfo{Username: u.Name, UID: u.UID, Groups: u.Groups}
	for k, values := range u.Extra {
		if out.Extra == nil {
			out.Extra = make(map[string]authenticationv1.ExtraValue, len(u.Extra))
		}
		out.Extra[k] = values
	}
	return out
}

func subject(s *authorizationv1.SubjectAccessReviewSpec) api.User {
	u := api.User{Name: s.User, UID: s.UID, Groups: s.Groups, Extra: map[string][]string{}}
	for k, values := range s.Extra {
		u.Extra[k] = values
	}
	return u
}

func oneOf(res *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes, kind string) error {
	if (res == nil) == (path == nil) {
		return apierrors.NewInvalid(authorizationv1.SchemeGroupVersion.WithKind(kind).GroupKind(), "", field.ErrorList{
			field.Invalid(field.NewPath("spec", "resourceAttributes"), res, "exactly one of nonResourceAttributes or resourceAttributes must be specified"),
		})
	}
	return nil
}

func (v *Verbs) subjectReview(ctx context.Context, o *authorizationv1.SubjectAccessReview) (runtime.Object, error) {
	if err := validSubject(&o.Spec, "SubjectAccessReview"); err != nil {
		return nil, err
	}
	o.Status = v.status(ctx, subject(&o.Spec), o.Spec.ResourceAttributes, o.Spec.NonResourceAttributes)
	return o, nil
}

func (v *Verbs) localReview(ctx context.Context, r *api.Request, o *authorizationv1.LocalSubjectAccessReview) (runtime.Object, error) {
	if err := validSubject(&o.Spec, "LocalSubjectAccessReview"); err != nil {
		return nil, err
	}
	if o.Spec.ResourceAttributes == nil || o.Spec.ResourceAttributes.Namespace != r.Namespace {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("spec.resourceAttributes.namespace must match namespace: %s", r.Namespace))
	}
	o.Status = v.status(ctx, subject(&o.Spec), o.Spec.ResourceAttributes, nil)
	return o, nil
}

func validSubject(s *authorizationv1.SubjectAccessReviewSpec, kind string) error {
	if s.User == "" && len(s.Groups) == 0 {
		return apierrors.NewBadRequest("spec.user: at least one of user or group must be specified")
	}
	return oneOf(s.ResourceAttributes, s.NonResourceAttributes, kind)
}

func (v *Verbs) status(ctx context.Context, u api.User, res *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes) authorizationv1.SubjectAccessReviewStatus {
	allowed, denied, reason := v.Allowed(ctx, u, res, path)
	return authorizationv1.SubjectAccessReviewStatus{Allowed: allowed, Denied: denied, Reason: reason}
}

func (v *Verbs) rulesReview(u api.User, o *authorizationv1.SelfSubjectRulesReview) (runtime.Object, error) {
	if o.Spec.Namespace == "" {
		return nil, apierrors.NewBadRequest("no namespace on request")
	}
	o.Status = authorizationv1.SubjectRulesReviewStatus{
		ResourceRules: []authorizationv1.ResourceRule{}, NonResourceRules: []authorizationv1.NonResourceRule{},
	}
	for _, rule := range v.Rules(u, o.Spec.Namespace) {
		if len(rule.NonResourceURLs) > 0 {
			o.Status.NonResourceRules = append(o.Status.NonResourceRules, authorizationv1.NonResourceRule{Verbs: rule.Verbs, NonResourceURLs: rule.NonResourceURLs})
			continue
		}
		o.Status.ResourceRules = append(o.Status.ResourceRules, authorizationv1.ResourceRule{
			Verbs: rule.Verbs, APIGroups: rule.APIGroups, Resources: rule.Resources, ResourceNames: rule.ResourceNames,
		})
	}
	return o, nil
}
