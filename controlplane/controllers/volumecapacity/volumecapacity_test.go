package volumecapacity_test

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// F89: if a driver can create no volumes of a class on a node, the capacity is zero and an
// annotation has the reason, until the driver returns another result. It is called with the class's
// parameters, without reserved parameters.
func TestNoRoomForAReason(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.Drivers.Change(func() {
			w.Drivers.Capacity = 1 << 30
			w.Drivers.Faults.CapacityError = status.Error(codes.FailedPrecondition, "its disk has no project quotas")
		})
		w.AddDriver("w1")
		mode := storagev1.VolumeBindingWaitForFirstConsumer
		for name, params := range map[string]map[string]string{"plain": {"csi.storage.k8s.io/fstype": "ext4"},
			"folders": {"backing": "directory"}} {
			w.CreateObject(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name},
				Provisioner: testcluster.OwnDriver, VolumeBindingMode: &mode, Parameters: params})
		}
		has := func(class string, room int64, why string) {
			t.Helper()
			w.Eventually("room for "+class, func() error {
				list, err := client.List[*storagev1.CSIStorageCapacity](w.Ctx, w.Admin, metav1.NamespaceSystem,
					metav1.ListOptions{})
				if err != nil {
					return err
				}
				for _, c := range list {
					if c.StorageClassName == class && c.Capacity.Value() == room &&
						c.Annotations[api.NoRoomAnnotation] == why {
						return nil
					}
				}
				return fmt.Errorf("there are %v", list)
			})
		}
		has("plain", 1<<30, "")
		has("folders", 0, "its disk has no project quotas")
		w.Drivers.Change(func() { w.Drivers.Faults.CapacityError = nil })
		has("folders", 1<<30, "")
		w.Drivers.Change(func() { w.Drivers.Faults.CapacityError = status.Error(codes.Unavailable, "it is asleep") })
		time.Sleep(10 * time.Minute)
		has("folders", 1<<30, "") // the known capacity stays
	})
}
