package pod

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/virtual"
)

// deviceRecorder records the devices with which containers are created.
type deviceRecorder struct {
	*fake.Runtime
	mu  sync.Mutex
	all map[string][]string
}

func (g *deviceRecorder) CreateContainer(ctx context.Context, q *cri.CreateContainerRequest) (
	*cri.CreateContainerResponse, error,
) {
	g.mu.Lock()
	for _, d := range q.Config.CDIDevices {
		g.all[q.Config.Metadata.Name] = append(g.all[q.Config.Metadata.Name], d.Name)
	}
	g.mu.Unlock()
	return g.Runtime.CreateContainer(ctx, q)
}

// No container is created before the pod's devices are prepared, and each gets only its own. The
// pod's end is reported after the devices were released, because they can then be allocated again.
func TestDevicesOfAPod(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		rt := &deviceRecorder{Runtime: n.rt, all: map[string][]string{}}
		n.cfg.Deps.Runtime = rt
		n.dev.Fail("Prepare", errors.New("driver x is not there"))
		n.startAgent()
		defer func() { n.stop() }()
		claim := "c"
		p := simplePod("u1", v1.Container{Name: "one", Image: "hello:1",
			Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "gpu", Request: "a"}}}},
			v1.Container{Name: "none", Image: "hello:1"})
		p.Spec.RestartPolicy = v1.RestartPolicyNever
		p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
		n.cluster.Put(p)
		virtual.Wait()
		if e := strings.Join(n.cluster.Events("u1"), "\n"); !strings.Contains(e, "FailedPrepareDynamicResources") ||
			!strings.Contains(e, "Failed to prepare dynamic resources: driver x is not there") {
			t.Errorf("events %s", e)
		}
		if len(rt.all) > 0 || strings.Contains(statusSummary(&n.reportedPod("u1").Status), "runs") {
			t.Errorf("a container was made: %s", statusSummary(&n.reportedPod("u1").Status))
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		if got := fmt.Sprint(rt.all); got != "map[one:[fake.example.com/dev=gpu-a]]" {
			t.Errorf("devices %s", got)
		}
		for _, sick := range []bool{false, true} {
			n.dev.Sicken(sick)
			time.Sleep(time.Second)
			virtual.Wait()
			want := "[{claim:gpu [{fake.example.com/pool/gpu Healthy <nil>}]}]"
			if sick {
				want = strings.Replace(want, "Healthy", "Unhealthy", 1)
			}
			if st := n.reportedPod("u1").Status.ContainerStatuses; fmt.Sprint(st[0].AllocatedResourcesStatus) != want ||
				st[1].AllocatedResourcesStatus != nil {
				t.Errorf("health %v and %v, want %s", st[0].AllocatedResourcesStatus,
					st[1].AllocatedResourcesStatus, want)
			}
		}
		n.dev.Fail("Release", fmt.Errorf("%w: devices/x.json: remove the file", agent.ErrDamagedRecord))
		n.rt.Exit("u1", "one", 0, "")
		n.rt.Exit("u1", "none", 0, "")
		virtual.Wait()
		if pods, _ := n.dev.Pods(); len(pods) != 1 || n.reportedPod("u1").Status.Phase != v1.PodRunning {
			t.Errorf("the pod is reported as %s while its devices are allocated to %v",
				n.reportedPod("u1").Status.Phase, pods)
		}
		const why = "Failed to unprepare dynamic resources: damaged record: devices/x.json: remove the file"
		if e := strings.Join(n.cluster.Events("u1"), "\n"); !strings.Contains(e, why) {
			t.Errorf("no event has the reason why the pod does not end: %s", e)
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		if pods, _ := n.dev.Pods(); len(pods) != 0 || n.reportedPod("u1").Status.Phase != v1.PodSucceeded {
			t.Errorf("%s, devices are with %v", n.reportedPod("u1").Status.Phase, pods)
		}
	})
}

// Devices that an earlier agent process prepared for a removed pod are released.
func TestDevicesOfPodsThatAreGone(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		claim := "c"
		p := simplePod("u1")
		p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
		if _, err := n.dev.Prepare(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		n.startAgent()
		defer func() { n.stop() }()
		time.Sleep(time.Minute)
		virtual.Wait()
		if pods, err := n.dev.Pods(); err != nil || slices.Contains(pods, "u1") {
			t.Errorf("devices are with %v, %v", pods, err)
		}
	})
}
