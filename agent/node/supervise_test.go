package node

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/virtual"
)

// failingPart is a part that fails at once while an error is set.
type failingPart struct{ why atomic.Pointer[string] }

func (w *failingPart) setFailure(why string) { w.why.Store(&why) }

func (w *failingPart) Run(ctx context.Context, _ agent.Objects, _ agent.Reporter) error {
	if why := w.why.Load(); why != nil && *why != "" {
		return errors.New(*why)
	}
	<-ctx.Done()
	return ctx.Err()
}

// A failed part sets a condition of the node and is restarted. Pods start and restart meanwhile,
// and the node stays ready. When the part runs again, the condition is false.
func TestPartFails(t *testing.T) {
	dir := t.TempDir()
	virtual.Test(t, func(t *testing.T) {
		cfg, c, rt := fakeConfig("w1", dir)
		proxy, side := &failingPart{}, &failingPart{}
		proxy.setFailure("Service rules need nftables: install nft")
		side.setFailure("no such thing: modprobe it")
		cfg.Services.Proxy = proxy
		cfg.Parts.Extra = map[string]func(context.Context, agent.Objects, agent.Reporter) error{"udp flows": side.Run}
		n, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- n.Run(ctx) }()
		time.Sleep(time.Minute)
		virtual.Wait()
		for cond, want := range map[v1.NodeConditionType]string{
			v1.NodeNetworkUnavailable: "proxy: Service rules need nftables: install nft",
			NodeDegraded:              "udp flows: no such thing: modprobe it"} {
			if got := condition(c.NodeFacts(), cond); got.Status != v1.ConditionTrue || got.Message != want {
				t.Errorf("%s: %+v", cond, got)
			}
		}
		if !readyNode(c) {
			t.Errorf("the node is not ready: %+v", condition(c.NodeFacts(), v1.NodeReady))
		}
		c.Put(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", UID: "u"},
			Spec: v1.PodSpec{RestartPolicy: v1.RestartPolicyAlways,
				Containers: []v1.Container{{Name: "app", Image: "hello:1"}}}})
		virtual.Wait()
		if readyPods(c) != 1 {
			t.Error("no pod starts while a part fails")
		}
		if err := rt.Exit("u", "app", 1, ""); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		virtual.Wait()
		if p, _ := c.Pod("u"); readyPods(c) != 1 || p.Status.ContainerStatuses[0].RestartCount != 1 {
			t.Errorf("no container restarts while a part fails: %+v", p.Status.ContainerStatuses)
		}
		proxy.setFailure("")
		side.setFailure("")
		time.Sleep(time.Minute)
		virtual.Wait()
		for _, cond := range []v1.NodeConditionType{v1.NodeNetworkUnavailable, NodeDegraded} {
			if got := condition(c.NodeFacts(), cond); got.Status != v1.ConditionFalse {
				t.Errorf("after the cure: %+v", got)
			}
		}
		stop()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// Without a runtime or images no pod can run. The node is then not ready, with the reason. A single
// failure is not reported.
func TestVitalPartFails(t *testing.T) {
	cfg, _, _ := fakeConfig("w1", t.TempDir())
	f, tr := newNodeFacts(&cfg), newPartFailures()
	tr.setFailure(partImages, "the disk is full")
	tr.setFailure("csi", "it hangs")
	var o observation
	f.setFailures(&o, tr)
	n := f.composeNode(o, nil, time.Now())
	if got := condition(n, v1.NodeReady); got.Status != v1.ConditionFalse || got.Message != "images: the disk is full" {
		t.Errorf("%+v", got)
	}
	if got := condition(n, NodeDegraded); got.Status != v1.ConditionTrue || got.Message != "csi: it hangs" {
		t.Errorf("%+v", got)
	}
	cfg.PodNetwork.isForeign = func() bool { return true }
	if got := condition(f.composeNode(o, nil, time.Now()), v1.NodeNetworkUnavailable); got.Type != "" {
		t.Errorf("it speaks of a network that is somebody else's: %+v", got)
	}
}

// Pod networks are checked at intervals. A failed check becomes one event of the pod, and
// attachments without a pod are released.
func TestPodNetworksAreTended(t *testing.T) {
	dir := t.TempDir()
	virtual.Test(t, func(t *testing.T) {
		cfg, c, rt := fakeConfig("w1", dir)
		n, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		script := rt.Network.(*fake.Network)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- n.Run(ctx) }()
		host := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "h", Namespace: "default", UID: "u2"},
			Spec: v1.PodSpec{HostNetwork: true, Containers: []v1.Container{{Name: "app", Image: "hello:1"}}}}
		c.Put(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", UID: "u"},
			Spec: v1.PodSpec{Containers: []v1.Container{{Name: "app", Image: "hello:1"}}}}, host)
		time.Sleep(networkCheckInterval + time.Second)
		virtual.Wait()
		if script.Count("Check") != 1 || script.Count("GC") != 1 {
			t.Errorf("after one interval: %v", script.Journal())
		}
		script.FailAlways("Check", errors.New("eth0 has lost its address"))
		script.Fail("GC", errors.New("a plugin hangs"), errors.New("a plugin hangs"))
		time.Sleep(3 * networkCheckInterval)
		virtual.Wait()
		told := slices.DeleteFunc(c.Events("u"), func(e string) bool {
			return !strings.Contains(e, "NetworkCheckFailed")
		})
		if len(told) != 1 || !strings.Contains(told[0], "eth0 has lost its address") {
			t.Errorf("told: %v", told)
		}
		if got := script.Count("GC"); got < 5 {
			t.Errorf("GC was tried %d times", got)
		}
		stop()
		<-done
	})
}
