package outage

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// checkEachStep takes a volume through its life and causes a fault at each step before the driver
// executes the call. Another volume gets the fault after the call, while the response is in
// transit. The pod gets the volume nevertheless, a snapshot and a volume restored from it have the
// volume's data, the data is kept as long as a claim exists, and then nothing is left: no object,
// mount, volume or snapshot. The journal shows whether the volume was ever in two places. The
// faults run in parallel.
func (a attachTest) checkEachStep(faults map[string]func(node string)) {
	a.Helper()
	began := time.Now()
	a.Run("steps", func(t *testing.T) {
		for fault, strike := range faults {
			for _, when := range []string{"before", "after"} {
				t.Run(fault+" killed "+when, func(t *testing.T) {
					t.Parallel()
					attachTest{t, a.cs, a.ns, a.shared}.runLife(fault, when, strike)
				})
			}
		}
	})
	a.Logf("%s killed before and after each step of a volume's life: nothing is left of two after %s",
		slices.Sorted(maps.Keys(faults)), time.Since(began).Round(10*time.Millisecond))
}

// volumeLife is the life of one volume, with a fault at each step.
type volumeLife struct {
	attachTest
	name   string // name of its objects, and prefix of the names of its volumes and snapshots
	strike func(node string)
}

func (a attachTest) runLife(fault, when string, strike func(node string)) {
	a.Helper()
	l := volumeLife{a, "held-" + fault + "-" + when, strike}
	a.createClass(l.name, map[string]string{"prefix": l.name + "-"})
	l.holdCalls(when, "CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume",
		"ControllerExpandVolume", "NodeExpandVolume",
		"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume", "CreateSnapshot",
		"DeleteSnapshot")
	ctx := context.Background()
	volume := l.createClaim(l.name, "8Mi", nil)
	l.doUndisturbed(func() error {
		_, err := a.cs.CoreV1().Pods(a.ns).Create(ctx, claimPod(l.name, l.name), metav1.CreateOptions{})
		return err
	})
	l.strikeAt("CreateVolume")
	l.strikeAt("ControllerPublishVolume")
	l.strikeAt("NodeStageVolume")
	l.strikeAt("NodePublishVolume")
	a.awaitRunning(l.name, "", soon)
	l.doUndisturbed(func() error {
		testenv.Eventually(a, soon, func() error { // its node's agent may have just started and have no session yet
			out, err := testenv.Try(a, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), "-n", a.ns, "exec", l.name,
				"--", "sh", "-c", "echo kept > /data/file")
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
		return nil
	})
	l.growClaim(l.name, "16Mi", func() {
		l.strikeAt("ControllerExpandVolume")
		l.strikeAt("NodeExpandVolume")
	})
	restored := l.checkSnapshot(when)
	l.doUndisturbed(func() error { return a.cs.CoreV1().Pods(a.ns).Delete(ctx, l.name, metav1.DeleteOptions{}) })
	l.strikeAt("NodeUnpublishVolume")
	l.strikeAt("NodeUnstageVolume")
	l.strikeAt("ControllerUnpublishVolume")
	a.awaitPodDeleted(l.name)
	l.checkData(volume)
	l.deleteClaim(l.name)
	l.strikeAt("DeleteVolume")
	a.awaitVolumeRemoved(volume)
	l.checkData(restored)
	l.deleteClaim(l.name + "-restored")
	a.awaitVolumeRemoved(restored)
}

// createClaim creates a claim of this test's class and returns the name of its future volume.
func (l volumeLife) createClaim(name, size string, source *v1.TypedLocalObjectReference) (volume string) {
	l.Helper()
	claim := &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1.PersistentVolumeClaimSpec{StorageClassName: &l.name,
			AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}, DataSource: source,
			Resources: v1.VolumeResourceRequirements{
				Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse(size)}}}}
	l.doUndisturbed(func() (err error) {
		claim, err = l.cs.CoreV1().PersistentVolumeClaims(l.ns).Create(context.Background(), claim,
			metav1.CreateOptions{})
		return err
	})
	return l.name + "-pvc-" + string(claim.UID)
}

func (l volumeLife) deleteClaim(name string) {
	l.Helper()
	l.doUndisturbed(func() error {
		return l.cs.CoreV1().PersistentVolumeClaims(l.ns).Delete(context.Background(), name, metav1.DeleteOptions{})
	})
}

// checkData checks that the data that the pod has written still exists.
func (l volumeLife) checkData(volume string) {
	l.Helper()
	if b, err := os.ReadFile(filepath.Join(l.shared, "volumes", volume, "data", "file")); err != nil ||
		string(b) != "kept\n" {
		l.Errorf("the volume %s of an existing claim has %q, %v", volume, b, err)
	}
}

// checkSnapshot takes a snapshot of the volume and restores it to another volume. It deletes the
// snapshot during the restore; the snapshot is deleted afterwards.
func (l volumeLife) checkSnapshot(when string) (restored string) {
	l.Helper()
	ctx, snapshots := context.Background(), l.snapshotClient()
	s := map[string]any{"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
		"metadata": map[string]any{"name": l.name},
		"spec": map[string]any{"volumeSnapshotClassName": driverName,
			"source": map[string]any{"persistentVolumeClaimName": l.name}}}
	l.doUndisturbed(func() error {
		_, err := snapshots.Create(ctx, &unstructured.Unstructured{Object: s}, metav1.CreateOptions{})
		return err
	})
	l.strikeAt("CreateSnapshot")
	testenv.Eventually(l, soon, func() error {
		s, err := snapshots.Get(ctx, l.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ready, _, _ := unstructured.NestedBool(s.Object, "status", "readyToUse"); !ready {
			return fmt.Errorf("VolumeSnapshot %s is %v", l.name, s.Object["status"])
		}
		return nil
	})
	l.holdCalls(when, "CreateVolume")
	group := "snapshot.storage.k8s.io"
	restored = l.createClaim(l.name+"-restored", "16Mi",
		&v1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot", Name: l.name})
	l.strikeAtWith("CreateVolume", func(node string) {
		l.doUndisturbed(func() error { return snapshots.Delete(ctx, l.name, metav1.DeleteOptions{}) })
		l.strike(node)
	})
	l.strikeAt("DeleteSnapshot")
	l.awaitNotFound("VolumeSnapshot "+l.name, func() error {
		_, err := snapshots.Get(ctx, l.name, metav1.GetOptions{})
		return err
	})
	testenv.Eventually(l, soon, func() error {
		c, err := l.cs.CoreV1().PersistentVolumeClaims(l.ns).Get(ctx, l.name+"-restored", metav1.GetOptions{})
		if err == nil && c.Status.Phase != v1.ClaimBound {
			err = fmt.Errorf("claim %s is %+v", c.Name, c.Status)
		}
		return err
	})
	l.checkData(restored)
	testenv.Eventually(l, soon, func() error {
		left, err := filepath.Glob(filepath.Join(l.shared, "snapshots", "*"+l.name+"-*"))
		if err != nil || len(left) > 0 {
			return fmt.Errorf("the driver has snapshots of the life %s: %q, %v", l.name, left, err)
		}
		out, err := testenv.Try(l, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), "get",
			"volumesnapshotcontents", "-o", "yaml")
		if err != nil || strings.Contains(out, l.name+"-pvc-") {
			return fmt.Errorf("contents of snapshots are left: %v %s", err, out)
		}
		return nil
	})
	return restored
}

func (l volumeLife) snapshotClient() dynamic.ResourceInterface {
	l.Helper()
	c, err := dynamic.NewForConfig(testenv.RestConfig(l))
	if err != nil {
		l.Fatal(err)
	}
	return c.Resource(schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1",
		Resource: "volumesnapshots"}).Namespace(l.ns)
}

// installSnapshots installs the snapshot CRDs and a VolumeSnapshotClass of the driver.
func (a attachTest) installSnapshots() {
	a.Helper()
	testenv.Kctl(a, "snapshot", "install", "--class", "")
	file := filepath.Join(a.TempDir(), "class.yaml")
	if err := os.WriteFile(file,
		[]byte("{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshotClass, metadata: {name: "+driverName+
			"}, driver: "+driverName+
			", deletionPolicy: Delete}"), 0o600); err != nil {
		a.Fatal(err)
	}
	testenv.Kctl(a, "apply", "-f", file)
	a.Cleanup(func() { testenv.Kctl(a, "delete", "-f", file) })
}

// growClaim expands a claim that is in use and waits until it is expanded.
func (l volumeLife) growClaim(claim, size string, meanwhile func()) {
	l.Helper()
	ctx, claims := context.Background(), l.cs.CoreV1().PersistentVolumeClaims(l.ns)
	l.doUndisturbed(func() error {
		_, err := claims.Patch(ctx, claim, types.MergePatchType,
			[]byte(`{"spec": {"resources": {"requests": {"storage": "`+size+`"}}}}`), metav1.PatchOptions{})
		return err
	})
	meanwhile()
	testenv.Eventually(l, soon, func() error {
		c, err := claims.Get(ctx, claim, metav1.GetOptions{})
		if err == nil && (c.Status.Capacity.Storage().String() != size || len(c.Status.Conditions) > 0) {
			err = fmt.Errorf("claim %s is %+v", claim, c.Status)
		}
		return err
	})
}

// holdCalls makes the driver delay calls.
func (l volumeLife) holdCalls(when string, steps ...string) {
	l.Helper()
	for _, dir := range []string{"hold", "held"} {
		if err := os.MkdirAll(filepath.Join(l.shared, dir), 0o755); err != nil {
			l.Fatal(err)
		}
	}
	for _, step := range steps {
		if err := os.WriteFile(filepath.Join(l.shared, "hold", l.name+"."+step), []byte(when), 0o600); err != nil {
			l.Fatal(err)
		}
	}
}

func (l volumeLife) strikeAt(step string) {
	l.Helper()
	l.strikeAtWith(step, l.strike)
}

// strikeAtWith waits until a driver delays a call, and causes the fault before the call continues.
func (l volumeLife) strikeAtWith(step string, strike func(node string)) {
	l.Helper()
	hold, held, node := filepath.Join(l.shared, "hold", l.name+"."+step),
		filepath.Join(l.shared, "held", l.name+"."+step), ""
	testenv.Eventually(l, soon, func() error {
		b, err := os.ReadFile(held)
		if err != nil {
			return fmt.Errorf("%s step %s: %w", l.name, step, err)
		}
		node = string(b)
		return nil
	})
	strike(node)
	for _, file := range []string{hold, held} {
		if err := os.Remove(file); err != nil {
			l.Fatal(err)
		}
	}
}

// awaitVolumeRemoved waits until no object, node or driver has the volume.
func (a attachTest) awaitVolumeRemoved(volume string) {
	a.Helper()
	ctx := context.Background()
	_, claim, _ := strings.Cut(volume, "-pvc-")
	testenv.Eventually(a, soon, func() error {
		if _, err := os.Stat(filepath.Join(a.shared, "volumes", volume)); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("the driver has %s: %v", volume, err)
		}
		volumes, err := a.cs.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, v := range volumes.Items {
			if strings.Contains(v.Name, claim) {
				return fmt.Errorf("PersistentVolume %s still exists: %+v", v.Name, v.Status)
			}
		}
		attachments, err := a.cs.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, x := range attachments.Items {
			if from := x.Spec.Source.PersistentVolumeName; from != nil && strings.Contains(*from, claim) {
				return fmt.Errorf("VolumeAttachment %s still exists: %+v", x.Name, x.Status)
			}
		}
		nodes, err := a.cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range nodes.Items {
			if said := fmt.Sprint(n.Status.VolumesInUse, n.Status.VolumesAttached); strings.Contains(said, volume) {
				return fmt.Errorf("node %s speaks of it: %s", n.Name, said)
			}
		}
		for _, s := range testenv.Lab().Status(ctx) {
			if s.Role != lab.RoleWorker || s.PID == 0 {
				continue
			}
			if out, err := s.Command(ctx, "cat", "/proc/self/mountinfo").Output(); err != nil ||
				strings.Contains(string(out), claim) {
				return fmt.Errorf("mounts of %s: %v %s", s.Name, err, out)
			}
		}
		return nil
	})
}

// strikes are one after the other, a daemon that is being started is not killed, and no command is on its way meanwhile.
var strikes sync.Mutex

// doUndisturbed calls ask once, while no fault kills a process.
func (l volumeLife) doUndisturbed(ask func() error) {
	l.Helper()
	strikes.Lock()
	defer strikes.Unlock()
	if err := ask(); err != nil {
		l.Fatal(err)
	}
}

// killDaemon kills the daemon of a host and starts it again.
func (a attachTest) killDaemon(node string) {
	a.Helper()
	strikes.Lock()
	defer strikes.Unlock()
	if err := testenv.Lab().KillDaemon(context.Background(), node); err != nil {
		a.Fatal(err)
	}
	if err := testenv.Lab().RestartDaemon(context.Background(), node); err != nil {
		a.Fatal(err)
	}
}

// killDriver kills the driver's process on a node. The DaemonSet starts another process.
func (a attachTest) killDriver(node string) {
	a.Helper()
	ctx, pods, now := context.Background(), a.cs.CoreV1().Pods(a.ns), int64(0)
	var list *v1.PodList
	testenv.Eventually(a, soon, func() (err error) { // the one before may have been killed just now
		list, err = pods.List(ctx, metav1.ListOptions{LabelSelector: "app=driver",
			FieldSelector: "spec.nodeName=" + node})
		if err == nil && len(list.Items) == 0 {
			err = fmt.Errorf("no driver on %s", node)
		}
		return err
	})
	for _, p := range list.Items {
		if err := pods.Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil &&
			!apierrors.IsNotFound(err) {
			// another life may strike it too
			a.Fatal(err)
		}
	}
}

func (a attachTest) killLeader(string) {
	a.Helper()
	name, _ := testenv.Leader(a, soon)
	a.killDaemon(name)
}
