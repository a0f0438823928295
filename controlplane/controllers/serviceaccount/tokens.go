package serviceaccount

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// TokenSigner returns a token of a ServiceAccount that is bound to a Secret of the account's
// namespace.
type TokenSigner func(account *corev1.ServiceAccount, secret string) (string, error)

// accountIndex indexes Secrets with service account tokens by their ServiceAccount, as
// namespace/name.
const accountIndex = "keelson.token-account"

// accountOf returns the name of the ServiceAccount for which Secret s requests a token, or "".
func accountOf(s *corev1.Secret) string {
	if s.Type != corev1.SecretTypeServiceAccountToken {
		return ""
	}
	return s.Annotations[corev1.ServiceAccountNameKey]
}

// Represents reports whether Secret s requests a token of this ServiceAccount, and not of a deleted
// account with the same name.
func Represents(s *corev1.Secret, account *corev1.ServiceAccount) bool {
	uid := s.Annotations[corev1.ServiceAccountUIDKey]
	return accountOf(s) == account.Name && (uid == "" || uid == string(account.UID))
}

// PlanToken returns a copy of Secret s with the current root certificates, its namespace and the
// UID of its account. It returns nil if s is complete. token reports whether the copy still needs a
// token.
func PlanToken(s *corev1.Secret, account *corev1.ServiceAccount, caPEM []byte) (next *corev1.Secret, token bool) {
	token = len(s.Data[corev1.ServiceAccountTokenKey]) == 0
	if !token && len(s.Data[corev1.ServiceAccountNamespaceKey]) > 0 &&
		bytes.Equal(s.Data[corev1.ServiceAccountRootCAKey], caPEM) {
		return nil, false
	}
	next = s.DeepCopy()
	data := map[string][]byte{corev1.ServiceAccountRootCAKey: caPEM}
	if len(s.Data[corev1.ServiceAccountNamespaceKey]) == 0 {
		data[corev1.ServiceAccountNamespaceKey] = []byte(s.Namespace)
	}
	if next.Data == nil {
		next.Data = map[string][]byte{}
	}
	maps.Copy(next.Data, data)
	metav1.SetMetaDataAnnotation(&next.ObjectMeta, corev1.ServiceAccountUIDKey, string(account.UID))
	return next, token
}

// NewTokens returns the controller that fills Secrets of type service-account-token, and deletes
// such Secrets if their ServiceAccount no longer exists.
func NewTokens(d engine.Deps, roots Roots, sign TokenSigner) *engine.Descriptor {
	secrets := client.Informer[*corev1.Secret](d.Informers)
	accounts := client.Informer[*corev1.ServiceAccount](d.Informers)
	engine.Index(secrets, accountIndex, func(o api.Object) []string {
		if s, ok := o.(*corev1.Secret); ok && accountOf(s) != "" {
			return []string{s.Namespace + "/" + accountOf(s)}
		}
		return nil
	})
	return &engine.Descriptor{
		Name:       "serviceaccount-token-controller",
		Workers:    2,
		RequeueAll: roots.Changed,
		Watches: []engine.Watch{
			engine.OnInformer(secrets, func(c engine.Change[*corev1.Secret]) []engine.Key {
				if c.Type == engine.Deleted || accountOf(c.New) == "" {
					return nil
				}
				return []engine.Key{engine.KeyOf(c.New)}
			}),
			engine.OnInformer(accounts, func(c engine.Change[*corev1.ServiceAccount]) []engine.Key {
				var keys []engine.Key
				for _, s := range engine.CachedBy[*corev1.Secret](secrets, accountIndex,
					c.New.Namespace+"/"+c.New.Name) {
					keys = append(keys, engine.KeyOf(s))
				}
				return keys
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"secrets"},
				Verbs: []string{"delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"serviceaccounts"}, Verbs: []string{"get", "list", "watch"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &tokenReconciler{term: t, secrets: secrets, accounts: accounts, roots: roots, sign: sign}
			return r.reconcileSecret
		},
	}
}

// tokenReconciler reconciles Secrets with service account tokens during one term of leadership.
// Every term has a new tokenReconciler.
type tokenReconciler struct {
	term              *engine.Term
	secrets, accounts cache.SharedIndexInformer
	roots             Roots
	sign              TokenSigner
}

func (r *tokenReconciler) reconcileSecret(ctx context.Context, key engine.Key) (time.Duration, error) {
	s, ok := engine.Cached[*corev1.Secret](r.secrets, key.Namespace, key.Name)
	if !ok || s.DeletionTimestamp != nil || accountOf(s) == "" {
		return 0, nil
	}
	account, err := r.secretAccount(ctx, s)
	switch {
	case err != nil:
		return 0, err
	case account == nil:
		return 0, r.deleteSecret(ctx, s)
	}
	return 0, r.fillSecret(ctx, s, account)
}

// secretAccount returns the ServiceAccount of Secret s, or nil if it does not exist. If the account
// is not cached, it is read from the API.
func (r *tokenReconciler) secretAccount(ctx context.Context, s *corev1.Secret) (*corev1.ServiceAccount, error) {
	if a, ok := engine.Cached[*corev1.ServiceAccount](r.accounts, s.Namespace, accountOf(s)); ok && Represents(s, a) {
		return a, nil
	}
	a, err := client.Get[*corev1.ServiceAccount](ctx, r.term.Client, s.Namespace, accountOf(s))
	switch {
	case apierrors.IsNotFound(err) || err == nil && !Represents(s, a):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading the service account of Secret %s/%s: %w", s.Namespace, s.Name, err)
	}
	return a, nil
}

// deleteSecret deletes Secret s. The deletion fails if the stored Secret has changed; it is then
// queued again.
func (r *tokenReconciler) deleteSecret(ctx context.Context, s *corev1.Secret) error {
	err := client.Delete[*corev1.Secret](ctx, r.term.Client, s.Namespace, s.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &s.UID, ResourceVersion: &s.ResourceVersion},
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting Secret %s/%s, whose service account no longer exists: %w", s.Namespace, s.Name, err)
	}
	return nil
}

func (r *tokenReconciler) fillSecret(ctx context.Context, s *corev1.Secret, account *corev1.ServiceAccount) error {
	next, token := PlanToken(s, account, r.roots.PEM())
	if next == nil {
		return nil
	}
	if token {
		text, err := r.sign(account, s.Name)
		if err != nil {
			return fmt.Errorf("creating a token for Secret %s/%s: %w", s.Namespace, s.Name, err)
		}
		next.Data[corev1.ServiceAccountTokenKey] = []byte(text)
	}
	if _, err := client.Update(ctx, r.term.Client, next); err != nil && !apierrors.IsNotFound(err) &&
		!apierrors.IsConflict(err) {
		return fmt.Errorf("writing the token into Secret %s/%s: %w", s.Namespace, s.Name, err)
	}
	return nil
}
