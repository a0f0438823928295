package report

import (
	"strings"
	"testing"
	"time"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

func usageMessage(change func(*fleetv1.NodeUsage)) *fleetv1.NodeUsage {
	of := func(cpu uint64) *fleetv1.Used {
		return &fleetv1.Used{CpuNano: cpu, Memory: 4 << 20, WindowNano: int64(15 * time.Second)}
	}
	m := &fleetv1.NodeUsage{AgeNano: int64(2 * time.Second), Node: of(2e9), Pods: []*fleetv1.PodUsage{
		{Uid: "u1", Containers: []*fleetv1.ContainerUsage{{Name: "app", Used: of(25e7)}}}}}
	if change != nil {
		change(m)
	}
	return m
}

// A usage report is kept, on this replica's clock, until the next one or until it is too old.
func TestUsageIsKeptWhileFresh(t *testing.T) {
	u, now := NewUsageReports(), time.Unix(1000, 0)
	if err := u.RecordUsage("w1", usageMessage(nil), now); err != nil {
		t.Fatal(err)
	}
	got := u.FreshReports(now)["w1"]
	if got == nil || !got.At.Equal(now.Add(-2*time.Second)) || got.Node == nil || got.Node.CPU != 2e9 {
		t.Fatalf("remembered: %+v", got)
	}
	if c := got.Pods["u1"]; len(c) != 1 || c[0].Name != "app" || c[0].CPU != 25e7 || c[0].Memory != 4<<20 ||
		c[0].Window != 15*time.Second {
		t.Errorf("containers of u1: %+v", c)
	}
	if err := u.RecordUsage("w1", usageMessage(nil), now.Add(usageMinInterval/2)); err == nil {
		t.Error("a node may tell as often as it likes")
	}
	later := now.Add(15 * time.Second)
	if err := u.RecordUsage("w1", usageMessage(func(m *fleetv1.NodeUsage) {
		m.Pods, m.Node = nil, nil
	}), later); err != nil {
		t.Fatal(err)
	}
	if got := u.FreshReports(later)["w1"]; got == nil || got.Node != nil || len(got.Pods) != 0 {
		t.Errorf("after the next message: %+v", got)
	}
	if got := u.FreshReports(later.Add(usageMaxAge)); len(got) != 0 || len(u.nodes) != 0 {
		t.Errorf("old figures are still shown: %v", got)
	}
}

// A usage report with impossible values is dropped as a whole, and the previous one stays.
func TestUsageBeyondBoundsIsDropped(t *testing.T) {
	long := strings.Repeat("x", maxUsageName+1)
	for name, spoil := range map[string]func(*fleetv1.NodeUsage){
		"from the future":     func(m *fleetv1.NodeUsage) { m.AgeNano = -1 },
		"old":                 func(m *fleetv1.NodeUsage) { m.AgeNano = int64(usageMaxAge) + 1 },
		"processors":          func(m *fleetv1.NodeUsage) { m.Node.CpuNano = maxUsageValue + 1 },
		"memory":              func(m *fleetv1.NodeUsage) { m.Pods[0].Containers[0].Used.Memory = maxUsageValue + 1 },
		"no window":           func(m *fleetv1.NodeUsage) { m.Node.WindowNano = 0 },
		"negative window":     func(m *fleetv1.NodeUsage) { m.Node.WindowNano = -1 },
		"long window":         func(m *fleetv1.NodeUsage) { m.Node.WindowNano = int64(2 * time.Hour) },
		"a container of none": func(m *fleetv1.NodeUsage) { m.Pods[0].Containers[0].Used = nil },
		"long name":           func(m *fleetv1.NodeUsage) { m.Pods[0].Containers[0].Name = long },
		"long UID":            func(m *fleetv1.NodeUsage) { m.Pods[0].Uid = long },
		"pods":                func(m *fleetv1.NodeUsage) { m.Pods = make([]*fleetv1.PodUsage, maxUsagePods+1) },
		"containers": func(m *fleetv1.NodeUsage) {
			m.Pods[0].Containers = make([]*fleetv1.ContainerUsage, maxUsageContainers+1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			u, now := NewUsageReports(), time.Unix(1000, 0)
			if err := u.RecordUsage("w1", usageMessage(nil), now); err != nil {
				t.Fatal(err)
			}
			now = now.Add(15 * time.Second)
			if err := u.RecordUsage("w1", usageMessage(spoil), now); err == nil {
				t.Error("taken")
			}
			if got := u.FreshReports(now)["w1"]; got == nil || got.Node.CPU != 2e9 {
				t.Errorf("what was known is now %+v", got)
			}
		})
	}
	if err := NewUsageReports().RecordUsage("w1", nil, time.Now()); err != nil {
		t.Errorf("an empty message says nothing, which is not wrong: %v", err)
	}
}
