package aggregation

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

// maxMeasuredServices is the maximum number of APIServices with metrics. collectTimeout is how long
// a collection waits at most for the cache of a starting replica.
const (
	maxMeasuredServices = 512
	collectTimeout      = 100 * time.Millisecond
)

var (
	unavailableService = prometheus.NewDesc("aggregator_unavailable_apiservice",
		"1 if an APIService does not have the condition Available, otherwise 0.", []string{"name"}, nil)
	unavailableTotal = prometheus.NewDesc("aggregator_unavailable_apiservice_total",
		"How often this replica, as the leader, found that an available or new APIService is unavailable.",
		[]string{"name", "reason"}, nil)
)

// unavailableCounts counts how often APIServices became unavailable, by name and by reason of the
// condition Available. It is safe for concurrent use.
type unavailableCounts struct {
	mu     sync.Mutex
	byName map[string]map[string]uint64
}

// countChange counts a change of the condition Available to c, if the APIService was not known to
// be unavailable before.
func (u *unavailableCounts) countChange(
	service *apiregistrationv1.APIService, c apiregistrationv1.APIServiceCondition,
) {
	before := availableCondition(service)
	if c.Status == apiregistrationv1.ConditionTrue ||
		before != nil && before.Status == apiregistrationv1.ConditionFalse {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.byName == nil {
		u.byName = map[string]map[string]uint64{}
	}
	if u.byName[service.Name] == nil {
		u.byName[service.Name] = map[string]uint64{}
	}
	u.byName[service.Name][c.Reason]++
}

// availableCondition returns the condition Available of an APIService, or nil.
func availableCondition(service *apiregistrationv1.APIService) *apiregistrationv1.APIServiceCondition {
	for i := range service.Status.Conditions {
		if c := &service.Status.Conditions[i]; c.Type == apiregistrationv1.Available {
			return c
		}
	}
	return nil
}

// Collector returns the availability of all APIServices, with the metric names of Kubernetes. The
// caller registers the collector.
func (s *Conditions) Collector() prometheus.Collector { return availability{s} }

type availability struct{ conditions *Conditions }

// Describe implements prometheus.Collector.
func (availability) Describe(ch chan<- *prometheus.Desc) {
	ch <- unavailableService
	ch <- unavailableTotal
}

// Collect implements prometheus.Collector. It deletes the counts of APIServices that no longer
// exist.
func (a availability) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	all := a.conditions.layer.cfg.All(ctx)
	if ctx.Err() != nil {
		return // a starting replica does not have the APIServices yet
	}
	exists := make(map[string]bool, len(all))
	for i, service := range all {
		exists[service.Name] = true
		if i >= maxMeasuredServices {
			continue
		}
		value := 1.0
		if c := availableCondition(service); c != nil && c.Status == apiregistrationv1.ConditionTrue {
			value = 0
		}
		ch <- prometheus.MustNewConstMetric(unavailableService, prometheus.GaugeValue, value, service.Name)
	}
	u := &a.conditions.unavailable
	u.mu.Lock()
	defer u.mu.Unlock()
	shown := 0
	for name, reasons := range u.byName {
		if !exists[name] {
			delete(u.byName, name)
			continue
		}
		if shown++; shown > maxMeasuredServices {
			continue
		}
		for reason, n := range reasons {
			ch <- prometheus.MustNewConstMetric(unavailableTotal, prometheus.CounterValue, float64(n), name, reason)
		}
	}
}
