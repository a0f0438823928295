package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/test/testenv"
)

const (
	podDriver      = "pooled.csi.example"
	podDriverImage = "example.com/storage/pooled:v1"
	podDriverDir   = "/var/lib/kubelet/plugins/pooled"
)

// A driver in a pod, installed as drivers are for kubelet: its socket below plugins, a sidecar that
// registers it, a sidecar for the liveness probe, mounts of pods and plugins with Bidirectional
// propagation, and the node's /dev. A pod's data on its volume outlives the pod. A new agent leaves
// the volume mounted. A new driver takes over from the previous one. When the driver is removed,
// the node unregisters it. F110
func TestDriverInAPod(t *testing.T) {
	w := newNamespace(t)
	w.loadDriver()
	w.installDriver("w3")
	w.awaitDriver("w3", true)
	w.createBoundClaim(podDriver, "pooled")
	user := func(name, script string) *v1.Pod {
		p := newPod(name, tools, "sh", "-c", script)
		p.Spec.NodeName = "w3"
		p.Spec.TerminationGracePeriodSeconds = new(int64(1)) // so that it is gone only when its volumes are
		p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/data"}}
		p.Spec.Volumes = []v1.Volume{{Name: "data", VolumeSource: v1.VolumeSource{
			PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "pooled"}}}}
		w.createPod(p)
		return w.awaitPod(name, requireReady)
	}
	add := func(word string) {
		t.Helper()
		testenv.Kctl(t, "-n", w.ns, "exec", "writer", "--", "sh", "-c", "echo "+word+" >> /data/file")
	}
	writer := user("writer", "echo first > /data/file; exec sleep 1000000")
	w.awaitExec("writer", "first", "cat /data/file")
	target := "/var/lib/kubelet/pods/" + string(writer.UID) + "/volumes/kubernetes.io~csi/" + w.ns + "-pooled/mount"
	mount := w.mountID("w3", target)
	if testenv.Owned() {
		testenv.Kctl(t, "lab", "restart", "--daemon", "w3")
		testenv.Eventually(t, soon, func() error {
			return testenv.Host(t, "w3").Command(context.Background(), "test", "-S",
				"/var/lib/kubelet/plugins_registry/"+podDriver+"-reg.sock").Run()
		})
		w.awaitExec("writer", "", "true")
	}
	add("agent")
	old := w.livingPods("driver")[0]
	if err := w.cs.CoreV1().Pods(w.ns).Delete(context.Background(), old.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		if now := w.livingPods("driver"); len(now) != 1 || now[0].UID == old.UID || !podIsReady(&now[0]) {
			return fmt.Errorf("there are %d pods of the driver, or the new one is not ready", len(now))
		}
		return nil
	})
	w.awaitExec("writer", "", "true")
	add("driver")
	if now := w.mountID("w3", target); now != mount {
		t.Errorf("the volume of the running pod was mounted again: %s, was %s", now, mount)
	}
	w.deletePod("writer")
	testenv.Eventually(t, soon, func() error {
		out, err := testenv.Host(t, "w3").Command(context.Background(), "ls", "/var/lib/kubelet/pods/").Output()
		if err == nil && strings.Contains(string(out), string(writer.UID)) {
			err = fmt.Errorf("left of the pod: %q", out)
		}
		return err
	})
	user("reader", "exec sleep 1000000")
	w.awaitExec("reader", "first agent driver", "cat /data/file")
	w.deletePod("reader")
	if err := w.cs.AppsV1().Deployments(w.ns).Delete(context.Background(), "driver", metav1.DeleteOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	w.awaitDriver("w3", false)
}

// loadDriver builds the image of the driver and its sidecars and loads it into the lab.
func (w testNamespace) loadDriver() {
	w.Helper()
	sidecar := filepath.Join(testenv.Build(w, "keelson.dev/keelson/test/e2e/sidecar"), "sidecar")
	driver := filepath.Join(testenv.Lab().Config.BinDir, "keelson-csi-local")
	testenv.LoadImage(w, podDriverImage, map[string]string{"driver": driver, "sidecar": sidecar}, "/driver")
}

// driverPodSpec returns the pod of a driver's manifest for one node.
func driverPodSpec(node string) v1.PodSpec {
	nodeName := v1.EnvVar{Name: "KUBE_NODE_NAME",
		ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "spec.nodeName"}}}
	privileged := &v1.SecurityContext{Privileged: new(true)}
	host := func(name, path string, t v1.HostPathType) v1.Volume {
		return v1.Volume{Name: name,
			VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: path, Type: &t}}}
	}
	both := new(v1.MountPropagationBidirectional)
	socket := v1.VolumeMount{Name: "socket-dir", MountPath: "/csi"}
	return v1.PodSpec{
		NodeName: node,
		Containers: []v1.Container{
			{
				Name: "driver", Image: podDriverImage,
				Args: []string{"--name=" + podDriver, "--socket=$(CSI_ENDPOINT)",
					"--node-id=$(KUBE_NODE_NAME)", "--root=/csi-data-dir"},
				Env:             []v1.EnvVar{{Name: "CSI_ENDPOINT", Value: "/csi/csi.sock"}, nodeName},
				SecurityContext: privileged,
				Ports:           []v1.ContainerPort{{Name: "healthz", ContainerPort: 9898, Protocol: v1.ProtocolTCP}},
				LivenessProbe: &v1.Probe{
					ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/healthz",
						Port: intstr.FromString("healthz")}},
					FailureThreshold: 5, InitialDelaySeconds: 2, TimeoutSeconds: 3, PeriodSeconds: 2,
				},
				VolumeMounts: []v1.VolumeMount{socket,
					{Name: "mountpoint-dir", MountPath: "/var/lib/kubelet/pods", MountPropagation: both},
					{Name: "plugins-dir", MountPath: "/var/lib/kubelet/plugins", MountPropagation: both},
					{Name: "csi-data-dir", MountPath: "/csi-data-dir"}, {Name: "dev-dir", MountPath: "/dev"}},
			},
			{
				Name: "node-driver-registrar", Image: podDriverImage, Command: []string{"/sidecar"},
				Args: []string{"--csi-address=/csi/csi.sock",
					"--kubelet-registration-path=" + podDriverDir + "/csi.sock"},
				Env:             []v1.EnvVar{nodeName},
				SecurityContext: privileged,
				VolumeMounts:    []v1.VolumeMount{socket, {Name: "registration-dir", MountPath: "/registration"}},
			},
			{
				Name: "liveness-probe", Image: podDriverImage, Command: []string{"/sidecar"},
				Args:         []string{"--csi-address=/csi/csi.sock", "--health-port=9898"},
				VolumeMounts: []v1.VolumeMount{socket},
			},
		},
		Volumes: []v1.Volume{
			host("socket-dir", podDriverDir, v1.HostPathDirectoryOrCreate),
			host("mountpoint-dir", "/var/lib/kubelet/pods", v1.HostPathDirectoryOrCreate),
			host("registration-dir", "/var/lib/kubelet/plugins_registry", v1.HostPathDirectory),
			host("plugins-dir", "/var/lib/kubelet/plugins", v1.HostPathDirectory),
			host("csi-data-dir", podDriverDir+"/data", v1.HostPathDirectoryOrCreate),
			host("dev-dir", "/dev", v1.HostPathDirectory),
		},
		TerminationGracePeriodSeconds: new(int64(5)),
	}
}

func (w testNamespace) installDriver(node string) {
	w.Helper()
	w.createCSIDriver(podDriver, map[string]string{"keelson.dev/served-by": "agent"}, true)
	labels := map[string]string{"app": "driver"}
	w.createWeb(&appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "driver"},
		Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Strategy: appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType},
			Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: driverPodSpec(node)},
		},
	})
	w.awaitReplicas("driver", 1)
}

// createCSIDriver creates a CSIDriver, which states whether the driver's volumes are attached.
func (w testNamespace) createCSIDriver(name string, annotations map[string]string, attached bool) {
	w.Helper()
	ctx, drivers := context.Background(), w.cs.StorageV1().CSIDrivers()
	if _, err := drivers.Create(ctx,
		&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations},
			Spec: storagev1.CSIDriverSpec{AttachRequired: &attached}}, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if err := drivers.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			w.Errorf("deleting the CSIDriver: %v", err)
		}
	})
}

// awaitDriver waits until the node's CSINode lists the driver, or does not list it.
func (w testNamespace) awaitDriver(node string, want bool) {
	w.Helper()
	testenv.Eventually(w, soon, func() error {
		n, err := w.cs.StorageV1().CSINodes().Get(context.Background(), node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		there := false
		for _, d := range n.Spec.Drivers {
			there = there || d.Name == podDriver && d.NodeID == node
		}
		if there != want {
			return fmt.Errorf("drivers of %s: %+v", node, n.Spec.Drivers)
		}
		return nil
	})
}

// createBoundClaim creates a claim and a volume of a driver for it.
func (w testNamespace) createBoundClaim(driver, claim string) {
	w.Helper()
	w.createClaim(claim, w.createVolumeFor(driver, claim, v1.ReadWriteOnce))
}

// createClaim creates a claim.
func (w testNamespace) createClaim(name string, spec v1.PersistentVolumeClaimSpec) {
	w.Helper()
	if _, err := w.cs.CoreV1().PersistentVolumeClaims(w.ns).Create(context.Background(), &v1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
}

// createVolumeFor creates a volume of 1Gi and returns the spec of a claim for it.
func (w testNamespace) createVolumeFor(
	driver, name string, mode v1.PersistentVolumeAccessMode,
) v1.PersistentVolumeClaimSpec {
	w.Helper()
	ctx := context.Background()
	size := v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	modes := []v1.PersistentVolumeAccessMode{mode}
	volume := w.ns + "-" + name
	pv := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: volume}, Spec: v1.PersistentVolumeSpec{
		Capacity: size, AccessModes: modes, PersistentVolumeReclaimPolicy: v1.PersistentVolumeReclaimRetain,
		StorageClassName: "by-hand",
		PersistentVolumeSource: v1.PersistentVolumeSource{CSI: &v1.CSIPersistentVolumeSource{Driver: driver,
			VolumeHandle: volume}}}}
	if _, err := w.cs.CoreV1().PersistentVolumes().Create(ctx, pv, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if err := w.cs.CoreV1().PersistentVolumes().Delete(ctx, volume, metav1.DeleteOptions{}); err != nil &&
			!apierrors.IsNotFound(err) {
			w.Errorf("deleting the volume: %v", err)
		}
	})
	return v1.PersistentVolumeClaimSpec{AccessModes: modes, StorageClassName: new("by-hand"), VolumeName: volume,
		Resources: v1.VolumeResourceRequirements{Requests: size}}
}

// mountID returns the ID of the mount at a path of a host.
func (w testNamespace) mountID(host, path string) string {
	w.Helper()
	out, err := testenv.Host(w, host).Command(context.Background(), "cat", "/proc/self/mountinfo").Output()
	if err != nil {
		w.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == path {
			return f[0]
		}
	}
	w.Fatalf("nothing is mounted at %s", path)
	return ""
}

func (w testNamespace) deletePod(name string) {
	w.Helper()
	if err := w.cs.CoreV1().Pods(w.ns).Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
		w.Fatal(err)
	}
	testenv.Eventually(w, soon, func() error {
		_, err := w.cs.CoreV1().Pods(w.ns).Get(context.Background(), name, metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("pod %s: %v", name, err)
		}
		return nil
	})
}
