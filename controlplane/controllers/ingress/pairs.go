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
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/ingressproxy/ingress"
)

// writePairs writes the TLS key pairs to which the Ingresses of a class refer into the Secrets that
// the proxies of the class mount. It is called before the proxies are created, so that they start
// with the key pairs.
func (l *reconciler) writePairs(ctx context.Context, class *networkingv1.IngressClass) error {
	given, left := ingress.SecretShards(class.Name, engine.CachedAll[*networkingv1.Ingress](l.controller.ingresses),
		l.controller, &l.controller.keys)
	var errs []error
	for i, want := range PlanPairs(class, given) {
		if want == nil {
			errs = append(errs, deleteIfOwned(ctx, l.t, class, l.madeSecrets, ingress.ShardName(class.Name, i)))
			continue
		}
		errs = append(errs, l.ensureSecret(ctx, class, want))
	}
	l.controller.mu.Lock()
	before := l.controller.left[class.Name]
	l.controller.left[class.Name] = left
	l.controller.mu.Unlock()
	if !maps.Equal(before, left) {
		for _, key := range l.controller.ingressKeys(func(i *networkingv1.Ingress) bool {
			return ingress.ClassOf(i) == class.Name
		}) {
			l.t.Enqueue(key)
		}
	}
	return errors.Join(errs...)
}

// ensureSecret creates the Secret wanted of an IngressClass, or restores the data of the existing
// Secret if they differ.
func (l *reconciler) ensureSecret(ctx context.Context, class *networkingv1.IngressClass, wanted *corev1.Secret) error {
	have, ok := l.madeSecrets.Get(wanted.Namespace, wanted.Name)
	var stored *corev1.Secret
	var err error
	switch {
	case !ok:
		stored, err = client.Create(ctx, l.t.Client, wanted)
		if apierrors.IsAlreadyExists(err) {
			return engine.RaceError("creating Secret %s/%s: %w", wanted.Namespace, wanted.Name, err)
		}
	case l.madeSecrets.IsDeleting(have) || maps.EqualFunc(have.Data, wanted.Data, func(a, b []byte) bool {
		return string(a) == string(b)
	}):
		return nil
	case !metav1.IsControlledBy(have, class):
		l.t.Events.Eventf(class, corev1.EventTypeWarning, "NameTaken",
			"Secret %s/%s exists and does not belong to this class: delete it, or rename the class",
			wanted.Namespace, wanted.Name)
		return nil
	default:
		next := have.DeepCopy()
		next.Data = wanted.Data
		stored, err = client.Update(ctx, l.t.Client, next)
	}
	if err != nil {
		return fmt.Errorf("writing Secret %s/%s: %w", wanted.Namespace, wanted.Name, err)
	}
	l.madeSecrets.RecordWrite(stored)
	return nil
}

// unplacedKeyPairs returns a message for each TLS key pair of Ingress i for which the Secrets of
// its class had no space.
func (l *reconciler) unplacedKeyPairs(i *networkingv1.Ingress) (out []string) {
	l.controller.mu.Lock()
	defer l.controller.mu.Unlock()
	left := l.controller.left[ingress.ClassOf(i)]
	for _, t := range i.Spec.TLS {
		if left[i.Namespace+"/"+t.SecretName] {
			out = append(out,
				fmt.Sprintf("Secret %s of tls is not served: the key pairs of older Ingresses of class %s use the "+
					"whole limit of %d MiB of its proxies. Move some of these Ingresses to another class.",
					t.SecretName, ingress.ClassOf(i), ingress.MaxShards))
		}
	}
	return out
}
