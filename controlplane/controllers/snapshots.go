package controllers

import (
	"context"
	"encoding/json"
	"fmt"

	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
)

// SnapshotGroup is the API group of VolumeSnapshots. A cluster has its kinds once their
// CustomResourceDefinitions are installed.
const SnapshotGroup = "snapshot.storage.k8s.io"

// GroupSnapshotGroup is the API group of VolumeGroupSnapshots. Its CustomResourceDefinitions are
// installed with those of VolumeSnapshots.
const GroupSnapshotGroup = "groupsnapshot.storage.k8s.io"

// ReachedFromAnnotation holds a node affinity of a volume in JSON: the nodes that can reach data.
// On a VolumeSnapshotContent it applies to the snapshot. On a PersistentVolumeClaim it applies to
// the data source of the claim's volume; the scheduler then binds the pod to one of these nodes.
const ReachedFromAnnotation = "keelson.dev/reached-from"

// FindSnapshotKind returns the kind of snapshots or group snapshots with a name. It returns nil if
// the kind is not served.
func FindSnapshotKind(c *client.Client, name string) *api.Kind {
	for _, k := range c.Kinds().Table().Stored() {
		if IsSnapshotKind(k) && k.GVK.Kind == name {
			return k
		}
	}
	return nil
}

// IsSnapshotKind reports whether a kind belongs to snapshots or group snapshots in a supported
// version. The definitions of external-snapshotter 8.7 store group snapshots as v1beta2, which has
// the same form as v1. v1beta1 has another form and is not supported.
func IsSnapshotKind(k *api.Kind) bool {
	switch k.GVK.Group {
	case SnapshotGroup:
		return k.GVK.Version == "v1"
	case GroupSnapshotGroup:
		return k.GVK.Version == "v1" || k.GVK.Version == "v1beta2"
	}
	return false
}

// TypedObject is a custom object and its conversion to a Go type. Object also holds fields that the
// Go type lacks.
type TypedObject[T any] struct {
	Object *custom.Object
	Typed  *T
}

// TypedOf converts an object to a Go type.
func TypedOf[T any](o *custom.Object) (s TypedObject[T], err error) {
	m, err := o.Map()
	if err == nil {
		s = TypedObject[T]{o, new(T)}
		err = runtime.DefaultUnstructuredConverter.FromUnstructured(m, s.Typed)
	}
	if err != nil {
		return s, fmt.Errorf("reading %s %s: %w", o.Kind, KeyOf(o), err)
	}
	return s, nil
}

// GetTyped reads one object of a kind from the API.
func GetTyped[T any](ctx context.Context, c *client.Client, k *api.Kind, namespace, name string) (s TypedObject[T], err error) {
	o, err := c.Do(ctx, &api.Request{Verb: api.VerbGet, Kind: k, Namespace: namespace, Name: name})
	if err != nil {
		return s, err
	}
	return TypedOf[T](o.(*custom.Object))
}

// ListTyped reads all objects of a kind from the API.
func ListTyped[T any](ctx context.Context, c *client.Client, k *api.Kind, namespace string) ([]TypedObject[T], error) {
	list, err := c.ListKind(ctx, k, namespace)
	if err != nil {
		return nil, err
	}
	out := make([]TypedObject[T], 0, len(list))
	for _, o := range list {
		s, err := TypedOf[T](o.(*custom.Object))
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// ReachableNodeAffinity returns the node affinity in an object's ReachedFromAnnotation. It returns
// nil if every node can reach the data.
func ReachableNodeAffinity(o metav1.Object) (*corev1.VolumeNodeAffinity, error) {
	text := o.GetAnnotations()[ReachedFromAnnotation]
	if text == "" {
		return nil, nil
	}
	a := &corev1.VolumeNodeAffinity{}
	if err := json.Unmarshal([]byte(text), a); err != nil {
		return nil, fmt.Errorf("annotation %s of %s: %w", ReachedFromAnnotation, o.GetName(), err)
	}
	return a, nil
}

// IsSnapshotReady reports whether volumes can be created from a snapshot, by the snapshot's status.
func IsSnapshotReady(s *snap.VolumeSnapshot) bool {
	return s.Status != nil && s.Status.ReadyToUse != nil && *s.Status.ReadyToUse && s.Status.BoundVolumeSnapshotContentName != nil
}
