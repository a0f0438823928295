package subresource

import (
	"context"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry"
)

// ServeVirtual performs the verbs of virtual kinds. Objects of virtual kinds are not stored. A
// create, such as of an access review, returns the object with its status.
func (v *Verbs) ServeVirtual(ctx context.Context, r *api.Request, a registry.Admission) (runtime.Object, error) {
	if r.Verb == api.VerbGet || r.Verb == api.VerbList {
		return v.readVirtual(ctx, r)
	}
	if r.Verb != api.VerbCreate || r.Object == nil {
		return nil, apierrors.NewMethodNotSupported(r.Kind.GroupResource(), string(r.Verb))
	}
	body, err := Admit(ctx, r, a, r.Object, nil)
	if err != nil {
		return nil, err
	}
	switch o := body.(type) {
	case *corev1.Binding:
		return v.bindNamed(ctx, r, a, o)
	case *authenticationv1.TokenReview:
		return v.tokenReview(ctx, o.DeepCopy())
	case *authenticationv1.SelfSubjectReview:
		// as in Kubernetes, the response contains no fields of the request
		out := &authenticationv1.SelfSubjectReview{TypeMeta: o.TypeMeta}
		out.Status.UserInfo = userInfo(r.User)
		out.CreationTimestamp = metav1.NewTime(v.Clock())
		return out, nil
	case *authorizationv1.SubjectAccessReview:
		return v.subjectReview(ctx, o.DeepCopy())
	case *authorizationv1.LocalSubjectAccessReview:
		return v.localReview(ctx, r, o.DeepCopy())
	case *authorizationv1.SelfSubjectAccessReview:
		out := o.DeepCopy()
		if err := invalidReview("SelfSubjectAccessReview", validateSelfReview(out)); err != nil {
			return nil, err
		}
		out.Status = v.Allowed(ctx, r.User, out.Spec.ResourceAttributes, out.Spec.NonResourceAttributes)
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

func subjectUser(s *authorizationv1.SubjectAccessReviewSpec) api.User {
	u := api.User{Name: s.User, UID: s.UID, Groups: s.Groups, Extra: map[string][]string{}}
	for k, values := range s.Extra {
		u.Extra[k] = values
	}
	return u
}

func (v *Verbs) subjectReview(ctx context.Context, o *authorizationv1.SubjectAccessReview) (runtime.Object, error) {
	if err := invalidReview("SubjectAccessReview",
		append(validateSubjectReview(&o.Spec), validateReviewMeta(o.ObjectMeta, "", "must be empty")...)); err != nil {
		return nil, err
	}
	o.Status = v.Allowed(ctx, subjectUser(&o.Spec), o.Spec.ResourceAttributes, o.Spec.NonResourceAttributes)
	return o, nil
}

func (v *Verbs) localReview(ctx context.Context, r *api.Request, o *authorizationv1.LocalSubjectAccessReview) (
	runtime.Object, error,
) {
	if err := invalidReview("LocalSubjectAccessReview", validateLocalReview(o, r.Namespace)); err != nil {
		return nil, err
	}
	o.Status = v.Allowed(ctx, subjectUser(&o.Spec), o.Spec.ResourceAttributes, nil)
	return o, nil
}

func (v *Verbs) rulesReview(u api.User, o *authorizationv1.SelfSubjectRulesReview) (runtime.Object, error) {
	if o.Spec.Namespace == "" {
		return nil, apierrors.NewBadRequest("no namespace on request")
	}
	o.Status = authorizationv1.SubjectRulesReviewStatus{
		ResourceRules: []authorizationv1.ResourceRule{}, NonResourceRules: []authorizationv1.NonResourceRule{},
	}
	if v.Unlisted != nil {
		o.Status.EvaluationError = v.Unlisted()
		o.Status.Incomplete = o.Status.EvaluationError != ""
	}
	for _, rule := range v.Rules(u, o.Spec.Namespace) {
		if len(rule.NonResourceURLs) > 0 {
			o.Status.NonResourceRules = append(o.Status.NonResourceRules,
				authorizationv1.NonResourceRule{Verbs: rule.Verbs, NonResourceURLs: rule.NonResourceURLs})
			continue
		}
		o.Status.ResourceRules = append(o.Status.ResourceRules, authorizationv1.ResourceRule{
			Verbs: rule.Verbs, APIGroups: rule.APIGroups, Resources: rule.Resources, ResourceNames: rule.ResourceNames,
		})
	}
	return o, nil
}
