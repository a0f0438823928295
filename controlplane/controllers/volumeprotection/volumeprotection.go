// Package volumeprotection keeps objects that are being deleted, by a finalizer, while they are in
// use: PersistentVolumeClaims that a pod uses, PersistentVolumes that are bound, and
// VolumeAttributesClasses that a claim or volume names.
package volumeprotection

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-helpers/storage/ephemeral"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Finalizers that keep claims, volumes and VolumeAttributesClasses in use.
const (
	ClaimFinalizer  = "kubernetes.io/pvc-protection"
	VolumeFinalizer = "kubernetes.io/pv-protection"
	ClassFinalizer  = "kubernetes.io/vac-protection"
)

// Kinds of keys in the controller's queue: claims, volumes and VolumeAttributesClasses.
const (
	claimKey  = "claim"
	volumeKey = "volume"
	classKey  = "class"
)

// classIndex indexes PersistentVolumes by their VolumeAttributesClass.
const classIndex = "keelson.attributesClassOfVolume"

// Uses reports whether pod p has mounted the claim or may mount it: p names the claim, is bound to
// a node and is not terminal. The claim of an ephemeral volume is used only by the pod for which it
// was created, not by a later pod of the same name.
func Uses(p *corev1.Pod, claim *corev1.PersistentVolumeClaim) bool {
	if p.Spec.NodeName == "" || api.IsPodTerminal(p) || p.Namespace != claim.Namespace {
		return false
	}
	return slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
		return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == claim.Name ||
			v.Ephemeral != nil && ephemeral.VolumeClaimName(p, &v) == claim.Name &&
				ephemeral.VolumeIsForPod(p, claim) == nil
	})
}

// New returns the controller that protects claims, volumes and VolumeAttributesClasses in use.
func New(d engine.Deps) *engine.Descriptor {
	claims := client.Informer[*corev1.PersistentVolumeClaim](d.Informers)
	volumes := client.Informer[*corev1.PersistentVolume](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	classes := client.Informer[*storagev1.VolumeAttributesClass](d.Informers)
	engine.Index(pods, engine.PodClaimIndex, engine.PodClaimKeys)
	engine.Index(claims, engine.AttributesClassIndex, engine.ClaimAttributesClasses)
	engine.Index(volumes, classIndex, func(o api.Object) []string {
		if v, ok := o.(*corev1.PersistentVolume); ok {
			return classOf(v)
		}
		return nil
	})
	return &engine.Descriptor{
		Name:    "volume-protection-controller",
		Workers: 2,
		Watches: []engine.Watch{
			engine.OnInformer(claims, func(c engine.Change[*corev1.PersistentVolumeClaim]) []engine.Key {
				keys := []engine.Key{{Kind: claimKey, Namespace: c.New.Namespace, Name: c.New.Name}}
				return append(keys, freedClassKeys(classes, c, api.VolumeAttributesClasses)...)
			}),
			engine.OnInformer(volumes, func(c engine.Change[*corev1.PersistentVolume]) []engine.Key {
				return append([]engine.Key{{Kind: volumeKey, Name: c.New.Name}}, freedClassKeys(classes, c, classOf)...)
			}),
			engine.OnInformer(classes, func(c engine.Change[*storagev1.VolumeAttributesClass]) []engine.Key {
				return []engine.Key{{Kind: classKey, Name: c.New.Name}}
			}),
			engine.OnInformer(pods, func(c engine.Change[*corev1.Pod]) []engine.Key { return ofPod(claims, c) }),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes", "persistentvolumeclaims"},
				Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"volumeattributesclasses"},
				Verbs: []string{"get", "list", "update", "watch"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, claims: claims, volumes: volumes, pods: pods, classes: classes}
			return r.reconcileProtection
		},
	}
}

// ofPod returns the keys of those claims of a pod that are being deleted, if the pod has ended or
// was deleted. Otherwise it returns nil.
func ofPod(claims cache.SharedIndexInformer, c engine.Change[*corev1.Pod]) []engine.Key {
	if c.Type != engine.Deleted && !api.IsPodTerminal(c.New) {
		return nil
	}
	var keys []engine.Key
	for _, name := range engine.PodClaimKeys(c.New) {
		name = name[len(c.New.Namespace)+1:]
		if pvc, ok := engine.Cached[*corev1.PersistentVolumeClaim](claims, c.New.Namespace, name); ok &&
			pvc.DeletionTimestamp != nil {
			keys = append(keys, engine.Key{Kind: claimKey, Namespace: pvc.Namespace, Name: pvc.Name})
		}
	}
	return keys
}

// reconciler reconciles claims, volumes and classes during one term of leadership. Every term has a
// new reconciler.
type reconciler struct {
	term                           *engine.Term
	claims, volumes, pods, classes cache.SharedIndexInformer
}

func (r *reconciler) reconcileProtection(ctx context.Context, key engine.Key) (time.Duration, error) {
	if key.Kind == classKey {
		return 0, r.reconcileClass(ctx, key.Name)
	}
	if key.Kind == volumeKey {
		v, ok := engine.Cached[*corev1.PersistentVolume](r.volumes, "", key.Name)
		if !ok {
			return 0, nil
		}
		return 0, engine.UpdateFinalizer(ctx, r.term.Client, v, VolumeFinalizer, v.Status.Phase == corev1.VolumeBound)
	}
	c, ok := engine.Cached[*corev1.PersistentVolumeClaim](r.claims, key.Namespace, key.Name)
	if !ok {
		return 0, nil
	}
	inUse, err := r.inUse(ctx, c)
	if err != nil {
		return 0, err
	}
	return 0, engine.UpdateFinalizer(ctx, r.term.Client, c, ClaimFinalizer, inUse)
}

// inUse reports whether a pod uses claim c, which is being deleted. Before it returns false, it
// lists the pods from the API, because a pod may not be cached yet.
func (r *reconciler) inUse(ctx context.Context, c *corev1.PersistentVolumeClaim) (bool, error) {
	if c.DeletionTimestamp == nil || !slices.Contains(c.Finalizers, ClaimFinalizer) {
		return false, nil
	}
	name := c.Namespace + "/" + c.Name
	if slices.ContainsFunc(engine.CachedBy[*corev1.Pod](r.pods, engine.PodClaimIndex, name), func(p *corev1.Pod) bool {
		return Uses(p, c)
	}) {
		return true, nil
	}
	live, err := client.List[*corev1.Pod](ctx, r.term.Client, c.Namespace, metav1.ListOptions{})
	if err != nil {
		return false, fmt.Errorf("listing the pods that may use claim %s: %w", name, err)
	}
	return slices.ContainsFunc(live, func(p *corev1.Pod) bool { return Uses(p, c) }), nil
}

func classOf(v *corev1.PersistentVolume) []string {
	if v.Spec.VolumeAttributesClassName == nil || *v.Spec.VolumeAttributesClassName == "" {
		return nil
	}
	return []string{*v.Spec.VolumeAttributesClassName}
}

// freedClassKeys returns the keys of the terminating VolumeAttributesClasses to which the changed
// object referred before change c and no longer refers. classNames returns the names of the classes
// to which an object refers.
func freedClassKeys[T api.Object](classes cache.SharedIndexInformer, c engine.Change[T], classNames func(T) []string) (
	keys []engine.Key,
) {
	var were []string
	switch c.Type {
	case engine.Deleted:
		were = classNames(c.New)
	case engine.Updated:
		were = classNames(c.Old)
	}
	for _, name := range were {
		class, ok := engine.Cached[*storagev1.VolumeAttributesClass](classes, "", name)
		if ok && class.DeletionTimestamp != nil &&
			(c.Type == engine.Deleted || !slices.Contains(classNames(c.New), name)) {
			keys = append(keys, engine.Key{Kind: classKey, Name: name})
		}
	}
	return keys
}

// reconcileClass adds the finalizer to a VolumeAttributesClass, or removes it if the class is being
// deleted and not in use. Before it removes the finalizer, it lists claims and volumes from the
// API.
func (r *reconciler) reconcileClass(ctx context.Context, name string) error {
	class, ok := engine.Cached[*storagev1.VolumeAttributesClass](r.classes, "", name)
	if !ok {
		return nil
	}
	inUse := false
	if class.DeletionTimestamp != nil && slices.Contains(class.Finalizers, ClassFinalizer) {
		inUse = len(engine.CachedBy[*corev1.PersistentVolumeClaim](r.claims, engine.AttributesClassIndex, name)) > 0 ||
			len(engine.CachedBy[*corev1.PersistentVolume](r.volumes, classIndex, name)) > 0
		if !inUse {
			claims, err := client.List[*corev1.PersistentVolumeClaim](ctx, r.term.Client, "", metav1.ListOptions{})
			if err != nil {
				return fmt.Errorf("listing the claims that may name VolumeAttributesClass %s: %w", name, err)
			}
			volumes, err := client.List[*corev1.PersistentVolume](ctx, r.term.Client, "", metav1.ListOptions{})
			if err != nil {
				return fmt.Errorf("listing the volumes that may have VolumeAttributesClass %s: %w", name, err)
			}
			inUse = slices.ContainsFunc(claims, func(c *corev1.PersistentVolumeClaim) bool {
				return slices.Contains(api.VolumeAttributesClasses(c), name)
			}) ||
				slices.ContainsFunc(volumes, func(v *corev1.PersistentVolume) bool {
					return slices.Contains(classOf(v), name)
				})
		}
	}
	return engine.UpdateFinalizer(ctx, r.term.Client, class, ClassFinalizer, inUse)
}
