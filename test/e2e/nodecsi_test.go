package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// F110: a StatefulSet with block device claims writes to its device, and the recreated pod reads
// the data of the previous pod. A pod with read-only access cannot write to the device.
func TestBlockDevices(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	block := v1.PersistentVolumeBlock
	spec := claimOfSize("24Mi")
	spec.VolumeMode = &block
	p := sleeperPod("x")
	p.Spec.Containers[0].VolumeDevices = []v1.VolumeDevice{{Name: "disk", DevicePath: "/dev/disk"}}
	labels := map[string]string{"app": "raw"}
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "raw"}, Spec: appsv1.StatefulSetSpec{
		Replicas: new(int32(1)), ServiceName: "raw", Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template:             v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: p.Spec},
		VolumeClaimTemplates: []v1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "disk"}, Spec: spec}},
	}}
	if _, err := w.cs.AppsV1().StatefulSets(w.ns).Create(ctx, set, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.awaitPod("raw-0", requireReady)
	sh := func(pod, script string) string {
		return strings.TrimSpace(testenv.Kctl(t, "-n", w.ns, "exec", pod, "--", "sh", "-c", script))
	}
	if out := sh("raw-0", "test -b /dev/disk && echo kept | dd of=/dev/disk bs=512 seek=2048 conv=sync,fsync "+
		"2>/dev/null && wc -c < /dev/disk"); out != fmt.Sprint(24<<20) {
		t.Errorf("the device is %q", out)
	}
	old := w.getPod("raw-0").UID
	if err := w.cs.CoreV1().Pods(w.ns).Delete(ctx, "raw-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.awaitPod("raw-0", func(p *v1.Pod) error {
		if p.UID == old {
			return errors.New("it is the previous pod")
		}
		return requireReady(p)
	})
	const look = "dd if=/dev/disk bs=512 skip=2048 count=1 2>/dev/null | head -c 4"
	if out := sh("raw-0", look); out != "kept" {
		t.Errorf("the pod that is made again reads %q", out)
	}
	reader := sleeperPod("reader")
	reader.Spec.Containers[0].VolumeDevices = []v1.VolumeDevice{{Name: "disk", DevicePath: "/dev/disk"}}
	reader.Spec.Volumes = []v1.Volume{{Name: "disk", VolumeSource: v1.VolumeSource{
		PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "disk-raw-0", ReadOnly: true}}}}
	w.createPod(reader)
	w.awaitPod("reader", requireReady)
	if out := sh("reader", look+"; dd if=/dev/zero of=/dev/disk bs=512 count=1 2>&1 || true"); !strings.HasPrefix(out,
		"kept") || !strings.Contains(out, "ermi") {
		t.Errorf("a pod that may only read: %q", out)
	}
	wrong := mountVolume(sleeperPod("wrong"), claimSource("disk-raw-0"))
	w.createPod(wrong)
	w.awaitEvent("wrong", "FailedMount", "volumeMode Block")
}

// F110: an inline volume of a pod: the driver receives the pod, and the volume is deleted with the
// pod.
func TestInlineVolume(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	name := w.ns + ".inline.example"
	yes := true
	if _, err := w.cs.StorageV1().CSIDrivers().Create(ctx,
		&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: storagev1.CSIDriverSpec{
			AttachRequired: new(bool), PodInfoOnMount: &yes,
			VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral}}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.cs.StorageV1().CSIDrivers().Delete(ctx, name, metav1.DeleteOptions{}) })
	user := mountVolume(sleeperPod("user"),
		v1.VolumeSource{CSI: &v1.CSIVolumeSource{Driver: name, VolumeAttributes: map[string]string{"word": "hello"},
			NodePublishSecretRef: &v1.LocalObjectReference{Name: "key"}}})
	user.Spec.NodeName = "w3"
	user.Spec.TerminationGracePeriodSeconds = new(int64(1))
	if _, err := w.cs.CoreV1().Secrets(w.ns).Create(ctx,
		&v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "key"}, Data: map[string][]byte{"key": []byte("secret")}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	made := w.createPod(user)
	w.awaitEvent("user", "FailedMount", name, "looked for in")
	const image = "example.com/storage/inline:v1"
	program := filepath.Join(testenv.Build(t, "keelson.dev/keelson/test/e2e/inlinedriver"), "inlinedriver")
	testenv.LoadImage(t, image, map[string]string{"driver": program}, "/driver")
	dir, both := "/var/lib/keelson/plugins/"+name, new(v1.MountPropagationBidirectional)
	host := func(name, path string) v1.Volume {
		return v1.Volume{Name: name,
			VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: path,
				Type: new(v1.HostPathDirectoryOrCreate)}}}
	}
	driver := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "driver"},
		Spec: v1.PodSpec{NodeName: "w3", Containers: []v1.Container{{
			Name: "driver", Image: image, Args: []string{name, "w3", "/csi/csi.sock"},
			SecurityContext: &v1.SecurityContext{Privileged: &yes},
			VolumeMounts: []v1.VolumeMount{{Name: "socket", MountPath: "/csi"},
				{Name: "pods", MountPath: "/var/lib/kubelet/pods", MountPropagation: both}}}},
			Volumes: []v1.Volume{host("socket", dir), host("pods", "/var/lib/kubelet/pods")}}}
	w.createPod(driver)
	w.awaitPod("driver", requireReady)
	w.awaitPod("user", requireReady)
	if out := testenv.Kctl(t, "-n", w.ns, "exec", "user", "--", "cat", "/data/pod"); out != w.ns+"/user hello secret" {
		t.Errorf("the volume contains %q", out)
	}
	w.deletePod("user")
	testenv.Eventually(t, soon, func() error {
		out, err := testenv.Host(t, "w3").Command(ctx, "sh", "-c",
			"ls /var/lib/kubelet/pods; cat /proc/self/mountinfo").Output()
		if err == nil && strings.Contains(string(out), string(made.UID)) {
			err = fmt.Errorf("left of the pod: %s", out)
		}
		return err
	})
	w.deletePod("driver")
	if err := testenv.Host(t, "w3").Command(ctx, "rm", "-rf", dir).Run(); err != nil {
		t.Error(err)
	}
}
