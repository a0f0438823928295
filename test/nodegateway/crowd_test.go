package nodegateway_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// P6: sixty nodes on three replicas; one replica ends under load. Every node keeps being Ready, every pod reaches its node, every
// status arrives.
func TestCrowd(t *testing.T) { crowd(t, 60, 300) }

// The same with as many nodes as the race detector lets enrol in seconds: it makes each handshake ten times dearer.
func TestSmallCrowd(t *testing.T) { crowd(t, 12, 300) }

func crowd(t *testing.T, nodes, pods int) {
	b := newBedWith(t, clocks{}, "cp1", "cp2", "cp3") // production's clocks: what is shown is that none of them runs out
	for i := range 50 {
		b.create(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("s", i)},
			Spec: v1.ServiceSpec{ClusterIP: v1.ClusterIPNone, Ports: []v1.ServicePort{{Port: 80}}}})
	}
	all := make([]*node, nodes)
	began := time.Now()
	for i := range all {
		all[i] = b.join(fmt.Sprint("w", i), nil)
	}
	// To enrol so many takes a slow machine a while of its processors, and who looks takes some of that.
	for _, n := range all {
		b.within(2*patience, 50*time.Millisecond, "node "+n.name, b.isReady(n.name, v1.ConditionTrue))
	}
	t.Logf("%d nodes joined within %s", nodes, time.Since(began).Round(time.Millisecond))
	if nodes >= 60 { // fewer may all find one replica first by chance
		evenly(t, b, all)
	}
	began = time.Now()
	made := make([]*v1.Pod, pods)
	for i := range made {
		made[i] = b.pod(fmt.Sprint("p", i), all[i%nodes].name, nil)
		if i == pods/2 {
			b.kill("cp2")
		}
	}
	for i, p := range made {
		n := all[i%nodes]
		n.PodStatus(report(n.awaitPod(b, p.UID), v1.PodRunning, ""))
	}
	for _, p := range made {
		b.eventually("status of "+p.Name, podIs(b, p.Name, v1.PodRunning))
	}
	t.Logf("%d pods delivered and reported within %s, with a replica lost in between", pods, time.Since(began).Round(time.Millisecond))
	for _, n := range all {
		if got := b.ready(n.name); got != v1.ConditionTrue {
			t.Errorf("node %s is Ready=%s", n.name, got)
		}
		if len(n.Services()) != 50 {
			t.Errorf("node %s holds %d services", n.name, len(n.Services()))
		}
	}
	b.eventually("every node with a session", func() error {
		for _, n := range all {
			if b.holder(n.name) == nil {
				return errors.New(n.name + " has none")
			}
		}
		return nil
	})
}

// evenly sees that no replica has nearly all sessions: each agent asks the replicas in an order of its own.
func evenly(t *testing.T, b *bed, all []*node) {
	t.Helper()
	of := map[string]int{}
	for _, n := range all {
		if r := b.holder(n.name); r != nil {
			of[r.name]++
		}
	}
	t.Logf("sessions of each replica: %v", of)
	for _, name := range []string{"cp1", "cp2", "cp3"} {
		if of[name] < len(all)/10 {
			t.Errorf("replica %s has %d of %d sessions", name, of[name], len(all))
		}
	}
}
