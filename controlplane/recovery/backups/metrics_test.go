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

// samples are those of a metric that a keeper exports.
func samples(t *testing.T, k *Keeper, name string) (out []float64) {
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

// Of backups to a bucket the leader alone says when the last one was made, also when another one leads now: a 0 of the others
// would be an alert that never ends.
func TestOnlyTheLeaderTellsOfBackups(t *testing.T) {
	const last = "keelson_backup_last_success_timestamp_seconds"
	virtual.Test(t, func(t *testing.T) {
		var leader atomic.Pointer[string]
		lead := func(name string) { leader.Store(&name) }
		lead("cp1")
		all, keepers := &rows{}, map[string]*Keeper{}
		for _, name := range []string{"cp1", "cp2"} {
			k, err := New(Config{Cluster: "prod", ID: "prod-1a2b", Replica: name, Write: (&store{}).write, Log: slog.New(slog.DiscardHandler),
				Options: Options{Schedule: "TZ=UTC 0 0 * * *", Keep: 9, S3: S3{URL: "s3://vault", Endpoint: "https://s3.test", Region: "x"}},
				Leads:   func() bool { return *leader.Load() == name }})
			if err != nil {
				t.Fatal(err)
			}
			k.target, keepers[name] = all, k
			if have := samples(t, k, last); len(have) > 0 {
				t.Errorf("%s says %v before it has looked", name, have)
			}
			ctx, cancel := context.WithCancel(t.Context())
			go func() { _ = k.Run(ctx) }()
			t.Cleanup(func() { cancel(); virtual.Wait() })
		}
		tells := func(when, who string) {
			t.Helper()
			for name, k := range keepers {
				have := samples(t, k, last)
				if name != who && len(have) > 0 || name == who && (len(have) != 1 || have[0] < float64(time.Now().Add(-24*time.Hour).Unix())) {
					t.Errorf("%s %s says %v", when, name, have)
				}
			}
		}
		pass(time.Minute)
		tells("at first", "cp1")
		lead("cp2")
		tells("before cp2 has looked", "")
		pass(2 * time.Minute)
		tells("when cp2 leads", "cp2")
	})
}

// A folder in which there is none is told of by a 0.
func TestNoBackupIsToldOf(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		k := begin(t, Options{Schedule: "@daily", Folder: "/dev/null/below", Keep: 1}, &store{})
		if have := samples(t, k, "keelson_backup_last_success_timestamp_seconds"); len(have) != 1 || !strings.Contains(k.State().Error.Error(), "/dev/null") || have[0] != 0 {
			t.Errorf("it says %v, and of its state %+v", have, k.State())
		}
	})
}
