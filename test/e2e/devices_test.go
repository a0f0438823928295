package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

const (
	deviceDriver      = "gpu.example.com"
	deviceDriverImage = "example.com/gpu/driver:v1"
	deviceDriverDir   = "/var/lib/kubelet/plugins/gpu"
	deviceClass       = "gpu.example.com"
)

// A pod with a DRA driver, a node with two devices, and pods that claim them by a template. Each
// pod gets its own device; one of its containers sees the device and the other does not. A third
// pod waits until another has ended. A restarted agent finds the devices prepared, and the driver
// unprepares each device once.
func TestDevicesByClaims(t *testing.T) {
	t.Parallel() // it waits for a driver that ends
	w := newNamespace(t)
	w.runDeviceDriver("w3")
	w.publishDevices("w3", 2)
	ctx := context.Background()
	template := &resourcev1.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: "gpu"},
		Spec: resourcev1.ResourceClaimTemplateSpec{
			Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{
				{Name: "r", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: deviceClass}}}}}}}
	if _, err := w.cs.ResourceV1().ResourceClaimTemplates(w.ns).Create(ctx, template, metav1.CreateOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	user := func(name string) {
		p := newPod(name, tools, "sh", "-c", "exec sleep 1000000")
		p.Spec.RestartPolicy = v1.RestartPolicyNever
		p.Spec.TerminationGracePeriodSeconds = new(int64(1))
		p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("gpu")}}
		without := *p.Spec.Containers[0].DeepCopy()
		without.Name = "without"
		p.Spec.Containers[0].Resources.Claims = []v1.ResourceClaim{{Name: "gpu"}}
		p.Spec.Containers = append(p.Spec.Containers, without)
		w.createPod(p)
	}
	user("one")
	user("two")
	first := w.awaitPod("one", requireReady)
	w.awaitPod("two", requireReady)
	seen := map[string]bool{}
	for _, name := range []string{"one", "two"} {
		p := w.getPod(name)
		claim := *p.Status.ResourceClaimStatuses[0].ResourceClaimName
		c, err := w.cs.ResourceV1().ResourceClaims(w.ns).Get(ctx, claim, metav1.GetOptions{})
		if err != nil || c.Status.Allocation == nil || p.Spec.NodeName != "w3" {
			t.Fatalf("pod %s on %s: claim %+v, %v", name, p.Spec.NodeName, c, err)
		}
		seen[c.Status.Allocation.Devices.Results[0].Device] = true
		inside := func(container string) string {
			return strings.TrimSpace(testenv.Kctl(t, "-n", w.ns, "exec", name, "-c", container, "--", "sh", "-c",
				`echo "$GPU_OF"; test -c /dev/gpu && echo there || echo none`))
		}
		if got := inside(p.Spec.Containers[0].Name); got != claim+"\nthere" {
			t.Errorf("pod %s: its container sees %q", name, got)
		}
		if got := inside("without"); got != "none" {
			t.Errorf("pod %s: the other container sees %q", name, got)
		}
	}
	if len(seen) != 2 {
		t.Errorf("devices %v for two pods", seen)
	}
	user("three")
	testenv.Eventually(t, soon, func() error {
		for _, c := range w.getPod("three").Status.Conditions {
			if c.Type == v1.PodScheduled && strings.Contains(c.Message,
				"cannot allocate all claims: 0 of 1 devices of class "+deviceClass) {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", w.getPod("three").Status.Conditions)
	})
	w.awaitDeviceHealth("two", "HEALTHY", "Healthy")
	w.awaitDeviceHealth("two", "UNHEALTHY", "Unhealthy")
	if testenv.Owned() {
		testenv.Kctl(t, "lab", "restart", "--daemon", "w3")
	}
	w.deletePod("one")
	w.awaitPod("three", requireReady)
	for _, name := range []string{"two", "three"} {
		w.deletePod(name)
	}
	testenv.Eventually(t, soon, func() error {
		list, err := w.cs.ResourceV1().ResourceClaims(w.ns).List(ctx, metav1.ListOptions{})
		if err != nil || len(list.Items) > 0 {
			return fmt.Errorf("%d claims, %v", len(list.Items), err)
		}
		return nil
	})
	w.deletePod("driver")
	testenv.Eventually(t, 2*soon, func() error {
		if _, err := w.cs.ResourceV1().ResourceSlices().Get(ctx, "w3-gpu",
			metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("devices of a removed driver are reported: %v", err)
		}
		return nil
	})
	// each is written before its answer
	b, err := testenv.Host(t, "w3").Command(ctx, "cat", deviceDriverDir+"/log").Output()
	out := string(b)
	if err != nil || strings.Count(out, "\nprepare ") != 3 || strings.Count(out, "\nunprepare ") != 3 {
		t.Errorf("the driver's log is (%v):\n%s", err, out)
	}
	if name := *first.Status.ResourceClaimStatuses[0].ResourceClaimName; !strings.Contains(out,
		"unprepare "+w.ns+"/"+name+" ") {
		t.Errorf("the driver did not get back the devices of claim %s:\n%s", name, out)
	}
}

// awaitDeviceHealth sets the health that the driver reports, and waits until the status of a pod
// has it.
func (w testNamespace) awaitDeviceHealth(pod, told string, want v1.ResourceHealthStatus) {
	w.Helper()
	lines := ""
	for i := range 2 {
		lines += fmt.Sprintf("gpu-%d %s 3600 as the driver says\n", i, told)
	}
	file := deviceDriverDir + "/health"
	if out, err := testenv.Host(w, "w3").Command(context.Background(), "sh", "-c",
		fmt.Sprintf("printf '%s' > %s.new && mv %s.new %s", lines, file, file, file)).CombinedOutput(); err != nil {
		w.Fatalf("%v: %s", err, out)
	}
	testenv.Eventually(w, soon, func() error {
		for _, c := range w.getPod(pod).Status.ContainerStatuses {
			for _, s := range c.AllocatedResourcesStatus {
				if s.Name == "claim:gpu" && len(s.Resources) == 1 && s.Resources[0].Health == want &&
					*s.Resources[0].Message == "as the driver says" {
					return nil
				}
			}
		}
		return fmt.Errorf("statuses %+v", w.getPod(pod).Status.ContainerStatuses)
	})
}

// runDeviceDriver runs the driver in a pod on a node.
func (w testNamespace) runDeviceDriver(node string) {
	w.Helper()
	binary := filepath.Join(testenv.Build(w, "keelson.dev/keelson/test/e2e/devicedriver"), "devicedriver")
	testenv.LoadImage(w, deviceDriverImage, map[string]string{"driver": binary}, "/driver")
	p := newPod("driver", deviceDriverImage)
	c := &p.Spec.Containers[0]
	c.Command = nil
	c.Args = []string{"--name=" + deviceDriver, "--registry=/var/lib/kubelet/plugins_registry",
		"--socket=" + deviceDriverDir + "/dra.sock",
		"--cdi=/var/run/cdi", "--log=" + deviceDriverDir + "/log", "--services=v1.DRAResourceHealth",
		"--health=" + deviceDriverDir + "/health"}
	c.SecurityContext = &v1.SecurityContext{Privileged: new(true)}
	p.Spec.NodeName = node
	p.Spec.TerminationGracePeriodSeconds = new(int64(1))
	for name, path := range map[string]string{"registry": "/var/lib/kubelet/plugins_registry", "own": deviceDriverDir,
		"cdi": "/var/run/cdi"} {
		p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: name, VolumeSource: v1.VolumeSource{
			HostPath: &v1.HostPathVolumeSource{Path: path, Type: new(v1.HostPathDirectoryOrCreate)}}})
		c.VolumeMounts = append(c.VolumeMounts, v1.VolumeMount{Name: name, MountPath: path})
	}
	w.createPod(p)
	w.awaitPod("driver", requireReady)
	w.Cleanup(func() {
		_ = testenv.Host(w, node).Command(context.Background(), "rm", "-rf", deviceDriverDir,
			"/var/lib/kubelet/plugins_registry/"+deviceDriver+"-reg.sock").Run()
	})
}

// publishDevices creates the ResourceSlice of a node's devices, as their driver would, and a
// DeviceClass for them.
func (w testNamespace) publishDevices(node string, n int) {
	w.Helper()
	ctx := context.Background()
	class := &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: deviceClass},
		Spec: resourcev1.DeviceClassSpec{Selectors: []resourcev1.DeviceSelector{
			{CEL: &resourcev1.CELDeviceSelector{Expression: `device.driver == "` + deviceDriver + `"`}}}}}
	slice := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-gpu"},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: deviceDriver, NodeName: &node, Pool: resourcev1.ResourcePool{Name: node, Generation: 1,
				ResourceSliceCount: 1}}}
	for i := range n {
		slice.Spec.Devices = append(slice.Spec.Devices, resourcev1.Device{Name: fmt.Sprint("gpu-", i)})
	}
	if _, err := w.cs.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	if _, err := w.cs.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		for _, err := range []error{w.cs.ResourceV1().DeviceClasses().Delete(ctx, class.Name, metav1.DeleteOptions{}),
			w.cs.ResourceV1().ResourceSlices().Delete(ctx, slice.Name, metav1.DeleteOptions{})} {
			if err != nil && !apierrors.IsNotFound(err) {
				w.Errorf("removing the devices: %v", err)
			}
		}
	})
}
