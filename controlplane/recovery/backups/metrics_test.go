package backups

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/internal/virtual"
)

// metricValues returns the values of a keeper's metric.
func metricValues(t *testing.T, k *Keeper, name string) (out []float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(k.Collectors()...)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == name {
				out = append(out, m.GetGauge().GetValue())
			}
		}
	}
	return out
}

// Only the leader exposes the time of the last backup to a bucket, also after a leader change. A 0
// of another replica would raise an alert.
func TestOnlyTheLeaderExposesTheMetric(t *testing.T) {
	const last = "keelson_backup_last_success_timestamp_seconds"
	virtual.Test(t, func(t *testing.T) {
		var leader atomic.Pointer[string]
		lead := func(name string) { leader.Store(&name) }
		lead("cp1")
		all, keepers := &memoryTarget{}, map[string]*Keeper{}
		for _, name := range []string{"cp1", "cp2"} {
			k, err := New(Config{Cluster: "prod", ID: "prod-1a2b", Replica: name, Write: (&fakeStore{}).write,
				Log: slog.New(slog.DiscardHandler),
				Options: Options{Schedule: "TZ=UTC 0 0 * * *", Keep: 9,
					S3: S3{URL: "s3://vault", Endpoint: "https://s3.test", Region: "x"}},
				IsLeader: func() bool { return *leader.Load() == name }})
			if err != nil {
				t.Fatal(err)
			}
			k.target, keepers[name] = all, k
			if have := metricValues(t, k, last); len(have) > 0 {
				t.Errorf("%s exposes %v before it has listed the backups", name, have)
			}
			ctx, cancel := context.WithCancel(t.Context())
			go func() { _ = k.Run(ctx) }()
			t.Cleanup(func() { cancel(); virtual.Wait() })
		}
		checkMetric := func(when, who string) {
			t.Helper()
			for name, k := range keepers {
				have := metricValues(t, k, last)
				if name != who && len(have) > 0 || name == who &&
					(len(have) != 1 || have[0] < float64(time.Now().Add(-24*time.Hour).Unix())) {
					t.Errorf("%s %s says %v", when, name, have)
				}
			}
		}
		advanceTime(time.Minute)
		checkMetric("at first", "cp1")
		lead("cp2")
		checkMetric("before cp2 has listed the backups", "")
		advanceTime(2 * time.Minute)
		checkMetric("when cp2 leads", "cp2")
	})
}

// The metric is 0 if the folder has no backup.
func TestMetricWithoutBackups(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		k := startKeeper(t, Options{Schedule: "@daily", Folder: "/dev/null/below", Keep: 1}, &fakeStore{})
		if have := metricValues(t, k, "keelson_backup_last_success_timestamp_seconds"); len(have) != 1 ||
			!strings.Contains(k.State().Error.Error(), "/dev/null") || have[0] != 0 {
			t.Errorf("metric %v, state %+v", have, k.State())
		}
	})
}
