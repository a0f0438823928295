package outage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/fault/attachdriver/journal"
	"keelson.dev/keelson/test/testenv"
)

const (
	driverName  = "attached.csi.example"
	driverImage = "example.com/storage/attached:v1"
	// promised is the maximum time until a StatefulSet's pod with an attached volume runs elsewhere
	// after a power cut: the requirement of a minute, which is logged, times three for slow
	// machines.
	promised = 3 * time.Minute
	// stays is the toleration in seconds of pods on a lost node in a cluster with default settings.
	// The lab's default is shorter.
	stays = int64(20)
)

// attachTest is a cluster with a CSI driver that attaches its volumes, and a StatefulSet of two
// pods that use them.
type attachTest struct {
	*testing.T
	cs     kubernetes.Interface
	ns     string
	shared string // folder that the driver's processes on all nodes share
}

// The volumes of a StatefulSet can be attached to one node at a time. When one node loses its power
// and another its network, pods and data are elsewhere within a minute, without manual action. The
// node with power but without network has ended its pod and unmounted the volume before it is
// attached elsewhere. When both nodes are back, they mount nothing that other nodes have. With the
// out-of-service taint a volume moves at once. A pod that uses a volume attached to another node
// reports it. Meanwhile agents, drivers and leaders are killed at each step of the lives of other
// volumes, their expansion, snapshots and restores. F110
func TestAttachedVolumesMove(t *testing.T) {
	a := attachTest{t, testenv.Client(t), testenv.Namespace(t), t.TempDir()}
	since := time.Now()
	phase := func(name string) { t.Logf("%s after %s", name, time.Since(since).Round(10*time.Millisecond)) }
	a.installDriver()
	a.createStatefulSet()
	before := [2]*v1.Pod{a.awaitRunning("db-0", "", soon), a.awaitRunning("db-1", "", soon)}
	a.checkRefusedPod(before[0], before[1].Spec.NodeName)
	a.checkSecondAttachment(before[0], before[1].Spec.NodeName)

	a.installSnapshots()
	phase("refusals told")
	began := time.Now()
	a.cutPower(before[0].Spec.NodeName)
	plugged := disconnectWorkers(t, before[1].Spec.NodeName)
	moved := [2]*v1.Pod{}
	var both sync.WaitGroup
	for i, p := range before {
		both.Go(func() {
			moved[i] = a.awaitReplacement(p.Name, p.UID, promised-time.Since(began))
			t.Logf("%s: from the loss of %s until it is ready elsewhere: %s", p.Name, p.Spec.NodeName,
				time.Since(began).Round(10*time.Millisecond))
		})
	}
	a.checkEachStep(map[string]func(string){"agent": a.killDaemon, "driver": a.killDriver})
	phase("agents and drivers killed")
	both.Wait()
	for i, p := range before {
		if moved[i] == nil {
			t.FailNow()
		}
		if moved[i].Spec.NodeName == p.Spec.NodeName {
			t.Errorf("%s is on the lost node %s again", p.Name, p.Spec.NodeName)
		}
		a.requireStarts(p.Name, 2)
	}
	phase("moved")
	plugged()
	a.powerOn(before[0].Spec.NodeName)
	for i, p := range before {
		awaitReady(t, a.cs, true, p.Spec.NodeName)
		a.awaitPodRemoved(p)
		if now := a.getPod(p.Name); now.UID != moved[i].UID {
			t.Errorf("%s was recreated when %s came back", p.Name, p.Spec.NodeName)
		}
		a.requireStarts(p.Name, 2)
	}

	phase("back")
	victim := moved[0].Spec.NodeName
	a.cutPower(victim)
	awaitReady(t, a.cs, false, victim)
	began = time.Now()
	testenv.Kctl(t, "taint", "node", victim, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
	again := a.awaitRunning("db-0", moved[0].UID, promised)
	t.Logf("db-0: from the out-of-service taint of %s until it is ready on %s: %s", victim, again.Spec.NodeName,
		time.Since(began).Round(10*time.Millisecond))
	if took := time.Since(began); took > time.Duration(stays)*time.Second {
		t.Errorf("with the out-of-service taint that took %s, and without it pods leave a lost node after %d s", took,
			stays)
	}
	a.requireStarts("db-0", 3)
	testenv.Kctl(t, "taint", "node", victim, "node.kubernetes.io/out-of-service-")
	a.powerOn(victim)
	awaitReady(t, a.cs, true, victim)
	a.awaitPodRemoved(moved[0])
	phase("back again")
	a.checkEachStep(map[string]func(string){"leader": a.killLeader})
	phase("leaders killed")
	a.uninstall()
	phase("uninstalled")
	lines, err := journal.Read(a.shared)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range journal.FindViolations(lines) {
		t.Errorf("never so: %s", w)
	}
	if t.Failed() {
		for _, l := range lines {
			t.Log(l)
		}
	}
}

// installDriver runs the driver on all nodes. Its processes share a folder.
func (a attachTest) installDriver() {
	a.Helper()
	program := filepath.Join(testenv.Build(a, "keelson.dev/keelson/test/fault/attachdriver"), "attachdriver")
	testenv.LoadImage(a, driverImage, map[string]string{"driver": program}, "/driver")
	ctx, storage, yes := context.Background(), a.cs.StorageV1(), true
	if _, err := storage.CSIDrivers().Create(ctx, &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: driverName,
		Annotations: map[string]string{"keelson.dev/served-by": "agent"}}}, metav1.CreateOptions{}); err != nil {
		a.Fatal(err)
	}
	a.Cleanup(func() { _ = storage.CSIDrivers().Delete(ctx, driverName, metav1.DeleteOptions{}) })
	a.createClass("attached", nil)
	both, grace, labels := v1.MountPropagationBidirectional, int64(1), map[string]string{"app": "driver"}
	host := func(name, path string) v1.Volume {
		kind := v1.HostPathDirectoryOrCreate
		return v1.Volume{Name: name,
			VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: path, Type: &kind}}}
	}
	spec := v1.PodSpec{TerminationGracePeriodSeconds: &grace,
		Tolerations: []v1.Toleration{{Operator: v1.TolerationOpExists}},
		Containers: []v1.Container{{Name: "driver", Image: driverImage,
			Args: []string{"--name=" + driverName, "--node=$(NODE)"},
			Env: []v1.EnvVar{{Name: "NODE",
				ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}}},
			SecurityContext: &v1.SecurityContext{Privileged: &yes},
			VolumeMounts: []v1.VolumeMount{{Name: "socket", MountPath: "/csi"}, {Name: "shared", MountPath: "/shared"},
				{Name: "pods", MountPath: "/var/lib/kubelet/pods", MountPropagation: &both},
				{Name: "plugins", MountPath: "/var/lib/kubelet/plugins", MountPropagation: &both}}}},
		Volumes: []v1.Volume{host("socket", "/var/lib/keelson/plugins/"+driverName), host("shared", a.shared),
			host("pods", "/var/lib/kubelet/pods"),
			host("plugins", "/var/lib/kubelet/plugins")}}
	if _, err := a.cs.AppsV1().DaemonSets(a.ns).Create(ctx,
		&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "driver"}, Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: spec}}},
		metav1.CreateOptions{}); err != nil {
		a.Fatal(err)
	}
	a.awaitRegistered(5)
}

// createClass creates a StorageClass of the driver.
func (a attachTest) createClass(name string, parameters map[string]string) {
	a.Helper()
	ctx, classes, yes := context.Background(), a.cs.StorageV1().StorageClasses(), true
	if _, err := classes.Create(ctx, &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name},
		Provisioner: driverName,
		Parameters:  parameters, AllowVolumeExpansion: &yes}, metav1.CreateOptions{}); err != nil {
		a.Fatal(err)
	}
	a.Cleanup(func() { _ = classes.Delete(ctx, name, metav1.DeleteOptions{}) })
}

// awaitRegistered waits until the driver is registered on this number of nodes.
func (a attachTest) awaitRegistered(want int) {
	a.Helper()
	testenv.Eventually(a, soon, func() error {
		l, err := a.cs.StorageV1().CSINodes().List(context.Background(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		n := 0
		for _, has := range l.Items {
			for _, d := range has.Spec.Drivers {
				if d.Name == driverName && d.NodeID == has.Name {
					n++
				}
			}
		}
		if n != want {
			return fmt.Errorf("%d nodes have the driver, want %d", n, want)
		}
		return nil
	})
}

// createStatefulSet creates two pods on two nodes, each with its own volume. They ignore SIGTERM
// and have the default tolerations for lost nodes. uninstall deletes them.
func (a attachTest) createStatefulSet() {
	a.Helper()
	const script = "echo $HOSTNAME >> /data/starts; trap '[ ! -e /data/end ] || exit' TERM; while :; do sleep " +
		"1000 & wait $!; done"
	class, replicas, labels, waits := "attached", int32(2), map[string]string{"app": "db"}, stays
	var tolerations []v1.Toleration
	for _, key := range []string{v1.TaintNodeNotReady, v1.TaintNodeUnreachable} {
		tolerations = append(tolerations, v1.Toleration{Key: key, Operator: v1.TolerationOpExists,
			Effect: v1.TaintEffectNoExecute, TolerationSeconds: &waits})
	}
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "db"}, Spec: appsv1.StatefulSetSpec{
		Replicas: &replicas, ServiceName: "db", PodManagementPolicy: appsv1.ParallelPodManagement,
		Selector: &metav1.LabelSelector{MatchLabels: labels},
		PersistentVolumeClaimRetentionPolicy: &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{
			WhenDeleted: appsv1.DeletePersistentVolumeClaimRetentionPolicyType,
			WhenScaled:  appsv1.RetainPersistentVolumeClaimRetentionPolicyType},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec: v1.PodSpec{Tolerations: tolerations,
				Affinity: &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{
					RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{{
						LabelSelector: &metav1.LabelSelector{MatchLabels: labels}, TopologyKey: v1.LabelHostname}}}},
				Containers: []v1.Container{{Name: "main", Image: "keelson.dev/tools:v1",
					Command:      []string{"sh", "-c", script},
					VolumeMounts: []v1.VolumeMount{{Name: "data", MountPath: "/data"}}}}}},
		VolumeClaimTemplates: []v1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"},
			Spec: v1.PersistentVolumeClaimSpec{StorageClassName: &class,
				AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
				Resources: v1.VolumeResourceRequirements{
					Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("8Mi")}}}}},
	}}
	if _, err := a.cs.AppsV1().StatefulSets(a.ns).Create(context.Background(), set, metav1.CreateOptions{}); err !=
		nil {
		a.Fatal(err)
	}
}

func (a attachTest) getPod(name string) *v1.Pod {
	a.Helper()
	p, err := a.cs.CoreV1().Pods(a.ns).Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		a.Fatal(err)
	}
	return p
}

// awaitRunning waits until a pod of this name runs that is not the previous pod.
func (a attachTest) awaitRunning(name string, before types.UID, within time.Duration) *v1.Pod {
	a.Helper()
	p := a.awaitReplacement(name, before, within)
	if p == nil {
		a.FailNow()
	}
	return p
}

// awaitReplacement is awaitRunning for any goroutine: it returns nil and marks the test as failed
// if the pod does not run.
func (a attachTest) awaitReplacement(name string, before types.UID, within time.Duration) (p *v1.Pod) {
	a.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if err := wait.For(ctx, 25*time.Millisecond, func() (err error) {
		if p, err = a.cs.CoreV1().Pods(a.ns).Get(context.Background(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		if p.UID == before {
			return errors.New(name + " is the previous pod")
		}
		for _, c := range p.Status.Conditions {
			if c.Type == v1.PodReady && c.Status == v1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("%s on %q is not ready: %+v", name, p.Spec.NodeName, p.Status.ContainerStatuses)
	}); err != nil {
		a.Errorf("after %s: %v", within, err)
		return nil
	}
	return p
}

// requireStarts checks the number of starts of the pod that its data records.
func (a attachTest) requireStarts(name string, want int) {
	a.Helper()
	testenv.Eventually(a, soon, func() error { // it is Ready when its program has started, which writes afterwards
		out, err := testenv.Try(a, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), "-n", a.ns, "exec", name, "--",
			"cat", "/data/starts")
		if err != nil || out != strings.Repeat(name+"\n", want) {
			return fmt.Errorf("the data of %s say %q, want %d starts: %v", name, out, want, err)
		}
		return nil
	})
}

// checkRefusedPod has a pod on another node want a volume.
func (a attachTest) checkRefusedPod(has *v1.Pod, other string) {
	a.Helper()
	ctx := context.Background()
	claim, err := a.cs.CoreV1().PersistentVolumeClaims(a.ns).Get(ctx, "data-"+has.Name, metav1.GetOptions{})
	if err != nil {
		a.Fatal(err)
	}
	p := claimPod("second", claim.Name)
	p.Spec.NodeName = other
	if _, err := a.cs.CoreV1().Pods(a.ns).Create(ctx, p, metav1.CreateOptions{}); err != nil {
		a.Fatal(err)
	}
	want := fmt.Sprintf("Multi-Attach error for volume %q: its access modes let one node have it, and node %s holds "+
		"it for pod %s/%s: it is released when that pod has ended",
		claim.Spec.VolumeName, has.Spec.NodeName, a.ns, has.Name)
	testenv.Eventually(a, soon, func() error {
		l, err := a.cs.CoreV1().Events(a.ns).List(ctx,
			metav1.ListOptions{FieldSelector: "involvedObject.name=second,reason=FailedAttachVolume"})
		if err != nil {
			return err
		}
		for _, e := range l.Items {
			if e.Message == want {
				return nil
			}
		}
		return fmt.Errorf("%d events FailedAttachVolume, none is: %s", len(l.Items), want)
	})
	a.checkFailedSources(has, other)
	if err := a.cs.CoreV1().Pods(a.ns).Delete(ctx, "second", metav1.DeleteOptions{}); err != nil {
		a.Fatal(err)
	}
	a.awaitPodDeleted("second")
}

// claimPod returns a pod that mounts a claim.
func claimPod(name, claim string) *v1.Pod {
	grace := int64(0)
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PodSpec{TerminationGracePeriodSeconds: &grace,
		Containers: []v1.Container{{Name: "main", Image: "keelson.dev/tools:v1", Command: []string{"sleep", "1000000"},
			VolumeMounts: []v1.VolumeMount{{Name: "data", MountPath: "/data"}}}},
		Volumes: []v1.Volume{{Name: "data",
			VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{
				ClaimName: claim}}}}}}
}

// awaitPodDeleted waits until a pod is deleted.
func (a attachTest) awaitPodDeleted(pod string) {
	a.Helper()
	a.awaitNotFound("pod "+pod, func() error {
		_, err := a.cs.CoreV1().Pods(a.ns).Get(context.Background(), pod, metav1.GetOptions{})
		return err
	})
}

func (a attachTest) awaitNotFound(what string, get func() error) {
	a.Helper()
	testenv.Eventually(a, soon, func() error {
		if err := get(); !apierrors.IsNotFound(err) {
			return fmt.Errorf("%s: %v", what, err)
		}
		return nil
	})
}

// cutPower cuts the power of a node.
func (a attachTest) cutPower(node string) {
	a.Helper()
	if err := testenv.Lab().Partition(node); err != nil {
		a.Fatal(err)
	}
	a.Cleanup(func() { a.powerOn(node) })
	if err := testenv.Lab().Kill(context.Background(), node); err != nil {
		a.Fatal(err)
	}
	if err := journal.WithLock(a.shared, func() error {
		return journal.Write(a.shared, journal.Line{What: journal.PowerCut, Node: node})
	}); err != nil {
		a.Fatal(err)
	}
}

// powerOn restores the power of a node. It does nothing if the node has power.
func (a attachTest) powerOn(node string) {
	a.Helper()
	for _, s := range testenv.Lab().Status(context.Background()) {
		if s.Name == node && s.PID != 0 {
			return
		}
	}
	if err := testenv.Lab().Restart(context.Background(), node); err != nil {
		a.Error(err)
	}
}

// awaitPodRemoved waits until a node has no trace of a pod. The journal must show that no volume of
// the pod is mounted meanwhile.
func (a attachTest) awaitPodRemoved(p *v1.Pod) {
	a.Helper()
	claim, err := a.cs.CoreV1().PersistentVolumeClaims(a.ns).Get(context.Background(), "data-"+p.Name,
		metav1.GetOptions{})
	if err != nil {
		a.Fatal(err)
	}
	testenv.Eventually(a, soon, func() error {
		out, err := testenv.Host(a, p.Spec.NodeName).Command(context.Background(), "sh", "-c",
			"ls /var/lib/kubelet/pods; cat /proc/self/mountinfo").Output()
		if err == nil &&
			(bytes.Contains(out, []byte(p.UID)) || bytes.Contains(out, []byte("/"+claim.Spec.VolumeName+"/data "))) {
			err = fmt.Errorf("node %s has something of %s (%s): %s", p.Spec.NodeName, p.Name, p.UID, out)
		}
		return err
	})
}

// uninstall deletes the pods, their volumes and the driver, each when its dependents are deleted.
func (a attachTest) uninstall() {
	a.Helper()
	ctx := context.Background()
	for _, name := range []string{"db-0", "db-1"} {
		testenv.Eventually(a, soon, func() error { // leaders were killed just now
			out, err := testenv.Try(a, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), "-n", a.ns, "exec", name,
				"--", "touch", "/data/end")
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
	if err := a.cs.AppsV1().StatefulSets(a.ns).Delete(ctx, "db", metav1.DeleteOptions{}); err != nil {
		a.Fatal(err)
	}
	testenv.Eventually(a, soon, func() error {
		l, err := a.cs.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, v := range l.Items {
			if v.Spec.ClaimRef != nil && v.Spec.ClaimRef.Namespace == a.ns {
				return fmt.Errorf("volume %s still exists: %+v", v.Name, v.Status)
			}
		}
		left, err := os.ReadDir(filepath.Join(a.shared, "volumes"))
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("the driver has %v", left)
		}
		return err
	})
	if err := a.cs.AppsV1().DaemonSets(a.ns).Delete(ctx, "driver", metav1.DeleteOptions{}); err != nil {
		a.Fatal(err)
	}
	a.awaitNotFound("pods of the driver", func() error {
		l, err := a.cs.CoreV1().Pods(a.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=driver"})
		if err == nil && len(l.Items) == 0 {
			err = apierrors.NewNotFound(v1.Resource("pods"), "driver")
		}
		return err
	})
	for _, h := range testenv.Hosts() {
		if h.Role == lab.RoleWorker {
			if err := h.Command(ctx, "rm", "-rf", "/var/lib/keelson/plugins/"+driverName).Run(); err != nil {
				a.Error(err)
			}
		}
	}
	a.awaitRegistered(0)
}
