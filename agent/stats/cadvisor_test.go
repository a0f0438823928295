package stats

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	summary "k8s.io/kubelet/pkg/apis/stats/v1alpha1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/virtual"
)

var rewrite = flag.Bool("rewrite", false, "write the current responses to testdata")

// newDetails returns the details of a cgroup with a CPU limit, in the form of cgroup v2.
func newDetails(path string) agent.CgroupDetails {
	descriptors := uint64(12)
	return agent.CgroupDetails{Path: path, CPU: &agent.CPUDetails{User: 3e8, System: 1e8},
		Throttling: &agent.ThrottlingDetails{Periods: 40, ThrottledPeriods: 4, ThrottledTime: 25e7},
		CPULimits:  &agent.CPULimits{Shares: 512, Period: 100000, Quota: 50000},
		Memory: &agent.MemoryDetails{Cache: 300, MappedFile: 30, ActiveFile: 50, InactiveFile: 100, Kernel: 70,
			MaxUsage: 6000, OwnFaults: 5, OwnMajorFaults: 1, LimitHits: 9, OOMKills: 2,
			Events: &agent.MemEvents{High: 4, Max: 9}},
		Devices: []agent.DeviceUsage{{Name: "/dev/sda", Major: 8, ReadBytes: 4096, Reads: 1, WriteBytes: 8192,
			Writes: 2}},
		Pressure: &agent.PressureDetails{CPU: agent.StallTime{Waiting: 11, Stalled: 10},
			Memory: agent.StallTime{Waiting: 21, Stalled: 20}, IO: agent.StallTime{Waiting: 31, Stalled: 30}},
		Processes: &agent.ProcessDetails{Count: 2, Descriptors: &descriptors}, ThreadsMax: 64}
}

// newMeasureDetails returns a function that adds details to the snapshots of newMeasure.
func newMeasureDetails(asked *int) func(context.Context) (*agent.UsageSnapshot, error) {
	measure := newMeasure(asked)
	return func(ctx context.Context) (*agent.UsageSnapshot, error) {
		m, err := measure(ctx)
		machine := newDetails("/")
		machine.CPULimits, machine.Processes = nil, nil
		m.Details = &agent.UsageDetails{Machine: machine,
			MachineNetwork: []agent.InterfaceUsage{{Name: "eth1", Received: 70, Sent: 90}},
			Root:           agent.CgroupDetails{Path: "/keelson", CPU: &agent.CPUDetails{User: 1e9}},
			Pods: []agent.PodDetails{{SandboxID: "s1", CgroupDetails: newDetails("/keelson/kubepods/podu1"),
				Containers: []agent.ContainerDetails{{ID: "c1", Image: "example.com/app:v1",
					CgroupDetails: newDetails("/keelson/kubepods/podu1/c1")}}}}}
		return m, err
	}
}

// newCadvisorSource returns a Source with a disk, and a pod with measured files.
func newCadvisorSource(asked *int) *Source {
	return New(Config{NodeName: "w1", Measure: newMeasure(asked), MeasureDetails: newMeasureDetails(asked),
		Disk: func() (agent.Disk, error) {
			return agent.Disk{Capacity: 100, Available: 40, Inodes: 10, InodesFree: 4}, nil
		},
		DiskDevice: func() string { return "/dev/sda1" },
		Machine:    Machine{BootID: "b", MachineID: "m", SystemUUID: "u", CPUs: 2},
		Storage: func() map[types.UID]agent.PodStorage {
			return map[types.UID]agent.PodStorage{"u1": {At: time.Now(), Used: 9,
				Containers: map[string]agent.ContainerStorage{"app": {Layer: 3, Logs: 2}}}}
		},
		Pods: func() []*v1.Pod {
			return []*v1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "static-w1", UID: "u1"}}}
		}})
}

// readCadvisor returns the response of /metrics/cadvisor.
func readCadvisor(t *testing.T, s *Source) string {
	t.Helper()
	var out bytes.Buffer
	if err := s.Cadvisor(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// The response has the names and labels of cAdvisor's metrics. Network metrics have the labels of
// the pod's sandbox, and all other metrics of the pod those of its cgroup. F133
func TestCadvisor(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		asked := 0
		got := readCadvisor(t, newCadvisorSource(&asked))
		const file = "testdata/cadvisor.txt"
		if *rewrite {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("the response differs from %s (-rewrite writes it):\n%s", file, got)
		}
		for _, line := range []string{
			`container_cpu_usage_seconds_total{container="app",id="/keelson/kubepods/podu1/c1",` +
				`image="example.com/app:v1",name="c1",namespace="kube-system",pod="static-w1",cpu="total"} ` +
				`0.25 946684800000`,
			`container_network_receive_bytes_total{container="",id="/keelson/kubepods/podu1",image="keelson-pause",` +
				`name="s1",namespace="kube-system",pod="static-w1",interface="eth0"} 7 946684800000`,
			`container_memory_working_set_bytes{container="",id="/",image="",name="",namespace="",pod=""} ` +
				`8.388608e+06 946684800000`,
			`container_fs_usage_bytes{container="",id="/",image="",name="",namespace="",pod="",device="/dev/sda1"} ` +
				`60 946684800000`,
			`machine_cpu_cores{boot_id="b",machine_id="m",system_uuid="u"} 2`,
		} {
			if !strings.Contains(got, "\n"+line+"\n") {
				t.Errorf("the response lacks\n%s", line)
			}
		}
	})
}

// Families are sorted by name, and each is named once: Prometheus refuses a family that is split.
func TestCadvisorFamiliesAreSorted(t *testing.T) {
	for i := range cadvisorFamilies[1:] {
		if a, b := cadvisorFamilies[i].name, cadvisorFamilies[i+1].name; a >= b {
			t.Errorf("%s is before %s", a, b)
		}
	}
}

// sampleValue returns the value and the timestamp of a metric's only line with all of the labels.
func sampleValue(t *testing.T, text, name string, labels ...string) string {
	t.Helper()
	var found []string
	for line := range strings.Lines(text) {
		head, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if ok && strings.HasPrefix(head, name+"{") && !slices.ContainsFunc(labels, func(l string) bool {
			return !strings.Contains(head, l)
		}) {
			found = append(found, value)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%s with %q has the values %q", name, labels, found)
	}
	return found[0]
}

// All endpoints report the same measurement. A request for details measures again if the last
// measurement has none, and the CPU rates of the summary are not taken over that short time. F133
func TestEndpointsReportOneMeasurement(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		asked := 0
		s := newCadvisorSource(&asked)
		read := func() (resource, cadvisor string, pod summary.PodStats) {
			var one, three bytes.Buffer
			cadvisor = readCadvisor(t, s)
			if err := errors.Join(s.Resource(t.Context(), &one), s.Summary(t.Context(), &three, false)); err != nil {
				t.Fatal(err)
			}
			var out summary.Summary
			if err := json.Unmarshal(three.Bytes(), &out); err != nil {
				t.Fatal(err)
			}
			return one.String(), cadvisor, out.Pods[0]
		}
		if _, err := s.Sample(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(MinInterval) // virtual time
		if _, err := s.Sample(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		resource, cadvisor, pod := read()
		if asked != 3 {
			t.Errorf("measured %d times, want 3", asked)
		}
		for _, c := range []struct{ name, label string }{{"container_cpu_usage_seconds_total", `cpu="total"`},
			{"container_memory_working_set_bytes", ""}} {
			if a, b := sampleValue(t, resource, c.name, `container="app"`),
				sampleValue(t, cadvisor, c.name, `container="app"`, c.label); a != b {
				t.Errorf("%s: %s in /metrics/resource, %s in /metrics/cadvisor", c.name, a, b)
			}
		}
		if want := fmt.Sprint(float64(*pod.Containers[0].CPU.UsageCoreNanoSeconds)/1e9, " ",
			pod.Containers[0].CPU.Time.UnixMilli()); sampleValue(t, cadvisor, "container_cpu_usage_seconds_total",
			`container="app"`) != want {
			t.Errorf("/stats/summary reports %s", want)
		}
		if r := pod.CPU.UsageNanoCores; r == nil || *r != 5e7 { // half a second in MinInterval
			t.Errorf("CPU rate %v", r)
		}
		time.Sleep(MinInterval - time.Millisecond)
		if again := readCadvisor(t, s); again != cadvisor || asked != 3 {
			t.Errorf("measured %d times within MinInterval", asked)
		}
		time.Sleep(time.Minute)
		if _, next, pod := read(); next == cadvisor || asked != 4 || *pod.CPU.UsageNanoCores >= 5e7 {
			t.Errorf("measured %d times, rate %d", asked, *pod.CPU.UsageNanoCores)
		}
	})
}

// A failed measurement is reported in a metric.
func TestCadvisorFailure(t *testing.T) {
	s := New(Config{NodeName: "w1", MeasureDetails: func(context.Context) (*agent.UsageSnapshot, error) {
		return nil, errors.New("no cgroups")
	}})
	if got := readCadvisor(t, s); !strings.Contains(got, "\ncontainer_scrape_error 1\n") ||
		strings.Contains(got, "container_last_seen") {
		t.Errorf("got %s", got)
	}
}

// A node that is a share of its machine reports the usage and the details of its cgroup as those of
// the machine.
func TestCadvisorOfShare(t *testing.T) {
	asked := 0
	s := newCadvisorSource(&asked)
	s.cfg.Share, s.cfg.Memory = true, 32<<20
	got := readCadvisor(t, s)
	if v := sampleValue(t, got, "container_cpu_usage_seconds_total", `id="/"`); !strings.HasPrefix(v, "1 ") {
		t.Errorf("CPU time of the node: %s", v)
	}
	if v := sampleValue(t, got, "container_cpu_user_seconds_total", `id="/"`); !strings.HasPrefix(v, "1 ") {
		t.Errorf("user time of the node: %s", v)
	}
	if v := sampleValue(t, got, "machine_memory_bytes", ""); v != "3.3554432e+07" {
		t.Errorf("memory of the node: %s", v)
	}
}

// A response for a full node allocates little memory.
func BenchmarkCadvisor(b *testing.B) {
	asked := 0
	base, err := newMeasureDetails(&asked)(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	pod, details := base.Pods[0], base.Details.Pods[0]
	base.Pods, base.Details.Pods = nil, nil
	for i := range 110 {
		pod.UID, pod.Name = types.UID(fmt.Sprint(i)), fmt.Sprintf("pod-%d", i)
		base.Pods, base.Details.Pods = append(base.Pods, pod), append(base.Details.Pods, details)
	}
	s := newCadvisorSource(&asked)
	s.cfg.MeasureDetails = func(context.Context) (*agent.UsageSnapshot, error) { return base, nil }
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Cadvisor(b.Context(), discard{}); err != nil {
			b.Fatal(err)
		}
	}
}
