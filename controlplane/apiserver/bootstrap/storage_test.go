package bootstrap_test

import (
	"testing"

	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/bootstrap"
)

// F110: a new cluster has a default StorageClass, given once: what its users make of it stays so,
// and a class that is the default already remains the only one.
func TestStorageClassIsGivenOnce(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	ensure := func() {
		t.Helper()
		if err := r.Setup.EnsureSystemObjects(ctx, 0); err != nil {
			t.Fatal(err)
		}
		if err := r.Setup.EnsureStorage(ctx, 0); err != nil {
			t.Fatal(err)
		}
	}
	classes, drivers := r.Admin().StorageV1().StorageClasses(), r.Admin().StorageV1().CSIDrivers()
	ensure()
	c, err := classes.Get(ctx, "standard", metav1.GetOptions{})
	if err != nil || c.Provisioner != "local.csi.keelson.dev" ||
		c.Annotations[bootstrap.DefaultClassAnnotation] != "true" ||
		*c.VolumeBindingMode != storagev1.VolumeBindingWaitForFirstConsumer {
		t.Fatalf("the class is %+v, %v", c, err)
	}
	c.Annotations[bootstrap.DefaultClassAnnotation] = "false"
	if _, err := classes.Update(ctx, c, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	ensure()
	if c, err = classes.Get(ctx, "standard", metav1.GetOptions{}); err != nil ||
		c.Annotations[bootstrap.DefaultClassAnnotation] != "false" {
		t.Errorf("what a user changed is %+v, %v", c, err)
	}
	if err := classes.Delete(ctx, "standard", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := drivers.Delete(ctx, bootstrap.LocalDriver, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	ensure()
	if _, err := classes.Get(ctx, "standard", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a class that a user deleted: %v", err)
	}
	if d, err := drivers.Get(ctx, bootstrap.LocalDriver, metav1.GetOptions{}); err != nil ||
		d.Annotations["keelson.dev/served-by"] != "agent" {
		t.Errorf("the driver's object is %+v, %v", d, err)
	}
}

// If a StorageClass is already the default, the bootstrap creates no second default class.
func TestStorageClassBesideAnother(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	classes := r.Admin().StorageV1().StorageClasses()
	if _, err := classes.Create(ctx,
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "mine",
			Annotations: map[string]string{bootstrap.DefaultClassAnnotation: "true"}},
			Provisioner: "mine.example"}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := r.Setup.EnsureSystemObjects(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if err := r.Setup.EnsureStorage(ctx, 0); err != nil {
		t.Fatal(err)
	}
	c, err := classes.Get(ctx, "standard", metav1.GetOptions{})
	if err != nil || c.Annotations[bootstrap.DefaultClassAnnotation] != "" {
		t.Errorf("the class is %+v, %v", c, err)
	}
}
