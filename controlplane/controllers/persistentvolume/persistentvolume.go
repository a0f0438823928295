package persistentvolume

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-helpers/storage/volume"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Kinds of keys in the binder's queue: PersistentVolumeClaims and PersistentVolumes.
const (
	claimKey  = "claim"
	volumeKey = "volume"
)

// Names of informer indexes: PersistentVolumes by the claim to which they refer, and
// PersistentVolumeClaims that are not bound yet.
const (
	claimRefIndex = "keelson.claimref"
	unboundIndex  = "keelson.unbound"
)

// New returns the controller that binds PersistentVolumeClaims to PersistentVolumes.
func New(d engine.Deps) *engine.Descriptor {
	claims := client.Informer[*corev1.PersistentVolumeClaim](d.Informers)
	volumes := client.Informer[*corev1.PersistentVolume](d.Informers)
	classes := client.Informer[*storagev1.StorageClass](d.Informers)
	drivers := client.Informer[*storagev1.CSIDriver](d.Informers)
	engine.Index(volumes, claimRefIndex, func(o api.Object) []string {
		if v, ok := o.(*corev1.PersistentVolume); ok && v.Spec.ClaimRef != nil {
			return []string{v.Spec.ClaimRef.Namespace + "/" + v.Spec.ClaimRef.Name}
		}
		return nil
	})
	engine.Index(claims, unboundIndex, func(o api.Object) []string {
		if !metav1.HasAnnotation(metav1.ObjectMeta{Annotations: o.GetAnnotations()}, volume.AnnBindCompleted) {
			return []string{"yes"}
		}
		return nil
	})
	unbound := func() []engine.Key {
		var keys []engine.Key
		for _, c := range engine.CachedBy[*corev1.PersistentVolumeClaim](claims, unboundIndex, "yes") {
			keys = append(keys, keyOf(c))
		}
		return keys
	}
	return &engine.Descriptor{
		Name:    "persistent-volume-binder",
		Workers: 4,
		Watches: []engine.Watch{
			engine.OnInformer(claims, func(c engine.Change[*corev1.PersistentVolumeClaim]) []engine.Key {
				return ofClaim(volumes, c)
			}),
			engine.OnInformer(volumes, func(c engine.Change[*corev1.PersistentVolume]) []engine.Key {
				return ofVolume(c, unbound)
			}),
			engine.OnInformer(classes, func(c engine.Change[*storagev1.StorageClass]) []engine.Key {
				if c.Type == engine.Deleted {
					return nil
				}
				return unbound()
			}),
			engine.OnInformer(drivers, func(engine.Change[*storagev1.CSIDriver]) []engine.Key { return unbound() }),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes", "persistentvolumeclaims"},
				Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes/status", "persistentvolumeclaims/status"},
				Verbs: []string{"update"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"storageclasses", "csidrivers"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &binder{
				term:    t,
				claims:  engine.ViewOf[*corev1.PersistentVolumeClaim](t, claims),
				volumes: engine.ViewOf[*corev1.PersistentVolume](t, volumes),
				classes: classes, drivers: drivers,
			}
			return r.reconcileKey
		},
	}
}

func keyOf(c *corev1.PersistentVolumeClaim) engine.Key {
	return engine.Key{Kind: claimKey, Namespace: c.Namespace, Name: c.Name}
}

// ofClaim returns the keys to reconcile when a claim changes: the claim, its volume, and the
// volumes that refer to it.
func ofClaim(volumes cache.SharedIndexInformer, c engine.Change[*corev1.PersistentVolumeClaim]) []engine.Key {
	var keys []engine.Key
	if c.Type != engine.Deleted {
		keys = append(keys, keyOf(c.New))
	}
	if name := c.New.Spec.VolumeName; name != "" {
		keys = append(keys, engine.Key{Kind: volumeKey, Name: name})
	}
	for _, v := range engine.CachedBy[*corev1.PersistentVolume](volumes, claimRefIndex,
		c.New.Namespace+"/"+c.New.Name) {
		keys = append(keys, engine.Key{Kind: volumeKey, Name: v.Name})
	}
	return keys
}

// ofVolume returns the keys to reconcile when a volume changes: the volume and its claim. If the
// volume is available, it also returns the keys of all unbound claims.
func ofVolume(c engine.Change[*corev1.PersistentVolume], unbound func() []engine.Key) []engine.Key {
	keys := []engine.Key{{Kind: volumeKey, Name: c.New.Name}}
	if ref := c.New.Spec.ClaimRef; ref != nil {
		keys = append(keys, engine.Key{Kind: claimKey, Namespace: ref.Namespace, Name: ref.Name})
	}
	if c.Type != engine.Deleted && c.New.Spec.ClaimRef == nil && c.New.Status.Phase == corev1.VolumeAvailable {
		keys = append(keys, unbound()...)
	}
	return keys
}

// binder reconciles claims and volumes during one term of leadership. Every term has a new binder.
type binder struct {
	term    *engine.Term
	claims  *engine.View[*corev1.PersistentVolumeClaim]
	volumes *engine.View[*corev1.PersistentVolume]

	classes, drivers cache.SharedIndexInformer
}

func (b *binder) reconcileKey(ctx context.Context, key engine.Key) (time.Duration, error) {
	if key.Kind == claimKey {
		return 0, b.reconcileClaim(ctx, key)
	}
	return 0, b.reconcileVolume(ctx, key.Name)
}

func (b *binder) reconcileClaim(ctx context.Context, key engine.Key) error {
	c, ok := b.claims.Get(key.Namespace, key.Name)
	if !ok {
		return nil
	}
	a := PlanClaim(c, b.volumes.All(), engine.CachedAll[*storagev1.StorageClass](b.classes))
	switch {
	case a.Bind != nil:
		return b.bindVolume(ctx, a.Bind, c)
	case a.Class != "":
		next := c.DeepCopy()
		next.Spec.StorageClassName = &a.Class
		_, err := b.updateClaim(ctx, next)
		return err
	}
	if a.Provisioner != "" && c.Annotations[volume.AnnStorageProvisioner] != a.Provisioner {
		next := c.DeepCopy()
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, volume.AnnStorageProvisioner, a.Provisioner)
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, volume.AnnBetaStorageProvisioner, a.Provisioner)
		next, err := b.updateClaim(ctx, next)
		if err != nil {
			return err
		}
		c = next
	}
	if d, _ := engine.Cached[*storagev1.CSIDriver](b.drivers, "", a.Provisioner); engine.IsServedByAgent(d) {
		a.Event = "" // the volume provisioner of this control plane records its own events
	}
	if a.Event != "" && (c.Status.Phase != a.Phase || a.Phase == corev1.ClaimPending) {
		b.term.Events.Event(c, a.Event, a.Reason, a.Message)
	}
	if a.Phase == "" || c.Status.Phase == a.Phase {
		return nil
	}
	status := corev1.PersistentVolumeClaimStatus{Phase: a.Phase, Conditions: c.Status.Conditions}
	if a.Phase == corev1.ClaimLost {
		status = *c.Status.DeepCopy()
		status.Phase = a.Phase
	}
	return b.claimStatus(ctx, c, status)
}

// bindVolume performs the remaining writes that bind volume v and claim c, at most four. The write
// of v comes first and serves as a lock: after it, the binding is always completed, even after a
// crash. The annotation of c is written before its status. From then on the binding is permanent.
func (b *binder) bindVolume(ctx context.Context, v *corev1.PersistentVolume, c *corev1.PersistentVolumeClaim) error {
	next, changed, err := BoundVolume(v, c)
	if err != nil {
		return fmt.Errorf("binding volume %s to claim %s/%s: %w", v.Name, c.Namespace, c.Name, err)
	}
	if changed {
		if next, err = b.updateVolume(ctx, next); err != nil {
			return err
		}
	}
	v = next
	if err := b.volumePhase(ctx, v, VolumeAction{Phase: corev1.VolumeBound}); err != nil {
		return err
	}
	bound, changed := BoundClaim(c, v)
	if changed {
		if bound, err = b.updateClaim(ctx, bound); err != nil {
			return err
		}
	}
	status := *bound.Status.DeepCopy()
	status.Phase, status.AccessModes = corev1.ClaimBound, v.Spec.AccessModes
	if c.Status.Phase != corev1.ClaimBound || status.Capacity == nil {
		status.Capacity = v.Spec.Capacity
	}
	if c.Status.Phase != corev1.ClaimBound {
		// this field is set here once; afterwards the volumeattributes controller updates it
		status.CurrentVolumeAttributesClassName = v.Spec.VolumeAttributesClassName
	}
	return b.claimStatus(ctx, bound, status)
}

func (b *binder) reconcileVolume(ctx context.Context, name string) error {
	v, ok := b.volumes.Get("", name)
	if !ok {
		return nil
	}
	c, err := b.claimOf(ctx, v)
	if err != nil {
		return err
	}
	a := PlanVolume(v, c)
	if a.Claim {
		b.term.Enqueue(engine.Key{Kind: claimKey, Namespace: v.Spec.ClaimRef.Namespace, Name: v.Spec.ClaimRef.Name})
	}
	if a.Unbind {
		if v, err = b.updateVolume(ctx, Unbound(v)); err != nil {
			return err
		}
		a.Phase = corev1.VolumeAvailable
	}
	return b.volumePhase(ctx, v, a)
}

// claimOf returns the claim that claimRef of volume v names, by name and UID. It returns nil if the
// claim does not exist, after it has confirmed this with the API: releasing a volume by mistake
// loses data.
func (b *binder) claimOf(ctx context.Context, v *corev1.PersistentVolume) (*corev1.PersistentVolumeClaim, error) {
	ref := v.Spec.ClaimRef
	if ref == nil || ref.UID == "" {
		return nil, nil
	}
	if c, ok := b.claims.Get(ref.Namespace, ref.Name); ok && c.UID == ref.UID {
		return c, nil
	}
	if v.Status.Phase == corev1.VolumeReleased || v.Status.Phase == corev1.VolumeFailed {
		return nil, nil // confirmed before; a claim that was deleted never returns, because UIDs are unique
	}
	c, err := client.Get[*corev1.PersistentVolumeClaim](ctx, b.term.Client, ref.Namespace, ref.Name)
	switch {
	case apierrors.IsNotFound(err) || err == nil && c.UID != ref.UID:
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading claim %s/%s of volume %s: %w", ref.Namespace, ref.Name, v.Name, err)
	}
	return c, nil
}

func (b *binder) volumePhase(ctx context.Context, v *corev1.PersistentVolume, a VolumeAction) error {
	if a.Phase == "" || v.Status.Phase == a.Phase {
		return nil
	}
	next := v.DeepCopy()
	now := metav1.NewTime(b.term.Now())
	next.Status.Phase, next.Status.Message, next.Status.Reason = a.Phase, a.Message, a.Reason
	next.Status.LastPhaseTransitionTime = &now
	next, err := client.UpdateStatus(ctx, b.term.Client, next)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("setting volume %s to %s: %w", v.Name, a.Phase, err)
	}
	b.volumes.RecordWrite(next)
	if a.Reason != "" {
		b.term.Events.Event(v, corev1.EventTypeWarning, a.Reason, a.Message)
	}
	return nil
}

func (b *binder) claimStatus(
	ctx context.Context, c *corev1.PersistentVolumeClaim, s corev1.PersistentVolumeClaimStatus,
) error {
	if equality.Semantic.DeepEqual(s, c.Status) {
		return nil
	}
	next := c.DeepCopy()
	next.Status = s
	next, err := client.UpdateStatus(ctx, b.term.Client, next)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("setting claim %s/%s to %s: %w", c.Namespace, c.Name, s.Phase, err)
	}
	b.claims.RecordWrite(next)
	return nil
}

func (b *binder) updateClaim(ctx context.Context, c *corev1.PersistentVolumeClaim) (
	*corev1.PersistentVolumeClaim, error,
) {
	next, err := client.Update(ctx, b.term.Client, c)
	if err != nil {
		return nil, fmt.Errorf("updating claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	b.claims.RecordWrite(next)
	return next, nil
}

func (b *binder) updateVolume(ctx context.Context, v *corev1.PersistentVolume) (*corev1.PersistentVolume, error) {
	next, err := client.Update(ctx, b.term.Client, v)
	if err != nil {
		return nil, fmt.Errorf("updating volume %s: %w", v.Name, err)
	}
	b.volumes.RecordWrite(next)
	return next, nil
}
