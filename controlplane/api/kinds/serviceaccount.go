package kinds

import (
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

func serviceAccountKind() *api.Kind {
	k := newKind(names{
		gv: corev1.SchemeGroupVersion, kind: "ServiceAccount", plural: "serviceaccounts", singular: "serviceaccount", short: []string{"sa"},
	}, func(l *corev1.ServiceAccountList) *[]corev1.ServiceAccount { return &l.Items })
	k.ReturnsDeleted = true
	addSub(k, "token", &api.Subresource{
		GVK:   authenticationv1.SchemeGroupVersion.WithKind("TokenRequest"),
		New:   func() runtime.Object { return &authenticationv1.TokenRequest{} },
		Verbs: []string{"create"},
	})
	k.PrepareCreate = func(o api.Object) { nameSecrets(o.(*corev1.ServiceAccount)) }
	k.PrepareUpdate = func(o, _ api.Object) { nameSecrets(o.(*corev1.ServiceAccount)) }
	k.Columns = columns(nameCol, col("Secrets"), ageCol)
	k.Row = row(func(s *corev1.ServiceAccount, now time.Time) []any {
		return []any{s.Name, int64(len(s.Secrets)), age(s, now)}
	})
	return k
}

// nameSecrets leaves of each reference the name alone: the Secrets are those of the account's namespace.
func nameSecrets(s *corev1.ServiceAccount) {
	var names []corev1.ObjectReference // not in place: what is stored may share the list
	for _, ref := range s.Secrets {
		names = append(names, corev1.ObjectReference{Name: ref.Name})
	}
	s.Secrets = names
}
