// Package authorization describes the kinds of the API group authorization.k8s.io. Objects of these
// kinds are not stored.
package authorization

import (
	authorizationv1 "k8s.io/api/authorization/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

// SubjectAccessReviewKind returns the definition of the kind SubjectAccessReview.
func SubjectAccessReviewKind() *api.Kind {
	return builder.NewVirtual[authorizationv1.SubjectAccessReview](builder.Names{
		GroupVersion: authorizationv1.SchemeGroupVersion, Kind: "SubjectAccessReview", Plural: "subjectaccessreviews",
		Singular: "subjectaccessreview", ClusterScoped: true})
}

// SelfSubjectAccessReviewKind returns the definition of the kind SelfSubjectAccessReview.
func SelfSubjectAccessReviewKind() *api.Kind {
	return builder.NewVirtual[authorizationv1.SelfSubjectAccessReview](builder.Names{
		GroupVersion: authorizationv1.SchemeGroupVersion, Kind: "SelfSubjectAccessReview",
		Plural: "selfsubjectaccessreviews", Singular: "selfsubjectaccessreview", ClusterScoped: true})
}

// LocalSubjectAccessReviewKind returns the definition of the kind LocalSubjectAccessReview.
func LocalSubjectAccessReviewKind() *api.Kind {
	return builder.NewVirtual[authorizationv1.LocalSubjectAccessReview](builder.Names{
		GroupVersion: authorizationv1.SchemeGroupVersion, Kind: "LocalSubjectAccessReview",
		Plural: "localsubjectaccessreviews", Singular: "localsubjectaccessreview"})
}

// SelfSubjectRulesReviewKind returns the definition of the kind SelfSubjectRulesReview.
func SelfSubjectRulesReviewKind() *api.Kind {
	return builder.NewVirtual[authorizationv1.SelfSubjectRulesReview](builder.Names{
		GroupVersion: authorizationv1.SchemeGroupVersion, Kind: "SelfSubjectRulesReview",
		Plural: "selfsubjectrulesreviews", Singular: "selfsubjectrulesreview", ClusterScoped: true})
}
