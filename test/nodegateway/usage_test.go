package nodegateway_test

import (
	"fmt"
	"testing"
	"time"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

func usedBy(cpu uint64) *agent.NodeAverageUsage {
	u := agent.AverageUsage{CPU: cpu, Memory: 1 << 20, Window: 15 * time.Second}
	return &agent.NodeAverageUsage{At: time.Now(), Node: &u, Pods: []agent.PodAverageUsage{
		{UID: "u1", Containers: []agent.ContainerAverageUsage{{Name: "app", AverageUsage: u}}}}}
}

// awaitUsage waits until a replica has the reported usage of a node.
func (b *testEnv) awaitUsage(replica, node string, cpu uint64) {
	b.t.Helper()
	b.awaitCondition(fmt.Sprintf("%s has the usage of %s", replica, node), func() error {
		got := b.replicas[replica].fleet.NodeUsages()[node]
		if got == nil || got.Node == nil || got.Node.CPU != cpu || len(got.Pods["u1"]) != 1 {
			return fmt.Errorf("it has %+v", got)
		}
		return nil
	})
}

// Every replica receives a node's usage: the one with its session, the others, and one that starts
// later. Each responds for all nodes.
func TestEveryReplicaKnowsTheUsage(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", "True")
	n.ReportUsage(usedBy(250))
	b.awaitUsage("cp1", "w1", 250)
	b.awaitUsage("cp2", "w1", 250)
	b.stopReplica("cp2")
	b.startReplica("cp2")
	b.awaitUsage("cp2", "w1", 250)
}

// Invalid usage reports of a raw client are distinguished from valid ones and dropped, and its
// stream continues: later reports are accepted.
func TestWrongUsageIsDropped(t *testing.T) {
	b := newTestEnv(t, "cp1")
	c := b.rawClient("w1", b.replicas["cp1"].address)
	s, err := c.Standby(b.ctx)
	if err != nil {
		t.Fatal(err)
	}
	say := func(m *fleetv1.StandbyUp) {
		t.Helper()
		if err := s.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	say(&fleetv1.StandbyUp{Kind: &fleetv1.StandbyUp_Hello{Hello: &fleetv1.StandbyHello{NodeName: "w1"}}})
	used := func(cpu uint64, pods int) *fleetv1.StandbyUp {
		u := &fleetv1.Used{CpuNano: cpu, Memory: 1, WindowNano: 1}
		m := &fleetv1.NodeUsage{Node: u}
		for i := range pods {
			m.Pods = append(m.Pods, &fleetv1.PodUsage{Uid: fmt.Sprintf("u%d", i+1),
				Containers: []*fleetv1.ContainerUsage{{Name: "c", Used: u}}})
		}
		return &fleetv1.StandbyUp{Kind: &fleetv1.StandbyUp_Usage{Usage: m}}
	}
	say(&fleetv1.StandbyUp{}) // of a later release with more fields
	say(used(1<<63, 1))
	say(used(5, 50_000))
	say(used(7, 1))
	b.awaitUsage("cp1", "w1", 7)
	if got := b.replicas["cp1"].fleet.NodeUsages(); len(got) != 1 {
		t.Errorf("what is known: %v", got)
	}
}
