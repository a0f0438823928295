package engine

import (
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/util/workqueue"
)

// QueueMetrics collects the Prometheus metrics of the controllers' work queues. The names of
// metrics and queues are the same as in the controller manager of Kubernetes. Gauges are computed
// when they are collected, so that an idle queue costs nothing.
type QueueMetrics struct {
	adds, retries  *prometheus.CounterVec
	queued, worked *prometheus.HistogramVec

	mu     sync.Mutex
	queues map[string]*keyQueue // queue by its name in metrics
}

var (
	queueLabels  = []string{"name"}
	queueDepth   = prometheus.NewDesc("workqueue_depth", "Number of keys that wait for a worker.", queueLabels, nil)
	queuePending = prometheus.NewDesc("workqueue_unfinished_work_seconds",
		"Sum of the times in seconds since the running reconciles started.", queueLabels, nil)
	queueLongest = prometheus.NewDesc("workqueue_longest_running_processor_seconds",
		"Time in seconds since the longest running reconcile started.", queueLabels, nil)
)

// NewQueueMetrics returns metrics that the caller must register.
func NewQueueMetrics() *QueueMetrics {
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, queueLabels)
	}
	times := func(name, help string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(10e-9, 10, 10)}, queueLabels)
	}
	return &QueueMetrics{
		adds:    counter("workqueue_adds_total", "Number of keys added to the queue."),
		retries: counter("workqueue_retries_total", "Number of keys queued again after an error or a requested delay."),
		queued:  times("workqueue_queue_duration_seconds", "Time in seconds that keys waited for a worker."),
		worked:  times("workqueue_work_duration_seconds", "Time in seconds that processing a key took."),
		queues:  map[string]*keyQueue{},
	}
}

// Describe implements prometheus.Collector.
func (m *QueueMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range []prometheus.Collector{m.adds, m.retries, m.queued, m.worked} {
		c.Describe(ch)
	}
	ch <- queueDepth
	ch <- queuePending
	ch <- queueLongest
}

// Collect implements prometheus.Collector.
func (m *QueueMetrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range []prometheus.Collector{m.adds, m.retries, m.queued, m.worked} {
		c.Collect(ch)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, q := range m.queues {
		depth, all, longest := q.queueState()
		ch <- prometheus.MustNewConstMetric(queueDepth, prometheus.GaugeValue, float64(depth), name)
		ch <- prometheus.MustNewConstMetric(queuePending, prometheus.GaugeValue, all.Seconds(), name)
		ch <- prometheus.MustNewConstMetric(queueLongest, prometheus.GaugeValue, longest.Seconds(), name)
	}
}

// queueNames maps names of controllers to the names of their queues in the controller manager of
// Kubernetes. It contains only names that queueName cannot derive from the controller's name.
var queueNames = map[string]string{
	"endpointslice-controller":           "endpoint_slice",
	"generic-garbage-collector":          "garbage_collector_attempt_to_delete",
	"service-account-controller":         "serviceaccount",
	"serviceaccount-token-controller":    "serviceaccount_tokens_secret",
	"resourcequota-controller":           "resourcequota_primary",
	"node-controller":                    "node_lifecycle_controller",
	"clusterrole-aggregation-controller": "ClusterRoleAggregator",
}

func queueName(controller string) string {
	if name, ok := queueNames[controller]; ok {
		return name
	}
	return strings.TrimSuffix(controller, "-controller")
}

// startQueue creates the queue of a controller for a term of leadership. In the metrics, it
// replaces the queue of the previous term.
func (m *QueueMetrics) startQueue(controller string, now func() time.Time) *keyQueue {
	name := queueName(controller)
	q := &keyQueue{
		clock: now, adds: m.adds.WithLabelValues(name), retries: m.retries.WithLabelValues(name),
		queued: m.queued.WithLabelValues(name), worked: m.worked.WithLabelValues(name), running: map[Key]time.Time{},
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.queues[name] = q
	return q
}

// keyQueue is the workqueue.Queue of a controller. It holds the waiting keys in order, and the keys
// that workers are processing.
type keyQueue struct {
	clock          func() time.Time
	adds, retries  prometheus.Counter
	queued, worked prometheus.Observer
	mu             sync.Mutex
	waiting        []waitingKey
	running        map[Key]time.Time // when processing of each key started
}

type waitingKey struct {
	key   Key
	since time.Time
}

var _ workqueue.Queue[Key] = (*keyQueue)(nil)

// Touch does nothing. It implements workqueue.Queue.
func (q *keyQueue) Touch(Key) {}

// Push appends a key to the waiting keys. It implements workqueue.Queue.
func (q *keyQueue) Push(k Key) {
	q.adds.Inc()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = append(q.waiting, waitingKey{k, q.clock()})
}

// Len returns the number of waiting keys. It implements workqueue.Queue.
func (q *keyQueue) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}

// Pop removes the first waiting key, records that its processing has started, and returns it. The
// queue must not be empty. Pop implements workqueue.Queue.
func (q *keyQueue) Pop() Key {
	q.mu.Lock()
	defer q.mu.Unlock()
	one, now := q.waiting[0], q.clock()
	q.waiting[0] = waitingKey{}
	if q.waiting = q.waiting[1:]; len(q.waiting) == 0 {
		q.waiting = nil
	}
	q.queued.Observe(now.Sub(one.since).Seconds())
	q.running[one.key] = now
	return one.key
}

// recordDone records that a worker has finished processing a key.
func (q *keyQueue) recordDone(k Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if since, ok := q.running[k]; ok {
		q.worked.Observe(q.clock().Sub(since).Seconds())
		delete(q.running, k)
	}
}

// clearKeys removes all keys. It is called at the end of a term of leadership.
func (q *keyQueue) clearKeys() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting, q.running = nil, map[Key]time.Time{}
}

// queueState returns the number of waiting keys. total is the sum of the times for which the keys
// in progress have been processed so far, and longest is the longest of these times.
func (q *keyQueue) queueState() (depth int, total, longest time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.clock()
	for _, since := range q.running {
		total += now.Sub(since)
		longest = max(longest, now.Sub(since))
	}
	return len(q.waiting), total, longest
}
