package pod

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/agent/pod/criconfig"
	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/internal/virtual"
)

// node is a simulated node in virtual time.
type node struct {
	t       *testing.T
	rt      *fake.Runtime
	img     *fake.Images
	net     *fake.Network
	vol     *fake.Volumes
	dev     *fake.Devices
	cluster *fake.Cluster
	cfg     Config
	set     *Set // the set of the running agent
	stop    func()
}

// noSubPaths mounts nothing: subPaths are tested with real mounts in subpath_test.go.
type noSubPaths struct{}

func (noSubPaths) Bind(_ context.Context, target, volume, sub string) (string, error) {
	return target, nil
}
func (noSubPaths) Release(string) error { return nil }

// prober succeeds at once, unless the test sets other results.
type prober struct {
	script func(ctx context.Context, t agent.ProbeTarget, on func(agent.ProbeEvent))
}

func (p prober) Watch(ctx context.Context, t agent.ProbeTarget, on func(agent.ProbeEvent)) {
	if p.script != nil {
		p.script(ctx, t, on)
		return
	}
	on(agent.ProbeEvent{State: agent.ProbeState{Started: t.Container.StartupProbe == nil}})
	on(agent.ProbeEvent{State: agent.ProbeState{Started: true, Ready: true}, Probe: "readiness", OK: true,
		Start: time.Now(), Took: time.Millisecond})
	<-ctx.Done()
}

func newNode(t *testing.T) *node {
	n := &node{t: t, img: &fake.Images{}, net: &fake.Network{}, vol: &fake.Volumes{}, dev: &fake.Devices{},
		cluster: fake.NewCluster()}
	n.rt = &fake.Runtime{Network: n.net}
	for _, i := range []string{"hello:1", "tools:1"} {
		n.img.Put(i, agent.ImageConfig{})
	}
	dir := t.TempDir()
	n.cfg = Config{Identity: Identity{NodeName: "w1", HostIPs: []string{"192.0.2.1"}},
		Paths: agent.Paths{State: filepath.Join(dir, "state"), Run: filepath.Join(dir, "run"),
			Logs: filepath.Join(dir, "logs")},
		Deps: Dependencies{Runtime: n.rt, Images: n.img, Volumes: n.vol, Devices: n.dev, Objects: n.cluster,
			Reporter: n.cluster, Prober: prober{}},
		Containers: criconfig.Config{CgroupRoot: "keelson", SubPaths: noSubPaths{}, ResolvConf: os.DevNull}}
	return n
}

// startAgent starts an agent. Calling stop or start again ends it; the runtime continues.
func (n *node) startAgent() {
	if n.stop != nil {
		n.stop()
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	n.set = New(n.cfg)
	go func() { done <- n.set.Run(ctx) }()
	n.stop = func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			n.t.Errorf("Run returned %v", err)
		}
		n.stop = nil
	}
}

// recordConfirmation writes the record that a control plane confirmed the assignment in this boot.
func (n *node) recordConfirmation() {
	n.t.Helper()
	New(n.cfg).acceptConfirmation()
	if confirmed, err := podfiles.WasConfirmedInBoot(n.cfg.Paths, n.cfg.Identity.BootID); !confirmed {
		n.t.Fatal("the confirmation is not recorded", err)
	}
}

func (n *node) reportedPod(uid types.UID) *v1.Pod {
	p, ok := n.cluster.Pod(uid)
	if !ok {
		n.t.Fatalf("pod %s is not there", uid)
	}
	return p
}

func (n *node) expectStatus(uid types.UID, want string) {
	n.t.Helper()
	virtual.Wait()
	p := n.reportedPod(uid)
	if got := statusSummary(&p.Status); got != want {
		n.t.Errorf("at %s pod %s is\n %q, want\n %q", time.Now().Format("05.000"), uid, got, want)
	}
}

// expectEvents returns the events of a pod and fails unless they contain all words.
func (n *node) expectEvents(uid types.UID, words ...string) string {
	n.t.Helper()
	events := strings.Join(n.cluster.Events(uid), "\n")
	for _, want := range words {
		if !strings.Contains(events, want) {
			n.t.Errorf("events do not say %q:\n%s", want, events)
		}
	}
	return events
}

func simplePod(uid string, containers ...v1.Container) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web-" + uid, Namespace: "default", UID: types.UID(uid),
		CreationTimestamp: metav1.Now(),
		Annotations: map[string]string{
			"keelson.dev/traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}},
		Spec:   v1.PodSpec{RestartPolicy: v1.RestartPolicyAlways, NodeName: "w1", DNSPolicy: v1.DNSClusterFirst},
		Status: v1.PodStatus{Phase: v1.PodPending}}
	if len(containers) == 0 {
		containers = []v1.Container{{Name: "app", Image: "hello:1"}}
	}
	p.Spec.Containers = containers
	return p
}

func deletePod(n *node, uid types.UID, grace int64) {
	p := n.reportedPod(uid).DeepCopy()
	end := metav1.NewTime(time.Now().Add(time.Duration(grace) * time.Second))
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &end, &grace
	n.cluster.Put(p)
}

const running = "Running 10.88.0.2 PodReadyToStartContainers Initialized ContainersReady Ready; app runs, ready"

func envValue(c *cri.ContainerConfig, key string) string {
	for _, e := range c.Envs {
		if e.Key == key {
			return string(e.Value)
		}
	}
	return ""
}
