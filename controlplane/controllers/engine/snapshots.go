package engine

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

// SnapshotGroup is the API group of VolumeSnapshots. A cluster serves it once its
// CustomResourceDefinitions are installed.
const SnapshotGroup = "snapshot.storage.k8s.io"

// GroupSnapshotGroup is the API group of VolumeGroupSnapshots. Its CustomResourceDefinitions are
// installed with those of VolumeSnapshots.
const GroupSnapshotGroup = "groupsnapshot.storage.k8s.io"

// ReachedFromAnnotation contains, as JSON, a VolumeNodeAffinity that selects the nodes which can
// reach the data of an object. For a VolumeSnapshotContent, these are the data of the snapshot. For
// a PersistentVolumeClaim, these are the data source of the claim's volume; the scheduler then
// binds the pod to one of these nodes.
const ReachedFromAnnotation = "keelson.dev/reached-from"

// FindSnapshotKind returns the kind of this name in the API groups of snapshots and group
// snapshots. It returns nil if the cluster does not serve it.
func FindSnapshotKind(c *client.Client, name string) *api.Kind {
	for _, k := range c.Kinds().Table().Stored() {
		if IsSnapshotKind(k) && k.GVK.Kind == name {
			return k
		}
	}
	return nil
}

// IsSnapshotKind reports whether k is a kind of snapshots or group snapshots in a supported
// version. The CustomResourceDefinitions of external-snapshotter 8.7 store group snapshots as
// v1beta2, which has the same form as v1. Version v1beta1 has another form and is not supported.
func IsSnapshotKind(k *api.Kind) bool {
	switch k.GVK.Group {
	case SnapshotGroup:
		return k.GVK.Version == "v1"
	case GroupSnapshotGroup:
		return k.GVK.Version == "v1" || k.GVK.Version == "v1beta2"
	}
	return false
}

// TypedObject is a custom object together with its conversion to a Go type. Object also contains
// fields that the Go type lacks.
type TypedObject[T any] struct {
	Object *custom.Object
	Typed  *T
}

// TypedOf returns custom object o with its conversion to Go type T.
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

// GetTyped reads one object of kind k from the API and converts it to Go type T.
func GetTyped[T any](ctx context.Context, c *client.Client, k *api.Kind, namespace, name string) (
	s TypedObject[T], err error,
) {
	o, err := c.Do(ctx, &api.Request{Verb: api.VerbGet, Kind: k, Namespace: namespace, Name: name})
	if err != nil {
		return s, err
	}
	return TypedOf[T](o.(*custom.Object))
}

// ListTyped reads all objects of kind k in a namespace from the API and converts them to Go type T.
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

// IsSnapshotReady reports whether the status of snapshot s shows that volumes can be created from
// it.
func IsSnapshotReady(s *snap.VolumeSnapshot) bool {
	return s.Status != nil && s.Status.ReadyToUse != nil && *s.Status.ReadyToUse &&
		s.Status.BoundVolumeSnapshotContentName != nil
}
