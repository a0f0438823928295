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
		GroupVersion: corev1.SchemeGroupVersion, Kind: "ServiceAccount", Plural: "serviceaccounts",
		Singular: "serviceaccount", Short: []string{"sa"},
	}, func(l *corev1.ServiceAccountList) *[]corev1.ServiceAccount { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	builder.AddSubresource(k, "token", &api.Subresource{
		GVK:   authenticationv1.SchemeGroupVersion.WithKind("TokenRequest"),
		New:   func() runtime.Object { return &authenticationv1.TokenRequest{} },
		Verbs: []string{"create"},
	})
	k.Writes.PrepareCreate = func(o api.Object) { nameSecrets(o.(*corev1.ServiceAccount)) }
	k.Writes.PrepareUpdate = func(o, _ api.Object) { nameSecrets(o.(*corev1.ServiceAccount)) }
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Secrets"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(s *corev1.ServiceAccount, now time.Time) []any {
		return []any{s.Name, int64(len(s.Secrets)), builder.Age(s, now)}
	})
	return k
}

// nameSecrets removes everything but the name from each reference to a Secret, because the Secrets
// are in the account's namespace.
func nameSecrets(s *corev1.ServiceAccount) {
	// a new list, because the stored object may share the old one
	var names []corev1.ObjectReference
	for _, ref := range s.Secrets {
		names = append(names, corev1.ObjectReference{Name: ref.Name})
	}
	s.Secrets = names
}
