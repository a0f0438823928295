package operator

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/api"
)

// LeaderWork records the state of the leader's work on this replica. The parts of this work, such
// as the scheduler and each controller, are restarted when they fail. LeaderWork is safe for
// concurrent use. The zero value is the state of a replica that is not the leader.
type LeaderWork struct {
	mu       sync.Mutex
	started  bool
	failures map[string]partFailure

	restarts map[string]float64 // number of restarts of each part since the process started
}

type partFailure struct {
	failedAt  time.Time
	healthyAt time.Time // from this time on the part is considered healthy, unless it fails again
	err       error
}

// recoveryTime is how long a part of the leader's work must run after a restart to be considered
// healthy.
const recoveryTime = 10 * time.Second

// maxFailureBytes is the maximum length of the error text that State returns.
const maxFailureBytes = 1024

// RecordStart records that this replica, as the new leader, has started all parts of the work.
func (w *LeaderWork) RecordStart() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.started, w.failures = true, map[string]partFailure{}
}

// RecordStop records that all parts of the work have stopped because this replica is no longer the
// leader.
func (w *LeaderWork) RecordStop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.started, w.failures = false, nil
}

// RecordFailure records that a part failed with err and will be restarted after delay.
func (w *LeaderWork) RecordFailure(part string, err error, delay time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.restarts == nil {
		w.restarts = map[string]float64{}
	}
	w.restarts[part]++
	if now := time.Now(); w.started {
		w.failures[part] = partFailure{failedAt: now, healthyAt: now.Add(delay + recoveryTime), err: err}
	}
}

// State returns whether the work has started (api.WorkBegun or api.WorkWaiting), and the parts that
// are not healthy, sorted by name.
func (w *LeaderWork) State() (state string, failing []api.ClusterPart) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	for name, f := range w.failures {
		if now.Before(f.healthyAt) {
			failing = append(failing, api.ClusterPart{Name: name, Since: f.failedAt.UnixMilli(),
				Error: api.Truncate(f.err.Error(), maxFailureBytes)})
		}
	}
	slices.SortFunc(failing, func(a, b api.ClusterPart) int { return cmp.Compare(a.Name, b.Name) })
	if !w.started {
		return api.WorkWaiting, nil
	}
	return api.WorkBegun, failing
}

var (
	restartsMetric = prometheus.NewDesc("keelson_leader_part_restarts_total",
		"How often a part of the leader's work failed and was restarted.", []string{"part"}, nil)
	leaderMetric = prometheus.NewDesc("leader_election_master_status",
		"1 if the component runs on this replica, which is then the raft leader, otherwise 0.",
		[]string{"name"}, nil)
)

// Collector returns a collector of the number of restarts of each part, and of the components that
// this replica runs as the leader.
func (w *LeaderWork) Collector() prometheus.Collector { return leaderCollector{w} }

type leaderCollector struct{ work *LeaderWork }

// Describe implements prometheus.Collector.
func (leaderCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- restartsMetric
	ch <- leaderMetric
}

// Collect implements prometheus.Collector.
func (c leaderCollector) Collect(ch chan<- prometheus.Metric) {
	c.work.mu.Lock()
	defer c.work.mu.Unlock()
	for part, n := range c.work.restarts {
		ch <- prometheus.MustNewConstMetric(restartsMetric, prometheus.CounterValue, n, part)
	}
	leads := 0.0
	if c.work.started {
		leads = 1
	}
	for _, name := range []string{"kube-controller-manager", "kube-scheduler"} { // the names of their Leases
		ch <- prometheus.MustNewConstMetric(leaderMetric, prometheus.GaugeValue, leads, name)
	}
}
