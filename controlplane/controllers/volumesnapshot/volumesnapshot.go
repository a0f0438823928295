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
	"keelson.dev/keelson/controlplane/controllers/engine"
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
	// pollInterval is the interval at which a driver is called again while it creates a snapshot.
	pollInterval = 5 * time.Second
	// retryInterval is the retry interval of an object that waits for another object. A change of
	// that object usually queues it earlier.
	retryInterval = 15 * time.Second
)

// New returns the snapshot controller. calls is the client with which CSI drivers are called
// through the agents of the nodes. If calls is nil, the controller calls no driver.
func New(d engine.Deps, calls api.NodeDrivers) *engine.Descriptor {
	i := d.Informers
	claims, drivers := client.Informer[*corev1.PersistentVolumeClaim](i), client.Informer[*storagev1.CSIDriver](i)
	csiNodes, nodes := client.Informer[*storagev1.CSINode](i), client.Informer[*corev1.Node](i)
	definitions := client.Informer[*extensionsv1.CustomResourceDefinition](i)
	kinds := client.Every(i, engine.IsSnapshotKind, func(cache.SharedIndexInformer) {})
	all := func() []engine.Key {
		var keys []engine.Key
		for _, one := range kinds.Now().Kinds {
			for _, o := range engine.CachedAll[*custom.Object](one.Informer) {
				keys = append(keys, keysOf(one.Kind, o)...)
			}
		}
		return keys
	}
	return &engine.Descriptor{
		Name:    "volume-snapshotter",
		Workers: 8,
		Watches: []engine.Watch{
			engine.OnInformer(definitions, func(c engine.Change[*extensionsv1.CustomResourceDefinition]) []engine.Key {
				if c.New.Name != Definition {
					return nil
				}
				return all()
			}),
			engine.OnInformer(drivers, func(engine.Change[*storagev1.CSIDriver]) []engine.Key { return all() }),
			engine.OnInformer(claims, func(c engine.Change[*corev1.PersistentVolumeClaim]) []engine.Key {
				if c.New.DeletionTimestamp == nil || !slices.Contains(c.New.Finalizers, claimFinalizer) {
					return nil
				}
				return []engine.Key{{Kind: claimKey, Namespace: c.New.Namespace, Name: c.New.Name}}
			}),
			engine.OnInformer(csiNodes, func(engine.Change[*storagev1.CSINode]) []engine.Key { return nil }),
			engine.OnInformer(nodes, func(engine.Change[*corev1.Node]) []engine.Key { return nil }),
		},
		Dynamic: &engine.DynamicWatch{Current: kinds.Now,
			Keys: func(k *api.Kind, c engine.Change[api.Object]) []engine.Key {
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
			{APIGroups: []string{snap.GroupName}, Resources: []string{"volumesnapshots", "volumesnapshotcontents"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{snap.GroupName}, Resources: []string{"volumesnapshotclasses"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{snap.GroupName}, Resources: []string{"volumesnapshots/status",
				"volumesnapshotcontents/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{groups.GroupName},
				Resources: []string{"volumegroupsnapshots", "volumegroupsnapshotcontents"},
				Verbs:     []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{groups.GroupName}, Resources: []string{"volumegroupsnapshotclasses"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{groups.GroupName},
				Resources: []string{"volumegroupsnapshots/status", "volumegroupsnapshotcontents/status"},
				Verbs:     []string{"update"}},
			{APIGroups: []string{"apiextensions.k8s.io"}, Resources: []string{"customresourcedefinitions"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumeclaims"},
				Verbs: []string{"get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"persistentvolumes"}, Verbs: []string{"get"}},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get"}},
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"csidrivers", "csinodes"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, calls: t.Drivers(calls), claims: claims, drivers: drivers, csiNodes: csiNodes,
				nodes: nodes, definitions: definitions}
			r.groups.snapshots = r
			return r.reconcileSnapshotKey
		},
	}
}

// keysOf returns the keys to reconcile when object o of kind k changes. These are the keys of o
// itself, of the snapshot if o is a content, and of the claim if o is a snapshot.
func keysOf(k *api.Kind, o *custom.Object) []engine.Key {
	switch k.GVK.Kind {
	case "VolumeSnapshot":
		keys := []engine.Key{{Kind: snapshotKey, Namespace: o.Namespace, Name: o.Name}}
		s, err := engine.TypedOf[snap.VolumeSnapshot](o)
		if err != nil {
			return keys
		}
		if s.Typed.Status != nil && s.Typed.Status.BoundVolumeSnapshotContentName != nil {
			keys = append(keys, engine.Key{Kind: contentKey, Name: *s.Typed.Status.BoundVolumeSnapshotContentName})
		}
		if from := s.Typed.Spec.Source.PersistentVolumeClaimName; from != nil {
			keys = append(keys, engine.Key{Kind: claimKey, Namespace: o.Namespace, Name: *from})
		}
		for _, of := range s.Typed.OwnerReferences {
			if of.Kind == "VolumeGroupSnapshot" {
				keys = append(keys, engine.Key{Kind: groupKey, Namespace: o.Namespace, Name: of.Name})
			}
		}
		return keys
	case "VolumeSnapshotContent":
		keys := []engine.Key{{Kind: contentKey, Name: o.Name}}
		if c, err := engine.TypedOf[snap.VolumeSnapshotContent](o); err == nil {
			ref := c.Typed.Spec.VolumeSnapshotRef
			keys = append(keys, engine.Key{Kind: snapshotKey, Namespace: ref.Namespace, Name: ref.Name})
		}
		return keys
	case "VolumeGroupSnapshot":
		keys := []engine.Key{{Kind: groupKey, Namespace: o.Namespace, Name: o.Name}}
		if g, err := engine.TypedOf[groups.VolumeGroupSnapshot](o); err == nil && g.Typed.Status != nil &&
			g.Typed.Status.BoundVolumeGroupSnapshotContentName != nil {
			keys = append(keys, engine.Key{Kind: groupContentKey,
				Name: *g.Typed.Status.BoundVolumeGroupSnapshotContentName})
		}
		return keys
	case "VolumeGroupSnapshotContent":
		keys := []engine.Key{{Kind: groupContentKey, Name: o.Name}}
		if c, err := engine.TypedOf[groups.VolumeGroupSnapshotContent](o); err == nil {
			ref := c.Typed.Spec.VolumeGroupSnapshotRef
			keys = append(keys, engine.Key{Kind: groupKey, Namespace: ref.Namespace, Name: ref.Name})
		}
		return keys
	}
	return nil
}

// reconciler reconciles snapshots and contents during one term of leadership. Every term has a new
// reconciler. It reads most objects from the API instead of a cache, because snapshots are few.
type reconciler struct {
	term  *engine.Term
	calls *engine.LeaderDrivers

	claims, drivers, csiNodes, nodes, definitions cache.SharedIndexInformer
	groups                                        groupReconciler
}

// groupReconciler reconciles VolumeGroupSnapshots and VolumeGroupSnapshotContents. The snapshots of
// a group are ordinary VolumeSnapshots.
type groupReconciler struct {
	snapshots *reconciler
}

type (
	snapshot = engine.TypedObject[snap.VolumeSnapshot]
	content  = engine.TypedObject[snap.VolumeSnapshotContent]

	group        = engine.TypedObject[groups.VolumeGroupSnapshot]
	groupContent = engine.TypedObject[groups.VolumeGroupSnapshotContent]
)

func (r *reconciler) reconcileSnapshotKey(ctx context.Context, key engine.Key) (next time.Duration, err error) {
	snapshots, contents := r.snapshotKind("VolumeSnapshot"), r.snapshotKind("VolumeSnapshotContent")
	if snapshots == nil || contents == nil || r.snapshotKind("VolumeSnapshotClass") == nil {
		return 0, nil
	}
	switch key.Kind {
	case claimKey:
		return 0, toRaceError(key, r.reconcileClaim(ctx, key))
	case groupKey, groupContentKey:
		if r.snapshotKind("VolumeGroupSnapshot") == nil || r.snapshotKind("VolumeGroupSnapshotContent") == nil ||
			r.snapshotKind("VolumeGroupSnapshotClass") == nil {
			return 0, nil
		}
		if key.Kind == groupKey {
			next, err = r.groups.reconcileGroup(ctx, key)
		} else {
			next, err = r.groups.reconcileGroupContent(ctx, key)
		}
		return next, toRaceError(key, err)
	}
	if key.Kind == snapshotKey {
		if !r.isBinder() {
			return 0, nil
		}
		s, err := engine.GetTyped[snap.VolumeSnapshot](ctx, r.term.Client, snapshots, key.Namespace, key.Name)
		if apierrors.IsNotFound(err) {
			return 0, nil
		}
		if err == nil {
			next, err = r.reconcileSnapshot(ctx, s)
		}
		return next, toRaceError(key, err)
	}
	c, err := engine.GetTyped[snap.VolumeSnapshotContent](ctx, r.term.Client, contents, "", key.Name)
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

func toRaceError(key engine.Key, err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) {
		return engine.RaceError("%s: %w", key, err)
	}
	return err
}

func (r *reconciler) snapshotKind(name string) *api.Kind {
	return engine.FindSnapshotKind(r.term.Client, name)
}

// isBinder reports whether this controller binds VolumeSnapshots to contents (see ServedBy).
func (r *reconciler) isBinder() bool {
	d, ok := engine.Cached[*extensionsv1.CustomResourceDefinition](r.definitions, "", Definition)
	return ok && d.Annotations[ServedBy] == ControlPlane
}

func (r *reconciler) isServed(driver string) bool {
	d, _ := engine.Cached[*storagev1.CSIDriver](r.drivers, "", driver)
	return r.calls != nil && engine.IsServedByAgent(d)
}

// writeObject stores a copy of object o after change has modified its metadata or spec, and returns
// the stored object. Fields that the Go type lacks are preserved.
func (r *reconciler) writeObject(ctx context.Context, o *custom.Object, change func(*custom.Object)) (
	*custom.Object, error,
) {
	next := o.DeepCopy()
	change(next)
	k := r.snapshotKind(o.Kind)
	if k == nil {
		return nil, fmt.Errorf("%s is no longer served", o.Kind)
	}
	out, err := r.term.Client.Do(ctx, &api.Request{Verb: api.VerbUpdate, Kind: k, Namespace: o.Namespace,
		Name: o.Name, Object: next})
	if err != nil {
		return nil, fmt.Errorf("updating %s %s: %w", o.Kind, engine.KeyOf(o), err)
	}
	return out.(*custom.Object), nil
}

// writeChange stores a copy of object s after change has modified its metadata or spec. It returns
// the stored object, or s if the write fails.
func writeChange[T any](ctx context.Context, r *reconciler, s engine.TypedObject[T], change func(*custom.Object)) (
	engine.TypedObject[T], error,
) {
	o, err := r.writeObject(ctx, s.Object, change)
	if err != nil {
		return s, err
	}
	next, err := engine.TypedOf[T](o)
	if err != nil {
		return s, err
	}
	return next, nil
}

// writeStatus stores status as the new status of object o.
func (r *reconciler) writeStatus(ctx context.Context, o *custom.Object, status any) error {
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(status)
	if err != nil {
		return fmt.Errorf("converting the status of %s %s: %w", o.Kind, engine.KeyOf(o), err)
	}
	return r.putStatus(ctx, o, m)
}

func (r *reconciler) putStatus(ctx context.Context, o *custom.Object, status map[string]any) error {
	next, k := o.DeepCopy(), r.snapshotKind(o.Kind)
	if k == nil {
		return fmt.Errorf("%s is no longer served", o.Kind)
	}
	next.Set("status", status)
	_, err := r.term.Client.Do(ctx, &api.Request{Verb: api.VerbUpdate, Kind: k, Subresource: "status",
		Namespace: o.Namespace, Name: o.Name, Object: next})
	if err != nil {
		return fmt.Errorf("writing the status of %s %s: %w", o.Kind, engine.KeyOf(o), err)
	}
	return nil
}

func (r *reconciler) recordEvent(o *custom.Object, kind, reason, message string) {
	r.term.Events.Event(o, kind, reason, message)
}
