package kinds

import (
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"

	"keelson.dev/keelson/controlplane/api"
)

func tokenReviewKind() *api.Kind {
	k := newVirtual[authenticationv1.TokenReview](names{gv: authenticationv1.SchemeGroupVersion, kind: "TokenReview", plural: "tokenreviews", singular: "tokenreview"})
	return k
}

func selfSubjectReviewKind() *api.Kind {
	k := newVirtual[authenticationv1.SelfSubjectReview](names{gv: authenticationv1.SchemeGroupVersion, kind: "SelfSubjectReview", plural: "selfsubjectreviews", singular: "selfsubjectreview"})
	return k
}

func subjectAccessReviewKind() *api.Kind {
	k := newVirtual[authorizationv1.SubjectAccessReview](names{gv: authorizationv1.SchemeGroupVersion, kind: "SubjectAccessReview", plural: "subjectaccessreviews", singular: "subjectaccessreview"})
	return k
}

func selfSubjectAccessReviewKind() *api.Kind {
	k := newVirtual[authorizationv1.SelfSubjectAccessReview](names{gv: authorizationv1.SchemeGroupVersion, kind: "SelfSubjectAccessReview", plural: "selfsubjectaccessreviews", singular: "selfsubjectaccessreview"})
	return k
}

func localSubjectAccessReviewKind() *api.Kind {
	k := newVirtual[authorizationv1.LocalSubjectAccessReview](names{gv: authorizationv1.SchemeGroupVersion, kind: "LocalSubjectAccessReview", plural: "localsubjectaccessreviews", singular: "localsubjectaccessreview"})
	k.Namespaced = true
	return k
}

func selfSubjectRulesReviewKind() *api.Kind {
	k := newVirtual[authorizationv1.SelfSubjectRulesReview](names{gv: authorizationv1.SchemeGroupVersion, kind: "SelfSubjectRulesReview", plural: "selfsubjectrulesreviews", singular: "selfsubjectrulesreview"})
	return k
}
