package controllers_test

import (
	"fmt"
	"testing"
	"time"

	storagev1 "k8s.io/api/storage/v1"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// F89: if a driver can create no volumes of a class on a node, the capacity is zero and an
// annotation has the reason, until the driver returns another result. It is called with the class's
// parameters, without reserved parameters.
func TestNoRoomForAReason(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.drivers.set(func() {
			w.drivers.room = 1 << 30
			w.drivers.never = status.Error(codes.FailedPrecondition, "its disk has no project quotas")
		})
		w.driverOn("w1")
		mode := storagev1.VolumeBindingWaitForFirstConsumer
		for name, params := range map[string]map[string]string{"plain": {"csi.storage.k8s.io/fstype": "ext4"}, "folders": {"backing": "directory"}} {
			w.create(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: ownDriver, VolumeBindingMode: &mode, Parameters: params})
		}
		has := func(class string, room int64, why string) {
			t.Helper()
			w.eventually("room for "+class, func() error {
				list, err := client.List[*storagev1.CSIStorageCapacity](w.ctx, w.admin, metav1.NamespaceSystem, metav1.ListOptions{})
				if err != nil {
					return err
				}
				for _, c := range list {
					if c.StorageClassName == class && c.Capacity.Value() == room && c.Annotations[api.NoRoomAnnotation] == why {
						return nil
					}
				}
				return fmt.Errorf("there are %v", list)
			})
		}
		has("plain", 1<<30, "")
		has("folders", 0, "its disk has no project quotas")
		w.drivers.set(func() { w.drivers.never = nil })
		has("folders", 1<<30, "")
		w.drivers.set(func() { w.drivers.never = status.Error(codes.Unavailable, "it is asleep") })
		time.Sleep(10 * time.Minute)
		has("folders", 1<<30, "") // the known capacity stays
	})
}
