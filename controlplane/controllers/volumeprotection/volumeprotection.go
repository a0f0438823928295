// Package volumeprotection keeps claims that a pod uses and volumes that are
// bound from vanishing: their deletion waits behind a finalizer.
package volumeprotection

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

// The finalizers.
const (
	ClaimFinalizer  = "kubernetes.io/pvc-protection"
	VolumeFinalizer = "kubernetes.io/pv-protection"
)

// The two sorts of keys.
const (
	claimKey  = "claim"
	volumeKey = "volume"
)

// claimIndex finds pods by the claims that they mount, as namespace/name.
const claimIndex = "keelson.claim"

// Finalizers are the finalizers that an object shall have: with mark while it is not being deleted,
// without once it is and inUse is false.
func Finalizers(o metav1.Object, mark string, inUse bool) (want []string, changed bool) {
	have := o.GetFinalizers()
	marked := slices.Contains(have, mark)
	switch {
	case o.GetDeletionTimestamp() == nil && !marked:
		return append(slices.Clone(have), mark), true
	case o.GetDeletionTimestamp() != nil && marked && !inUse:
		return slices.DeleteFunc(slices.Clone(have), func(f string) bool { return f == mark }), true
	}
	return have, false
}

// ClaimsOf are the claims that a pod mounts, those made for its ephemeral volumes too.
func ClaimsOf(p *corev1.Pod) []string {
	var out []string
	for _, v := range p.Spec.Volumes {
		switch {
		case v.PersistentVolumeClaim != nil:
			out = append(out, p.Namespace+"/"+v.PersistentVolumeClaim.ClaimName)
		case v.Ephemeral != nil:
			out = append(out, p.Namespace+"/"+p.Name+"-"+v.Name)
		}
	}
	return out
}

// Uses says whether a pod has the claim mounted or may mount it: it has a node and has not ended.
func Uses(p *corev1.Pod, claim string) bool {
	return p.Spec.NodeName != "" && !controllers.PodEnded(p) && slices.Contains(ClaimsOf(p), claim)
}

// New returns the controller.
func New(d controllers.Deps) *controllers.Controller {
	claims := client.Informer[*corev1.PersistentVolumeClaim](d.Informers)
	volumes := client.Informer[*corev1.PersistentVolume](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	controllers.Index(pods, claimIndex, func(o api.Object) []string {
		if p, ok := o.(*corev1.Pod); ok {
			return ClaimsOf(p)
		}
		return nil
	})
	return &controllers.Controller{
		Name:    "volume-protection-controller",
		Workers: 2,
		Watches: []controllers.Watch{
			controllers.OnInformer(claims, func(c controllers.Change[*corev1.PersistentVolumeClaim]) []controllers.Key {
				return []controllers.Key{{Kind: claimKey, Namespace: c.New.Namespace, Name: c.New.Name}}
			}),
			controllers.OnInformer(volumes, func(c controllers.Change[*corev1.PersistentVolume]) []controllers.Key {
				return []controllers.Key{{Kind: volumeKey, Name: c.New.Name}}
			}),
			controllers.OnInformer(pods, func(c controllers.Change[*corev1.Pod]) []controllers.Key { return ofPod(claims, c) }),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes", "persistentvolumeclaims"}, Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}},
		},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			r := &reconciler{term: t, claims: claims, volumes: volumes, pods: pods}
			return r.reconcile
		},
	}
}

// ofPod maps a pod that lets go of its claims to those that wait for it.
func ofPod(claims cache.SharedIndexInformer, c controllers.Change[*corev1.Pod]) []controllers.Key {
	if c.Type != controllers.Deleted && !controllers.PodEnded(c.New) {
		return nil
	}
	var keys []controllers.Key
	for _, name := range ClaimsOf(c.New) {
		name = name[len(c.New.Namespace)+1:]
		if pvc, ok := controllers.Cached[*corev1.PersistentVolumeClaim](claims, c.New.Namespace, name); ok && pvc.DeletionTimestamp != nil {
			keys = append(keys, controllers.Key{Kind: claimKey, Namespace: pvc.Namespace, Name: pvc.Name})
		}
	}
	return keys
}

// reconciler is the thin shell of one leadership.
type reconciler struct {
	term                  *controllers.Term
	claims, volumes, pods cache.SharedIndexInformer
}

func (r *reconciler) reconcile(ctx context.Context, key controllers.Key) (time.Duration, error) {
	if key.Kind == volumeKey {
		v, ok := controllers.Cached[*corev1.PersistentVolume](r.volumes, "", key.Name)
		if !ok {
			return 0, nil
		}
		return 0, mark(ctx, r.term.Client, v, VolumeFinalizer, v.Status.Phase == corev1.VolumeBound)
	}
	c, ok := controllers.Cached[*corev1.PersistentVolumeClaim](r.claims, key.Namespace, key.Name)
	if !ok {
		return 0, nil
	}
	inUse, err := r.inUse(ctx, c)
	if err != nil {
		return 0, err
	}
	return 0, mark(ctx, r.term.Client, c, ClaimFinalizer, inUse)
}

// inUse asks the cache, and before it says no the API: a pod may have come that the cache has not seen.
func (r *reconciler) inUse(ctx context.Context, c *corev1.PersistentVolumeClaim) (bool, error) {
	if c.DeletionTimestamp == nil || !slices.Contains(c.Finalizers, ClaimFinalizer) {
		return false, nil
	}
	name := c.Namespace + "/" + c.Name
	if slices.ContainsFunc(controllers.CachedBy[*corev1.Pod](r.pods, claimIndex, name), func(p *corev1.Pod) bool { return Uses(p, name) }) {
		return true, nil
	}
	live, err := client.List[*corev1.Pod](ctx, r.term.Client, c.Namespace, metav1.ListOptions{})
	if err != nil {
		return false, fmt.Errorf("listing the pods that may use claim %s: %w", name, err)
	}
	return slices.ContainsFunc(live, func(p *corev1.Pod) bool { return Uses(p, name) }), nil
}

// mark writes the finalizers when they are to change.
func mark[T api.Object](ctx context.Context, c *client.Client, obj T, finalizer string, inUse bool) error {
	want, changed := Finalizers(obj, finalizer, inUse)
	if !changed {
		return nil
	}
	next := obj.DeepCopyObject().(T)
	next.SetFinalizers(want)
	if _, err := client.Update(ctx, c, next); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("updating the finalizers of %s: %w", obj.GetName(), err)
	}
	return nil
}
