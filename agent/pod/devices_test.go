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

// A container gets the devices of the claims that it references, or of a single request, without
// duplicates.
func TestDevicesOfContainers(t *testing.T) {
	all := agent.ClaimedDevices{
		"gpu": {{Requests: []string{"big"}, CDI: []string{"v/c=1", "v/c=both"}}, {Requests: []string{"small/cheap"}, CDI: []string{"v/c=2", "v/c=both"}}},
		"nic": {{CDI: []string{"v/n=1"}}},
	}
	for want, uses := range map[string][]v1.ResourceClaim{
		"":                           nil,
		"v/c=1 v/c=both v/c=2":       {{Name: "gpu"}},
		"v/c=1 v/c=both":             {{Name: "gpu", Request: "big"}},
		"v/c=2 v/c=both":             {{Name: "gpu", Request: "small"}},
		"v/n=1":                      {{Name: "nic", Request: "any"}},
		"v/n=1 v/c=1 v/c=both v/c=2": {{Name: "nic"}, {Name: "gpu"}},
		"v/c=2 v/c=both v/n=1":       {{Name: "gpu", Request: "small"}, {Name: "nic"}, {Name: "none"}},
	} {
		var got []string
		for _, d := range devicesOf(&v1.Container{Resources: v1.ResourceRequirements{Claims: uses}}, all) {
			got = append(got, d.Name)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%v: %v, want %s", uses, got, want)
		}
	}
}

// given records the devices with which containers are created.
type given struct {
	*fake.Runtime
	mu  sync.Mutex
	all map[string][]string
}

func (g *given) CreateContainer(ctx context.Context, q *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
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
		rt := &given{Runtime: n.rt, all: map[string][]string{}}
		n.cfg.Runtime = rt
		n.dev.Fail("Prepare", errors.New("driver x is not there"))
		n.start()
		defer func() { n.stop() }()
		claim := "c"
		p := simplePod("u1", v1.Container{Name: "one", Image: "hello:1", Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "gpu", Request: "a"}}}},
			v1.Container{Name: "none", Image: "hello:1"})
		p.Spec.RestartPolicy = v1.RestartPolicyNever
		p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
		n.cluster.Put(p)
		virtual.Wait()
		if e := strings.Join(n.cluster.Events("u1"), "\n"); !strings.Contains(e, "FailedPrepareDynamicResources") || !strings.Contains(e, "Failed to prepare dynamic resources: driver x is not there") {
			t.Errorf("events %s", e)
		}
		if len(rt.all) > 0 || strings.Contains(summary(&n.pod("u1").Status), "runs") {
			t.Errorf("a container was made: %s", summary(&n.pod("u1").Status))
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
			if st := n.pod("u1").Status.ContainerStatuses; fmt.Sprint(st[0].AllocatedResourcesStatus) != want || st[1].AllocatedResourcesStatus != nil {
				t.Errorf("health %v and %v, want %s", st[0].AllocatedResourcesStatus, st[1].AllocatedResourcesStatus, want)
			}
		}
		n.dev.Fail("Release", fmt.Errorf("%w: devices/x.json: remove the file", agent.ErrDamagedRecord))
		n.rt.Exit("u1", "one", 0, "")
		n.rt.Exit("u1", "none", 0, "")
		virtual.Wait()
		if pods, _ := n.dev.Pods(); len(pods) != 1 || n.pod("u1").Status.Phase != v1.PodRunning {
			t.Errorf("the end of a pod is told (%s) while its devices are with %v", n.pod("u1").Status.Phase, pods)
		}
		const why = "Failed to unprepare dynamic resources: damaged record: devices/x.json: remove the file"
		if e := strings.Join(n.cluster.Events("u1"), "\n"); !strings.Contains(e, why) {
			t.Errorf("nobody is told why the pod does not end: %s", e)
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		if pods, _ := n.dev.Pods(); len(pods) != 0 || n.pod("u1").Status.Phase != v1.PodSucceeded {
			t.Errorf("%s, devices are with %v", n.pod("u1").Status.Phase, pods)
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
		n.start()
		defer func() { n.stop() }()
		time.Sleep(time.Minute)
		virtual.Wait()
		if pods, err := n.dev.Pods(); err != nil || slices.Contains(pods, "u1") {
			t.Errorf("devices are with %v, %v", pods, err)
		}
	})
}
