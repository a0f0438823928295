// Package ephemeralvolume creates the PersistentVolumeClaims of generic ephemeral volumes of pods.
// A pod owns its claims, and garbage collection deletes them with the pod.
package ephemeralvolume

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/storage/ephemeral"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Conflict is an ephemeral volume for which no claim can be created, because another claim has its
// name.
type Conflict struct{ Volume, Why string }

// PlanClaims returns the claims that must be created for the ephemeral volumes of pod p. It also
// returns the volumes for which no claim can be created. claim looks up a claim of the pod's
// namespace by name.
func PlanClaims(p *corev1.Pod, claim func(name string) (*corev1.PersistentVolumeClaim, bool)) (
	missing []*corev1.PersistentVolumeClaim, taken []Conflict,
) {
	if p.DeletionTimestamp != nil || api.IsPodTerminal(p) {
		return nil, nil
	}
	for i := range p.Spec.Volumes {
		v := &p.Spec.Volumes[i]
		if v.Ephemeral == nil || v.Ephemeral.VolumeClaimTemplate == nil {
			continue
		}
		have, ok := claim(ephemeral.VolumeClaimName(p, v))
		if !ok {
			missing = append(missing, claimFor(p, v))
		} else if err := ephemeral.VolumeIsForPod(p, have); err != nil {
			taken = append(taken, Conflict{v.Name, err.Error()})
		}
	}
	return missing, taken
}

func claimFor(p *corev1.Pod, v *corev1.Volume) *corev1.PersistentVolumeClaim {
	t := v.Ephemeral.VolumeClaimTemplate.DeepCopy()
	c := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: ephemeral.VolumeClaimName(p, v), Labels: t.Labels, Annotations: t.Annotations,
			OwnerReferences: []metav1.OwnerReference{
				*metav1.NewControllerRef(p, corev1.SchemeGroupVersion.WithKind("Pod"))},
		},
		Spec: t.Spec,
	}
	engine.CopyTrace(c, p)
	return c
}

// New returns the controller of ephemeral volumes.
func New(d engine.Deps) *engine.Descriptor {
	pods := client.Informer[*corev1.Pod](d.Informers)
	claims := client.Informer[*corev1.PersistentVolumeClaim](d.Informers)
	engine.Index(pods, engine.PodClaimIndex, engine.PodClaimKeys)
	return &engine.Descriptor{
		Name:    "ephemeral-volume-controller",
		Workers: 4,
		Watches: []engine.Watch{
			engine.OnInformer(pods, func(c engine.Change[*corev1.Pod]) []engine.Key {
				if c.Type != engine.Added || !hasEphemeral(c.New) { // the volumes of a pod are immutable
					return nil
				}
				return engine.Self(c)
			}),
			engine.OnInformer(claims, func(c engine.Change[*corev1.PersistentVolumeClaim]) []engine.Key {
				if c.Type != engine.Deleted {
					return nil
				}
				var keys []engine.Key
				for _, p := range engine.CachedBy[*corev1.Pod](pods, engine.PodClaimIndex,
					c.New.Namespace+"/"+c.New.Name) {
					keys = append(keys, engine.KeyOf(p))
				}
				return keys
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods/finalizers"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"},
				Verbs: []string{"create", "get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			view := engine.ViewOf[*corev1.PersistentVolumeClaim](t, claims)
			return func(ctx context.Context, key engine.Key) (time.Duration, error) {
				p, ok := engine.Cached[*corev1.Pod](pods, key.Namespace, key.Name)
				if !ok {
					return 0, nil
				}
				return 0, reconcilePod(ctx, t, view, p)
			}
		},
	}
}

func hasEphemeral(p *corev1.Pod) bool {
	for i := range p.Spec.Volumes {
		if p.Spec.Volumes[i].Ephemeral != nil {
			return true
		}
	}
	return false
}

// reconcilePod creates the missing claims of pod p. If another claim has the name of one of them,
// the deletion of that claim queues p again.
func reconcilePod(
	ctx context.Context, t *engine.Term, view *engine.View[*corev1.PersistentVolumeClaim], p *corev1.Pod,
) error {
	missing, taken := PlanClaims(p, func(name string) (*corev1.PersistentVolumeClaim, bool) {
		return view.Get(p.Namespace, name)
	})
	for _, c := range taken {
		t.Events.Eventf(p, corev1.EventTypeWarning, "FailedBinding", "ephemeral volume %s: %s", c.Volume, c.Why)
	}
	for _, c := range missing {
		made, err := client.Create(ctx, t.Client, c)
		switch {
		case apierrors.IsAlreadyExists(err): // wait until the existing claim is cached: it may belong to another pod
			return engine.RaceError("claim %s/%s of pod %s: %w", c.Namespace, c.Name, p.Name, err)
		case err != nil:
			t.Events.Eventf(p, corev1.EventTypeWarning, "FailedBinding",
				"ephemeral volume of claim %s: %v", c.Name, err)
			return fmt.Errorf("creating claim %s/%s of pod %s: %w", c.Namespace, c.Name, p.Name, err)
		}
		view.RecordWrite(made)
	}
	return nil
}
