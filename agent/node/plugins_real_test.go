package node

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"keelson.dev/keelson/agent"
)

// thing is the resource of the test's plugin.
const thing v1.ResourceName = "example.com/thing"

// thingPlugin is a device plugin in a process beside the agent.
type thingPlugin struct {
	*testNode
	list string
	cmd  *exec.Cmd
}

func (b *testNode) things(devices string, args ...string) *thingPlugin {
	b.t.Helper()
	dir := filepath.Dir(b.cfg.Dirs.State)
	bin := filepath.Join(dir, "deviceplugin")
	if out, err := exec.Command("go", "build", "-o", bin, "keelson.dev/keelson/test/e2e/deviceplugin").
		CombinedOutput(); err != nil {
		b.t.Fatalf("building the plugin: %v\n%s", err, out)
	}
	p := &thingPlugin{testNode: b, list: filepath.Join(dir, "list")}
	if err := os.WriteFile(p.list, []byte(devices), 0o600); err != nil {
		b.t.Fatal(err)
	}
	p.cmd = exec.Command(bin, append([]string{"--folder=" + b.cfg.Dirs.DevicePlugins, "--list=" + p.list}, args...)...)
	p.cmd.Stderr = logWriter{b.t}
	if err := p.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _, _ = p.cmd.Process.Kill(), p.cmd.Wait() })
	return p
}

// node waits until the Node has the given numbers of devices.
func (p *thingPlugin) node(capacity, allocatable int64) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), time.Minute)
	defer cancel()
	if err := p.cluster.Await(ctx, fmt.Sprintf("%d devices, %d of them to be given out", capacity, allocatable),
		func() bool {
			n := p.cluster.NodeFacts()
			if n == nil {
				return false
			}
			c, has := n.Status.Capacity[thing]
			a := n.Status.Allocatable[thing]
			return has && c.Value() == capacity && a.Value() == allocatable
		}); err != nil {
		p.t.Fatal(err)
	}
}

func (p *thingPlugin) pod(uid string, count int64, script string) *v1.Pod {
	c := newShell("app", script)
	c.Resources.Limits = v1.ResourceList{thing: *resource.NewQuantity(count, resource.DecimalSI)}
	c.Resources.Requests = c.Resources.Limits
	pod := realPod(uid, c)
	pod.Spec.RestartPolicy = v1.RestartPolicyNever
	p.cluster.Put(pod)
	return pod
}

// resources queries the kubelet's pod resources API for the only pod.
func (p *thingPlugin) resources() string {
	p.t.Helper()
	conn, err := grpc.NewClient("unix://"+p.cfg.Dirs.PodResources,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		p.t.Fatal(err)
	}
	defer conn.Close()
	c := podresources.NewPodResourcesListerClient(conn)
	pod, err := c.Get(p.t.Context(), &podresources.GetPodResourcesRequest{PodNamespace: p.cluster.Pods()[0].Namespace,
		PodName: p.cluster.Pods()[0].Name})
	if err != nil {
		p.t.Fatal(err)
	}
	all, err := c.GetAllocatableResources(p.t.Context(), &podresources.AllocatableResourcesRequest{})
	if err != nil {
		p.t.Fatal(err)
	}
	var out strings.Builder
	told := func(list []*podresources.ContainerDevices) {
		for _, d := range list {
			var nodes []int64
			for _, n := range d.GetTopology().GetNodes() {
				nodes = append(nodes, n.ID)
			}
			fmt.Fprintf(&out, "%s of %v", strings.Join(d.DeviceIds, ","), nodes)
		}
	}
	for _, c := range pod.PodResources.Containers {
		fmt.Fprintf(&out, "%s %s ", c.Name, c.Devices[0].ResourceName)
		told(c.Devices)
	}
	out.WriteString("; allocatable ")
	told(all.Devices)
	return out.String()
}

// A device plugin beside the whole agent: the node tells of its devices, a container has the variable, the mount and the
// device that the plugin named, the device as far as the plugin permits; a pod that finds none left fails; a new agent
// leaves the container as it is and gives its device to nobody else; what the plugin says of its health is in the pod's
// status; and when the pod has ended, the device is given to another. F92
func TestRealDevicePlugin(t *testing.T) {
	b := newTestNode(t)
	share := filepath.Join(filepath.Dir(b.cfg.Dirs.State), "share")
	if err := os.Mkdir(share, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(share, "driver"), []byte("mounted"), 0o644); err != nil {
		t.Fatal(err)
	}
	// a device that containers do not have by default, and that is safe to open
	device := "/dev/loop-control"
	if _, err := os.Stat(device); err != nil {
		device = "/dev/fuse"
	}
	p := b.things("a,b!", "--device="+device, "--mount="+share+":/opt/thing", "--prepare")
	p.node(2, 1)
	p.pod("one", 1, `exec /bin/busybox sleep 1000`)
	first := b.awaitPod("Ready", "one", isReady)
	inside := func(uid string) string {
		t.Helper()
		var out bytes.Buffer
		err := newServer(b).Exec(t.Context(), types.UID(uid), "app",
			[]string{"/bin/sh", "-c", `echo "$THINGS"; /bin/busybox cat /opt/thing/driver; echo
			/bin/busybox touch /opt/thing/x || echo ro
			(: < /dev/thing-a) && echo open
			(: > /dev/thing-a) 2>/dev/null || echo denied`}, false, false, agent.Streams{Stdout: &out})
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(strings.Fields(out.String()), " ")
	}
	const sees = "a mounted ro open denied"
	if got := inside("one"); got != sees {
		t.Errorf("the container sees %q, want %q", got, sees)
	}
	if got, want := p.resources(), `app example.com/thing a of [0]; allocatable a of [0]`; got != want {
		t.Errorf("the device assignments are %q, want %q", got, want)
	}
	p.pod("two", 1, "exit 0")
	two := b.awaitPod("its refusal", "two", func(p *v1.Pod) bool { return p.Status.Phase == v1.PodFailed })
	if two.Status.Reason != "UnexpectedAdmissionError" ||
		!strings.Contains(two.Status.Message, "unavailable for example.com/thing. Requested: 1, Available: 0") {
		t.Errorf("%s: %s", two.Status.Reason, two.Status.Message)
	}
	b.deletePod("two", 0)

	b.stop()
	b.startAgent()
	p.node(2, 1)
	again := b.awaitPod("the pod", "one", isReady)
	if again.Status.ContainerStatuses[0].ContainerID != first.Status.ContainerStatuses[0].ContainerID {
		t.Error("the new agent recreated the container")
	}
	p.pod("three", 1, "exit 0")
	b.awaitPod("its refusal by the new agent", "three", func(p *v1.Pod) bool {
		return p.Status.Reason == "UnexpectedAdmissionError"
	})
	b.deletePod("three", 0)

	if err := os.WriteFile(p.list, []byte("a!,b!"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	p.node(2, 0)
	b.awaitPod("the health of its device", "one", func(p *v1.Pod) bool {
		s := p.Status.ContainerStatuses[0].AllocatedResourcesStatus
		return len(s) == 1 && s[0].Name == thing && len(s[0].Resources) == 1 && s[0].Resources[0].ResourceID == "a" &&
			s[0].Resources[0].Health == v1.ResourceHealthStatusUnhealthy
	})
	if err := os.WriteFile(p.list, []byte("a"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	p.node(1, 1)
	b.deletePod("one", 0)
	if err := b.cluster.Await(t.Context(), "the end of the first", func() bool {
		_, ok := b.cluster.Pod("one")
		return !ok
	}); err != nil {
		t.Fatal(err)
	}
	p.pod("four", 1, "exec /bin/busybox sleep 1000")
	b.awaitPod("Ready", "four", isReady)
	if got := inside("four"); got != sees {
		t.Errorf("the next container sees %q, want %q", got, sees)
	}
	_, _ = p.cmd.Process.Kill(), p.cmd.Wait()
	p.node(1, 0)
}
