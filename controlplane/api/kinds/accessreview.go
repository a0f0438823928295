package kinds

import (
	authorizationv1 "k8s.io/api/authorization/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

func subjectAccessReviewKind() *api.Kind {
	return builder.NewVirtual[authorizationv1.SubjectAccessReview](builder.Names{
		GroupVersion: authorizationv1.SchemeGroupVersion, Kind: "SubjectAccessReview", Plural: "subjectaccessreviews", Singular: "subjectaccessreview", ClusterScoped: true})
}

func selfSubjectAccessReviewKind() *api.Kind {
	return builder.NewVirtual[authorizationv1.SelfSubjectAccessReview](builder.Names{
		GroupVersion: authorizationv1.SchemeGroupVersion, Kind: "SelfSubjectAccessReview", Plural: "selfsubjectaccessreviews", Singular: "selfsubjectaccessreview", ClusterScoped: true})
}

func localSubjectAccessReviewKind() *api.Kind {
	return builder.NewVirtual[authorizationv1.LocalSubjectAccessReview](builder.Names{
		GroupVersion: authorizationv1.SchemeGroupVersion, Kind: "LocalSubjectAccessReview", Plural: "localsubjectaccessreviews", Singular: "localsubjectaccessreview"})
}

func selfSubjectRulesReviewKind() *api.Kind {
	return builder.NewVirtual[authorizationv1.SelfSubjectRulesReview](builder.Names{
		GroupVersion: authorizationv1.SchemeGroupVersion, Kind: "SelfSubjectRulesReview", Plural: "selfsubjectrulesreviews", Singular: "selfsubjectrulesreview", ClusterScoped: true})
}
