package pod

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/pod/criconfig"
	"keelson.dev/keelson/internal/virtual"
)

// envRecorder records the environment with which containers are created.
type envRecorder struct {
	*fake.Runtime
	mu  sync.Mutex
	all map[string][]string
}

func (e *envRecorder) CreateContainer(ctx context.Context, q *cri.CreateContainerRequest) (
	*cri.CreateContainerResponse, error,
) {
	e.mu.Lock()
	for _, kv := range q.Config.Envs {
		if strings.HasPrefix(kv.Key, "THING_") {
			e.all[q.Config.Labels[agent.LabelPodUID]] = append(e.all[q.Config.Labels[agent.LabelPodUID]],
				q.Config.Metadata.Name+":"+kv.Key)
		}
	}
	e.mu.Unlock()
	return e.Runtime.CreateContainer(ctx, q)
}

func (e *envRecorder) envOfPod(uid string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return strings.Join(e.all[uid], " ")
}

func podWithThings(uid string, n int64) *v1.Pod {
	q := v1.ResourceList{fake.Thing: *resource.NewQuantity(n, resource.DecimalSI)}
	p := simplePod(uid, v1.Container{Name: "app", Image: "hello:1",
		Resources: v1.ResourceRequirements{Requests: q, Limits: q}}, v1.Container{Name: "other", Image: "hello:1"})
	p.Spec.RestartPolicy = v1.RestartPolicyNever
	return p
}

// newNodeWithThings returns a node with a device plugin that has count devices.
func newNodeWithThings(t *testing.T, count int) (*node, *fake.Plugins, *envRecorder) {
	n := newNode(t)
	plugins, rt := &fake.Plugins{Number: count}, &envRecorder{Runtime: n.rt, all: map[string][]string{}}
	n.cfg.Deps.Plugins, n.cfg.Deps.Runtime = plugins, rt
	n.cfg.Node = func() *v1.Node {
		return &v1.Node{Status: v1.NodeStatus{Allocatable: v1.ResourceList{fake.Thing: resource.MustParse("1"),
			v1.ResourcePods: resource.MustParse("10")}}}
	}
	return n, plugins, rt
}

// A pod gets its devices before anything of it is created, and only its requesting container sees
// them. Without free devices the pod fails with kubelet's reason. The devices are free when the
// pod's end is reported. F92
func TestDevicesOfPlugins(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n, plugins, rt := newNodeWithThings(t, 3)
		plugins.Delay("Allocate", time.Second)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(podWithThings("u1", 2))
		virtual.Wait()
		if n.rt.Count("RunPodSandbox") != 0 || n.vol.Count("MountAll") != 0 {
			t.Error("something of the pod is made before it has its devices")
		}
		time.Sleep(2 * time.Second)
		virtual.Wait()
		if got := rt.envOfPod("u1"); got != "app:THING_0 app:THING_1" {
			t.Errorf("its containers see %s", got)
		}
		n.cluster.Put(podWithThings("u2", 2))
		time.Sleep(2 * time.Second)
		virtual.Wait()
		st := n.reportedPod("u2").Status
		const why = "Pod was rejected: Allocate failed due to too few devices of example.com/thing for " +
			"container app, which is unexpected"
		if st.Phase != v1.PodFailed || st.Reason != "UnexpectedAdmissionError" || st.Message != why ||
			len(st.ContainerStatuses) > 0 {
			t.Errorf("a pod without devices: %+v", st)
		}
		if e := strings.Join(n.cluster.Events("u2"), "\n"); !strings.Contains(e, "UnexpectedAdmissionError") ||
			!strings.Contains(e, why) {
			t.Errorf("events %s", e)
		}
		if n.rt.Count("RunPodSandbox web-u2") != 0 {
			t.Error("something of it was made")
		}
		plugins.Fail("Release", errors.New("disk full"))
		n.rt.Exit("u1", "app", 0, "")
		n.rt.Exit("u1", "other", 0, "")
		virtual.Wait()
		if pods, _ := plugins.Pods(); len(pods) != 1 || n.reportedPod("u1").Status.Phase != v1.PodRunning {
			t.Errorf("the pod is reported as %s while its devices are allocated to %v",
				n.reportedPod("u1").Status.Phase, pods)
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		if pods, _ := plugins.Pods(); len(pods) != 0 || n.reportedPod("u1").Status.Phase != v1.PodSucceeded {
			t.Errorf("%s, devices are with %v", n.reportedPod("u1").Status.Phase, pods)
		}
		if h := n.reportedPod("u1").Status.ContainerStatuses[0].AllocatedResourcesStatus; len(h) != 1 ||
			len(h[0].Resources) != 2 {
			t.Errorf("which devices it had is no longer on record: %v", h)
		}
		n.cluster.Put(podWithThings("u3", 3))
		time.Sleep(2 * time.Second)
		virtual.Wait()
		if got := rt.envOfPod("u3"); got != "app:THING_0 app:THING_1 app:THING_2" {
			t.Errorf("the next pod sees %s", got)
		}
	})
}

// Changes of device health appear in the status of the containers with these devices. F92
func TestHealthOfDevices(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n, plugins, _ := newNodeWithThings(t, 2)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(podWithThings("u1", 2))
		is := func(want string) {
			t.Helper()
			time.Sleep(time.Second)
			virtual.Wait()
			var got []string
			for _, cs := range n.reportedPod("u1").Status.ContainerStatuses {
				for _, s := range cs.AllocatedResourcesStatus {
					for _, d := range s.Resources {
						got = append(got, fmt.Sprint(cs.Name, ":", s.Name, ":", d.ResourceID, ":", d.Health))
					}
				}
			}
			if strings.Join(got, " ") != want {
				t.Errorf("%v, want %s", got, want)
			}
		}
		is("app:example.com/thing:0:Healthy app:example.com/thing:1:Healthy")
		plugins.Sick("1", true)
		is("app:example.com/thing:0:Healthy app:example.com/thing:1:Unhealthy")
		plugins.Sick("1", false)
		is("app:example.com/thing:0:Healthy app:example.com/thing:1:Healthy")
	})
}

// A pod deleted while it waits for devices is removed at once. Devices that an earlier agent
// process allocated to a removed pod are released; for a running pod the plugin is not called
// again. F92
func TestDevicesAndTheEndOfThings(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n, plugins, _ := newNodeWithThings(t, 2)
		plugins.Delay("Allocate", time.Hour)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(podWithThings("u1", 1))
		time.Sleep(time.Second)
		deletePod(n, "u1", 30)
		time.Sleep(time.Second)
		virtual.Wait()
		if _, there := n.cluster.Pod("u1"); there || plugins.Count("Release u1") == 0 {
			t.Errorf("it is there: %t; journal %v", there, plugins.Journal())
		}
		plugins.Delay("Allocate", 0)
		n.cluster.Put(podWithThings("u2", 1))
		time.Sleep(time.Second)
		virtual.Wait()
		n.stop()
		if err := plugins.Allocate(t.Context(), podWithThings("u9", 1)); err != nil {
			t.Fatal(err)
		}
		asked := plugins.Count("Allocate")
		n.startAgent()
		time.Sleep(time.Minute)
		virtual.Wait()
		if pods, _ := plugins.Pods(); fmt.Sprint(pods) != "[u2]" || plugins.Count("Allocate") != asked {
			t.Errorf("devices are with %v; journal %v", pods, plugins.Journal())
		}
	})
}

// A device that cannot be prepared delays its container, which is retried. F92
func TestDevicesThatAreNotReady(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n, plugins, _ := newNodeWithThings(t, 2)
		plugins.FailAlways("Container", errors.New("it is too hot"))
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(podWithThings("u1", 1))
		time.Sleep(time.Second)
		virtual.Wait()
		if w := n.reportedPod("u1").Status.ContainerStatuses[0].State.Waiting; w == nil ||
			w.Reason != "CreateContainerConfigError" || w.Message != "it is too hot" {
			t.Errorf("%+v", n.reportedPod("u1").Status.ContainerStatuses)
		}
		plugins.FailAlways("Container", nil)
		time.Sleep(time.Minute)
		virtual.Wait()
		if n.reportedPod("u1").Status.Phase != v1.PodRunning {
			t.Errorf("%+v", n.reportedPod("u1").Status)
		}
	})
}

// The pod's settings take precedence over a plugin's, and a plugin cannot set the agent's own
// names. F92
func TestWithPlugins(t *testing.T) {
	c := &cri.ContainerConfig{Envs: []*cri.KeyValue{{Key: "A", Value: []byte("pod")}},
		Mounts:     []*cri.Mount{{ContainerPath: "/a"}},
		CDIDevices: []*cri.CDIDevice{{Name: "v/c=1"}}, Annotations: map[string]string{criconfig.AnnotationHash: "h"}}
	criconfig.AddPluginDevices(c, agent.PluginDevices{Envs: []*cri.KeyValue{{Key: "A", Value: []byte("plugin")}},
		Mounts:  []*cri.Mount{{ContainerPath: "/b"}},
		Devices: []*cri.Device{{HostPath: "/dev/null"}}, CDI: []*cri.CDIDevice{{Name: "v/c=1"}, {Name: "v/c=2"}},
		Annotations: map[string]string{criconfig.AnnotationHash: "x", criconfig.AnnotationMessageFile: "/etc/shadow",
			criconfig.AnnotationRestartCount: "9", "example.com/a": "1"}})
	if string(c.Envs[1].Value) != "pod" || c.Mounts[1].ContainerPath != "/a" || len(c.Devices) != 1 ||
		len(c.CDIDevices) != 2 {
		t.Errorf("%+v", c)
	}
	if got := slices.Sorted(maps.Keys(c.Annotations)); fmt.Sprint(got) !=
		"[example.com/a "+criconfig.AnnotationHash+"]" || c.Annotations[criconfig.AnnotationHash] != "h" {
		t.Errorf("annotations %v", c.Annotations)
	}
}
