package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

const (
	thing            v1.ResourceName = "example.com/thing"
	thingPluginImage                 = "example.com/thing/plugin:v1"
	thingDir                         = "/var/lib/thing"
	pluginsDir                       = "/var/lib/kubelet/device-plugins"
)

// A device plugin in a DaemonSet, as vendors ship them. Its node reports two devices. Of three pods
// that request one device each, two see their device (a variable, a mount, a device, a CDI
// description) and one waits. A restarted agent keeps the allocations. The device of a finished pod
// goes to the waiting pod. A pod bound by hand to a node without free devices is rejected, and the
// API refuses pods that would share a device. F91 F92
func TestDevicePlugin(t *testing.T) {
	w := newNamespace(t)
	w.runDevicePlugin("w3")
	w.awaitDevices("w3", 2, 2)
	user := func(name, node string) *v1.Pod {
		p := newPod(name, tools, "sh", "-c", "exec sleep 1000000")
		p.Spec.RestartPolicy = v1.RestartPolicyNever
		p.Spec.TerminationGracePeriodSeconds = new(int64(1))
		p.Spec.NodeName = node
		p.Spec.Containers[0].Resources.Limits = v1.ResourceList{thing: resource.MustParse("1")}
		return w.createPod(p)
	}
	user("one", "")
	user("two", "")
	has := map[string]string{}
	see := func(name string) {
		t.Helper()
		var health []v1.ResourceHealth
		p := w.awaitPod(name, func(p *v1.Pod) error { // a restarted agent first waits for the plugin
			if err := requireReady(p); err != nil {
				return err
			}
			health = nil
			for _, s := range p.Status.ContainerStatuses[0].AllocatedResourcesStatus {
				if s.Name == thing {
					health = append(health, s.Resources...)
				}
			}
			if len(health) != 1 || health[0].Health != v1.ResourceHealthStatusHealthy {
				return fmt.Errorf("pod %s: status of its devices %+v", name, p.Status.ContainerStatuses)
			}
			return nil
		})
		if p.Spec.NodeName != "w3" {
			t.Errorf("pod %s is on %s", name, p.Spec.NodeName)
		}
		id := string(health[0].ResourceID)
		has[name] = id
		w.awaitExec(name, id+" yes driver 3 1 ro", fmt.Sprintf(
			`echo "$THINGS $CDI_%[1]s"; cat /opt/thing/driver; head -c 3 /dev/thing-%[1]s | wc -c; ls /dev | grep -c `+
				`^thing-; touch /opt/thing/x 2>/dev/null || echo ro`, id))
	}
	see("one")
	see("two")
	if has["one"] == has["two"] {
		t.Errorf("one device for two pods: %v", has)
	}
	user("three", "")
	w.awaitPod("three", func(p *v1.Pod) error {
		for _, c := range p.Status.Conditions {
			if c.Type == v1.PodScheduled && strings.Contains(c.Message, "Insufficient "+string(thing)) {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", p.Status.Conditions)
	})
	user("byhand", "w3")
	refused := w.awaitPod("byhand", func(p *v1.Pod) error {
		if p.Status.Phase != v1.PodFailed {
			return fmt.Errorf("%+v", p.Status)
		}
		return nil
	})
	if refused.Status.Reason != "UnexpectedAdmissionError" ||
		!strings.Contains(refused.Status.Message, "Requested: 1, Available: 0") {
		t.Errorf("%s: %s", refused.Status.Reason, refused.Status.Message)
	}
	w.awaitEvent("byhand", "UnexpectedAdmissionError")
	before := w.getPod("two").Status.ContainerStatuses[0]
	if testenv.Owned() {
		testenv.Kctl(t, "lab", "restart", "--daemon", "w3")
		w.awaitDevices("w3", 2, 2) // the plugin has registered again by itself
	}
	w.deletePod("one")
	see("three")
	if has["three"] != has["one"] {
		t.Errorf("devices %v", has)
	}
	if after := w.getPod("two").Status.ContainerStatuses[0]; after.ContainerID != before.ContainerID ||
		after.RestartCount != 0 {
		t.Errorf("another pod's container: %+v, before %+v", after, before)
	}
	see("two")
	w.refuseSharedDevices()
	if err := w.cs.AppsV1().DaemonSets(w.ns).Delete(context.Background(), "thing-plugin",
		metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.awaitDevices("w3", 2, 0)
	w.awaitPod("two", func(p *v1.Pod) error {
		s := p.Status.ContainerStatuses[0].AllocatedResourcesStatus
		if len(s) != 1 || s[0].Resources[0].Health != v1.ResourceHealthStatusUnknown {
			return fmt.Errorf("status of its devices %+v", s)
		}
		return nil
	})
}

// refuseSharedDevices makes the API refuse pods that would share a device.
func (w testNamespace) refuseSharedDevices() {
	w.Helper()
	for words, res := range map[string]v1.ResourceRequirements{
		"Limit must be set for non overcommitable " +
			"resources": {Requests: v1.ResourceList{thing: resource.MustParse("1")}},
		"must be equal to " + string(thing) + " limit": {
			Requests: v1.ResourceList{thing: resource.MustParse("1")},
			Limits:   v1.ResourceList{thing: resource.MustParse("2")}},
		"must be an integer": {
			Limits: v1.ResourceList{thing: resource.MustParse("500m")}},
	} {
		p := sleeperPod("shares")
		p.Spec.Containers[0].Resources = res
		if _, err := w.cs.CoreV1().Pods(w.ns).Create(context.Background(), p, metav1.CreateOptions{}); err == nil ||
			!strings.Contains(err.Error(), words) {
			w.Errorf("%v: %v, want %q", res, err, words)
		}
	}
}

// awaitDevices waits until a node reports a capacity and a number of allocatable devices.
func (w testNamespace) awaitDevices(node string, capacity, allocatable int64) {
	w.Helper()
	testenv.Eventually(w, soon, func() error {
		n, err := w.cs.CoreV1().Nodes().Get(context.Background(), node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		c, a := n.Status.Capacity[thing], n.Status.Allocatable[thing]
		if c.Value() != capacity || a.Value() != allocatable {
			return fmt.Errorf("node %s has %s things, %s of them to be given out: want %d and %d", node, c.String(),
				a.String(), capacity, allocatable)
		}
		return nil
	})
}

// runDevicePlugin runs the device plugin on a node.
func (w testNamespace) runDevicePlugin(node string) {
	w.Helper()
	binary := filepath.Join(testenv.Build(w, "keelson.dev/keelson/test/e2e/deviceplugin"), "deviceplugin")
	testenv.LoadImage(w, thingPluginImage, map[string]string{"plugin": binary}, "/plugin")
	host := testenv.Host(w, node)
	if out, err := host.Command(context.Background(), "sh", "-c",
		"mkdir -p "+thingDir+" && echo driver > "+thingDir+"/driver").CombinedOutput(); err != nil {
		w.Fatalf("%v: %s", err, out)
	}
	labels := map[string]string{"app": "thing-plugin"}
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "thing-plugin"},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}}}
	d.Spec.Template.Labels = labels
	d.Spec.Template.Spec = newPod("plugin", thingPluginImage).Spec
	spec := &d.Spec.Template.Spec
	spec.NodeSelector = map[string]string{v1.LabelHostname: node}
	spec.TerminationGracePeriodSeconds = new(int64(1))
	c := &spec.Containers[0]
	c.Command = nil
	c.Args = []string{"--resource=" + string(thing), "--devices=a,b", "--mount=" + thingDir + ":/opt/thing",
		"--cdi=/var/run/cdi", "--prepare", "--prefer"}
	for name, path := range map[string]string{"plugins": pluginsDir, "cdi": "/var/run/cdi"} {
		spec.Volumes = append(spec.Volumes, v1.Volume{Name: name, VolumeSource: v1.VolumeSource{
			HostPath: &v1.HostPathVolumeSource{Path: path, Type: new(v1.HostPathDirectoryOrCreate)}}})
		c.VolumeMounts = append(c.VolumeMounts, v1.VolumeMount{Name: name, MountPath: path})
	}
	if _, err := w.cs.AppsV1().DaemonSets(w.ns).Create(context.Background(), d, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		_ = host.Command(context.Background(), "rm", "-rf", thingDir, pluginsDir+"/thing.sock",
			"/var/run/cdi/thing.json").Run()
	})
}
