package session

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/virtual"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// standbyRecorder records the messages sent on a standby stream.
type standbyRecorder struct {
	grpc.ClientStream
	sent chan *fleetv1.StandbyUp
}

func (u standbyRecorder) Send(m *fleetv1.StandbyUp) error     { u.sent <- m; return nil }
func (u standbyRecorder) Recv() (*fleetv1.StandbyDown, error) { panic("nothing is received here") }
func (u standbyRecorder) nextUsage() *fleetv1.NodeUsage       { return (<-u.sent).GetUsage() }
func newStandbyRecorder() standbyRecorder {
	return standbyRecorder{sent: make(chan *fleetv1.StandbyUp, 4)}
}
func newUsed(cpu uint64) agent.AverageUsage {
	return agent.AverageUsage{CPU: cpu, Memory: 5, Window: time.Second}
}
func newNodeUsed(at time.Time, pods ...agent.PodAverageUsage) *agent.NodeAverageUsage {
	n := newUsed(7)
	return &agent.NodeAverageUsage{At: at, Node: &n, Pods: pods}
}

// Each replica receives new usage at once. A replica that connects later receives the newest usage
// with its age.
func TestReplicasAreToldWhatWasUsed(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		s := New(Config{NodeName: "w1"})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		early, late := newStandbyRecorder(), newStandbyRecorder()
		go s.sendUsage(ctx, &standbySender{stream: early})
		virtual.Wait()
		if len(early.sent) != 0 {
			t.Fatal("a usage report was sent before the first measurement")
		}
		s.ReportUsage(newNodeUsed(time.Now(), agent.PodAverageUsage{UID: "u1",
			Containers: []agent.ContainerAverageUsage{{Name: "app", AverageUsage: newUsed(3)}}}))
		m := early.nextUsage()
		if m.GetAgeNano() != 0 || m.GetNode().GetCpuNano() != 7 || len(m.GetPods()) != 1 || m.Pods[0].Uid != "u1" {
			t.Fatalf("usage report: %v", m)
		}
		if c := m.Pods[0].Containers; len(c) != 1 || c[0].Name != "app" || c[0].Used.CpuNano != 3 ||
			c[0].Used.Memory != 5 || c[0].Used.WindowNano != int64(time.Second) {
			t.Errorf("containers: %v", c)
		}
		time.Sleep(3 * time.Second)
		go s.sendUsage(ctx, &standbySender{stream: late})
		if age := late.nextUsage().GetAgeNano(); age != int64(3*time.Second) {
			t.Errorf("a replica that connects 3 s later gets usage with age %v", time.Duration(age))
		}
		s.ReportUsage(newNodeUsed(time.Now()))
		if a, b := early.nextUsage(), late.nextUsage(); len(a.GetPods()) != 0 || len(b.GetPods()) != 0 {
			t.Errorf("told: %v, %v", a, b)
		}
	})
}
