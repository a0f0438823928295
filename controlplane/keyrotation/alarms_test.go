package keyrotation

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/keyrotation/rotation"
)

// gatherMetrics returns the values of a collector's metrics, by name and labels.
func gatherMetrics(t *testing.T, c prometheus.Collector) map[string]float64 {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(c)
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, family := range all {
		for _, m := range family.Metric {
			name := family.GetName()
			for _, l := range m.Label {
				name += " " + l.GetName() + "=" + l.GetValue()
			}
			out[name] = m.GetGauge().GetValue()
		}
	}
	return out
}

// The metrics show the step of a rotation in progress and when the step started. They show no
// rotation that has ended. F51
func TestKeyMetrics(t *testing.T) {
	keys := &follower{}
	collector := stepCollector{keys}
	for _, rec := range []rotation.Record{{}, {Kind: rotation.ClusterCA, Step: rotation.Done},
		{Kind: rotation.PeersCA, Step: rotation.Aborted}} {
		keys.current.Store(&rec)
		if got := gatherMetrics(t, collector); len(got) != 0 {
			t.Errorf("%+v: the metrics are %v", rec, got)
		}
	}
	keys.current.Store(&rotation.Record{Kind: rotation.ClusterCA, Step: rotation.Wait, Since: 1_700_000_000_500})
	if got := gatherMetrics(t, collector); len(got) != 1 ||
		got["keelson_key_rotation_since_timestamp_seconds kind=cluster-ca step=wait"] != 1_700_000_000.5 {
		t.Errorf("metrics: %v", got)
	}
}

// A rotation that does not proceed raises an alarm ten minutes after its step was reached. In the
// step wait, the ten minutes start when the time of the step has passed. F51
func TestRotationAlarm(t *testing.T) {
	now := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) int64 { return now.Add(-d).UnixMilli() }
	for _, c := range []struct {
		name  string
		rec   rotation.Record
		alarm bool
	}{
		{"no rotation", rotation.Record{}, false},
		{"done", rotation.Record{Step: rotation.Done, Since: ago(time.Hour)}, false},
		{"aborted", rotation.Record{Step: rotation.Aborted, Since: ago(time.Hour)}, false},
		{"nine minutes at trust", rotation.Record{Step: rotation.Trust, Since: ago(9 * time.Minute)}, false},
		{"ten minutes at trust", rotation.Record{Step: rotation.Trust, Since: ago(10 * time.Minute)}, true},
		{"an hour at forget", rotation.Record{Step: rotation.Forget, Since: ago(time.Hour)}, true},
		{"the time of wait has not passed", rotation.Record{Step: rotation.Wait, Since: ago(20 * time.Hour),
			Until: ago(-4 * time.Hour)}, false},
		{"the time of wait passed nine minutes ago",
			rotation.Record{Step: rotation.Wait, Since: ago(24 * time.Hour), Until: ago(9 * time.Minute)}, false},
		{"the time of wait passed an hour ago", rotation.Record{Step: rotation.Wait, Since: ago(25 * time.Hour),
			Until: ago(time.Hour)}, true},
	} {
		c.rec.Kind = rotation.ClusterCA
		got := rotationAlarms(c.rec, now)
		if (len(got) == 1) != c.alarm || len(got) > 1 {
			t.Errorf("%s: %+v", c.name, got)
		}
		if len(got) == 1 && (got[0].Kind != "rotation" || !strings.Contains(got[0].Message, "cluster-ca") ||
			!strings.Contains(got[0].Remedy, "rotate --status")) {
			t.Errorf("%s: %+v", c.name, got[0])
		}
	}
}
