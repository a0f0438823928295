package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/test/testenv"
)

// claimOfSize returns a claim of the default class.
func claimOfSize(size string) v1.PersistentVolumeClaimSpec {
	return v1.PersistentVolumeClaimSpec{AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
		Resources: v1.VolumeResourceRequirements{
			Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse(size)}}}
}

// F110: a StatefulSet with volumeClaimTemplates starts on a new cluster without further setup. Its
// volumes have the requested size, its data outlives its pod and the agent, and the volumes are
// deleted with the claims. A claim that no node has space for reports it.
func TestVolumesOutOfTheBox(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	p := sleeperPod("x")
	p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/data"}}
	labels := map[string]string{"app": "db"}
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "db"}, Spec: appsv1.StatefulSetSpec{
		Replicas: new(int32(2)), ServiceName: "db", PodManagementPolicy: appsv1.ParallelPodManagement,
		Selector: &metav1.LabelSelector{MatchLabels: labels},
		PersistentVolumeClaimRetentionPolicy: &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{
			WhenDeleted: appsv1.DeletePersistentVolumeClaimRetentionPolicyType,
			WhenScaled:  appsv1.RetainPersistentVolumeClaimRetentionPolicyType},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: p.Spec},
		VolumeClaimTemplates: []v1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"},
			Spec: claimOfSize("24Mi")}},
	}}
	began := time.Now()
	if _, err := w.cs.AppsV1().StatefulSets(w.ns).Create(ctx, set, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.awaitPod("db-0", requireReady)
	w.awaitPod("db-1", requireReady)
	t.Logf("two pods with fresh volumes are ready after %s", time.Since(began).Round(time.Millisecond))
	volumes := map[string]bool{}
	for _, name := range []string{"data-db-0", "data-db-1"} {
		c, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil || c.Spec.StorageClassName == nil || *c.Spec.StorageClassName != "standard" {
			t.Fatalf("claim %s: %+v, %v", name, c, err)
		}
		volumes[c.Spec.VolumeName] = true
	}
	sh := func(script string) string {
		return testenv.Kctl(t, "-n", w.ns, "exec", "db-0", "--", "sh", "-c", script)
	}
	if out := sh("ls -A /data; echo kept > /data/file; sync; dd if=/dev/zero of=/data/large bs=1M count=30 2>&1 || " +
		"true; rm /data/large"); !strings.Contains(out, "No space left") || strings.Contains(out, "lost+found") {
		t.Errorf("writing 30 MiB to an empty volume of 24: %q", out)
	}
	node := w.getPod("db-0").Spec.NodeName
	h := testenv.Host(t, node)
	if err := testenv.Lab().KillDaemon(ctx, node); err != nil {
		t.Fatal(err)
	}
	if err := testenv.Lab().RestartDaemon(ctx, node); err != nil {
		t.Fatal(err)
	}
	old := w.getPod("db-0").UID
	if err := w.cs.CoreV1().Pods(w.ns).Delete(ctx, "db-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.awaitPod("db-0", func(p *v1.Pod) error { // its name is hardly ever free
		if p.UID == old {
			return errors.New("it is the previous pod")
		}
		return requireReady(p)
	})
	w.awaitExec("db-0", "kept", "cat /data/file")
	if got := w.getPod("db-0").Spec.NodeName; got != node {
		t.Errorf("the pod runs on %s, its data are on %s", got, node)
	}
	w.growClaim("data-db-0", "40Mi")

	w.createClaim("vast", claimOfSize("900Ti"))
	w.createPod(mountVolume(sleeperPod("vast"), claimSource("vast")))
	w.awaitEvent("vast", "FailedScheduling", "did not have enough free storage")
	w.deletePod("vast")
	if err := w.cs.AppsV1().StatefulSets(w.ns).Delete(ctx, "db", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		for name := range volumes {
			if _, err := w.cs.CoreV1().PersistentVolumes().Get(ctx, name,
				metav1.GetOptions{}); !apierrors.IsNotFound(err) {
				return fmt.Errorf("volume %s: %v", name, err)
			}
		}
		return nil
	})
	out, err := h.Command(ctx, "ls", "-A", "/var/lib/keelson/local-volumes/.images").Output()
	for name := range volumes {
		if err != nil || strings.Contains(string(out), name) {
			t.Errorf("node %s has %s: %v", node, out, err)
		}
	}
}

// growClaim expands a claim that is in use. It handles nodes with agents that may not expand
// mounted file systems.
func (w testNamespace) growClaim(claim, size string) {
	w.Helper()
	ctx := context.Background()
	if _, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Patch(ctx, claim, types.MergePatchType,
		[]byte(`{"spec": {"resources": {"requests": {"storage": "`+size+`"}}}}`), metav1.PatchOptions{}); err != nil {
		w.Fatal(err)
	}
	testenv.Eventually(w.T, soon, func() error {
		c, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Get(ctx, claim, metav1.GetOptions{})
		if err != nil || c.Status.Capacity.Storage().String() == size {
			return err
		}
		list, err := w.cs.CoreV1().Events(w.ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.InvolvedObject.Name == claim && e.Reason == "VolumeResizeFailed" &&
				strings.Contains(e.Message, "CAP_SYS_RESOURCE") {
				w.Log("the lab's nodes may not grow mounted file systems: ", e.Message)
				return nil
			}
		}
		return fmt.Errorf("the claim has %s", c.Status.Capacity.Storage())
	})
}
