package stats

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

// newUsage returns the usage of an object with CPU time cpu.
func newUsage(cpu time.Duration) agent.Usage {
	return agent.Usage{At: time.Now(), HasCPU: true, CPU: uint64(cpu), HasMemory: true, Memory: 12 << 20,
		WorkingSet: 8 << 20, Limit: 64 << 20, RSS: 4 << 20,
		HasSwap: true, Swap: 4096, HasSwapLimit: true, SwapLimit: 8192, HasProcesses: true, Processes: 3}
}

// newMeasure returns a function that counts its calls. Each call adds a second of CPU time to the
// node, and half a second to the pod.
func newMeasure(asked *int) func(context.Context) (*agent.UsageSnapshot, error) {
	return func(context.Context) (*agent.UsageSnapshot, error) {
		*asked++
		n := time.Duration(*asked)
		started := time.Now().Add(-time.Minute)
		return &agent.UsageSnapshot{Machine: newUsage(n * 10 * time.Second), Root: newUsage(n * time.Second),
			Pods: []agent.PodUsage{{UID: "u1", Namespace: "kube-system",
				Name: "static", Started: started, Usage: newUsage(n * 500 * time.Millisecond),
				Network: []agent.InterfaceUsage{{Name: "eth0", Received: 7, Sent: 9}},
				Containers: []agent.ContainerUsage{{Name: "app", Started: started,
					Usage: newUsage(n * 250 * time.Millisecond)}}}}}, nil
	}
}

const resource = `# HELP container_cpu_usage_seconds_total [STABLE] Cumulative cpu time consumed by the container in core-seconds
# TYPE container_cpu_usage_seconds_total counter
container_cpu_usage_seconds_total{container="app",namespace="kube-system",pod="static-w1"} 0.25 946684800000
# HELP container_memory_working_set_bytes [STABLE] Current working set of the container in bytes
# TYPE container_memory_working_set_bytes gauge
container_memory_working_set_bytes{container="app",namespace="kube-system",pod="static-w1"} 8.388608e+06 946684800000
# HELP container_start_time_seconds [STABLE] Start time of the container since unix epoch in seconds
# TYPE container_start_time_seconds gauge
container_start_time_seconds{container="app",namespace="kube-system",pod="static-w1"} 9.4668474e+08
# HELP container_swap_limit_bytes [ALPHA] Current amount of the container swap limit in bytes. Reported only on non-windows systems
# TYPE container_swap_limit_bytes gauge
container_swap_limit_bytes{container="app",namespace="kube-system",pod="static-w1"} 8192 946684800000
# HELP container_swap_usage_bytes [ALPHA] Current amount of the container swap usage in bytes. Reported only on non-windows systems
# TYPE container_swap_usage_bytes gauge
container_swap_usage_bytes{container="app",namespace="kube-system",pod="static-w1"} 4096 946684800000
# HELP node_cpu_usage_seconds_total [STABLE] Cumulative cpu time consumed by the node in core-seconds
# TYPE node_cpu_usage_seconds_total counter
node_cpu_usage_seconds_total 10 946684800000
# HELP node_memory_working_set_bytes [STABLE] Current working set of the node in bytes
# TYPE node_memory_working_set_bytes gauge
node_memory_working_set_bytes 8.388608e+06 946684800000
# HELP node_swap_usage_bytes [ALPHA] Current swap usage of the node in bytes. Reported only on non-windows systems
# TYPE node_swap_usage_bytes gauge
node_swap_usage_bytes 4096 946684800000
# HELP pod_cpu_usage_seconds_total [STABLE] Cumulative cpu time consumed by the pod in core-seconds
# TYPE pod_cpu_usage_seconds_total counter
pod_cpu_usage_seconds_total{namespace="kube-system",pod="static-w1"} 0.5 946684800000
# HELP pod_memory_working_set_bytes [STABLE] Current working set of the pod in bytes
# TYPE pod_memory_working_set_bytes gauge
pod_memory_working_set_bytes{namespace="kube-system",pod="static-w1"} 8.388608e+06 946684800000
# HELP pod_swap_usage_bytes [ALPHA] Current amount of the pod swap usage in bytes. Reported only on non-windows systems
# TYPE pod_swap_usage_bytes gauge
pod_swap_usage_bytes{namespace="kube-system",pod="static-w1"} 4096 946684800000
# HELP resource_scrape_error [STABLE] 1 if there was an error while getting container metrics, 0 otherwise
# TYPE resource_scrape_error gauge
resource_scrape_error 0
# HELP scrape_error [ALPHA] (Deprecated since 1.29.0) 1 if there was an error while getting container metrics, 0 otherwise
# TYPE scrape_error gauge
scrape_error 0
`

// The text is that of the kubelet except for the values. Nothing is measured twice within
// MinInterval, or without a request.
func TestResource(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		asked := 0
		s := New(Config{NodeName: "w1", Measure: newMeasure(&asked), Pods: func() []*v1.Pod {
			return []*v1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "static-w1", UID: "u1"}}}
		}})
		text := func() string {
			var out bytes.Buffer
			if err := s.Resource(t.Context(), &out); err != nil {
				t.Fatal(err)
			}
			return out.String()
		}
		if got := text(); got != resource {
			t.Errorf("got\n%s", got)
		}
		time.Sleep(MinInterval - time.Millisecond)
		if got := text(); got != resource || asked != 1 {
			t.Errorf("measured %d times, got\n%s", asked, got)
		}
		time.Sleep(time.Hour)
		if got := text(); got == resource || asked != 2 {
			t.Errorf("measured %d times, got\n%s", asked, got)
		}
	})
}

// A node that is a share of its machine reports the usage of its own cgroup, and its configured
// capacity.
func TestSummary(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		asked := 0
		s := New(Config{NodeName: "w1", Measure: newMeasure(&asked), Share: true, Memory: 32 << 20,
			Disk: func() (agent.Disk, error) {
				return agent.Disk{Capacity: 100, Available: 40, Inodes: 10, InodesFree: 4}, nil
			}})
		ask := func(only bool) (out summary.Summary, text string) {
			var b bytes.Buffer
			if err := s.Summary(t.Context(), &b, only); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal(b.Bytes(), &out); err != nil {
				t.Fatalf("%v: %s", err, b.String())
			}
			return out, b.String()
		}
		first, _ := ask(false)
		if first.Node.CPU.UsageNanoCores != nil {
			t.Error("a rate of one reading")
		}
		time.Sleep(MinInterval)
		got, text := ask(false)
		n, p := got.Node, got.Pods[0]
		if n.NodeName != "w1" || *n.CPU.UsageCoreNanoSeconds != 2e9 || *n.CPU.UsageNanoCores != 1e8 ||
			*n.Memory.AvailableBytes != 24<<20 || *n.Fs.UsedBytes != 60 || *n.Fs.InodesUsed != 6 {
			t.Errorf("the node: %s", text)
		}
		if p.PodRef.UID != "u1" || *p.CPU.UsageNanoCores != 5e7 || *p.Network.RxBytes != 7 ||
			p.Network.Name != "eth0" || *p.ProcessStats.ProcessCount != 3 || len(p.Containers) != 1 {
			t.Errorf("the pod: %s", text)
		}
		if c := p.Containers[0]; c.Name != "app" || *c.CPU.UsageNanoCores != 2.5e7 ||
			*c.Memory.AvailableBytes != 56<<20 || *c.Swap.SwapAvailableBytes != 4096 {
			t.Errorf("the container: %s", text)
		}
		if only, text := ask(true); only.Node.Fs != nil || only.Pods[0].Network != nil || only.Pods[0].Memory == nil {
			t.Errorf("processors and memory alone: %s", text)
		}
	})
}

// Disk usage of pods has the kubelet's form: measured usage with the size of the node's disk,
// separate file systems with their own size, and the name of a claim.
func TestSummaryOfStorage(t *testing.T) {
	asked, at := 0, time.Unix(1e9, 0)
	s := New(Config{NodeName: "w1", Measure: newMeasure(&asked),
		Disk: func() (agent.Disk, error) {
			return agent.Disk{Capacity: 100, Available: 40, Inodes: 10, InodesFree: 4}, nil
		},
		Storage: func() map[types.UID]agent.PodStorage {
			return map[types.UID]agent.PodStorage{"u1": {At: at, Used: 9,
				Containers: map[string]agent.ContainerStorage{"app": {Layer: 3, Logs: 2}},
				Volumes: []agent.VolumeStorage{{Name: "scratch", At: at, Used: 4},
					{Name: "data", Claim: "c", At: at, Used: 5,
						FileSystem: &agent.Disk{Capacity: 50, Available: 45, Inodes: 8, InodesFree: 7}}}}}
		}})
	var b bytes.Buffer
	if err := s.Summary(t.Context(), &b, false); err != nil {
		t.Fatal(err)
	}
	var out summary.Summary
	if err := json.Unmarshal(b.Bytes(), &out); err != nil {
		t.Fatal(err)
	}
	p := out.Pods[0]
	if e := p.EphemeralStorage; e == nil || *e.UsedBytes != 9 || *e.CapacityBytes != 100 || *e.AvailableBytes != 40 ||
		!e.Time.Time.Equal(at) {
		t.Errorf("ephemeral storage: %s", b.String())
	}
	if c := p.Containers[0]; c.Rootfs == nil || *c.Rootfs.UsedBytes != 3 || *c.Logs.UsedBytes != 2 {
		t.Errorf("the container: %s", b.String())
	}
	if v := p.VolumeStats; len(v) != 2 || *v[0].UsedBytes != 4 || *v[0].CapacityBytes != 100 || v[0].PVCRef != nil ||
		*v[1].CapacityBytes != 50 || *v[1].InodesUsed != 1 || v[1].PVCRef.Name != "c" ||
		v[1].PVCRef.Namespace != p.PodRef.Namespace {
		t.Errorf("the volumes: %s", b.String())
	}
	b.Reset()
	if err := s.Summary(t.Context(), &b, true); err != nil || strings.Contains(b.String(), "volume") ||
		strings.Contains(b.String(), "rootfs") {
		t.Errorf("processors and memory alone: %v %s", err, b.String())
	}
}

// A failed measurement is reported in a metric, and as an error if there is nothing to report.
func TestFailures(t *testing.T) {
	s := New(Config{NodeName: "w1", Measure: func(context.Context) (*agent.UsageSnapshot, error) {
		return nil, errors.New("no cgroups")
	}})
	var out bytes.Buffer
	if err := s.Resource(t.Context(), &out); err != nil ||
		!strings.Contains(out.String(), "\nresource_scrape_error 1\n") {
		t.Errorf("%v %s", err, out.String())
	}
	if err := s.Summary(t.Context(), &out, false); err == nil || !strings.Contains(err.Error(), "no cgroups") {
		t.Errorf("the summary: %v", err)
	}
	out.Reset()
	s = New(Config{NodeName: "w1", Measure: func(context.Context) (*agent.UsageSnapshot, error) {
		return &agent.UsageSnapshot{Machine: newUsage(time.Second)}, errors.New("some of it")
	}})
	if err := s.Resource(t.Context(), &out); err != nil ||
		!strings.Contains(out.String(), "\nresource_scrape_error 1\n") ||
		!strings.Contains(out.String(), "\nnode_cpu_usage_seconds_total 1 ") {
		t.Errorf("a part: %v %s", err, out.String())
	}
	out.Reset()
	if err := s.WriteAgentMetrics(t.Context(), &out); err != nil ||
		!strings.Contains(out.String(), `kubelet_node_name{node="w1"} 1`) ||
		!strings.Contains(out.String(), "\nprocess_resident_memory_bytes ") {
		t.Errorf("its own: %v %s", err, out.String())
	}
}

// A scrape of a full node allocates little memory.
func BenchmarkResource(b *testing.B) {
	m := &agent.UsageSnapshot{Machine: newUsage(time.Hour)}
	for i := range 110 {
		p := agent.PodUsage{UID: types.UID(fmt.Sprint(i)), Namespace: "default", Name: fmt.Sprintf("pod-%d", i),
			Started: time.Now(), Usage: newUsage(time.Minute)}
		p.Containers = []agent.ContainerUsage{{Name: "app", Started: time.Now(), Usage: newUsage(time.Minute)}}
		m.Pods = append(m.Pods, p)
	}
	s := New(Config{NodeName: "w1", Measure: func(context.Context) (*agent.UsageSnapshot, error) { return m, nil }})
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Resource(b.Context(), discard{}); err != nil {
			b.Fatal(err)
		}
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
