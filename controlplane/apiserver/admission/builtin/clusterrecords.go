package builtin

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
)

// clusterRecords rejects every API write, by any user, of the Secrets that record join tokens,
// joining machines and revocations. Only the corresponding cluster operations may write them: a
// forged token record would be useless, and a restored one would allow further uses. Deleting such
// a Secret is allowed; it withdraws a token or a revocation.
func clusterRecords(_ context.Context, a *api.Attempt) error {
	obj := a.Whole
	if !a.IsCoreResource("secrets") || obj == nil || a.Request.Internal.ClusterVerb {
		return nil
	}
	for _, o := range []api.Object{obj, a.Stored} {
		s, ok := o.(*corev1.Secret)
		if ok && s.Type == pki.RevocationSecretType {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, obj.GetName(),
				errors.New("revocation records are created only by 'kctl cluster revoke' and by the deletion of Nodes"))
		}
		if ok && s.Type == pki.ClaimSecretType {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, obj.GetName(),
				errors.New("records of joining machines are created only by enrollment"))
		}
		if ok && s.Type == pki.TokenSecretType {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, obj.GetName(),
				errors.New("join token records are created only by 'kctl cluster token create'"))
		}
	}
	return nil
}
