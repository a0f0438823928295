package kinds

import (
	authenticationv1 "k8s.io/api/authentication/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

func tokenReviewKind() *api.Kind {
	return builder.NewVirtual[authenticationv1.TokenReview](builder.Names{
		GroupVersion: authenticationv1.SchemeGroupVersion, Kind: "TokenReview", Plural: "tokenreviews", Singular: "tokenreview", ClusterScoped: true})
}

func selfSubjectReviewKind() *api.Kind {
	return builder.NewVirtual[authenticationv1.SelfSubjectReview](builder.Names{
		GroupVersion: authenticationv1.SchemeGroupVersion, Kind: "SelfSubjectReview", Plural: "selfsubjectreviews", Singular: "selfsubjectreview", ClusterScoped: true})
}
