package ingress

import (
	"context"
	"errors"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/ingressproxy/ingress"
)

// givePairs writes the TLS key pairs that the Ingresses of a class name to the Secrets that the
// proxies of the class mount. It is called before the proxies are created, so that they start with
// the key pairs.
func (l *leading) givePairs(ctx context.Context, class *networkingv1.IngressClass) error {
	given, left := ingress.SecretShards(class.Name, controllers.CachedAll[*networkingv1.Ingress](l.ingresses), l.controller, &l.keys)
	var errs []error
	for i, want := range PlanPairs(class, given) {
		if want == nil {
			errs = append(errs, deleteIfOwned(ctx, l.t, class, l.madeSecrets, ingress.ShardName(class.Name, i)))
			continue
		}
		errs = append(errs, l.ensureSecret(ctx, class, want))
	}
	l.mu.Lock()
	before := l.left[class.Name]
	l.left[class.Name] = left
	l.mu.Unlock()
	if !maps.Equal(before, left) {
		for _, key := range l.ingressKeys(func(i *networkingv1.Ingress) bool { return ingress.ClassOf(i) == class.Name }) {
			l.t.Enqueue(key)
		}
	}
	return errors.Join(errs...)
}

// ensureSecret creates Secret want of an IngressClass, or restores its data if they differ.
func (l *leading) ensureSecret(ctx context.Context, class *networkingv1.IngressClass, want *corev1.Secret) error {
	have, ok := l.madeSecrets.Get(want.Namespace, want.Name)
	var stored *corev1.Secret
	var err error
	switch {
	case !ok:
		stored, err = client.Create(ctx, l.t.Client, want)
		if apierrors.IsAlreadyExists(err) {
			return controllers.RaceError("creating Secret %s/%s: %w", want.Namespace, want.Name, err)
		}
	case l.madeSecrets.IsDeleting(have) || maps.EqualFunc(have.Data, want.Data, func(a, b []byte) bool { return string(a) == string(b) }):
		return nil
	case !metav1.IsControlledBy(have, class):
		l.t.Events.Eventf(class, corev1.EventTypeWarning, "NameTaken", "Secret %s/%s is there and does not belong to this class: delete it, or name the class otherwise", want.Namespace, want.Name)
		return nil
	default:
		next := have.DeepCopy()
		next.Data = want.Data
		stored, err = client.Update(ctx, l.t.Client, next)
	}
	if err != nil {
		return fmt.Errorf("writing Secret %s/%s: %w", want.Namespace, want.Name, err)
	}
	l.madeSecrets.RecordWrite(stored)
	return nil
}

// unplacedKeyPairs returns a message for each TLS key pair of Ingress i for which the Secrets of
// its class had no space.
func (l *leading) unplacedKeyPairs(i *networkingv1.Ingress) (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := l.left[ingress.ClassOf(i)]
	for _, t := range i.Spec.TLS {
		if left[i.Namespace+"/"+t.SecretName] {
			out = append(out, fmt.Sprintf("Secret %s of tls is not served: the key pairs of older Ingresses of class %s fill the %d MiB that its proxies are given. Give some of them a class of their own.",
				t.SecretName, ingress.ClassOf(i), ingress.MaxShards))
		}
	}
	return out
}
