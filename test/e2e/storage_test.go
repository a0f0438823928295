package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/test/testenv"
)

// F110: a claim bound to a volume, mounted through a CSI driver's socket; the data outlives the pod.
func TestClaimThroughCSI(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	volume := w.ns + "-data"
	pv := &v1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: volume},
		Spec: v1.PersistentVolumeSpec{
			Capacity:                      v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")},
			AccessModes:                   []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: v1.PersistentVolumeReclaimRetain,
			StorageClassName:              "local",
			PersistentVolumeSource: v1.PersistentVolumeSource{
				CSI: &v1.CSIPersistentVolumeSource{Driver: "local.csi.keelson.dev", VolumeHandle: volume}},
			NodeAffinity: &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
				MatchExpressions: []v1.NodeSelectorRequirement{{Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn,
					Values: []string{"w2"}}},
			}}}},
		},
	}
	if _, err := w.cs.CoreV1().PersistentVolumes().Create(ctx, pv, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.cs.CoreV1().PersistentVolumes().Delete(ctx, volume, metav1.DeleteOptions{}); err != nil &&
			!apierrors.IsNotFound(err) {
			t.Errorf("deleting the volume: %v", err)
		}
	})
	claim := &v1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "data"},
		Spec: v1.PersistentVolumeClaimSpec{
			AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}, StorageClassName: new("local"),
			VolumeName: volume,
			Resources: v1.VolumeResourceRequirements{
				Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("500Mi")}},
		},
	}
	if _, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Create(ctx, claim, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		c, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Get(ctx, "data", metav1.GetOptions{})
		v, err2 := w.cs.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{})
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		if c.Status.Phase != v1.ClaimBound || v.Status.Phase != v1.VolumeBound || v.Spec.ClaimRef == nil ||
			v.Spec.ClaimRef.UID != c.UID {
			return fmt.Errorf("claim %s, volume %s", c.Status.Phase, v.Status.Phase)
		}
		return nil
	})
	user := func(name, script string) {
		p := newPod(name, tools, "sh", "-c", script)
		p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/data"}}
		p.Spec.Volumes = []v1.Volume{{Name: "data",
			VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{
				ClaimName: "data"}}}}
		w.createPod(p)
		got := w.awaitPod(name, requireReady)
		if got.Spec.NodeName != "w2" {
			t.Errorf("pod %s runs on %s, its volume is on w2", name, got.Spec.NodeName)
		}
	}
	user("writer", "echo kept > /data/file; exec sleep 1000000")
	w.awaitExec("writer", "kept", "cat /data/file")
	if err := w.cs.CoreV1().Pods(w.ns).Delete(ctx, "writer", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		_, err := w.cs.CoreV1().Pods(w.ns).Get(ctx, "writer", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("pod writer: %v", err)
		}
		return nil
	})
	user("reader", "exec sleep 1000000")
	w.awaitExec("reader", "kept", "cat /data/file")
}

// A mount of a driver in a pod below kubelet's folder, with Bidirectional propagation, is visible
// on its node: unmodified drivers publish volumes in this way.
func TestDriverMountsReachTheNode(t *testing.T) {
	w := newNamespace(t)
	p := newPod("driver", tools, "sh", "-c", "mkdir -p /var/lib/kubelet/pods/e2e && mount -t tmpfs e2e "+
		"/var/lib/kubelet/pods/e2e && trap exit TERM && { sleep 1000000 & wait; }")
	p.Spec.NodeName = "w3"
	c := &p.Spec.Containers[0]
	c.SecurityContext = &v1.SecurityContext{Privileged: new(true)}
	c.Lifecycle =
		&v1.Lifecycle{PreStop: &v1.LifecycleHandler{
			Exec: &v1.ExecAction{Command: []string{"umount", "/var/lib/kubelet/pods/e2e"}}}}
	c.VolumeMounts = []v1.VolumeMount{{Name: "kubelet", MountPath: "/var/lib/kubelet",
		MountPropagation: new(v1.MountPropagationBidirectional)}}
	p.Spec.TerminationGracePeriodSeconds = new(int64(90)) // within which the hook has to be through
	p.Spec.Volumes = []v1.Volume{{Name: "kubelet",
		VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: "/var/lib/kubelet",
			Type: new(v1.HostPathDirectory)}}}}
	w.createPod(p)
	w.awaitPod("driver", requireReady)
	mounted := func(want bool) {
		t.Helper()
		testenv.Eventually(t, soon, func() error {
			out, err := testenv.Host(t, "w3").Command(context.Background(), "cat", "/proc/self/mountinfo").Output()
			if got := strings.Contains(string(out), " /var/lib/kubelet/pods/e2e "); err == nil && got != want {
				err = fmt.Errorf("on the node it is mounted: %v, want %v", got, want)
			}
			return err
		})
	}
	mounted(true)
	if err := w.cs.CoreV1().Pods(w.ns).Delete(context.Background(), "driver", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	mounted(false)
}

const ownDriver = "local.csi.keelson.dev"

// mountVolume mounts a volume at /data in the pod's container.
func mountVolume(p *v1.Pod, source v1.VolumeSource) *v1.Pod {
	p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/data"}}
	p.Spec.Volumes = []v1.Volume{{Name: "data", VolumeSource: source}}
	return p
}

func claimSource(name string) v1.VolumeSource {
	return v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: name}}
}

// A pod gets a claim of its own for a generic ephemeral volume, which is mounted, is no other pod's, and goes with it.
func TestGenericEphemeralVolume(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	spec := w.createVolumeFor(ownDriver, "scratch", v1.ReadWriteOncePod)
	p := mountVolume(newPod("worker", tools, "sh", "-c", "echo here > /data/file; exec sleep 1000000"), v1.VolumeSource{
		Ephemeral: &v1.EphemeralVolumeSource{VolumeClaimTemplate: &v1.PersistentVolumeClaimTemplate{Spec: spec}}})
	made := w.createPod(p)
	w.awaitPod("worker", requireReady)
	c, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Get(ctx, "worker-data", metav1.GetOptions{})
	if err != nil || c.Status.Phase != v1.ClaimBound || !metav1.IsControlledBy(c, made) {
		t.Fatalf("the claim is %+v, %v", c, err)
	}
	w.awaitExec("worker", "here", "cat /data/file")
	w.deletePod("worker")
	testenv.Eventually(t, soon, func() error {
		_, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Get(ctx, "worker-data", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("the claim: %v", err)
		}
		return nil
	})
}

// A claim of ReadWriteOncePod is used by one pod in the whole cluster: a second pod waits, reports
// the reason, and uses it when the first has gone.
func TestReadWriteOncePod(t *testing.T) {
	w := newNamespace(t)
	w.createClaim("sole", w.createVolumeFor(ownDriver, "sole", v1.ReadWriteOncePod))
	w.createPod(mountVolume(sleeperPod("first"), claimSource("sole")))
	w.awaitPod("first", requireReady)
	w.createPod(mountVolume(sleeperPod("second"), claimSource("sole")))
	const why = "node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode"
	w.awaitEvent("second", "FailedScheduling", why)
	w.deletePod("first")
	w.awaitPod("second", requireReady)
}

// A claim on the cluster's own driver grows where its class lets it, while a pod uses it, and only upward.
func TestClaimGrows(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	class := w.ns + "-grows"
	if _, err := w.cs.StorageV1().StorageClasses().Create(ctx,
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: class},
			Provisioner: ownDriver, AllowVolumeExpansion: new(true)}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.cs.StorageV1().StorageClasses().Delete(ctx, class, metav1.DeleteOptions{}) })
	spec := w.createVolumeFor(ownDriver, "grows", v1.ReadWriteOnce)
	patch := []byte(fmt.Sprintf(`{"spec": {"storageClassName": %q}}`, class))
	if _, err := w.cs.CoreV1().PersistentVolumes().Patch(ctx, spec.VolumeName, types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	spec.StorageClassName = &class
	w.createClaim("grows", spec)
	w.createPod(mountVolume(sleeperPod("user"), claimSource("grows")))
	w.awaitPod("user", requireReady)
	ask := func(size string) error {
		_, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Patch(ctx, "grows", types.MergePatchType,
			[]byte(`{"spec": {"resources": {"requests": {"storage": "`+size+`"}}}}`), metav1.PatchOptions{})
		return err
	}
	if err := ask("3Gi"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		c, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Get(ctx, "grows", metav1.GetOptions{})
		if err == nil && (c.Status.Capacity.Storage().String() != "3Gi" || len(c.Status.Conditions) > 0 ||
			len(c.Status.AllocatedResourceStatuses) > 0) {
			err = fmt.Errorf("the claim is %+v", c.Status)
		}
		return err
	})
	if err := ask("2Gi"); !apierrors.IsInvalid(err) {
		t.Errorf("a smaller claim: %v", err)
	}
	if p := w.getPod("user"); requireReady(p) != nil || len(p.Status.ContainerStatuses) != 1 ||
		p.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("the pod is %+v", p.Status)
	}
}

// F110: a group snapshot of a pod's two volumes is consistent while the pod writes to them in turn,
// and new volumes start with its content.
func TestGroupOfSnapshots(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	testenv.Kctl(t, "snapshot", "install")
	claim := func(name string, from *v1.TypedLocalObjectReference) {
		w.createClaim(name, v1.PersistentVolumeClaimSpec{AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
			DataSource: from,
			Resources: v1.VolumeResourceRequirements{
				Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("16Mi")}}})
	}
	twice := func(name, script, first, second string) *v1.Pod {
		p := mountVolume(newPod(name, tools, "sh", "-c", script), claimSource(first))
		p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: "second", VolumeSource: claimSource(second)})
		p.Spec.Containers[0].VolumeMounts = append(p.Spec.Containers[0].VolumeMounts,
			v1.VolumeMount{Name: "second", MountPath: "/second"})
		return p
	}
	for _, name := range []string{"one", "two"} {
		claim(name, nil)
		if _, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Patch(ctx, name, types.MergePatchType,
			[]byte(`{"metadata": {"labels": {"app": "writer"}}}`), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// A number is written over the one before, in one piece: a file that is emptied first would be empty in some snapshots.
	w.createPod(twice("writer", "i=0; while true; do i=$((i+1)); printf '%8d\\n' $i 1<> /data/n; printf '%8d\\n' $i "+
		"1<> /second/n; done", "one", "two"))
	w.awaitPod("writer", requireReady)
	testenv.Eventually(t, soon, func() error {
		var first, second int
		_, err := fmt.Sscan(testenv.Kctl(t, "-n", w.ns, "exec", "writer", "--", "sh", "-c",
			"cat /data/n /second/n 2>/dev/null; true"), &first, &second)
		return err
	})
	w.applyFile("groupsnapshot.yaml", "LABEL", "writer")
	testenv.Kctl(t, "-n", w.ns, "wait", "--for=jsonpath={.status.readyToUse}=true", "--timeout=180s",
		"volumegroupsnapshot/both")
	group := "snapshot.storage.k8s.io"
	for _, name := range []string{"one", "two"} {
		out := testenv.Kctl(t, "-n", w.ns, "get", "volumesnapshot", "-o",
			`jsonpath={.items[?(@.spec.source.persistentVolumeClaimName=="`+name+`")].metadata.name}`)
		claim("then-"+name, &v1.TypedLocalObjectReference{APIGroup: &group, Kind: "VolumeSnapshot",
			Name: strings.TrimSpace(out)})
	}
	w.deletePod("writer")
	w.createPod(twice("reader", "cat /data/n /second/n; exec sleep 1000000", "then-one", "then-two"))
	w.awaitPod("reader", requireReady)
	var first, second int
	testenv.Eventually(t, soon, func() error {
		_, err := fmt.Sscan(testenv.Kctl(t, "-n", w.ns, "logs", "reader"), &first, &second)
		return err
	})
	if first != second && first != second+1 {
		t.Errorf("the volumes of one moment hold %d and %d", first, second)
	}
	w.deletePod("reader")
	testenv.Kctl(t, "-n", w.ns, "delete", "volumegroupsnapshot", "both", "--timeout=180s")
	testenv.Eventually(t, soon, func() error { // the group is deleted before its last snapshot
		out := testenv.Kctl(t, "get", "volumegroupsnapshotcontents,volumesnapshotcontents", "-o", "yaml")
		if strings.Contains(out, "namespace: "+w.ns+"\n") {
			return fmt.Errorf("left: %s", out)
		}
		return nil
	})
}
