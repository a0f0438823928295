package stats

import (
	"context"
	"io"
	"os"
	"runtime/metrics"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/promtext"
)

// WriteAgentMetrics writes the metrics of the agent process itself for /metrics, such as
// its memory and its goroutines.
func (s *Source) WriteAgentMetrics(ctx context.Context, to io.Writer) error {
	t := promtext.NewWriter(to)
	counter := func(name, help string, v float64) {
		t.StartFamily(name, promtext.Counter, help)
		t.WriteSample(v, time.Time{}, "")
	}
	read := []metrics.Sample{{Name: "/sched/goroutines:goroutines"}, {Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/total:bytes"}, {Name: "/gc/cycles/total:gc-cycles"}}
	metrics.Read(read)
	value := func(i int) float64 {
		if read[i].Value.Kind() != metrics.KindUint64 {
			return 0 // a Go release without this metric
		}
		return float64(read[i].Value.Uint64())
	}
	counter("go_gc_cycles_total_gc_cycles_total", "Garbage collections since the agent started.", value(3))
	writeGauge(t, "go_goroutines", "Number of goroutines that currently exist.", value(0))
	writeGauge(t, "go_memory_classes_total_bytes", "All memory mapped by the Go runtime.", value(2))
	writeGauge(t, "go_memstats_heap_alloc_bytes",
		"Bytes of heap objects, those that are not collected yet included.", value(1))
	writeGauge(t, "kubelet_node_name", "The node's name. The count is always 1.", 1, "node", s.cfg.NodeName)
	if sample, _ := s.Sample(ctx); sample != nil {
		containers := 0
		for i := range sample.Pods {
			containers += len(sample.Pods[i].Containers)
		}
		writeGauge(t, "kubelet_running_containers", "Number of containers currently running", float64(containers),
			"container_state", "running")
		writeGauge(t, "kubelet_running_pods", "Number of pods that have a running pod sandbox",
			float64(len(sample.Pods)))
	}
	var used unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &used) == nil {
		counter("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.",
			float64(used.Utime.Nano()+used.Stime.Nano())/1e9)
	}
	if pages, ok := residentPages(); ok {
		writeGauge(t, "process_resident_memory_bytes", "Resident memory size in bytes.",
			float64(pages)*float64(os.Getpagesize()))
	}
	s.addStartTime(t)
	return t.Flush()
}

// WriteStartTime writes the start time of the agent, which the kubelet reports in /metrics/probes
// too.
func (s *Source) WriteStartTime(to io.Writer) error {
	w := promtext.NewWriter(to)
	s.addStartTime(w)
	return w.Flush()
}

func (s *Source) addStartTime(w *promtext.Writer) {
	writeGauge(w, "process_start_time_seconds", "Start time of the process since unix epoch in seconds.",
		float64(s.cfg.Started.UnixNano())/1e9)
}

// residentPages returns the number of resident memory pages of this process, and false if it cannot
// be read.
func residentPages() (uint64, bool) {
	raw, err := os.ReadFile("/proc/self/statm")
	f := strings.Fields(string(raw))
	if err != nil || len(f) < 2 {
		return 0, false
	}
	n, err := strconv.ParseUint(f[1], 10, 64)
	return n, err == nil
}
