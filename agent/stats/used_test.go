package stats

import (
	"context"
	"testing"
	"time"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/virtual"
)

// Every 15 s the usage between two measurements is reported. The first report has no rates, except
// for containers that started during the agent's run.
func TestUseIsToldEvery15Seconds(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		asked := 0
		s := New(Config{NodeName: "w1", Measure: newMeasure(&asked)})
		ctx, cancel := context.WithCancel(t.Context())
		told, done := make(chan *agent.NodeAverageUsage, 8), make(chan error, 1)
		go func() { done <- s.ReportUsage(ctx, func(u *agent.NodeAverageUsage) { told <- u }) }()
		first := <-told
		if first.Node != nil {
			t.Errorf("a rate of one measurement: %+v", first.Node)
		}
		begin := time.Now()
		second := <-told
		if d := time.Since(begin); d != ReportInterval {
			t.Errorf("told again after %v", d)
		}
		// 10 s of CPU time on the node, 250 ms in the container, in 15 s each.
		if n := second.Node; n == nil || n.CPU != 666666666 || n.Memory != 8<<20 || n.Window != ReportInterval {
			t.Errorf("the node: %+v", second.Node)
		}
		if len(second.Pods) != 1 || second.Pods[0].UID != "u1" || len(second.Pods[0].Containers) != 1 {
			t.Fatalf("pods: %+v", second.Pods)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// newSample returns a sample of one pod with two containers.
func newSample(at time.Time, cpu time.Duration, secondStarted time.Time) *Sample {
	u := func(cpu time.Duration) agent.Usage {
		return agent.Usage{At: at, HasCPU: true, CPU: uint64(cpu), HasMemory: true, WorkingSet: 1 << 20}
	}
	return &Sample{At: at, Node: u(cpu), Pods: []agent.PodUsage{{UID: "u1", Containers: []agent.ContainerUsage{
		{Name: "a", Started: time.Unix(1, 0), Usage: u(cpu)}, {Name: "b", Started: secondStarted, Usage: u(cpu / 2)}}}}}
}

// A container that has just started has no meaningful usage. A pod with a missing container is
// omitted, because it would appear to use little. A restarted container is measured since its
// restart.
func TestPodsAreToldWhole(t *testing.T) {
	var m usageMeter
	at := time.Unix(1000, 0)
	if u := m.usageSince(newSample(at, 10*time.Second, at.Add(-time.Second))); len(u.Pods) != 0 {
		t.Errorf("a container of one second was measured: %+v", u.Pods)
	}
	at = at.Add(15 * time.Second)
	u := m.usageSince(newSample(at, 40*time.Second, at.Add(-16*time.Second)))
	if len(u.Pods) != 1 || u.Pods[0].Containers[0].CPU != 2e9 || u.Pods[0].Containers[1].CPU != 1e9 {
		t.Fatalf("%+v", u.Pods)
	}
	at = at.Add(15 * time.Second)
	u = m.usageSince(newSample(at, 40*time.Second, at.Add(-10*time.Second)))
	if len(u.Pods) != 1 || u.Pods[0].Containers[0].CPU != 0 || u.Pods[0].Containers[1].CPU != 2e9 ||
		u.Pods[0].Containers[1].Window != 10*time.Second {
		t.Fatalf("after a restart: %+v", u.Pods)
	}
	at = at.Add(15 * time.Second)
	one := newSample(at, 60*time.Second, time.Unix(1, 0))
	one.Pods[0].Containers[1].HasMemory = false
	if u := m.usageSince(one); len(u.Pods) != 0 {
		t.Errorf("a pod without the memory of a container: %+v", u.Pods)
	}
}
