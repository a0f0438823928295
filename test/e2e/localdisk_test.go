package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// F110: a blank disk of a node, as a local PersistentVolume, gets a file system when the first pod
// uses it. The next pod finds the data of the first, and the disk is not in use when they are gone.
func TestLocalDisk(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	file := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(file, 64<<20); err != nil {
		t.Fatal(err)
	}
	device := strings.TrimSpace(testenv.Must(t, "losetup", "--find", "--show", file))
	t.Cleanup(func() { testenv.Must(t, "losetup", "--detach", device) })
	size := v1.ResourceList{v1.ResourceStorage: resource.MustParse("64Mi")}
	pv := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: w.ns}, Spec: v1.PersistentVolumeSpec{
		Capacity: size, AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
		PersistentVolumeReclaimPolicy: v1.PersistentVolumeReclaimRetain,
		StorageClassName:              "disks",
		PersistentVolumeSource: v1.PersistentVolumeSource{Local: &v1.LocalVolumeSource{Path: device,
			FSType: new("ext4")}},
		NodeAffinity: &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
			MatchExpressions: []v1.NodeSelectorRequirement{{Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn,
				Values: []string{"w2"}}}}}}}}}
	if _, err := w.cs.CoreV1().PersistentVolumes().Create(ctx, pv, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.cs.CoreV1().PersistentVolumes().Delete(ctx, w.ns, metav1.DeleteOptions{}) })
	w.createClaim("disk", v1.PersistentVolumeClaimSpec{AccessModes: pv.Spec.AccessModes, StorageClassName: new("disks"),
		VolumeName: w.ns,
		Resources:  v1.VolumeResourceRequirements{Requests: size}})
	for _, one := range []struct{ name, script, want string }{
		{"writer", "echo kept > /data/file && sync; stat -f -c %T /data", "ext2/ext3"},
		{"reader", "cat /data/file", "kept"},
	} {
		w.createPod(mountVolume(sleeperPod(one.name), claimSource("disk")))
		if p := w.awaitPod(one.name, requireReady); p.Spec.NodeName != "w2" {
			t.Errorf("pod %s runs on %s, its disk is at w2", one.name, p.Spec.NodeName)
		}
		if out := testenv.Kctl(t, "-n", w.ns, "exec", one.name, "--", "sh", "-c", one.script); strings.TrimSpace(out) !=
			one.want {
			t.Errorf("pod %s: %q, want %q", one.name, out, one.want)
		}
		w.deletePod(one.name)
	}
	testenv.Eventually(t, soon, func() error {
		// which the kernel refuses for a mounted device
		f, err := os.OpenFile(device, os.O_RDONLY|os.O_EXCL, 0)
		if err == nil {
			err = f.Close()
		}
		return err
	})
}
