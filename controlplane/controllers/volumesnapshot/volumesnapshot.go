package volumesnapshot

import (
	"context"
	"fmt"
	"slices"
	"time"

	groups "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	extensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

// Kinds of keys in the controller's queue: VolumeSnapshots, their contents, and source claims;
// VolumeGroupSnapshots and their contents.
const (
	snapshotKey = "snapshot"
	contentKey  = "content"
	claimKey    = "claim"

	groupKey        = "group"
	groupContentKey = "group content"
)

const (
	// poll is the interval at which a driver is called again while it creates a snapshot.
	poll = 5 * time.Second
	// again is the retry interval of an object that waits for another object. A change of that
	// object usually queues it earlier.
	again = 15 * time.Second
)

// New returns the snapshot controller. calls reaches CSI drivers through the agents of the nodes.
// If calls is nil, the controller calls no driver.
func New(d controllers.Deps, calls api.NodeDrivers) *controllers.Controller {
	i := d.Informers
	claims, drivers := client.Informer[*corev1.PersistentVolumeClaim](i), client.Informer[*storagev1.CSIDriver](i)
	csiNodes, nodes := client.Informer[*storagev1.CSINode](i), client.Informer[*corev1.Node](i)
	definitions := client.Informer[*extensionsv1.CustomResourceDefinition](i)
	kinds := client.Every(i, controllers.IsSnapshotKind, func(cache.SharedIndexInformer) {})
	all := func() []controllers.Key {
		var keys []controllers.Key
		for _, one := range kinds.Now().Kinds {
			for _, o := range controllers.CachedAll[*custom.Object](one.Informer) {
				keys = append(keys, keysOf(one.Kind, o)...)
			}
		}
		return keys
	}
	return &controllers.Controller{
		Name:    "volume-snapshotter",
		Workers: 8,
		Watches: []controllers.Watch{
			controllers.OnInformer(definitions, func(c controllers.Change[*extensionsv1.CustomResourceDefinition]) []controllers.Key {
				if c.New.Name != Definition {
					return nil
				}
				return all()
			}),
			controllers.OnInformer(drivers, func(controllers.Change[*storagev1.CSIDriver]) []controllers.Key { return all() }),
			controllers.OnInformer(claims, func(c controllers.Change[*corev1.PersistentVolumeClaim]) []controllers.Key {
				if c.New.DeletionTimestamp == nil || !slices.Contains(c.New.Finalizers, claimFinalizer) {
					return nil
				}
				return []controllers.Key{{Kind: claimKey, Namespace: c.New.Namespace, Name: c.New.Name}}
			}),
			controllers.OnInformer(csiNodes, func(controllers.Change[*storagev1.CSINode]) []controllers.Key { return nil }),
			controllers.OnInformer(nodes, func(controllers.Change[*corev1.Node]) []controllers.Key { return nil }),
		},
		Dynamic: &controllers.DynamicWatch{Current: kinds.Now, Keys: func(k *api.Kind, c controllers.Change[api.Object]) []controllers.Key {
			o, ok := c.New.(*custom.Object)
			if !ok {
				return nil
			}
			if k.GVK.Kind == "VolumeSnapshotClass" || k.GVK.Kind == "VolumeGroupSnapshotClass" {
				return all()
			}
			return keysOf(k, o)
		}},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{snap.GroupName}, Resources: []string{"volumesnapshots", "volumesnapshotcontents"}, Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{snap.GroupName}, Resources: []string{"volumesnapshotclasses"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{snap.GroupName}, Resources: []string{"volumesnapshots/status", "volumesnapshotcontents/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{groups.GroupName}, Resources: []string{"volumegroupsnapshots", "volumegroupsnapshotcontents"}, Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{groups.GroupName}, Resources: []string{"volumegroupsnapshotclasses"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{groups.GroupName}, Resources: []string{"volumegroupsnapshots/status", "volumegroupsnapshotcontents/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{"apiextensions.k8s.io"}, Resources: []string{"customresourcedefinitions"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"}, Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"get"}},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"csidrivers", "csinodes"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *controllers.Term) controllers.Reconcile {
			r := &reconciler{term: t, calls: t.Drivers(calls), claims: claims, drivers: drivers, csiNodes: csiNodes, nodes: nodes, definitions: definitions}
			return r.reconcileSnapshotKey
		},
	}
}

// keysOf returns the keys to reconcile when object o of kind k changes: o itself, the snapshot of a
// content, and the claim of a snapshot.
func keysOf(k *api.Kind, o *custom.Object) []controllers.Key {
	switch k.GVK.Kind {
	case "VolumeSnapshot":
		keys := []controllers.Key{{Kind: snapshotKey, Namespace: o.Namespace, Name: o.Name}}
		s, err := controllers.TypedOf[snap.VolumeSnapshot](o)
		if err != nil {
			return keys
		}
		if s.Typed.Status != nil && s.Typed.Status.BoundVolumeSnapshotContentName != nil {
			keys = append(keys, controllers.Key{Kind: contentKey, Name: *s.Typed.Status.BoundVolumeSnapshotContentName})
		}
		if from := s.Typed.Spec.Source.PersistentVolumeClaimName; from != nil {
			keys = append(keys, controllers.Key{Kind: claimKey, Namespace: o.Namespace, Name: *from})
		}
		for _, of := range s.Typed.OwnerReferences {
			if of.Kind == "VolumeGroupSnapshot" {
				keys = append(keys, controllers.Key{Kind: groupKey, Namespace: o.Namespace, Name: of.Name})
			}
		}
		return keys
	case "VolumeSnapshotContent":
		keys := []controllers.Key{{Kind: contentKey, Name: o.Name}}
		if c, err := controllers.TypedOf[snap.VolumeSnapshotContent](o); err == nil {
			ref := c.Typed.Spec.VolumeSnapshotRef
			keys = append(keys, controllers.Key{Kind: snapshotKey, Namespace: ref.Namespace, Name: ref.Name})
		}
		return keys
	case "VolumeGroupSnapshot":
		keys := []controllers.Key{{Kind: groupKey, Namespace: o.Namespace, Name: o.Name}}
		if g, err := controllers.TypedOf[groups.VolumeGroupSnapshot](o); err == nil && g.Typed.Status != nil && g.Typed.Status.BoundVolumeGroupSnapshotContentName != nil {
			keys = append(keys, controllers.Key{Kind: groupContentKey, Name: *g.Typed.Status.BoundVolumeGroupSnapshotContentName})
		}
		return keys
	case "VolumeGroupSnapshotContent":
		keys := []controllers.Key{{Kind: groupContentKey, Name: o.Name}}
		if c, err := controllers.TypedOf[groups.VolumeGroupSnapshotContent](o); err == nil {
			ref := c.Typed.Spec.VolumeGroupSnapshotRef
			keys = append(keys, controllers.Key{Kind: groupKey, Namespace: ref.Namespace, Name: ref.Name})
		}
		return keys
	}
	return nil
}

// reconciler reconciles snapshots and contents during one term of leadership. Every term has a new
// reconciler. It reads most objects from the API instead of a cache, because snapshots are few.
type reconciler struct {
	term  *controllers.Term
	calls *controllers.LeaderDrivers

	claims, drivers, csiNodes, nodes, definitions cache.SharedIndexInformer
}

type (
	snapshot = controllers.TypedObject[snap.VolumeSnapshot]
	content  = controllers.TypedObject[snap.VolumeSnapshotContent]

	group        = controllers.TypedObject[groups.VolumeGroupSnapshot]
	groupContent = controllers.TypedObject[groups.VolumeGroupSnapshotContent]
)

func (r *reconciler) reconcileSnapshotKey(ctx context.Context, key controllers.Key) (next time.Duration, err error) {
	snapshots, contents := r.snapshotKind("VolumeSnapshot"), r.snapshotKind("VolumeSnapshotContent")
	if snapshots == nil || contents == nil || r.snapshotKind("VolumeSnapshotClass") == nil {
		return 0, nil
	}
	switch key.Kind {
	case claimKey:
		return 0, toRaceError(key, r.reconcileClaim(ctx, key))
	case groupKey, groupContentKey:
		if r.snapshotKind("VolumeGroupSnapshot") == nil || r.snapshotKind("VolumeGroupSnapshotContent") == nil || r.snapshotKind("VolumeGroupSnapshotClass") == nil {
			return 0, nil
		}
		if key.Kind == groupKey {
			next, err = r.groupNamed(ctx, key)
		} else {
			next, err = r.groupContentNamed(ctx, key)
		}
		return next, toRaceError(key, err)
	}
	if key.Kind == snapshotKey {
		if !r.isBinder() {
			return 0, nil
		}
		s, err := controllers.GetTyped[snap.VolumeSnapshot](ctx, r.term.Client, snapshots, key.Namespace, key.Name)
		if apierrors.IsNotFound(err) {
			return 0, nil
		}
		if err == nil {
			next, err = r.reconcileSnapshot(ctx, s)
		}
		return next, toRaceError(key, err)
	}
	c, err := controllers.GetTyped[snap.VolumeSnapshotContent](ctx, r.term.Client, contents, "", key.Name)
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err == nil && r.isBinder() {
		c, err = r.deleteOrphanedContent(ctx, c)
	}
	if err == nil && c.Object != nil && r.isServed(c.Typed.Spec.Driver) {
		next, err = r.reconcileContent(ctx, c)
	}
	return next, toRaceError(key, err)
}

func toRaceError(key controllers.Key, err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) {
		return controllers.RaceError("%s: %w", key, err)
	}
	return err
}

func (r *reconciler) snapshotKind(name string) *api.Kind {
	return controllers.FindSnapshotKind(r.term.Client, name)
}

// isBinder reports whether this controller binds VolumeSnapshots to contents (see ServedBy).
func (r *reconciler) isBinder() bool {
	d, ok := controllers.Cached[*extensionsv1.CustomResourceDefinition](r.definitions, "", Definition)
	return ok && d.Annotations[ServedBy] == ControlPlane
}

func (r *reconciler) isServed(driver string) bool {
	d, _ := controllers.Cached[*storagev1.CSIDriver](r.drivers, "", driver)
	return r.calls != nil && controllers.IsServedByAgent(d)
}

// writeObject stores object o with a change of its metadata or spec, and returns the stored object.
// Fields that the Go type lacks are preserved.
func (r *reconciler) writeObject(ctx context.Context, o *custom.Object, change func(*custom.Object)) (*custom.Object, error) {
	next := o.DeepCopy()
	change(next)
	k := r.snapshotKind(o.Kind)
	if k == nil {
		return nil, fmt.Errorf("%s is not served any more", o.Kind)
	}
	out, err := r.term.Client.Do(ctx, &api.Request{Verb: api.VerbUpdate, Kind: k, Namespace: o.Namespace, Name: o.Name, Object: next})
	if err != nil {
		return nil, fmt.Errorf("updating %s %s: %w", o.Kind, controllers.KeyOf(o), err)
	}
	return out.(*custom.Object), nil
}

// writeChange stores object s with a change of its metadata or spec. It returns the stored object,
// or s if the write fails.
func writeChange[T any](ctx context.Context, r *reconciler, s controllers.TypedObject[T], change func(*custom.Object)) (controllers.TypedObject[T], error) {
	o, err := r.writeObject(ctx, s.Object, change)
	if err != nil {
		return s, err
	}
	next, err := controllers.TypedOf[T](o)
	if err != nil {
		return s, err
	}
	return next, nil
}

// writeStatus stores status as the new status of object o.
func (r *reconciler) writeStatus(ctx context.Context, o *custom.Object, status any) error {
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(status)
	if err != nil {
		return fmt.Errorf("converting the status of %s %s: %w", o.Kind, controllers.KeyOf(o), err)
	}
	return r.putStatus(ctx, o, m)
}

func (r *reconciler) putStatus(ctx context.Context, o *custom.Object, status map[string]any) error {
	next, k := o.DeepCopy(), r.snapshotKind(o.Kind)
	if k == nil {
		return fmt.Errorf("%s is not served any more", o.Kind)
	}
	next.Set("status", status)
	_, err := r.term.Client.Do(ctx, &api.Request{Verb: api.VerbUpdate, Kind: k, Subresource: "status", Namespace: o.Namespace, Name: o.Name, Object: next})
	if err != nil {
		return fmt.Errorf("writing the status of %s %s: %w", o.Kind, controllers.KeyOf(o), err)
	}
	return nil
}

func (r *reconciler) recordEvent(o *custom.Object, kind, reason, message string) {
	r.term.Events.Event(o, kind, reason, message)
}
