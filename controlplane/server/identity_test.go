package server

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/internal/clusterid"
)

// Two of three replicas are abandoned by a recovery and start again with their data. They find the
// recovered replica, stop serving and raise an alarm, and so does the recovered cluster. After a
// rebuild they are members again. F53
func TestAbandonedReplicasStopServing(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.put("cp3", "a")
	for _, name := range []string{"cp3", "cp2", "cp1"} {
		_ = p.members[name].stop()
	}
	lost, err := recovery.Recover(p.members["cp1"].cfg.Dir(), true)
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(lost.Members); got != "[cp2 cp3]" {
		t.Errorf("abandoned: %s", got)
	}
	p.again("cp1")
	// cp3 was stopped before it had caught up the first time.
	newcomer := filepath.Join(p.members["cp3"].cfg.DataDir, datadir.NewcomerFile)
	if err := datadir.WriteJSON(newcomer, map[string]string{"cp1": datadir.HostPort(address(1), p.cluster.PeerPort)}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"cp2", "cp3"} { // together a majority of the members that they remember
		p.start(p.members[name].cfg)
	}
	for _, name := range []string{"cp2", "cp3"} {
		p.abandoned(t, name)
	}
	p.put("cp1", "recovered")
	eventually(t, func() error { return alarmed(p.status("cp1"), "cp2", "cp3") })

	// The record survives a restart while the recovered cluster cannot be reached.
	p.stop("cp1")
	p.stop("cp2")
	p.start(p.members["cp2"].cfg)
	p.abandoned(t, "cp2")
	p.again("cp1")
	eventually(t, func() error { return alarmed(p.status("cp1"), "cp2", "cp3") })

	for _, name := range []string{"cp2", "cp3"} {
		p.stop(name)
		if _, err := recovery.Rebuild(p.members[name].cfg.Dir(), []string{address(1)}); err != nil {
			t.Fatal(err)
		}
		p.again(name)
		p.holds(name, "a", "recovered")
	}
	for name := range p.members {
		eventually(t, func() error {
			if s := p.status(name); len(s.Alarms) > 0 || len(s.Members) != 3 {
				return fmt.Errorf("after the rebuilds %s: %+v %+v", name, s.Alarms, s.Members)
			}
			return nil
		})
	}
}

// abandoned awaits that a replica serves its status with an alarm and refuses all other requests.
func (p *plane) abandoned(t *testing.T, name string) {
	t.Helper()
	eventually(t, func() error {
		var s api.ClusterStatus
		if err := p.call(name, "GET", api.PathClusterStatus, nil, &s); err != nil {
			return err
		}
		return alarmed(s, name)
	})
	_, err := p.create(name, "split-brain")
	if err == nil || !strings.Contains(err.Error(), "abandoned") || !strings.Contains(err.Error(), "rebuild") {
		t.Errorf("a write at %s: %v", name, err)
	}
}

// alarmed returns nil when a status has an alarm that each of these replicas is abandoned, and no
// other alarm of that kind.
func alarmed(s api.ClusterStatus, names ...string) error {
	var got []string
	for _, a := range s.Alarms {
		if a.Kind == "abandoned" && strings.Contains(a.Remedy, "rebuild") {
			got = append(got, a.Member)
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(names) {
		return fmt.Errorf("%s has alarms %+v, want them of %v", s.Answered, s.Alarms, names)
	}
	return nil
}

// A backup is restored at one replica while the others run with their data. They stop serving when
// the restored replica starts, and both sides raise the alarm. F53
func TestRestoreAbandonsTheOthers(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.put("cp1", "a")
	file := p.backup("cp1")
	p.put("cp1", "later")
	p.stop("cp1")
	eventually(t, func() error { _, err := p.create("cp2", "without-cp1"); return err })
	r, err := recovery.Restore(p.members["cp1"].cfg.Dir(), file, recovery.RestoreOptions{Replace: true, Beside: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Abandoned) != 2 || r.Abandoned["cp2"] == "" || r.Abandoned["cp3"] == "" {
		t.Errorf("abandoned: %v", r.Abandoned)
	}
	p.again("cp1")
	p.abandoned(t, "cp2")
	p.abandoned(t, "cp3")
	eventually(t, func() error { return alarmed(p.status("cp1"), "cp2", "cp3") })
	p.put("cp1", "later")
	first := p.status("cp1").Incarnation

	// Restored again, the cluster has a later identity, and the abandoned replicas are still known.
	p.restored("cp1", file)
	eventually(t, func() error { return alarmed(p.status("cp1"), "cp2", "cp3") })
	if again := p.status("cp1").Incarnation; first == 0 || again <= first {
		t.Errorf("incarnation %d after the second restore, %d after the first", again, first)
	}
}

func newTestIdentities(t *testing.T) *identities {
	return newIdentities(Config{Name: "cp1", DataDir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}, datadir.Cluster{ID: "c"})
}

// A replica is abandoned by a later incarnation of its own cluster only, and only once its own
// incarnation is known. F53
func TestLaterIncarnationAbandonsAReplica(t *testing.T) {
	for _, c := range []struct {
		what      string
		own       uint64
		sees      clusterid.Identity
		abandoned bool
	}{
		{"later", 5, clusterid.Identity{Cluster: "c", Incarnation: 6}, true},
		{"same", 5, clusterid.Identity{Cluster: "c", Incarnation: 5}, false},
		{"earlier", 5, clusterid.Identity{Cluster: "c", Incarnation: 4}, false},
		{"another cluster", 5, clusterid.Identity{Cluster: "d", Incarnation: 6}, false},
		{"not known yet", 5, clusterid.Identity{}, false},
	} {
		for _, order := range []string{"own first", "own last"} {
			d := newTestIdentities(t)
			if order == "own first" {
				d.settle(c.own)
			}
			d.observe(c.sees, "192.0.2.2", "cp2")
			if order == "own last" {
				if d.isAbandoned() {
					t.Errorf("%s: abandoned before its own incarnation is known", c.what)
				}
				d.settle(c.own)
			}
			if got := d.isAbandoned(); got != c.abandoned {
				t.Errorf("%s, %s: abandoned %v", c.what, order, got)
			}
			rec, err := Config{DataDir: d.folder}.Dir().AbandonedBy()
			if err != nil || (rec != nil) != c.abandoned {
				t.Errorf("%s, %s: record %+v, error %v", c.what, order, rec, err)
			}
		}
	}
}

// A replica without data keeps the incarnation that it joins, and forgets that of an earlier join
// when no replica sends one. F53
func TestJoinedIncarnation(t *testing.T) {
	d := newTestIdentities(t)
	read := func() (rec datadir.IdentityRecord, found bool) {
		t.Helper()
		if err := d.keepJoined(); err != nil {
			t.Fatal(err)
		}
		found, err := datadir.ReadJSON(filepath.Join(d.folder, datadir.JoinedFile), &rec)
		if err != nil {
			t.Fatal(err)
		}
		return rec, found
	}
	for _, sees := range []uint64{0, 7, 3} {
		d.observe(clusterid.Identity{Cluster: "c", Incarnation: sees}, "192.0.2.2", "cp2")
		if rec, found := read(); !found || rec.Incarnation != d.newest || rec.Incarnation < sees {
			t.Errorf("after %d: %+v %v", sees, rec, found)
		}
	}
	d.seen = false
	if rec, found := read(); found {
		t.Errorf("of an earlier join: %+v", rec)
	}
}

// The alarm of an abandoned replica is up while the replica answers, and is gone when it has the
// current data. The number of alarms is bounded. F53
func TestAlarmsOfAbandonedReplicas(t *testing.T) {
	d := newTestIdentities(t)
	d.settle(5)
	d.observe(clusterid.Identity{Cluster: "c", Incarnation: 0}, "192.0.2.2", "cp2")
	d.observeUnknown("192.0.2.3", "cp3")
	now := time.Now()
	if got := d.alarms(now); len(got) != 2 || got[0].Member != "cp2" || got[1].Member != "cp3" ||
		!strings.Contains(got[1].Message, "192.0.2.3") {
		t.Errorf("%+v", got)
	}
	d.observe(clusterid.Identity{Cluster: "c", Incarnation: 5}, "192.0.2.2", "")
	if got := d.alarms(now); len(got) != 1 || got[0].Member != "cp3" {
		t.Errorf("after cp2 was rebuilt: %+v", got)
	}
	if got := d.alarms(now.Add(olderShown + time.Second)); len(got) != 0 {
		t.Errorf("after cp3 has been silent: %+v", got)
	}
	for i := range 1000 {
		d.observe(clusterid.Identity{Cluster: "c"}, fmt.Sprint(i), "")
	}
	if got := d.alarms(now); len(got) != datadir.MaxAbandoned {
		t.Errorf("%d alarms, want %d", len(got), datadir.MaxAbandoned)
	}
}

// An abandoned replica of a release without identities answers without one. A replica that does
// not know its identity yet answers with that of no cluster. F53
func TestProbeOfAReleaseWithoutIdentities(t *testing.T) {
	for shows, want := range map[string]bool{"": true, "/0": false, "c/0": false, "c/5": false} {
		server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if got := req.Header.Get(clusterid.Header); got != "c/5" {
				t.Errorf("the probe sends %q", got)
			}
			if shows != "" {
				w.Header().Set(clusterid.Header, shows)
			}
		}))
		host, port, err := net.SplitHostPort(server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		r := &Replica{ids: newTestIdentities(t)}
		if r.cluster.APIPort, err = strconv.Atoi(port); err != nil {
			t.Fatal(err)
		}
		r.ids.settle(5)
		trusts := server.Client().Transport.(*http.Transport).TLSClientConfig
		r.peers = newReplicas("cp1", r.cluster, nil, func() *tls.Config { return trusts }, slog.New(slog.DiscardHandler))
		r.peers.ids = r.ids
		r.peers.renew()
		unknown := false
		r.probeIdentities(t.Context(), map[string]string{"cp2": datadir.HostPort(host, 1)},
			func(name, at string) { unknown = name == "cp2" && at == host })
		if unknown != want {
			t.Errorf("a replica that shows %q: of a release without identities %v", shows, unknown)
		}
		if got := r.ids.alarms(time.Now()); (len(got) == 1 && got[0].Member == "cp2") != (shows == "c/0") {
			t.Errorf("a replica that shows %q: %+v", shows, got)
		}
		server.Close()
	}
}

// The API compares the identity of a request. A client without a replica's certificate changes
// nothing by what it sends. F53
func TestRequestsOfOtherIncarnations(t *testing.T) {
	for _, c := range []struct {
		what, sends, replica string
		code                 int
		abandoned, alarm     bool
	}{
		{"client without identities", "", "", 200, false, false},
		{"kctl that has no record", "/0", "", 200, false, false},
		{"kctl of an earlier incarnation", "c/0", "", 200, false, false},
		{"kctl of a later incarnation", "c/6", "", 421, false, false},
		{"kctl of another cluster", "d/6", "", 200, false, false},
		{"nonsense", "c", "", 400, false, false},
		{"abandoned replica", "c/0", "cp2", 421, false, true},
		{"replica that joins", "/0", "cp2", 200, false, false},
		{"recovered replica", "c/6", "cp2", 421, true, false},
	} {
		d := newTestIdentities(t)
		d.settle(5)
		next := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.Header.Get(clusterid.Header) != "" {
				t.Errorf("%s: the identity is sent on", c.what)
			}
		})
		h := d.guard(func(*http.Request) string { return c.replica })(next)
		req, w := httptest.NewRequest("GET", "/", nil), httptest.NewRecorder()
		if c.sends != "" {
			req.Header.Set(clusterid.Header, c.sends)
		}
		h.ServeHTTP(w, req)
		if w.Code != c.code || d.isAbandoned() != c.abandoned || (len(d.alarms(time.Now())) > 0) != c.alarm {
			t.Errorf("%s: code %d, abandoned %v, alarms %v", c.what, w.Code, d.isAbandoned(), d.alarms(time.Now()))
		}
		if got := w.Header().Get(clusterid.Header); (got == "c/5") != (c.sends != "" && c.code != 400) {
			t.Errorf("%s: answered with %q", c.what, got)
		}
		w = httptest.NewRecorder()
		if h.ServeHTTP(w, httptest.NewRequest("GET", "/", nil)); (w.Code == 503) != c.abandoned {
			t.Errorf("%s: the next request has code %d", c.what, w.Code)
		}
	}
}
