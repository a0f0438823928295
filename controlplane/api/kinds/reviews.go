package kinds

import (
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"

	"keelson.dev/keelson/controlplane/api"
)

func tokenReviewKind() *api.Kind {
	return newVirtual[authenticationv1.TokenReview](names{
		gv: authenticationv1.SchemeGroupVersion, kind: "TokenReview", plural: "tokenreviews", singular: "tokenreview", global: true})
}

func selfSubjectReviewKind() *api.Kind {
	return newVirtual[authenticationv1.SelfSubjectReview](names{
		gv: authenticationv1.SchemeGroupVersion, kind: "SelfSubjectReview", plural: "selfsubjectreviews", singular: "selfsubjectreview", global: true})
}

func subjectAccessReviewKind() *api.Kind {
	return newVirtual[authorizationv1.SubjectAccessReview](names{
		gv: authorizationv1.SchemeGroupVersion, kind: "SubjectAccessReview", plural: "subjectaccessreviews", singular: "subjectaccessreview", global: true})
}

func selfSubjectAccessReviewKind() *api.Kind {
	return newVirtual[authorizationv1.SelfSubjectAccessReview](names{
		gv: authorizationv1.SchemeGroupVersion, kind: "SelfSubjectAccessReview", plural: "selfsubjectaccessreviews", singular: "selfsubjectaccessreview", global: true})
}

func localSubjectAccessReviewKind() *api.Kind {
	return newVirtual[authorizationv1.LocalSubjectAccessReview](names{
		gv: authorizationv1.SchemeGroupVersion, kind: "LocalSubjectAccessReview", plural: "localsubjectaccessreviews", singular: "localsubjectaccessreview"})
}

func selfSubjectRulesReviewKind() *api.Kind {
	return newVirtual[authorizationv1.SelfSubjectRulesReview](names{
		gv: authorizationv1.SchemeGroupVersion, kind: "SelfSubjectRulesReview", plural: "selfsubjectrulesreviews", singular: "selfsubjectrulesreview", global: true})
}
