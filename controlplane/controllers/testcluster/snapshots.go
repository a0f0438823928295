package testcluster

import (
	"errors"
	"fmt"
	"strings"
	"time"

	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	extensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// AddSnapshotKinds registers the kinds of VolumeSnapshots, and requests that the control plane
// binds snapshots. It creates a default VolumeSnapshotClass with a Secret. It returns the kinds by
// name.
func AddSnapshotKinds(w *Cluster) map[string]*api.Kind {
	w.T.Helper()
	out := map[string]*api.Kind{}
	for kind, plural := range map[string]string{"VolumeSnapshot": "volumesnapshots",
		"VolumeSnapshotContent": "volumesnapshotcontents", "VolumeSnapshotClass": "volumesnapshotclasses"} {
		of := custom.Resource{Group: snap.GroupName, Kind: kind, Plural: plural, Singular: strings.ToLower(kind),
			Namespaced: kind == "VolumeSnapshot"}
		out[kind] = custom.NewKind(of, "v1", kind != "VolumeSnapshotClass", custom.NewStorage(of, "v1"))
		if err := w.Admin.Kinds().Register(out[kind]); err != nil {
			w.T.Fatal(err)
		}
	}
	// The version is not served by the definition, because the kinds are registered above.
	w.CreateObject(&extensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "volumesnapshots." + snap.GroupName, Annotations: map[string]string{
			"keelson.dev/served-by":                "control-plane",
			extensionsv1.KubeAPIApprovedAnnotation: "https://github.com/kubernetes-csi/external-snapshotter/pull/814",
		}},
		Spec: extensionsv1.CustomResourceDefinitionSpec{
			Group: snap.GroupName, Scope: extensionsv1.NamespaceScoped,
			Names: extensionsv1.CustomResourceDefinitionNames{
				Plural: "volumesnapshots", Singular: "volumesnapshot", Kind: "VolumeSnapshot",
				ListKind: "VolumeSnapshotList",
			},
			Versions: []extensionsv1.CustomResourceDefinitionVersion{{
				Name: "v1", Storage: true, Schema: &extensionsv1.CustomResourceValidation{
					OpenAPIV3Schema: &extensionsv1.JSONSchemaProps{Type: "object",
						XPreserveUnknownFields: ptr.To(true)},
				},
			}},
		},
	})
	w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s-key"},
		Data: map[string][]byte{"key": []byte("open")}})
	CreateCustom(w, out["VolumeSnapshotClass"],
		"metadata: {name: std, annotations: {snapshot.storage.kubernetes.io/is-default-class: 'true'}}\ndriver: "+
			OwnDriver+
			"\ndeletionPolicy: Delete\nparameters: {csi.storage.k8s.io/snapshotter-secret-name: s-key, "+
			"csi.storage.k8s.io/snapshotter-secret-namespace: '${volumesnapshot.namespace}'}")
	return out
}

// CreateSnapshot creates a VolumeSnapshot of the claim.
func CreateSnapshot(w *Cluster, kinds map[string]*api.Kind, name, claim string) {
	w.T.Helper()
	CreateCustom(w, kinds["VolumeSnapshot"],
		fmt.Sprintf("metadata: {name: %s}\nspec: {source: {persistentVolumeClaimName: %s}}", name, claim))
}

// DeleteCustom deletes an object of a custom kind.
func DeleteCustom(w *Cluster, k *api.Kind, name string) {
	w.T.Helper()
	namespace := ""
	if k.Namespaced {
		namespace = "default"
	}
	if _, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbDelete, Kind: k, Namespace: namespace,
		Name: name}); err != nil {
		w.T.Fatal(err)
	}
}

// AwaitSnapshot waits until check returns nil for the VolumeSnapshot of this name.
func AwaitSnapshot(w *Cluster, kinds map[string]*api.Kind, name string, check func(*snap.VolumeSnapshot) error) {
	w.T.Helper()
	w.EventuallyWithin(5*time.Minute, "snapshot "+name, func() error {
		s, err := engine.GetTyped[snap.VolumeSnapshot](w.Ctx, w.Admin, kinds["VolumeSnapshot"], "default", name)
		if err == nil {
			err = check(s.Typed)
		}
		return err
	})
}

// CheckSnapshotReady returns an error unless the snapshot is ready to use, without an error, and
// has the size and creation time that OwnDriver returns.
func CheckSnapshotReady(s *snap.VolumeSnapshot) error {
	if !engine.IsSnapshotReady(s) || s.Status.Error != nil || s.Status.RestoreSize.String() != "1Gi" ||
		s.Status.CreationTime.Unix() != 1e9 {
		return fmt.Errorf("its status is %+v", s.Status)
	}
	return nil
}

// CheckContents returns an error unless the number of VolumeSnapshotContents is contents, and the
// number of snapshots that OwnDriver stores is onDisk.
func CheckContents(w *Cluster, kinds map[string]*api.Kind, contents, onDisk int) error {
	list, err := w.Admin.ListKind(w.Ctx, kinds["VolumeSnapshotContent"], "")
	w.Drivers.Mu.Lock()
	defer w.Drivers.Mu.Unlock()
	if err == nil && (len(list) != contents || len(w.Drivers.Snapshots) != onDisk) {
		err = fmt.Errorf("%d contents, %d snapshots", len(list), len(w.Drivers.Snapshots))
	}
	return err
}

// AwaitCustomDeleted waits until an object of a custom kind does not exist.
func AwaitCustomDeleted(w *Cluster, k *api.Kind, name string) {
	w.T.Helper()
	w.EventuallyWithin(5*time.Minute, name+" goes", func() error {
		_, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbGet, Kind: k, Namespace: "default", Name: name})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.New("it is there")
	})
}
