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
func TestCrowd(t *testing.T) { checkManyNodes(t, 60, 300) }

// The same with as many nodes as the race detector lets enrol in seconds: it makes each handshake ten times dearer.
func TestSmallCrowd(t *testing.T) { checkManyNodes(t, 12, 300) }

func checkManyNodes(t *testing.T, nodes, pods int) {
	// production timeouts: the test shows that none of them expires
	b := newTestEnvWith(t, timeouts{}, "cp1", "cp2", "cp3")
	for i := range 50 {
		b.createObject(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("s", i)},
			Spec: v1.ServiceSpec{ClusterIP: v1.ClusterIPNone, Ports: []v1.ServicePort{{Port: 80}}}})
	}
	all := make([]*node, nodes)
	began := time.Now()
	for i := range all {
		all[i] = b.startAgent(fmt.Sprint("w", i), nil)
	}
	// Enrolling so many nodes takes a slow machine a while, and polling takes some of its CPU time.
	for _, n := range all {
		b.awaitWithin(2*patience, 50*time.Millisecond, "node "+n.name, b.hasReady(n.name, v1.ConditionTrue))
	}
	t.Logf("%d nodes joined within %s", nodes, time.Since(began).Round(time.Millisecond))
	if nodes >= 60 { // fewer may all find one replica first by chance
		requireSpread(t, b, all)
	}
	began = time.Now()
	made := make([]*v1.Pod, pods)
	for i := range made {
		made[i] = b.createPod(fmt.Sprint("p", i), all[i%nodes].name, nil)
		if i == pods/2 {
			b.stopReplica("cp2")
		}
	}
	for i, p := range made {
		n := all[i%nodes]
		n.PodStatus(podStatus(n.awaitPod(b, p.UID), v1.PodRunning, ""))
	}
	for _, p := range made {
		b.awaitCondition("status of "+p.Name, podHasPhase(b, p.Name, v1.PodRunning))
	}
	t.Logf("%d pods delivered and reported within %s, with a replica lost in between", pods,
		time.Since(began).Round(time.Millisecond))
	for _, n := range all {
		if got := b.readyStatus(n.name); got != v1.ConditionTrue {
			t.Errorf("node %s is Ready=%s", n.name, got)
		}
		if len(n.Services()) != 50 {
			t.Errorf("node %s holds %d services", n.name, len(n.Services()))
		}
	}
	b.awaitCondition("every node with a session", func() error {
		for _, n := range all {
			if b.sessionHolder(n.name) == nil {
				return errors.New(n.name + " has none")
			}
		}
		return nil
	})
}

// requireSpread checks that no replica has nearly all sessions: each agent tries the replicas in
// its own order.
func requireSpread(t *testing.T, b *testEnv, all []*node) {
	t.Helper()
	of := map[string]int{}
	for _, n := range all {
		if r := b.sessionHolder(n.name); r != nil {
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
