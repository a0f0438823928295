package probe

import (
	"cmp"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/promtext"
)

// maxEndedWatches is how many watches may end before the counters of removed pods are deleted. It
// bounds the memory of counters on a node that is not scraped.
const maxEndedWatches = 64

// resultNames and kindNames are the values of the labels result and probe_type, as in the kubelet.
var (
	resultNames = [...]string{resultSuccess: "successful", resultFailure: "failed", resultUnknown: "unknown"}
	kindNames   = map[string]string{Startup: "Startup", Liveness: "Liveness", Readiness: "Readiness"}
)

// probeCounters counts the results of all probes. Counters outlive their container, so that the
// failures that led to its restart can be scraped. They are deleted with the pod.
type probeCounters struct {
	mu     sync.Mutex
	probes map[probeID]*probeCounter
	ended  int // watches that have ended since the counters of removed pods were deleted
}

// probeID identifies a probe of a container of a pod.
type probeID struct {
	pod             types.UID
	container, kind string
}

type probeCounter struct {
	labels   promtext.Labels // of the probe's durations
	results  [len(resultNames)]uint64
	duration *promtext.Buckets
	watches  int // running watches of the container
}

// startWatch returns the counter of a probe of a container. The caller must call endWatch.
func (c *probeCounters) startWatch(t *agent.ProbeTarget, kind string) *probeCounter {
	id := probeID{t.Pod.UID, t.Container.Name, kind}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.probes == nil {
		c.probes = map[probeID]*probeCounter{}
	}
	counter := c.probes[id]
	if counter == nil {
		counter = &probeCounter{duration: promtext.NewBuckets(promtext.DefaultBounds()),
			labels: promtext.FormatLabels("container", t.Container.Name, "namespace", t.Pod.Namespace, "pod",
				t.Pod.Name, "probe_type", kindNames[kind])}
		c.probes[id] = counter
	}
	counter.watches++
	return counter
}

// endWatch ends the use of a counter. pods returns the pods of the node.
func (c *probeCounters) endWatch(counter *probeCounter, pods func() map[types.UID]bool) {
	c.mu.Lock()
	counter.watches--
	c.ended++
	full := c.ended >= maxEndedWatches
	c.mu.Unlock()
	if full {
		c.deleteRemoved(pods())
	}
}

// deleteRemoved deletes the counters of pods that are neither watched nor in pods.
func (c *probeCounters) deleteRemoved(pods map[types.UID]bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = 0
	maps.DeleteFunc(c.probes, func(id probeID, counter *probeCounter) bool {
		return counter.watches == 0 && !pods[id.pod]
	})
}

// countResult counts the result of a probe that took d.
func (c *probeCounters) countResult(counter *probeCounter, r probeResult, d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	counter.results[r]++
	counter.duration.AddValue(d.Seconds())
}

// writeCounters writes the counters, sorted by pod, container and kind.
func (c *probeCounters) writeCounters(w *promtext.Writer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ids := slices.SortedFunc(maps.Keys(c.probes), func(a, b probeID) int {
		return cmp.Or(cmp.Compare(c.probes[a].labels, c.probes[b].labels), cmp.Compare(a.pod, b.pod))
	})
	w.StartFamily("prober_probe_total", promtext.Counter,
		"Cumulative number of a liveness, readiness or startup probe for a container by result.")
	for _, id := range ids {
		for r, n := range c.probes[id].results {
			if n > 0 {
				w.WriteSample(float64(n), time.Time{}, c.probes[id].labels, "pod_uid", string(id.pod), "result",
					resultNames[r])
			}
		}
	}
	w.StartFamily("prober_probe_duration_seconds", promtext.Histogram, "Duration in seconds for a probe response.")
	written := promtext.Labels("")
	for _, id := range ids {
		// The labels do not contain the UID: a pod that replaces one of the same name has the same.
		if counter := c.probes[id]; counter.labels != written {
			w.WriteBuckets(counter.duration, counter.labels)
			written = counter.labels
		}
	}
}

// WriteMetrics writes the response of /metrics/probes: the numbers and durations of the probes of
// the node's pods, under the names of the kubelet. Attempts that do not count are omitted.
func (p *Prober) WriteMetrics(output io.Writer) error {
	p.counters.deleteRemoved(p.knownPods())
	w := promtext.NewWriter(output)
	p.counters.writeCounters(w)
	return w.Flush()
}

// knownPods returns the UIDs of the node's pods.
func (p *Prober) knownPods() map[types.UID]bool {
	known := map[types.UID]bool{}
	if p.cfg.Pods != nil {
		for _, pod := range p.cfg.Pods() {
			known[pod.UID] = true
		}
	}
	return known
}
