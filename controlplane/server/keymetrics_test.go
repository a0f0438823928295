package server

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/server/rotation"
)

// shown are the metrics of a collector: names with labels, and values.
func shown(t *testing.T, c prometheus.Collector) map[string]float64 {
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

// An exchange that is under way shows in the metrics with its step, since when; one that is over does not. F51
func TestKeyMetrics(t *testing.T) {
	r := &Replica{keys: &keys{}}
	for _, rec := range []rotation.Record{{}, {Kind: rotation.ClusterCA, Step: rotation.Done}, {Kind: rotation.PeersCA, Step: rotation.Aborted}} {
		r.keys.seen.Store(&rec)
		if got := shown(t, keyMetrics{r}); len(got) != 0 {
			t.Errorf("%+v shows %v", rec, got)
		}
	}
	r.keys.seen.Store(&rotation.Record{Kind: rotation.ClusterCA, Step: rotation.Wait, Since: 1_700_000_000_500})
	if got := shown(t, keyMetrics{r}); len(got) != 1 || got["keelson_key_rotation_since_timestamp_seconds kind=cluster-ca step=wait"] != 1_700_000_000.5 {
		t.Errorf("it shows %v", got)
	}
}

// An exchange that does not go on is an alarm after ten minutes of a step, or of the end of the time that the step wait was
// meant to take; and no sooner. F51
func TestRotationAlarm(t *testing.T) {
	now := time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) int64 { return now.Add(-d).UnixMilli() }
	for _, c := range []struct {
		name  string
		rec   rotation.Record
		alarm bool
	}{
		{"none ever was", rotation.Record{}, false},
		{"it is over", rotation.Record{Step: rotation.Done, Since: ago(time.Hour)}, false},
		{"it was given up", rotation.Record{Step: rotation.Aborted, Since: ago(time.Hour)}, false},
		{"nine minutes", rotation.Record{Step: rotation.Trust, Since: ago(9 * time.Minute)}, false},
		{"ten minutes", rotation.Record{Step: rotation.Trust, Since: ago(10 * time.Minute)}, true},
		{"forget", rotation.Record{Step: rotation.Forget, Since: ago(time.Hour)}, true},
		{"it is meant to wait", rotation.Record{Step: rotation.Wait, Since: ago(20 * time.Hour), Until: ago(-4 * time.Hour)}, false},
		{"it has just waited", rotation.Record{Step: rotation.Wait, Since: ago(24 * time.Hour), Until: ago(9 * time.Minute)}, false},
		{"it waits on", rotation.Record{Step: rotation.Wait, Since: ago(25 * time.Hour), Until: ago(time.Hour)}, true},
	} {
		c.rec.Kind = rotation.ClusterCA
		got := rotationAlarms(c.rec, now)
		if (len(got) == 1) != c.alarm || len(got) > 1 {
			t.Errorf("%s: %+v", c.name, got)
		}
		if len(got) == 1 && (got[0].Kind != "rotation" || !strings.Contains(got[0].Message, "cluster-ca") || !strings.Contains(got[0].Remedy, "rotate --status")) {
			t.Errorf("%s: %+v", c.name, got[0])
		}
	}
}
