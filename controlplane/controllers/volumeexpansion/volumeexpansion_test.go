package volumeexpansion_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// createExpandable creates a volume of a driver and a claim that is bound to it. Their StorageClass
// allows expansion, which admission requires of a claim that requests more.
func createExpandable(w *testcluster.Cluster, name, driver string) {
	w.T.Helper()
	w.CreateObject(&storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: driver, AllowVolumeExpansion: ptr.To(true),
	})
	v, c := testcluster.NewDriverVolume(name, driver), testcluster.NewClassClaim(name, name, "1Gi")
	v.Spec.StorageClassName, c.Spec.VolumeName = name, name
	w.CreateObject(v)
	w.CreateObject(c)
	w.AwaitBound(name)
}

// A claim that requests more gets it from the cluster's own driver. For another driver, one event
// names the controller for which it waits.
func TestClaimsGrow(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1", "w2", "w3")
		for name, driver := range map[string]string{"own": "local.csi.keelson.dev", "theirs": "other.example.com"} {
			createExpandable(w, name, driver)
			w.RequestSize(name, "3Gi")
		}
		w.AwaitClaim("own", testcluster.HasCapacity("3Gi"))
		if m := w.Drivers.Volume("own"); m == nil || m.Size != 3<<30 {
			t.Errorf("the driver has %+v", m)
		}
		w.AwaitEvent("VolumeResizeSuccessful", "volume own has 3Gi")
		w.AwaitEvent("ExternalExpanding", "waiting for an external controller to expand volume theirs to 3Gi: that of "+
			"CSI driver other.example.com")
		time.Sleep(10 * time.Minute)
		w.AwaitRest()
		list, err := client.Get[*corev1.PersistentVolume](w.Ctx, w.Admin, "", "theirs")
		if q := testcluster.StorageSize("1Gi")[corev1.ResourceStorage]; err != nil ||
			q.Cmp(list.Spec.Capacity[corev1.ResourceStorage]) != 0 {
			t.Errorf("another's volume was changed: %+v, %v", list, err)
		}
		w.AwaitClaim("theirs", testcluster.HasCapacity("1Gi"))
	})
}

// Regardless of lost calls, crashes and leader changes, at the end a claim has the size that it
// requested last.
func TestClaimsGrowUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			ChangeController: testcluster.FailReconciles("expand-controller", 2, time.Millisecond)})
		settings := engine.Options{Resync: time.Second}
		stop := w.Lead(settings)
		defer func() { stop() }()
		w.AddNode("w1")
		w.AddDriver("w1")
		createExpandable(w, "own", "local.csi.keelson.dev")
		for i := range 12 {
			w.RequestSize("own", fmt.Sprintf("%dGi", i+2))
			if i%2 == 1 {
				stop()
				stop = w.Lead(settings)
			}
			if i%3 == 2 {
				w.AwaitClaim("own", testcluster.HasCapacity(fmt.Sprintf("%dGi", i+2)))
			}
		}
		w.AwaitClaim("own", testcluster.HasCapacity("13Gi"))
	})
}

// A volume is expanded on nodes where a pod has it mounted, and not before. Errors of nodes are
// reported, and a claim that requested too much may request less.
func TestClaimsGrowOnNodes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		w.AddDriver("w1", "w2", "w3")
		w.Drivers.Change(func() {
			w.Drivers.Faults.NodeExpandError = status.Error(codes.FailedPrecondition, "not while it is mounted")
		})
		createExpandable(w, "own", "local.csi.keelson.dev")
		w.RequestSize("own", "900Pi")
		says := func(state corev1.ClaimResourceStatus, kind corev1.PersistentVolumeClaimConditionType, words string) {
			t.Helper()
			w.AwaitClaim("own", func(c *corev1.PersistentVolumeClaim) bool {
				return c.Status.AllocatedResourceStatuses[corev1.ResourceStorage] == state &&
					slices.ContainsFunc(c.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool {
						return c.Type == kind && strings.Contains(c.Message, words)
					})
			})
		}
		says(corev1.PersistentVolumeClaimControllerResizeInfeasible, corev1.PersistentVolumeClaimControllerResizeError,
			"there is no such disk")
		w.RequestSize("own", "3Gi")
		says(corev1.PersistentVolumeClaimNodeResizePending, corev1.PersistentVolumeClaimFileSystemResizePending, "")
		time.Sleep(10 * time.Minute)
		w.AwaitRest()
		if m := w.Drivers.Volume("own"); m.Size != 3<<30 || m.Node == "w2" {
			t.Errorf("before a pod has it: %+v", m)
		}
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "user"},
			Spec: corev1.PodSpec{NodeName: "w2",
				Containers: []corev1.Container{{Name: "c", Image: "i"}},
				Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
					PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "own"}}}}}}
		w.CreateObject(p)
		says(corev1.PersistentVolumeClaimNodeResizePending, corev1.PersistentVolumeClaimNodeResizeError,
			"not while it is mounted")
		w.Drivers.Change(func() { w.Drivers.Faults.NodeExpandError = testcluster.ErrGrows })
		w.AwaitClaim("own", testcluster.HasCapacity("3Gi"))
		if m := w.Drivers.Volume("own"); m.Node != "w2" {
			t.Errorf("it was grown on %s", m.Node)
		}
		w.AwaitEvent("FileSystemResizeSuccessful", "volume own has 3Gi, also on its node")
	})
}
