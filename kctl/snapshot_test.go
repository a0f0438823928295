package kctl

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/dynamic"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/test/bed/loopback"
)

// A cluster that asks for snapshots serves their kinds, by the rules of those who publish them, with a default class.
func TestSnapshotInstall(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	plane, err := loopback.Start(ctx, t.TempDir(), loopback.Shape{Name: "snapshot", Replicas: 1, Ready: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := plane.Stop(); err != nil {
			t.Error(err)
		}
	}()
	cluster, err := dynamic.NewForConfig(plane.Configs[0])
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig, err := filepath.Abs(plane.Founded.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"created", "unchanged"} {
		flags := genericclioptions.NewConfigFlags(false)
		cache := t.TempDir()
		flags.KubeConfig, flags.CacheDir = &kubeconfig, &cache
		var out bytes.Buffer
		root := &cobra.Command{Use: "kctl", SilenceErrors: true, SilenceUsage: true}
		root.AddCommand(snapshotCommand(cmdutil.NewFactory(flags), genericiooptions.IOStreams{Out: &out, ErrOut: &out}))
		root.SetArgs([]string{"snapshot", "install"})
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(out.String(), " "+want+"\n"); n != 8 {
			t.Errorf("%d are %s:\n%s", n, want, &out)
		}
	}
	snapshots := cluster.Resource(schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: "volumesnapshots"}).Namespace("default")
	_, err = snapshots.Create(ctx, &unstructured.Unstructured{Object: map[string]any{"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
		"metadata": map[string]any{"name": "both"}, "spec": map[string]any{"source": map[string]any{"persistentVolumeClaimName": "a", "volumeSnapshotContentName": "b"}}}}, metav1.CreateOptions{})
	if err == nil || !strings.Contains(err.Error(), "exactly one of volumeSnapshotContentName and persistentVolumeClaimName must be set") {
		t.Errorf("a snapshot of two things: %v", err)
	}
}
