package backups

import "github.com/prometheus/client_golang/prometheus"

// Collectors returns the collectors of the metrics about the scheduled backups.
func (k *Keeper) Collectors() []prometheus.Collector {
	return []prometheus.Collector{
		lastMetric{k},
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "keelson_backup_size_bytes",
			Help: "Size of the last backup that this process made, in bytes."},
			func() float64 { return float64(k.State().Size) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "keelson_backup_failures_total",
			Help: "Number of failed attempts to make a backup."},
			func() float64 { return float64(k.failed.Load()) }),
	}
}

// lastMetric is a Prometheus collector for the time of the newest backup. It has a value only on a
// replica that makes backups. Otherwise a follower that does not use the bucket would report 0
// forever, which raises an alert.
type lastMetric struct{ k *Keeper }

var lastSuccess = prometheus.NewDesc("keelson_backup_last_success_timestamp_seconds",
	"Time of the newest valid backup, in seconds since 1970; 0 if there is none. Absent on replicas that do not "+
		"make the backups, and until the existing backups are listed.", nil, nil)

// Describe implements prometheus.Collector.
func (lastMetric) Describe(ch chan<- *prometheus.Desc) { ch <- lastSuccess }

// Collect implements prometheus.Collector.
func (m lastMetric) Collect(ch chan<- prometheus.Metric) {
	s := m.k.State()
	if !m.k.MakesBackups() || s.Next.IsZero() { // Next is zero until the target has been listed
		return
	}
	last := 0.0
	if !s.Last.IsZero() {
		last = float64(s.Last.Unix())
	}
	ch <- prometheus.MustNewConstMetric(lastSuccess, prometheus.GaugeValue, last)
}
