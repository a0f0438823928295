package pod

import (
	"errors"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/pod/admission"
	"keelson.dev/keelson/agent/pod/diskusage"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/internal/virtual"
)

// A pod runs with the handler of its RuntimeClass, and the sandbox records it. An event reports an
// unknown handler. A missing class is waited for.
func TestRuntimeClasses(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.Handlers = []string{"own"}
		n.startAgent()
		defer func() { n.stop() }()
		class := func(name, handler string) *nodev1.RuntimeClass {
			return &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Handler: handler}
		}
		n.cluster.Put(class("fast", "own"), class("boxed", "gvisor"))
		for uid, name := range map[string]string{"u1": "fast", "u2": "boxed", "u3": "late", "u4": ""} {
			p := simplePod(uid)
			p.Spec.RuntimeClassName = &name
			n.cluster.Put(p)
		}
		time.Sleep(2 * time.Minute)
		virtual.Wait()
		ready := func(uid string) bool {
			return strings.Contains(statusSummary(&n.reportedPod(simplePod(uid).UID).Status), " Ready;")
		}
		for uid, want := range map[string]bool{"u1": true, "u2": false, "u3": false, "u4": true} {
			if ready(uid) != want {
				t.Errorf("%s: %s", uid, statusSummary(&n.reportedPod(simplePod(uid).UID).Status))
			}
		}
		for uid, want := range map[string]string{"u2": `no runtime for handler "gvisor"`,
			"u3": `RuntimeClass "late" not found`} {
			e := strings.Join(n.cluster.Events(simplePod(uid).UID), "\n")
			if !strings.Contains(e, "FailedCreatePodSandBox") || !strings.Contains(e, want) {
				t.Errorf("%s: events do not say %s: %s", uid, want, e)
			}
		}
		list, err := n.rt.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
		if err != nil {
			t.Fatal(err)
		}
		handlers := map[string]string{}
		for _, s := range list.Items {
			handlers[s.Metadata.Uid] = s.RuntimeHandler
		}
		if len(handlers) != 2 || handlers["u1"] != "own" || handlers["u4"] != "" {
			t.Errorf("sandboxes run by %v", handlers)
		}
		n.cluster.Put(class("late", "own"))
		virtual.Wait() // the class ends the wait, not a timer
		if !ready("u3") {
			t.Errorf("with its class there: %s", statusSummary(&n.reportedPod("u3").Status))
		}
	})
}

// The overhead of the RuntimeClass is added to the pod's cgroup limits. A pod without limits gets
// none by it.
func TestOverheadOfThePodsCgroup(t *testing.T) {
	list := func(cpu, memory string) v1.ResourceList {
		return v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu), v1.ResourceMemory: resource.MustParse(memory)}
	}
	limited := simplePod("u1", v1.Container{Name: "a",
		Resources: v1.ResourceRequirements{Requests: list("1", "1Gi"), Limits: list("2", "2Gi")}})
	limited.Spec.Overhead = list("250m", "64Mi")
	if r := lifecycle.PodResources(limited); r.CpuShares != 1280 || r.CpuQuota != 225000 ||
		r.MemoryLimitInBytes != 2<<30+64<<20 {
		t.Errorf("with limits: %v", r)
	}
	if r := lifecycle.ContainerResources(limited, &limited.Spec.Containers[0], 4<<30); r.CpuShares != 1024 ||
		r.MemoryLimitInBytes != 2<<30 {
		t.Errorf("the container got the overhead: %v", r)
	}
	open := simplePod("u2")
	open.Spec.Overhead = list("250m", "64Mi")
	if r := lifecycle.PodResources(open); r.CpuShares != 256 || r.CpuQuota != 0 || r.MemoryLimitInBytes != 0 ||
		lifecycle.QOS(open) != v1.PodQOSBestEffort {
		t.Errorf("without: %v, %s", r, lifecycle.QOS(open))
	}
	if lifecycle.CPURequest(limited) != 1250 {
		t.Errorf("the tier counts %d", lifecycle.CPURequest(limited))
	}
	full := &v1.Node{Status: v1.NodeStatus{Allocatable: list("1249m", "4Gi")}}
	if stop := admission.CheckNode(limited, nil, full); stop == nil ||
		!strings.Contains(stop.Message, "cpu, requested: 1250, used: 0, capacity: 1249") {
		t.Errorf("admission: %+v", stop)
	}
	full.Status.Allocatable = list("1500m", "4Gi")
	if stop := admission.CheckNode(open, []*v1.Pod{limited}, full); stop != nil {
		t.Errorf("exactly full: %+v", stop)
	}
	limited.Spec.Containers[0].Resources.Limits[v1.ResourceEphemeralStorage] = resource.MustParse("1Mi")
	limited.Spec.Overhead[v1.ResourceEphemeralStorage] = resource.MustParse("1Mi")
	if l := diskusage.PodLimits(limited); l.Pod == nil || l.Pod.Value() != 2<<20 {
		t.Errorf("on disk: %v", l.Pod)
	}
}

// Only a missing class is retried at once: other sandbox failures keep their back-off.
func TestOnlyAMissingClassIsTriedAtOnce(t *testing.T) {
	x := newWorld(t, simplePod("u1"))
	key := (lifecycle.Action{Kind: lifecycle.CreateSandbox}).Key()
	for err, again := range map[error]bool{errNoRuntimeClass: true, errors.New("no address is left"): false} {
		x.worker.actions.recordResult(lifecycle.Action{Kind: lifecycle.CreateSandbox}, err, false)
		x.worker.retryFailedActions()
		if got := x.worker.observed.Failures[key].Retry.IsZero(); got != again {
			t.Errorf("%v: tried at once: %v", err, got)
		}
	}
}
