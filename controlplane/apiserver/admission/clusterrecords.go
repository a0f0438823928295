package admission

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
)

// clusterRecords leaves the records of join tokens, of machines that join and of revocations to the
// verbs that make them, whoever asks: a token's record that was written by hand
// would let nobody in, and one that was put back would give uses anew. Deleting
// one is how a token is withdrawn, and how a revocation is taken back.
func clusterRecords(_ context.Context, a *api.Attempt) error {
	obj := a.Whole
	if !a.Is("secrets") || obj == nil || a.Request.ClusterVerb {
		return nil
	}
	for _, o := range []api.Object{obj, a.Stored} {
		s, ok := o.(*corev1.Secret)
		if ok && s.Type == pki.RevocationSecretType {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, obj.GetName(),
				errors.New("records of revocations are made by 'kctl cluster revoke' and by the deletion of Nodes only"))
		}
		if ok && s.Type == pki.ClaimSecretType {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, obj.GetName(),
				errors.New("records of machines that join are made when they enrol only"))
		}
		if ok && s.Type == pki.TokenSecretType {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, obj.GetName(),
				errors.New("records of join tokens are made by 'kctl cluster token create' only"))
		}
	}
	return nil
}
