package replica_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// scrape reads a replica's metrics as a monitoring system would, by name and labels.
func scrape(t testing.TB, r *replica.Replica) map[string]float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(r.Collector()); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			name := strings.TrimPrefix(f.GetName(), "keelson_store_")
			if len(labels) > 0 {
				name += "{" + strings.Join(labels, ",") + "}"
			}
			// Two of the three are absent, which reads as 0.
			out[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return out
}

// The metrics say what has happened.
func TestMetricsTellWhatHappened(t *testing.T) {
	// who leads goes on
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { slowToMiss(cfg); cfg.Quota = 1 << 30 })
	leader, follower := c.Leader(), c.Followers()[0]
	const n = 20
	w, err := c.Replica(follower).Watch(within(t, patience), "/", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	var last raftstore.Revision
	for i := range n {
		last = commit(t, c.Replica(leader), raftstore.Put(fmt.Sprintf("/k/%d", i%4), []byte("value")))
		last = max(last, commit(t, c.Replica(follower), raftstore.Put(fmt.Sprintf("/k/%d", i%4), []byte("value"))))
	}
	c.AwaitRevision(last)
	if err := c.Replica(follower).Snapshot(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Replica(leader).Members(within(t, patience)); err != nil { // it asks how far they are
		t.Fatal(err)
	}
	l, f := scrape(t, c.Replica(leader)), scrape(t, c.Replica(follower))
	is := func(who string, m map[string]float64, name string, ok func(float64) bool) {
		t.Helper()
		if v, there := m[name]; !there || !ok(v) {
			t.Errorf("%s: %s is %v (there: %t)", who, name, v, there)
		}
	}
	exactly := func(x float64) func(float64) bool { return func(v float64) bool { return v == x } }
	atLeast := func(x float64) func(float64) bool { return func(v float64) bool { return v >= x } }
	is("leader", l, "role{role=leader}", exactly(1))
	is("leader", l, "role{role=follower}", exactly(0))
	is("follower", f, "role{role=follower}", exactly(1))
	is("leader", l, "leaderships_total", atLeast(1))
	is("leader", l, "elections_started_total", atLeast(1))
	is("follower", f, "leader_changes_total", atLeast(1))
	is("follower", f, "leader_known", exactly(1))
	for who, m := range map[string]map[string]float64{"leader": l, "follower": f} {
		is(who, m, "commit_seconds", atLeast(n))
		is(who, m, "apply_seconds", atLeast(n))
		is(who, m, "log_write_seconds", atLeast(n))
		is(who, m, "log_written_bytes_total", atLeast(n*5))
		is(who, m, "entries_applied_total", atLeast(2*n))
		is(who, m, "term", atLeast(1))
		is(who, m, "revision", exactly(float64(last)))
		is(who, m, "history_revisions", exactly(float64(last)))
		is(who, m, "keys", exactly(4))
		is(who, m, "bytes", exactly(4*9))
		is(who, m, "history_bytes", exactly(float64((2*n-4)*9)))
		is(who, m, "quota_bytes", exactly(1<<30))
		is(who, m, "applied_index", atLeast(2*n))
		is(who, m, "commit_index", atLeast(2*n))
	}
	is("leader", l, "batch_proposals", atLeast(n))
	is("follower", f, "forwarded_proposals_total", atLeast(n))
	is("follower", f, "read_index_rounds_total", atLeast(1))
	is("follower", f, "watchers", exactly(1))
	is("follower", f, "snapshots_total", atLeast(1))
	is("follower", f, "snapshot_bytes", atLeast(100))
	is("leader", l, "member_lag_entries{member="+follower+"}", func(v float64) bool { return v < 10 })
	is("leader", l, "member_contact_seconds{member="+follower+"}", func(v float64) bool { return v >= 0 && v < 60 })
	if _, there := f["member_lag_entries{member="+leader+"}"]; there {
		t.Error("a follower tells of lag that it cannot know")
	}
	for name := range l {
		if strings.HasPrefix(name, "alarm") {
			t.Errorf("alarm without cause: %s", name)
		}
	}

	// A replica that does not run has metrics all the same.
	idle, err := replica.New(c.Config(follower))
	if err != nil {
		t.Fatal(err)
	}
	is("idle", scrape(t, idle), "revision", exactly(0))
}

// What another member says of itself is known everywhere.
func TestMembersTellHowFarTheyAre(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	rev := commit(t, c.Replica("r1"), raftstore.Put("/k", nil))
	c.AwaitRevision(rev)
	down := c.Followers()[1]
	c.Stop(down)
	for _, name := range []string{c.Leader(), c.Followers()[0]} {
		all, err := c.Replica(name).Members(within(t, patience))
		if err != nil || len(all) != 3 {
			t.Fatalf("%s: members %v, error %v", name, all, err)
		}
		for _, m := range all {
			if m.ID != down && (m.Applied < uint64(rev) || m.Contact == 0) {
				t.Errorf("%s of %s: %+v", name, m.ID, m)
			}
			if m.ID == down && name != c.Leader() && m.Contact != 0 && m.Applied == 0 {
				t.Errorf("%s heard of %s, which is down: %+v", name, down, m)
			}
		}
		if s := c.Replica(name).Status(); s.DiskBytes == 0 || len(s.Members) != 3 {
			t.Errorf("status of %s: %+v", name, s)
		}
	}
}
