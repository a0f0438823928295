package backups

import "github.com/prometheus/client_golang/prometheus"

// Collectors are the metrics of a keeper.
func (k *Keeper) Collectors() []prometheus.Collector {
	return []prometheus.Collector{
		lastMetric{k},
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "keelson_backup_size_bytes", Help: "How long the last backup is that this process made."},
			func() float64 { return float64(k.State().Size) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "keelson_backup_failures_total", Help: "Attempts at a backup that failed."},
			func() float64 { return float64(k.failed.Load()) }),
	}
}

// lastMetric says how old the newest backup is, where this replica is the one to know: one that leaves a bucket to the leader
// would say 0 for ever.
type lastMetric struct{ k *Keeper }

var lastSuccess = prometheus.NewDesc("keelson_backup_last_success_timestamp_seconds",
	"For which time the newest good backup was made, in seconds since 1970; 0 = there is none. Absent where another replica makes them, as the leader does those to a bucket, and until this one has looked.", nil, nil)

// Describe implements prometheus.Collector.
func (lastMetric) Describe(ch chan<- *prometheus.Desc) { ch <- lastSuccess }

// Collect implements prometheus.Collector.
func (m lastMetric) Collect(ch chan<- prometheus.Metric) {
	s := m.k.State()
	if !m.k.Mine() || s.Next.IsZero() { // who has looked knows when the next one is due
		return
	}
	last := 0.0
	if !s.Last.IsZero() {
		last = float64(s.Last.Unix())
	}
	ch <- prometheus.MustNewConstMetric(lastSuccess, prometheus.GaugeValue, last)
}
