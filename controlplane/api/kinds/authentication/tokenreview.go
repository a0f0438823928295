// Package authentication describes the kinds of the API group authentication.k8s.io. Objects of
// these kinds are not stored.
package authentication

import (
	authenticationv1 "k8s.io/api/authentication/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

// TokenReviewKind returns the definition of the kind TokenReview.
func TokenReviewKind() *api.Kind {
	return builder.NewVirtual[authenticationv1.TokenReview](builder.Names{
		GroupVersion: authenticationv1.SchemeGroupVersion, Kind: "TokenReview", Plural: "tokenreviews",
		Singular: "tokenreview", ClusterScoped: true})
}

// SelfSubjectReviewKind returns the definition of the kind SelfSubjectReview.
func SelfSubjectReviewKind() *api.Kind {
	return builder.NewVirtual[authenticationv1.SelfSubjectReview](builder.Names{
		GroupVersion: authenticationv1.SchemeGroupVersion, Kind: "SelfSubjectReview", Plural: "selfsubjectreviews",
		Singular: "selfsubjectreview", ClusterScoped: true})
}
