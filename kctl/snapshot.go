package kctl

import (
	"context"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/dynamic"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/kctl/definitions"
	"keelson.dev/keelson/kctl/verb"
)

// localDriver is the name of the CSI driver for local volumes, which is part of every node agent.
const localDriver = "local.csi.keelson.dev"

// API resources of the classes (VolumeSnapshotClass and VolumeGroupSnapshotClass) that 'kctl
// snapshot install' creates.
var (
	snapshotClasses = schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1",
		Resource: "volumesnapshotclasses"}
	groupSnapshotClasses = schema.GroupVersionResource{Group: "groupsnapshot.storage.k8s.io", Version: "v1",
		Resource: "volumegroupsnapshotclasses"}
)

const (
	defaultSnapshotClass      = "snapshot.storage.kubernetes.io/is-default-class"
	defaultGroupSnapshotClass = "groupsnapshot.storage.kubernetes.io/is-default-class"
)

func snapshotCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:     "snapshot",
		Short:   "Manage snapshots of volumes",
		Example: "  kctl snapshot install",
	}
	return verb.NewGroup(c, snapshotInstallCommand(f, streams))
}

func snapshotInstallCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	c := &cobra.Command{
		Use:   "install",
		Short: "Install the kinds of volume snapshots, and default classes for local volumes",
		Long: "Install the CustomResourceDefinitions of volume snapshots, release " +
			definitions.Snapshot.Release +
			": VolumeSnapshot,\n" +
			"VolumeSnapshotContent and VolumeSnapshotClass (snapshot.storage.k8s.io/v1), and\n" +
			"VolumeGroupSnapshot, VolumeGroupSnapshotContent and VolumeGroupSnapshotClass\n" +
			"(groupsnapshot.storage.k8s.io/v1). A default VolumeSnapshotClass and a default\n" +
			"VolumeGroupSnapshotClass are created for the driver " +
			localDriver +
			".\n" +
			"\n" +
			"Existing definitions that this command did not create are not changed, because another snapshot\n" +
			"controller may use them. To let the control plane serve them, run:\n" +
			"  kctl annotate crd volumesnapshots.snapshot.storage.k8s.io keelson.dev/served-by=control-plane\n" +
			"\n" +
			"'kctl delete crd' deletes a kind and all of its objects.",
		Example: "  kctl snapshot install\n" +
			"  kctl snapshot install --class nightly\n" +
			"\n" +
			"  # Install the kinds without classes\n" +
			"  kctl snapshot install --class ''",
	}
	const both = "the VolumeSnapshotClass and the VolumeGroupSnapshotClass"
	return addInstall(c, f, streams, definitions.Snapshot, "standard", both,
		func(ctx context.Context, cluster dynamic.Interface, class string) error {
			if err := createSnapshotClass(ctx, cluster, streams, snapshotClasses, "VolumeSnapshotClass",
				defaultSnapshotClass, class); err != nil {
				return err
			}
			return createSnapshotClass(ctx, cluster, streams, groupSnapshotClasses, "VolumeGroupSnapshotClass",
				defaultGroupSnapshotClass, class)
		})
}

// createSnapshotClass creates a class for snapshots of local volumes, unless it exists, and prints
// the result. resource and kind select VolumeSnapshotClass or VolumeGroupSnapshotClass.
// defaultAnnotation is the annotation that makes the class the default.
func createSnapshotClass(ctx context.Context, cluster dynamic.Interface, streams genericiooptions.IOStreams,
	resource schema.GroupVersionResource, kind, defaultAnnotation, name string) error {
	class := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": resource.GroupVersion().String(), "kind": kind,
		"metadata": map[string]any{"name": name, "annotations": map[string]any{defaultAnnotation: "true"}},
		"driver":   localDriver, "deletionPolicy": "Delete",
	}}
	return createClass(ctx, cluster, streams, resource, class, func() error { return nil })
}
