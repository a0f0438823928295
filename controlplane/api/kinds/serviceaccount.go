package kinds

import (
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

func serviceAccountKind() *api.Kind {
	k := newKind[corev1.ServiceAccount, corev1.ServiceAccountList](names{
		gv: corev1.SchemeGroupVersion, kind: "ServiceAccount", plural: "serviceaccounts", singular: "serviceaccount", short: []string{"sa"},
	})
	k.ReturnsDeleted = true
	addSub(k, "token", &api.Subresource{
		GVK:   authenticationv1.SchemeGroupVersion.WithKind("TokenRequest"),
		New:   func() runtime.Object { return &authenticationv1.TokenRequest{} },
		Verbs: []string{"create"},
	})
	k.Columns = columns(nameCol, numCol("Secrets"), ageCol)
	k.Row = row(func(s *corev1.ServiceAccount, now time.Time) []any {
		return []any{s.Name, int64(len(s.Secrets)), age(s, now)}
	})
	return k
}
