package scheduler

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Metrics collects the Prometheus metrics of a scheduler. Names, labels and bucket bounds are those
// of kube-scheduler. The values of all replicas can be added: a replica that does not lead counts
// no pods. Metrics is safe for concurrent use and must be given to one scheduler only.
type Metrics struct {
	attempts   *prometheus.CounterVec   // by result and profile
	durations  *prometheus.HistogramVec // of attempts, by result and profile
	algorithm  prometheus.Histogram
	scheduled  scheduledMetrics
	points     *prometheus.HistogramVec // by extension point, status and profile
	incoming   *prometheus.CounterVec   // by queue and event
	preemption preemptionMetrics
	volumes    *prometheus.HistogramVec // by operation

	source atomic.Pointer[Scheduler] // the scheduler with the queue that is counted
}

// scheduledMetrics are the metrics of pods that were bound: the time since they first entered the
// queue, by number of attempts, and the number of attempts.
type scheduledMetrics struct {
	sli      *prometheus.HistogramVec
	attempts prometheus.Histogram
}

// preemptionMetrics are the number of searches for pods to evict, and of the pods that they found.
type preemptionMetrics struct {
	attempts prometheus.Counter
	victims  prometheus.Histogram
}

var (
	pendingPods = prometheus.NewDesc("scheduler_pending_pods",
		"Number of pods without a node, by queue. 0 on a replica that does not lead.", []string{"queue"}, nil)
	unschedulablePods = prometheus.NewDesc("scheduler_unschedulable_pods",
		"Number of pods that a plugin refused in their last attempt, by plugin. A pod counts for each such plugin.",
		[]string{"plugin", "profile"}, nil)
)

// NewMetrics returns metrics that the caller must register and set as Config.Metrics.
func NewMetrics() *Metrics {
	histogram := func(name, help string, buckets []float64) prometheus.HistogramOpts {
		return prometheus.HistogramOpts{Namespace: "scheduler", Name: name, Help: help, Buckets: buckets}
	}
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: "scheduler", Name: name, Help: help}
	}
	attempt, point := prometheus.ExponentialBuckets(0.001, 2, 15), prometheus.ExponentialBuckets(0.0001, 2, 12)
	return &Metrics{
		attempts: prometheus.NewCounterVec(counter("schedule_attempts_total",
			"Number of attempts to schedule a pod, by result."), []string{"result", "profile"}),
		durations: prometheus.NewHistogramVec(histogram("scheduling_attempt_duration_seconds",
			"Time in seconds from the start of an attempt to its failure or to the end of the binding.", attempt),
			[]string{"result", "profile"}),
		algorithm: prometheus.NewHistogram(histogram("scheduling_algorithm_duration_seconds",
			"Time in seconds that choosing a node took.", attempt)),
		scheduled: scheduledMetrics{
			sli: prometheus.NewHistogramVec(histogram("pod_scheduling_sli_duration_seconds",
				"Time in seconds from a pod's first entry into the queue to its binding.",
				prometheus.ExponentialBuckets(0.01, 2, 20)), []string{"attempts"}),
			attempts: prometheus.NewHistogram(histogram("pod_scheduling_attempts",
				"Number of attempts after which a pod was bound.", prometheus.ExponentialBuckets(1, 2, 5))),
		},
		points: prometheus.NewHistogramVec(histogram("framework_extension_point_duration_seconds",
			"Time in seconds that all plugins of an extension point took for a pod.", point),
			[]string{"extension_point", "status", "profile"}),
		incoming: prometheus.NewCounterVec(counter("queue_incoming_pods_total",
			"Number of pods that entered a queue, by queue and cause."), []string{"queue", "event"}),
		preemption: preemptionMetrics{
			attempts: prometheus.NewCounter(counter("preemption_attempts_total",
				"Number of searches for pods of lower priority to evict.")),
			victims: prometheus.NewHistogram(histogram("preemption_victims",
				"Number of pods that a preemption evicts.", prometheus.ExponentialBuckets(1, 2, 7))),
		},
		volumes: prometheus.NewHistogramVec(histogram("volume_scheduling_duration_seconds",
			"Time in seconds to choose (assume) and to bind the volumes of a pod with unbound claims.", attempt),
			[]string{"operation"}),
	}
}

func (m *Metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.attempts, m.durations, m.algorithm, m.scheduled.sli, m.scheduled.attempts,
		m.points, m.incoming, m.preemption.attempts, m.preemption.victims, m.volumes}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.collectors() {
		c.Describe(ch)
	}
	ch <- pendingPods
	ch <- unschedulablePods
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.collectors() {
		c.Collect(ch)
	}
	s := m.source.Load()
	if s == nil {
		return
	}
	sizes, refused := s.queue.queueSizes()
	if !s.lead.running.Load() {
		clear(refused)
		sizes = [numQueues]int{}
	}
	for i, n := range sizes {
		ch <- prometheus.MustNewConstMetric(pendingPods, prometheus.GaugeValue, float64(n), queueNames[i])
	}
	for by, n := range refused {
		ch <- prometheus.MustNewConstMetric(unschedulablePods, prometheus.GaugeValue, float64(n), by.plugin, by.profile)
	}
}

// observeVolumes records how long an operation of the plugin VolumeBinding took. It implements
// framework.Volumes.ObserveOperation.
func (m *Metrics) observeVolumes(operation string, d time.Duration) {
	m.volumes.WithLabelValues(operation).Observe(d.Seconds())
}

// maxAttemptsLabel is the number of attempts from which on pods share a label value.
const maxAttemptsLabel = 15

// observeScheduled records a pod that was bound: the number of its attempts, and the time since it
// first entered the queue.
func (m *Metrics) observeScheduled(attempts int, d time.Duration) {
	label := strconv.Itoa(maxAttemptsLabel) + "+"
	if attempts < maxAttemptsLabel {
		label = strconv.Itoa(attempts)
	}
	m.scheduled.sli.WithLabelValues(label).Observe(d.Seconds())
	m.scheduled.attempts.Observe(float64(attempts))
}

// attemptResult is the result of an attempt to schedule a pod.
type attemptResult uint8

const (
	resultScheduled     attemptResult = iota // the pod was bound
	resultUnschedulable                      // plugins refused the pod
	resultError                              // the attempt failed
	numResults
)

// String returns the result in the metrics of kube-scheduler.
func (r attemptResult) String() string {
	return [numResults]string{"scheduled", "unschedulable", "error"}[r]
}

// profileMetrics are the metrics of the pods of one profile. It implements
// framework.DurationObserver. A nil *profileMetrics measures nothing.
type profileMetrics struct {
	attempts  [numResults]prometheus.Counter
	durations [numResults]prometheus.Observer

	points prometheus.ObserverVec
	// observers of points by point and code, created when they are first used
	cached [framework.NumTimedPoints][framework.NumCodes]atomic.Pointer[prometheus.Observer]
}

// profileMetrics returns the metrics of the profile with the given name.
func (m *Metrics) profileMetrics(profile string) *profileMetrics {
	p := &profileMetrics{points: m.points.MustCurryWith(prometheus.Labels{"profile": profile})}
	for r := range numResults {
		p.attempts[r] = m.attempts.WithLabelValues(r.String(), profile)
		p.durations[r] = m.durations.WithLabelValues(r.String(), profile)
	}
	return p
}

// ObservePoint implements framework.DurationObserver.
func (p *profileMetrics) ObservePoint(at framework.TimedPoint, code framework.Code, d time.Duration) {
	if p == nil {
		return
	}
	o := p.cached[at][code].Load()
	if o == nil {
		made := p.points.WithLabelValues(at.String(), code.String())
		o = &made
		p.cached[at][code].Store(o)
	}
	(*o).Observe(d.Seconds())
}

// recordAttempt records the result of the current attempt to schedule the pod. It must be called
// before the pod returns to the queue or is removed from it.
func (s *Scheduler) recordAttempt(pod *queuedPod, result attemptResult) {
	p := s.profiles.forPod(pod.Pod).metrics
	p.attempts[result].Inc()
	now := s.queue.now()
	p.durations[result].Observe(now.Sub(pod.attempt.start).Seconds())
	if result == resultScheduled {
		s.metrics.observeScheduled(pod.Attempts, now.Sub(pod.place.enteredAt))
	}
}
