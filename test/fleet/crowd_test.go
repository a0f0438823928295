package fleet_test

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
func TestCrowd(t *testing.T) {
	const nodes, pods = 60, 300
	b := newBedWith(t, clocks{}, "cp1", "cp2", "cp3") // production's clocks: what is shown is that none of them runs out
	for i := range 50 {
		b.create(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("s", i)},
			Spec: v1.ServiceSpec{ClusterIP: v1.ClusterIPNone, Ports: []v1.ServicePort{{Port: 80}}}})
	}
	crowd := make([]*node, nodes)
	began := time.Now()
	for i := range crowd {
		crowd[i] = b.join(fmt.Sprint("w", i), nil)
	}
	for _, n := range crowd {
		b.awaitReady(n.name, v1.ConditionTrue)
	}
	t.Logf("%d nodes joined within %s", nodes, time.Since(began).Round(time.Millisecond))
	began = time.Now()
	all := make([]*v1.Pod, pods)
	for i := range all {
		all[i] = b.pod(fmt.Sprint("p", i), crowd[i%nodes].name, nil)
		if i == pods/2 {
			b.kill("cp2")
		}
	}
	for i, p := range all {
		n := crowd[i%nodes]
		n.PodStatus(report(n.awaitPod(b, p.UID), v1.PodRunning, ""))
	}
	for _, p := range all {
		b.eventually("status of "+p.Name, podIs(b, p.Name, v1.PodRunning))
	}
	t.Logf("%d pods delivered and reported within %s, with a replica lost in between", pods, time.Since(began).Round(time.Millisecond))
	for _, n := range crowd {
		if got := b.ready(n.name); got != v1.ConditionTrue {
			t.Errorf("node %s is Ready=%s", n.name, got)
		}
		if len(n.Services()) != 50 {
			t.Errorf("node %s holds %d services", n.name, len(n.Services()))
		}
	}
	b.eventually("every node with a session", func() error {
		for _, n := range crowd {
			if b.holder(n.name) == nil {
				return errors.New(n.name + " has none")
			}
		}
		return nil
	})
}
