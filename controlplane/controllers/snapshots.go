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

// SnapshotGroup is the API group of snapshots, whose kinds a cluster has once somebody has brought their definitions.
const SnapshotGroup = "snapshot.storage.k8s.io"

// GroupSnapshotGroup is the API group of groups of snapshots, whose kinds come with those of snapshots.
const GroupSnapshotGroup = "groupsnapshot.storage.k8s.io"

// ReachedFromAnnotation says from which nodes data are reached, as the node affinity of a volume in JSON: on a
// VolumeSnapshotContent those of the snapshot, on a claim those of what its volume is to be made of. The scheduler goes
// by that of a claim.
const ReachedFromAnnotation = "keelson.dev/reached-from"

// SnapshotKind is a kind of snapshots, or of groups of them, by its name, nil where none is served.
func SnapshotKind(c *client.Client, name string) *api.Kind {
	for _, k := range c.Kinds().Table().Stored() {
		if IsSnapshotKind(k) && k.GVK.Kind == name {
			return k
		}
	}
	return nil
}

// IsSnapshotKind says whether a kind is one of snapshots, or of groups of them. Groups are stored as v1beta2, which v1 has
// the form of, by the definitions of external-snapshotter 8.7; those of v1beta1 have another.
func IsSnapshotKind(k *api.Kind) bool {
	switch k.GVK.Group {
	case SnapshotGroup:
		return k.GVK.Version == "v1"
	case GroupSnapshotGroup:
		return k.GVK.Version == "v1" || k.GVK.Version == "v1beta2"
	}
	return false
}

// Stored is an object as its Go type, and as it is stored: with fields that the type does not know.
type Stored[T any] struct {
	Object *custom.Object
	Typed  *T
}

// TypedOf reads an object as a Go type.
func TypedOf[T any](o *custom.Object) (s Stored[T], err error) {
	m, err := o.Map()
	if err == nil {
		s = Stored[T]{o, new(T)}
		err = runtime.DefaultUnstructuredConverter.FromUnstructured(m, s.Typed)
	}
	if err != nil {
		return s, fmt.Errorf("reading %s %s: %w", o.Kind, KeyOf(o), err)
	}
	return s, nil
}

// GetTyped reads one object of a kind from the API.
func GetTyped[T any](ctx context.Context, c *client.Client, k *api.Kind, namespace, name string) (s Stored[T], err error) {
	o, err := c.Do(ctx, &api.Request{Verb: api.VerbGet, Kind: k, Namespace: namespace, Name: name})
	if err != nil {
		return s, err
	}
	return TypedOf[T](o.(*custom.Object))
}

// ListTyped reads all objects of a kind from the API.
func ListTyped[T any](ctx context.Context, c *client.Client, k *api.Kind, namespace string) ([]Stored[T], error) {
	list, err := c.ListKind(ctx, k, namespace)
	if err != nil {
		return nil, err
	}
	out := make([]Stored[T], 0, len(list))
	for _, o := range list {
		s, err := TypedOf[T](o.(*custom.Object))
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// ReachedFrom reads a node affinity from an annotation; nil where every node will do.
func ReachedFrom(o metav1.Object) (*corev1.VolumeNodeAffinity, error) {
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

// IsReady says whether volumes can be made of a snapshot by what its object says.
func IsReady(s *snap.VolumeSnapshot) bool {
	return s.Status != nil && s.Status.ReadyToUse != nil && *s.Status.ReadyToUse && s.Status.BoundVolumeSnapshotContentName != nil
}
