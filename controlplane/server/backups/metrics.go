package backups

import "github.com/prometheus/client_golang/prometheus"

// Collectors are the metrics of a keeper.
func (k *Keeper) Collectors() []prometheus.Collector {
	gauge := func(name, help string, of func(State) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return of(k.State()) })
	}
	return []prometheus.Collector{
		gauge("keelson_backup_last_success_timestamp_seconds", "For which time the newest good backup was made, in seconds since 1970; 0 = there is none.", func(s State) float64 {
			if s.Last.IsZero() {
				return 0
			}
			return float64(s.Last.Unix())
		}),
		gauge("keelson_backup_size_bytes", "How long the last backup is that this process made.", func(s State) float64 { return float64(s.Size) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "keelson_backup_failures_total", Help: "Attempts at a backup that failed."},
			func() float64 { return float64(k.failed.Load()) }),
	}
}
