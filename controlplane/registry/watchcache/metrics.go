package watchcache

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/raftstore"
)

// Operation is a kind of request to the store, for the metrics.
type Operation uint8

const (
	OpCreate Operation = iota // commit that creates an object
	OpUpdate                  // commit that changes an object
	OpDelete                  // commit that removes an object
	OpGet                     // confirmation of the newest revision for the read of one object
	OpList                    // the same for a list or a watch; also the read of a page at a past revision
	numOperations
)

// String returns the name of the operation in the metrics of kube-apiserver.
func (o Operation) String() string {
	return [numOperations]string{"create", "update", "delete", "get", "list"}[o]
}

// maxMeasuredResources is the maximum number of resources with their own series of store requests.
// Requests for further resources are counted under otherResources.
const (
	maxMeasuredResources = 512
	otherResources       = "other"
)

// storeRequests measures the requests of a cache, and of the writes of its registry, to the store.
// The names and labels are those of the etcd client of kube-apiserver.
type storeRequests struct {
	duration      *prometheus.HistogramVec
	total, failed *prometheus.CounterVec

	mu       sync.Mutex
	measured map[schema.GroupResource]bool // the resources with their own series
}

var requestLabels = []string{"operation", "group", "resource"}

func newStoreRequests() *storeRequests {
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, requestLabels)
	}
	return &storeRequests{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "etcd_request_duration_seconds",
			Help: "Time in seconds of requests to the store, by operation and resource. The store is raft, not etcd.",
			Buckets: []float64{0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15,
				20, 30, 45, 60}}, requestLabels),
		total:    counter("etcd_requests_total", "Number of requests to the store, by operation and resource."),
		failed:   counter("etcd_request_errors_total", "Number of requests to the store that failed."),
		measured: map[schema.GroupResource]bool{},
	}
}

// operationMetrics are the metrics of one operation on one resource.
type operationMetrics struct {
	duration      prometheus.Observer
	total, failed prometheus.Counter
}

// operationMetrics returns the metrics of an operation on a resource.
func (r *storeRequests) operationMetrics(of schema.GroupResource, op Operation) *operationMetrics {
	r.mu.Lock()
	defer r.mu.Unlock()
	group, resource := of.Group, of.Resource
	if !r.measured[of] {
		if len(r.measured) < maxMeasuredResources {
			r.measured[of] = true
		} else {
			group, resource = "", otherResources
		}
	}
	return &operationMetrics{duration: r.duration.WithLabelValues(op.String(), group, resource),
		total:  r.total.WithLabelValues(op.String(), group, resource),
		failed: r.failed.WithLabelValues(op.String(), group, resource)}
}

// deleteUnserved deletes the series of the resources that are not in served.
func (r *storeRequests) deleteUnserved(served map[schema.GroupResource]*storageCache) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for of := range r.measured {
		if served[of] != nil {
			continue
		}
		delete(r.measured, of)
		labels := prometheus.Labels{"group": of.Group, "resource": of.Resource}
		r.duration.DeletePartialMatch(labels)
		r.total.DeletePartialMatch(labels)
		r.failed.DeletePartialMatch(labels)
	}
}

// storageCounts counts, for the metrics, the requests to the store for one storage, the events that
// the cache has received, and the watches that ended because their clients were too slow.
type storageCounts struct {
	requests   [numOperations]atomic.Pointer[operationMetrics] // created when they are first used
	received   atomic.Uint64
	terminated atomic.Uint64
}

// ObserveRequest records a request to the store for an object of the kind: its start and its error.
// A commit whose preconditions do not hold has not failed, as in kube-apiserver.
func (s *Served) ObserveRequest(op Operation, started time.Time, err error) {
	m := s.storage.counts.requests[op].Load()
	if m == nil {
		m = s.storage.cache.requests.operationMetrics(s.Kind.GroupResource(), op)
		s.storage.counts.requests[op].Store(m)
	}
	m.duration.Observe(time.Since(started).Seconds())
	m.total.Inc()
	var conflict *raftstore.ConflictError
	if err != nil && !errors.As(err, &conflict) {
		m.failed.Inc()
	}
}

var (
	resourceLabels = []string{"group", "resource"}
	receivedEvents = prometheus.NewDesc("apiserver_watch_cache_events_received_total",
		"Number of changes that the watch cache received from the store, by resource.", resourceLabels, nil)
	cacheVersion = prometheus.NewDesc("apiserver_watch_cache_resource_version",
		"Revision of the last change of a resource in the watch cache.", resourceLabels, nil)
	terminatedWatchers = prometheus.NewDesc("apiserver_terminated_watchers_total",
		"Number of watches that ended because their clients were too slow, by resource.", resourceLabels, nil)
)

// StoreMetrics returns the metrics of the cache: its requests to the store, and the state of each
// resource. The caller registers the collector.
func (c *Cache) StoreMetrics() prometheus.Collector { return collector{c} }

type collector struct{ cache *Cache }

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	r := c.cache.requests
	for _, v := range []prometheus.Collector{r.duration, r.total, r.failed} {
		v.Describe(ch)
	}
	ch <- receivedEvents
	ch <- cacheVersion
	ch <- terminatedWatchers
}

// Collect implements prometheus.Collector. It deletes the series of resources that are no longer
// served.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	served := map[schema.GroupResource]*storageCache{}
	for kind, s := range c.cache.routes.Load().byKind {
		served[kind.GroupResource()] = s.storage
	}
	r := c.cache.requests
	r.deleteUnserved(served)
	for _, v := range []prometheus.Collector{r.duration, r.total, r.failed} {
		v.Collect(ch)
	}
	n := 0
	for of, sc := range served {
		if n++; n > maxMeasuredResources {
			return
		}
		put := func(desc *prometheus.Desc, kind prometheus.ValueType, value uint64) {
			ch <- prometheus.MustNewConstMetric(desc, kind, float64(value), of.Group, of.Resource)
		}
		put(receivedEvents, prometheus.CounterValue, sc.counts.received.Load())
		put(cacheVersion, prometheus.GaugeValue, uint64(sc.snap.Load().changed))
		put(terminatedWatchers, prometheus.CounterValue, sc.counts.terminated.Load())
	}
}
