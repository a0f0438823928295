// Package serviceaccount provides every namespace with the service account "default", and with the
// cluster's root certificates in ConfigMap kube-root-ca.crt. It also fills Secrets that request a
// service account token.
package serviceaccount

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Names of the two objects that the controller creates in every namespace: the ServiceAccount
// DefaultAccount, and the ConfigMap RootCAMap. The ConfigMap has the cluster's root certificates
// under key RootCAKey.
const (
	DefaultAccount = "default"
	RootCAMap      = "kube-root-ca.crt"
	RootCAKey      = "ca.crt"
)

const rootCADescription = "The certificates by which clients inside the cluster verify its API server."

// NamespacePlan is the result of PlanNamespace: the writes for a namespace. A nil field means no
// write.
type NamespacePlan struct {
	Account *corev1.ServiceAccount // ServiceAccount to create
	Create  *corev1.ConfigMap
	Update  *corev1.ConfigMap
}

// PlanNamespace returns the writes that give namespace ns its ServiceAccount and its ConfigMap with
// the root certificates pem. account reports whether the ServiceAccount exists. ca is the existing
// ConfigMap, or nil.
func PlanNamespace(ns *corev1.Namespace, account bool, ca *corev1.ConfigMap, pem string) NamespacePlan {
	var n NamespacePlan
	if ns.DeletionTimestamp != nil || ns.Status.Phase == corev1.NamespaceTerminating {
		return n
	}
	if !account {
		n.Account = &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: DefaultAccount}}
	}
	switch {
	case ca == nil:
		n.Create = &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: ns.Name, Name: RootCAMap,
				Annotations: map[string]string{"kubernetes.io/description": rootCADescription},
			},
			Data: map[string]string{RootCAKey: pem},
		}
	case len(ca.Data) != 1 || ca.Data[RootCAKey] != pem || len(ca.BinaryData) > 0:
		n.Update = ca.DeepCopy()
		n.Update.Data = map[string]string{RootCAKey: pem}
		n.Update.BinaryData = nil
	}
	return n
}

// Roots provides the root certificates of the cluster, which may change at run time.
type Roots interface {
	PEM() []byte
	Changed() <-chan struct{} // Changed returns a channel that is closed at the first change of PEM after the call.
}

// FixedRoots is an implementation of Roots with certificates that never change.
type FixedRoots []byte

// PEM implements Roots.
func (f FixedRoots) PEM() []byte { return f }

// Changed implements Roots.
func (FixedRoots) Changed() <-chan struct{} { return nil }

// New returns the controller that creates the default ServiceAccount and the root certificate
// ConfigMap in every namespace.
func New(d engine.Deps, roots Roots) *engine.Descriptor {
	namespaces := client.Informer[*corev1.Namespace](d.Informers)
	accounts := client.Informer[*corev1.ServiceAccount](d.Informers)
	maps := client.Informer[*corev1.ConfigMap](d.Informers)
	return &engine.Descriptor{
		Name:       "service-account-controller",
		Workers:    2,
		RequeueAll: roots.Changed,
		Watches: []engine.Watch{
			engine.OnInformer(namespaces, engine.Self[*corev1.Namespace]),
			engine.OnInformer(accounts, func(c engine.Change[*corev1.ServiceAccount]) []engine.Key {
				return ofMember(c.New.Namespace, c.New.Name == DefaultAccount)
			}),
			engine.OnInformer(maps, func(c engine.Change[*corev1.ConfigMap]) []engine.Key {
				return ofMember(c.New.Namespace, c.New.Name == RootCAMap)
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"serviceaccounts"},
				Verbs: []string{"create", "get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"configmaps"},
				Verbs: []string{"create", "get", "list", "update", "watch"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			account := engine.ViewOf[*corev1.ServiceAccount](t, accounts)
			ca := engine.ViewOf[*corev1.ConfigMap](t, maps)
			return func(ctx context.Context, key engine.Key) (time.Duration, error) {
				ns, ok := engine.Cached[*corev1.Namespace](namespaces, "", key.Name)
				if !ok {
					return 0, nil
				}
				_, has := account.Get(ns.Name, DefaultAccount)
				have, ok := ca.Get(ns.Name, RootCAMap)
				if !ok {
					have = nil
				}
				needs := PlanNamespace(ns, has, have, string(roots.PEM()))
				return 0, errors.Join(
					writeObject(ctx, t, account, needs.Account, client.Create[*corev1.ServiceAccount]),
					writeObject(ctx, t, ca, needs.Create, client.Create[*corev1.ConfigMap]),
					writeObject(ctx, t, ca, needs.Update, client.Update[*corev1.ConfigMap]),
				)
			}
		},
	}
}

// ofMember returns the key of namespace if ours is true, which means that the changed object is one
// that the controller creates. Otherwise it returns nil.
func ofMember(namespace string, ours bool) []engine.Key {
	if !ours {
		return nil
	}
	return []engine.Key{{Name: namespace}}
}

// writeObject stores obj by calling write, which creates or updates an object, and records the
// result in v. It does nothing if obj is nil.
func writeObject[T interface {
	comparable
	api.Object
}](
	ctx context.Context, t *engine.Term, v *engine.View[T], obj T,
	write func(context.Context, *client.Client, T) (T, error),
) error {
	var none T
	if obj == none {
		return nil
	}
	namespace, name := obj.GetNamespace(), obj.GetName()
	stored, err := write(ctx, t.Client, obj)
	switch {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) || apierrors.IsAlreadyExists(err):
		return nil // the namespace is terminating, or the existing object is not cached yet
	case err != nil:
		return fmt.Errorf("writing %s of namespace %s: %w", name, namespace, err)
	}
	v.RecordWrite(stored)
	return nil
}
