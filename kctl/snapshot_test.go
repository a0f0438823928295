package kctl

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// A cluster that asks for snapshots serves their kinds, by the rules of those who publish them, with a default class.
func TestSnapshotInstall(t *testing.T) {
	ctx, plane := oneReplica(t, "snapshot")
	cluster, kubeconfig := dynamicOf(t, plane)
	for _, want := range []string{"created", "unchanged"} {
		out, err := withKubeconfig(t, kubeconfig, "snapshot", "install")
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(out, " "+want+"\n"); n != 8 {
			t.Errorf("%d are %s:\n%s", n, want, out)
		}
	}
	snapshots := cluster.Resource(schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1",
		Resource: "volumesnapshots"}).Namespace("default")
	_, err := snapshots.Create(ctx,
		&unstructured.Unstructured{Object: map[string]any{"apiVersion": "snapshot.storage.k8s.io/v1",
			"kind":     "VolumeSnapshot",
			"metadata": map[string]any{"name": "both"},
			"spec": map[string]any{"source": map[string]any{"persistentVolumeClaimName": "a",
				"volumeSnapshotContentName": "b"}}}}, metav1.CreateOptions{})
	if err == nil || !strings.Contains(err.Error(),
		"exactly one of volumeSnapshotContentName and persistentVolumeClaimName must be set") {
		t.Errorf("a snapshot of two things: %v", err)
	}
}
