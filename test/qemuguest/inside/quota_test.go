//go:build guest

package inside

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	storage "k8s.io/client-go/kubernetes/typed/storage/v1"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/wait"
)

// createRepeatedly repeats a request until it succeeds: on a machine as slow as this one, requests
// miss the server's deadlines.
func createRepeatedly(ctx context.Context, t *testing.T, what string, create func() error) {
	t.Helper()
	if err := wait.For(ctx, 250*time.Millisecond, func() error {
		if err := create(); !apierrors.IsAlreadyExists(err) {
			return err
		}
		return nil
	}); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// checkProjectQuota runs a pod with a volume in a folder of the node's disk (backing: directory)
// that writes more than the volume's size. A project quota stops it with the error of a full disk
// or of an exceeded quota.
func checkProjectQuota(t *testing.T, l *lab.Lab) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	h, err := l.Host("w1")
	if err != nil {
		t.Fatal(err)
	}
	const disk = "mkdir -p /var/lib/keelson/local-volumes && dd if=/dev/zero of=/var/lib/keelson/disk bs=1 count=0 " +
		"seek=167772160 && " +
		"mkfs.ext4 -q -F -O quota,project /var/lib/keelson/disk && mount -o loop,prjquota /var/lib/keelson/disk " +
		"/var/lib/keelson/local-volumes"
	if out, err := h.Command(ctx, "sh", "-c", disk).CombinedOutput(); err != nil {
		t.Fatalf("a disk with quotas: %v %s", err, out)
	}
	// The driver has files of the disk open for a moment, which is long on a slow machine: the disk is busy then.
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		if err := wait.For(ctx, time.Second, func() error {
			if out, err := h.Command(ctx, "umount", "/var/lib/keelson/local-volumes").CombinedOutput(); err != nil {
				return fmt.Errorf("unmounting the disk with quotas: %w: %s", err, out)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	classes, err := storage.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	core, waits, class := newClient(t), storagev1.VolumeBindingWaitForFirstConsumer, "folders"
	createRepeatedly(ctx, t, "the class", func() error {
		_, err := classes.StorageClasses().Create(ctx,
			&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: class}, Provisioner: "local.csi.keelson.dev",
				Parameters: map[string]string{"backing": "directory"}, VolumeBindingMode: &waits},
			metav1.CreateOptions{})
		return err
	})
	createRepeatedly(ctx, t, "the claim", func() error {
		_, err := core.PersistentVolumeClaims("default").Create(ctx,
			&v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "data"},
				Spec: v1.PersistentVolumeClaimSpec{StorageClassName: &class,
					AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
					Resources: v1.VolumeResourceRequirements{
						Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("16Mi")}}}},
			metav1.CreateOptions{})
		return err
	})
	p := newPod("writer", "", "", "sh", "-c", "head -c 12582912 /dev/zero > /data/fits; echo fits $?; "+
		"said=$(dd if=/dev/zero of=/data/more bs=65536 count=192 2>&1); echo more $?; echo \"$said\" | head -n 1; wc "+
		"-c < /data/fits; echo $(($(wc -c < /data/more) <= 4194304)); df -m /data | tail -n 1")
	p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/data"}}
	p.Spec.Volumes = []v1.Volume{{Name: "data",
		VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}
	createRepeatedly(ctx, t, "the pod", func() error {
		_, err := core.Pods("default").Create(ctx, p, metav1.CreateOptions{})
		return err
	})
	var said []byte
	if err := wait.For(ctx, time.Second, func() error {
		got, err := core.Pods("default").Get(ctx, p.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got.Status.Phase != v1.PodSucceeded {
			list, err := core.Events("default").List(ctx, metav1.ListOptions{})
			words := []string{}
			for _, e := range list.Items {
				words = append(words, e.Reason+": "+e.Message)
			}
			return errors.Join(err, fmt.Errorf("it is %s: %+v; %s", got.Status.Phase, got.Status.ContainerStatuses,
				strings.Join(words, "; ")))
		}
		said, err = core.Pods("default").GetLogs(p.Name, &v1.PodLogOptions{}).DoRaw(ctx)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("it said %s", said)
	lines := strings.Split(strings.TrimSpace(string(said)), "\n")
	if len(lines) != 6 || lines[0] != "fits 0" || lines[1] != "more 1" ||
		!strings.Contains(lines[2], "quota exceeded") && !strings.Contains(lines[2], "No space left") ||
		lines[3] != "12582912" || lines[4] != "1" || len(strings.Fields(lines[5])) < 2 ||
		strings.Fields(lines[5])[1] != "16" {
		t.Errorf("the output for 24 MiB in a volume of 16 MiB is %q", lines)
	}
}
