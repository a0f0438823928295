package core

import (
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

// ServiceAccountKind returns the definition of the kind ServiceAccount.
func ServiceAccountKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "ServiceAccount", Plural: "serviceaccounts", Singular: "serviceaccount", Short: []string{"sa"},
	}, func(l *corev1.ServiceAccountList) *[]corev1.ServiceAccount { return &l.Items })
	k.ReturnsDeleted = true
	builder.AddSubresource(k, "token", &api.Subresource{
		GVK:   authenticationv1.SchemeGroupVersion.WithKind("TokenRequest"),
		New:   func() runtime.Object { return &authenticationv1.TokenRequest{} },
		Verbs: []string{"create"},
	})
	k.PrepareCreate = func(o api.Object) { nameSecrets(o.(*corev1.ServiceAccount)) }
	k.PrepareUpdate = func(o, _ api.Object) { nameSecrets(o.(*corev1.ServiceAccount)) }
	k.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Secrets"), builder.AgeColumn)
	k.Row = builder.Row(func(s *corev1.ServiceAccount, now time.Time) []any {
		return []any{s.Name, int64(len(s.Secrets)), builder.Age(s, now)}
	})
	return k
}

// nameSecrets reduces each reference to the name, because the Secrets are in the account's
// namespace.
func nameSecrets(s *corev1.ServiceAccount) {
	// a new list, because the stored object may share the old one
	var names []corev1.ObjectReference
	for _, ref := range s.Secrets {
		names = append(names, corev1.ObjectReference{Name: ref.Name})
	}
	s.Secrets = names
}
