package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/probe"
	"keelson.dev/keelson/internal/reservedspace"
)

func fakeConfig(name, dir string) (Config, *fake.Cluster, *fake.Runtime) {
	c, net := fake.NewCluster(), &fake.Network{}
	rt, img := &fake.Runtime{Network: net}, &fake.Images{}
	img.Put("hello:1", agent.ImageConfig{})
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	cfg := Flags(fs)
	cfg.NodeName, cfg.NodeIPs, cfg.Dirs.State, cfg.Dirs.Run, cfg.Dirs.Logs = name, []string{"192.0.2.1"},
		filepath.Join(dir, name, "state"), filepath.Join(dir, name, "run"), filepath.Join(dir, name, "logs")
	cfg.Parts.Session, cfg.Parts.Runtime, cfg.Parts.Images, cfg.Parts.Volumes, cfg.Pods.ResolvConf = c, rt, img,
		&fake.Volumes{}, os.DevNull
	cfg.PodNetwork.New = func(agent.Objects) agent.Network { return net }
	cfg.Parts.Prober = probe.New(probe.Config{Ask: probe.AlwaysPass})
	return *cfg, c, rt
}

// One process simulates many nodes. Each runs its pods to Ready, and terminates them on request.
// F93, F115
func TestManyNodes(t *testing.T) {
	const nodes, pods = 100, 5
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	run, stop := context.WithCancel(ctx)
	done := make(chan error, nodes)
	clusters := make([]*fake.Cluster, nodes)
	for i := range nodes {
		cfg, c, _ := fakeConfig(fmt.Sprintf("w%d", i), dir)
		clusters[i] = c
		n, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		go func() { done <- n.Run(run) }()
		for k := range pods {
			c.Put(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("p%d", k), Namespace: "default",
				UID: types.UID(fmt.Sprintf("u%d", k))},
				Spec: v1.PodSpec{Containers: []v1.Container{{Name: "app", Image: "hello:1",
					ReadinessProbe: &v1.Probe{}}}}})
		}
	}
	for i, c := range clusters {
		if err := c.Await(ctx, fmt.Sprintf("all pods of node %d", i), func() bool {
			return readyPods(c) == pods && readyNode(c)
		}); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	for range nodes {
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

func readyPods(c *fake.Cluster) (n int) {
	for _, p := range c.Pods() {
		for _, cond := range p.Status.Conditions {
			if cond.Type == v1.PodReady && cond.Status == v1.ConditionTrue {
				n++
			}
		}
	}
	return n
}

func condition(n *v1.Node, t v1.NodeConditionType) v1.NodeCondition {
	for _, c := range n.Status.Conditions {
		if c.Type == t {
			return c
		}
	}
	return v1.NodeCondition{}
}

func readyNode(c *fake.Cluster) bool {
	n := c.NodeFacts()
	return n != nil && condition(n, v1.NodeReady).Status == v1.ConditionTrue
}

// F115: the content of a Node, and that a node without network is not ready.
func TestFacts(t *testing.T) {
	cfg, c, rt := fakeConfig("w1", t.TempDir())
	rt.Handlers = []string{"z", "own"}
	net := &fake.Network{}
	net.FailAlways("Ready", errors.New("no pod CIDR yet"))
	cfg.PodNetwork.New = func(agent.Objects) agent.Network { return net }
	for flags, set := range map[string]func() error{
		"capacity": func() (err error) { cfg.Node.Capacity, err = parseResources("cpu=2,memory=4Gi"); return err },
		"labels":   func() (err error) { cfg.Node.Labels, err = parseLabels("zone=a"); return err },
		"taints": func() (err error) {
			cfg.Node.Taints, err = parseTaints("dedicated=db:NoSchedule,x:NoExecute")
			return err
		},
	} {
		if err := set(); err != nil {
			t.Fatal(flags, err)
		}
	}
	n, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	run, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- n.Run(run) }()
	if err := c.Await(ctx, "facts that say why", func() bool {
		return c.NodeFacts() != nil && strings.Contains(condition(c.NodeFacts(), v1.NodeReady).Message,
			"no pod CIDR yet")
	}); err != nil {
		t.Fatal(err)
	}
	net.FailAlways("Ready", nil)
	if err := c.Await(ctx, "a ready node", func() bool { return readyNode(c) }); err != nil {
		t.Fatal(err)
	}
	stop()
	<-done
	got := c.NodeFacts()
	for key, want := range map[string]string{v1.LabelHostname: "w1", v1.LabelOSStable: "linux",
		v1.LabelArchStable:      runtime.GOARCH,
		"beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": runtime.GOARCH, "zone": "a"} {
		if got.Labels[key] != want {
			t.Errorf("label %s = %q", key, got.Labels[key])
		}
	}
	if cpu, mem, pods := got.Status.Allocatable.Cpu().String(), got.Status.Allocatable.Memory().String(),
		got.Status.Allocatable.Pods().String(); cpu != "2" || mem != "3996Mi" || pods != "110" {
		t.Errorf("allocatable: cpu %s, memory %s, pods %s", cpu, mem, pods)
	}
	if len(got.Spec.Taints) != 2 || got.Spec.Taints[0].Value != "db" || got.Status.Addresses[0].Address != "192.0.2.1" {
		t.Errorf("taints %v, addresses %v", got.Spec.Taints, got.Status.Addresses)
	}
	if h := got.Status.RuntimeHandlers; len(h) != 3 || h[0].Name != "" || h[1].Name != "own" || h[2].Name != "z" ||
		*h[1].Features.UserNamespaces || *h[1].Features.RecursiveReadOnlyMounts {
		t.Errorf("handlers %+v", h)
	}
	// F129: the control plane gives pods that need a feature only to nodes that declare it.
	if d := got.Status.DeclaredFeatures; !slices.IsSorted(d) || !slices.Contains(d, "PodLevelResources") {
		t.Errorf("declared features %q", d)
	}
	if i := got.Status.NodeInfo; i.KubeletVersion != Version || i.KernelVersion == "" || i.BootID == "" {
		t.Errorf("info: %+v", i)
	}
	for _, c := range []v1.NodeConditionType{v1.NodeMemoryPressure, v1.NodeDiskPressure, v1.NodePIDPressure} {
		if condition(got, c).Status != v1.ConditionFalse {
			t.Errorf("%s: %+v", c, condition(got, c))
		}
	}
}

// Invalid flags are rejected with the flag's name.
func TestBadConfiguration(t *testing.T) {
	for args, want := range map[string]string{
		"--node-name=Not_A_Name --server=h:1": "--node-name",
		"--node-name=w1":                      "--server is missing",
		"--capacity=cpu":                      "-capacity",
		"--capacity=cpu=lots":                 "not a valid quantity of cpu",
		"--taints=a=b":                        "-taints",
		"--node-labels=a/b/c=1":               "-node-labels",

		"--memory-pressure-below=lots": `"lots": want a size, such as 200Mi, or a share of the node's memory`,
		"--memory-pressure-below=100%": "-memory-pressure-below",
		"--inode-pressure-below=20Gi":  `"20Gi": want a number, such as 50000, or a share of the disk's inodes`,
		"--inode-pressure-below=0":     "-inode-pressure-below",

		"--runtime-handler=No_Name":                       `"No_Name" is not a valid handler name`,
		"--runtime-handler=gvisor=/usr/local/bin/runsc":   `handler "gvisor" cannot run "/usr/local/bin/runsc"`,
		strings.Repeat("--runtime-handler=a ", 33) + "--": "at most 32 handler names are allowed",
	} {
		fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		fs.SetOutput(io.Discard)
		cfg := Flags(fs)
		err := fs.Parse(strings.Fields(args))
		if err == nil {
			_, err = New(*cfg)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", args, err)
		}
	}
}

func TestMachine(t *testing.T) {
	if total, _, err := machineMemory(); err != nil || total <= 0 {
		t.Errorf("memory: %d, %v", total, err)
	}
	if total, left, err := diskSpace("/not/there/yet"); err != nil || total <= 0 || left < 0 || left > total {
		t.Errorf("disk: %d of %d left, %v", left, total, err)
	}
	if left, err := pidsAvailable(); err != nil || left <= 0 || left > 100 {
		t.Errorf("pids left: %d%%, %v", left, err)
	}
}

// F95: a node has disk pressure if less than the floor is free. The floor is not allocatable.
func TestDiskFloor(t *testing.T) {
	total, left, err := diskSpace(t.TempDir())
	if err != nil || left < 4<<20 {
		t.Skipf("the machine's disk is full: %d bytes, %v", left, err)
	}
	for above, short := range map[int64]bool{1 << 20: false, total - 1: true} {
		cfg, _, _ := fakeConfig("w1", t.TempDir())
		cfg.Parts.Runtime, cfg.Node.DiskFloor = nil, reservedspace.Bytes(above)
		f := newNodeFacts(&cfg)
		n := f.currentNode()
		if got := condition(n, v1.NodeDiskPressure); (got.Status == v1.ConditionTrue) != short {
			t.Errorf("%d bytes are to stay free, %d are: %+v", above, left, got)
		}
		disk, memory := n.Status.Allocatable.StorageEphemeral(), n.Status.Allocatable.Memory()
		if disk.Value() != total-above || memory.IsZero() {
			t.Errorf("%d of %d bytes are to stay free, pods may have %s", above, total, disk)
		}
	}
}

// The first report of a new node contains its actual pressure. F115
func TestFirstFacts(t *testing.T) {
	cfg, _, _ := fakeConfig("w1", t.TempDir())
	for what, rt := range map[string]agent.Runtime{"a fake node": cfg.Parts.Runtime, "a machine": nil} {
		cfg.Parts.Runtime = rt
		f := newNodeFacts(&cfg)
		n, o := f.currentNode(), f.observeMachine()
		for c, short := range map[v1.NodeConditionType]bool{ // the test's machine may really have pressure
			v1.NodeMemoryPressure: o.memoryPressure,
			v1.NodeDiskPressure:   o.diskPressure,
			v1.NodePIDPressure:    o.pidPercent >= 0 && o.pidPercent < pidThreshold,
		} {
			if got := condition(n, c); (got.Status == v1.ConditionTrue) != short {
				t.Errorf("%s, %+v left: %+v", what, o, got)
			}
		}
		if got := condition(n, v1.NodeReady); got.Status != v1.ConditionFalse ||
			got.Message != "the agent is starting" {
			t.Errorf("%s: %+v", what, got)
		}
		if _, told := n.Annotations[CSIDriversAnnotation]; told {
			t.Errorf("%s speaks of CSI drivers that nobody looked for", what)
		}
	}
}

// Pods are admitted by the stored Node's labels, taints and extended resources, and by the
// machine's own resources.
func TestStoredNodeAdmits(t *testing.T) {
	cfg, c, _ := fakeConfig("w1", t.TempDir())
	cfg.Node.Labels = map[string]string{"given": "once"}
	cfg.Node.Capacity = v1.ResourceList{v1.ResourceCPU: resource.MustParse("2")}
	f := newNodeFacts(&cfg)
	admitting := f.admissionNodeFunc(c)
	if n := admitting(); n.Labels["given"] != "once" {
		t.Errorf("without a stored node: labels %v", n.Labels)
	}
	stored := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Labels: map[string]string{"disk": "ssd"}}}
	stored.Spec.Taints = []v1.Taint{{Key: "broken", Effect: v1.TaintEffectNoExecute}}
	stored.Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse("64"),
		"example.com/dongle": resource.MustParse("4")}
	c.Put(stored)
	n := admitting()
	if n.Labels["disk"] != "ssd" || len(n.Labels) != 1 || len(n.Spec.Taints) != 1 {
		t.Errorf("labels %v, taints %v", n.Labels, n.Spec.Taints)
	}
	cpu, dongles := n.Status.Allocatable[v1.ResourceCPU], n.Status.Allocatable["example.com/dongle"]
	if cpu.String() != "2" || dongles.String() != "4" {
		t.Errorf("allocatable: %v", n.Status.Allocatable)
	}
	if len(f.currentNode().Status.Allocatable) == len(n.Status.Allocatable) || f.currentNode().Labels["disk"] != "" {
		t.Error("the facts were changed")
	}
}

// The tier settings follow the running pods and the node's allocatable resources.
func TestTiersOf(t *testing.T) {
	asks := func(phase v1.PodPhase, request, limit string) *v1.Pod {
		c := v1.Container{Name: "app"}
		if request != "" {
			c.Resources.Requests = v1.ResourceList{v1.ResourceCPU: resource.MustParse(request)}
		}
		if limit != "" {
			c.Resources.Limits = v1.ResourceList{v1.ResourceCPU: resource.MustParse(limit),
				v1.ResourceMemory: resource.MustParse("1Gi")}
		}
		return &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{c}}, Status: v1.PodStatus{Phase: phase}}
	}
	pods := []*v1.Pod{asks(v1.PodRunning, "500m", ""), asks(v1.PodPending, "250m", "1"), asks(v1.PodSucceeded, "4", ""),
		asks(v1.PodRunning, "", ""),
		asks(v1.PodRunning, "2", "2")} // the last one is Guaranteed
	pods[4].Spec.Containers[0].Resources.Requests = pods[4].Spec.Containers[0].Resources.Limits
	got := podTiers(pods, v1.ResourceList{v1.ResourceCPU: resource.MustParse("2"),
		v1.ResourceMemory: resource.MustParse("3Gi")}, 7)
	if want := (agent.Tiers{CPU: 2000, Memory: 3 << 30, PIDs: 7, Burstable: 750}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
