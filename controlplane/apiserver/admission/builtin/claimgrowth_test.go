package builtin_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// A claim can be expanded if its StorageClass allows expansion. Otherwise the response is a 403.
func TestClaimExpansionNeedsStorageClass(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	yes := true
	r.Must(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "grows"}, Provisioner: "x",
		AllowVolumeExpansion: &yes})
	r.Must(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "stays"}, Provisioner: "x"})
	claims := r.Admin().CoreV1().PersistentVolumeClaims("default")
	grow := func(name string) error {
		_, err := claims.Patch(ctx, name, types.MergePatchType,
			[]byte(`{"spec":{"resources":{"requests":{"storage":"2Gi"}}}}`), metav1.PatchOptions{})
		return err
	}
	for _, class := range []string{"grows", "stays", "gone", ""} {
		name := "of-" + class + "-class"
		c :=
			r.Must(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
				Spec: corev1.PersistentVolumeClaimSpec{
					StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
					Resources: corev1.VolumeResourceRequirements{
						Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
				}}).(*corev1.PersistentVolumeClaim).DeepCopy()
		if err := grow(name); !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%s, not bound: %v", name, err)
		}
		c.Status.Phase = corev1.ClaimBound
		if _, err := claims.UpdateStatus(ctx, c, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		err := grow(name)
		if class == "grows" && err != nil || class != "grows" && (!apierrors.IsForbidden(err) ||
			!strings.Contains(err.Error(), "only dynamically provisioned pvc can be resized and the storageclass that "+
				"provisions the pvc must support resize")) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
