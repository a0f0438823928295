package nodegateway_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

// Events count up instead of multiplying; stage times arrive on the replica's clock.
func TestEventsAndStages(t *testing.T) {
	b := newTestEnv(t, "cp1")
	n := b.startAgent("w1", nil)
	p := b.createPod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	for range 5 {
		n.Event(&v1.Event{
			ObjectMeta:     metav1.ObjectMeta{Namespace: "default"},
			InvolvedObject: v1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "p", UID: p.UID},
			Type:           v1.EventTypeWarning, Reason: "BackOff", Message: "again",
		})
	}
	b.awaitCondition("event", func() error {
		list, err := client.List[*v1.Event](b.ctx, b.client, "default", metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(list) != 1 || list[0].Count != 5 {
			return fmt.Errorf("%d events, the first counts %d", len(list), append(list, &v1.Event{})[0].Count)
		}
		return nil
	})
	// The replica knows the agent's clock by the heartbeat that was quickest: on a busy machine that is not the first.
	sent := 0
	b.awaitCondition("a stage at its time", func() error {
		trace := fmt.Sprintf("00-0123456789abcdef01234567%08x-0123456789abcdef-01", sent)
		sent++
		began := time.Now()
		n.Stages(trace, "pod/default/p", []agent.StageTime{{Name: "sandbox", Start: began, Duration: time.Millisecond}})
		var got []api.Stage
		b.awaitCondition("stage", func() error {
			if got = b.replicas["cp1"].timeline.StagesOfTrace(api.TraceID(trace)); len(got) != 1 {
				return fmt.Errorf("%d stages", len(got))
			}
			return nil
		})
		if off := got[0].Start.Sub(began).Abs(); off > 20*time.Millisecond || got[0].Actor != "agent/w1" {
			return fmt.Errorf("stage %+v is %s off", got[0], off)
		}
		return nil
	})
}

// P20: a terminating pod behind a Service may be stopped once every node's proxy has applied its removal, and not before.
// No clock opens the gate or takes a node for lost here: a busy machine must not look like proxies that have answered.
func TestStopGate(t *testing.T) {
	b := newTestEnvWith(t, timeouts{heartbeat: heartbeat, suspect: time.Hour, grace: time.Hour, stopGate: time.Hour},
		"cp1",
		"cp2")
	w1, w2 := b.startAgent("w1", nil), b.startAgent("w2", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.awaitReady("w2", v1.ConditionTrue)
	p := b.createPod("p", "w1", nil)
	alone := b.createPod("alone", "w1", nil)
	yes, no := true, false
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "svc-1",
			Labels: map[string]string{discoveryv1.LabelServiceName: "svc"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{
			Addresses: []string{"10.0.1.2"}, Conditions: discoveryv1.EndpointConditions{Ready: &yes},
			TargetRef: &v1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "p", UID: p.UID},
		}},
	}
	slice, err := client.Create(b.ctx, b.client, slice)
	if err != nil {
		t.Fatal(err)
	}
	proxy := func(n *node) { n.ProxyApplied(n.Revision()) }
	seen := func(n *node) { // the slice, and the revision, which comes after it
		t.Helper()
		rev, err := strconv.ParseUint(slice.ResourceVersion, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		b.awaitCondition("slice on "+n.name, func() error {
			if s, ok := n.EndpointSlice("default", "svc-1"); !ok || s.ResourceVersion != slice.ResourceVersion ||
				n.Revision() < rev {
				return fmt.Errorf("it has %v and shows revision %d of %d", s, n.Revision(), rev)
			}
			return nil
		})
	}
	seen(w1)
	seen(w2)
	proxy(w1)
	proxy(w2)
	n := int64(30)
	for _, name := range []string{"p", "alone"} {
		if err := client.Delete[*v1.Pod](b.ctx, b.client, "default", name,
			metav1.DeleteOptions{GracePeriodSeconds: &n}); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	select {
	case <-w1.StopGate(alone.UID):
		t.Logf("a pod in no slice: gate after %s", time.Since(began))
	case <-time.After(patience):
		t.Error("a pod in no slice was not let go before its gate's bound")
	}
	slice = slice.DeepCopy()
	slice.Endpoints[0].Conditions.Ready = &no
	if slice, err = client.Update(b.ctx, b.client, slice); err != nil {
		t.Fatal(err)
	}
	seen(w1)
	seen(w2)
	proxy(w1)
	select {
	case <-w1.StopGate(p.UID):
		t.Error("the gate opened though a proxy may still route to the pod")
	case <-time.After(100 * time.Millisecond):
	}
	proxy(w2)
	select {
	case <-w1.StopGate(p.UID):
		t.Logf("gate opened %s after the deletion", time.Since(began))
	case <-time.After(patience):
		t.Error("the gate stayed closed")
	}
}

// P20: a proxy that never answers cannot hold a pod for ever.
func TestStopGateIsBounded(t *testing.T) {
	b := newTestEnvWith(t, steady, "cp1", "cp2") // the gate as in production
	w1 := b.startAgent("w1", nil)
	b.startAgent("w2", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.awaitReady("w2", v1.ConditionTrue)
	q := b.createPod("q", "w1", nil)
	yes, n := true, int64(30)
	if _, err := client.Create(b.ctx, b.client, &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "svc-2",
			Labels: map[string]string{discoveryv1.LabelServiceName: "svc"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{
			Addresses: []string{"10.0.1.2"}, Conditions: discoveryv1.EndpointConditions{Ready: &yes},
			TargetRef: &v1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "q", UID: q.UID},
		}},
	}); err != nil {
		t.Fatal(err)
	}
	b.awaitCondition("the slice on w1", func() error {
		if len(w1.EndpointSlices()) != 1 {
			return errors.New("not there")
		}
		return nil
	})
	began := time.Now()
	if err := client.Delete[*v1.Pod](b.ctx, b.client, "default", "q",
		metav1.DeleteOptions{GracePeriodSeconds: &n}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-w1.StopGate(q.UID):
		// That it is a second and no more, fleet's own test of the gate shows on a clock that does not depend on the machine.
		if took := time.Since(began); took < 800*time.Millisecond {
			t.Errorf("the bound of 1 s took %s", took)
		}
	case <-time.After(patience):
		t.Error("the gate has no bound")
	}
}

// An idle cluster writes nothing: heartbeats stay in memory.
func TestIdleWritesNothing(t *testing.T) {
	// a stall of the machine loses no node
	b := newTestEnvWith(t, timeouts{heartbeat: heartbeat, suspect: time.Minute, grace: time.Minute}, "cp1", "cp2")
	n := b.startAgent("w1", nil)
	p := b.createPod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	n.PodStatus(podStatus(p, v1.PodRunning, ""))
	b.awaitCondition("status", podHasPhase(b, "p", v1.PodRunning))
	b.awaitReady("w1", v1.ConditionTrue)
	b.awaitLeaseOwned("w1")
	before := b.writes.Load()
	ctx, cancel := context.WithTimeout(b.ctx, 10*heartbeat)
	defer cancel()
	<-ctx.Done() // the measured time itself
	if wrote := b.writes.Load() - before; wrote != 0 {
		t.Errorf("ten heartbeats of an idle node made %d writes; the last was %s", wrote, b.lastWrite.Load())
	}
	if got := b.readyStatus("w1"); got != v1.ConditionTrue {
		t.Errorf("the node was lost while idle: Ready=%s", got)
	}
}
