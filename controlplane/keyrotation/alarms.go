package keyrotation

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
)

// stepPatience is how long a step may take without an alarm. For the step wait, it is how long the
// step may continue after its planned end.
const stepPatience = 10 * time.Minute

// Alarms returns an alarm if the rotation in progress has not left its step for stepPatience,
// according to the record that this replica has read.
func (r *Rotator) Alarms(now time.Time) []api.ClusterAlarm {
	return rotationAlarms(*r.keys.current.Load(), now)
}

func rotationAlarms(record rotation.Record, now time.Time) []api.ClusterAlarm {
	since := time.UnixMilli(record.Since)
	if record.Step == rotation.Wait { // the step wait has a planned end
		since = time.UnixMilli(record.Until)
	}
	if !record.Active() || now.Sub(since) < stepPatience {
		return nil
	}
	return []api.ClusterAlarm{{Kind: "rotation", Since: since.UnixMilli(),
		Message: fmt.Sprintf("the rotation of %s has not proceeded beyond step %s since %s", record.Kind, record.Step,
			since.UTC().Format(time.RFC3339)),
		Remedy: "'kctl cluster rotate --status' lists the replicas and nodes that it waits for: " +
			"start those that are unreachable, or remove those that no longer exist"}}
}

// StaleKeysAlarms returns one alarm for each member of s that has stale keys: the member missed a
// rotation, and other replicas reject its signatures.
func StaleKeysAlarms(s api.ClusterStatus) (alarms []api.ClusterAlarm) {
	for _, m := range s.Members {
		if m.StaleKeys == "" {
			continue
		}
		alarms = append(alarms, api.ClusterAlarm{Kind: "stale keys", Member: m.Name, Since: m.StaleSince,
			Message: m.StaleKeys,
			Remedy: fmt.Sprintf("on the machine of %s, stop the replica, move its data directory aside and join "+
				"it again with 'keelson-controlplane join'", m.Name)})
	}
	return alarms
}

var stepSinceMetric = prometheus.NewDesc("keelson_key_rotation_since_timestamp_seconds",
	"Time at which the current key rotation reached its step, in seconds since 1970; absent if no "+
		"rotation is in progress.",
	[]string{"kind", "step"}, nil)

// Collector returns a collector of the metric that describes a rotation in progress, as this
// replica observes it.
func (r *Rotator) Collector() prometheus.Collector { return stepCollector{r.keys} }

type stepCollector struct{ keys *follower }

// Describe implements prometheus.Collector.
func (stepCollector) Describe(ch chan<- *prometheus.Desc) { ch <- stepSinceMetric }

// Collect implements prometheus.Collector.
func (c stepCollector) Collect(ch chan<- prometheus.Metric) {
	if record := c.keys.current.Load(); record.Active() {
		ch <- prometheus.MustNewConstMetric(stepSinceMetric, prometheus.GaugeValue, float64(record.Since)/1000,
			string(record.Kind), string(record.Step))
	}
}
