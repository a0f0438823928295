package membership

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

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/clusterid"
)

func newTestIdentities(t *testing.T) *identityChecker {
	return newIdentityChecker(datadir.Dir{Name: "cp1", Path: t.TempDir(), Log: slog.New(slog.DiscardHandler)},
		datadir.Cluster{ID: "c"})
}

// A replica is abandoned by a later incarnation of its own cluster only, and only once its own
// incarnation is known. F53
func TestLaterIncarnationAbandonsAReplica(t *testing.T) {
	for _, c := range []struct {
		name      string
		own       uint64
		observed  clusterid.Identity
		abandoned bool
	}{
		{"later incarnation", 5, clusterid.Identity{Cluster: "c", Incarnation: 6}, true},
		{"same incarnation", 5, clusterid.Identity{Cluster: "c", Incarnation: 5}, false},
		{"earlier incarnation", 5, clusterid.Identity{Cluster: "c", Incarnation: 4}, false},
		{"another cluster", 5, clusterid.Identity{Cluster: "d", Incarnation: 6}, false},
		{"identity that is not known yet", 5, clusterid.Identity{}, false},
	} {
		for _, order := range []string{"own first", "own last"} {
			d := newTestIdentities(t)
			if order == "own first" {
				d.setIncarnation(c.own)
			}
			d.observeIdentity(c.observed, "192.0.2.2", "cp2")
			if order == "own last" {
				if d.isAbandoned() {
					t.Errorf("%s: abandoned before its own incarnation is known", c.name)
				}
				d.setIncarnation(c.own)
			}
			if got := d.isAbandoned(); got != c.abandoned {
				t.Errorf("%s, %s: abandoned %v", c.name, order, got)
			}
			rec, err := datadir.Dir{Path: d.dataDir}.AbandonedBy()
			if err != nil || (rec != nil) != c.abandoned {
				t.Errorf("%s, %s: record %+v, error %v", c.name, order, rec, err)
			}
		}
	}
}

// A replica without data records the incarnation that it joins. It deletes the incarnation of an
// earlier join if no replica sends an incarnation. F53
func TestJoinedIncarnation(t *testing.T) {
	d := newTestIdentities(t)
	read := func() (rec datadir.IdentityRecord, found bool) {
		t.Helper()
		if err := d.recordJoinedIncarnation(); err != nil {
			t.Fatal(err)
		}
		found, err := datadir.ReadJSON(filepath.Join(d.dataDir, datadir.JoinedFile), &rec)
		if err != nil {
			t.Fatal(err)
		}
		return rec, found
	}
	for _, observed := range []uint64{0, 7, 3} {
		d.observeIdentity(clusterid.Identity{Cluster: "c", Incarnation: observed}, "192.0.2.2", "cp2")
		if rec, found := read(); !found || rec.Incarnation != d.newestIncarnation || rec.Incarnation < observed {
			t.Errorf("after incarnation %d the record is %+v, found %v", observed, rec, found)
		}
	}
	d.observedAny = false
	if rec, found := read(); found {
		t.Errorf("the record of an earlier join remains: %+v", rec)
	}
}

// The alarm about an abandoned replica exists while the replica responds, and ends when the replica
// has the current data. The number of alarms is bounded. F53
func TestAlarmsOfAbandonedReplicas(t *testing.T) {
	d := newTestIdentities(t)
	d.setIncarnation(5)
	d.observeIdentity(clusterid.Identity{Cluster: "c", Incarnation: 0}, "192.0.2.2", "cp2")
	d.recordWithoutIdentity("192.0.2.3", "cp3")
	now := time.Now()
	if got := d.abandonedAlarms(now); len(got) != 2 || got[0].Member != "cp2" || got[1].Member != "cp3" ||
		!strings.Contains(got[1].Message, "192.0.2.3") {
		t.Errorf("alarms about cp2 and cp3: %+v", got)
	}
	d.observeIdentity(clusterid.Identity{Cluster: "c", Incarnation: 5}, "192.0.2.2", "")
	if got := d.abandonedAlarms(now); len(got) != 1 || got[0].Member != "cp3" {
		t.Errorf("after cp2 was rebuilt: %+v", got)
	}
	if got := d.abandonedAlarms(now.Add(olderAlarmDuration + time.Second)); len(got) != 0 {
		t.Errorf("after cp3 has been silent: %+v", got)
	}
	for i := range 1000 {
		d.observeIdentity(clusterid.Identity{Cluster: "c"}, fmt.Sprint(i), "")
	}
	if got := d.abandonedAlarms(now); len(got) != datadir.MaxAbandoned {
		t.Errorf("%d alarms, want %d", len(got), datadir.MaxAbandoned)
	}
}

// An abandoned replica of a release without identities responds without an identity. A replica that
// has not read its identity yet responds with the identity of no cluster. F53
func TestProbeOfAReleaseWithoutIdentities(t *testing.T) {
	for header, want := range map[string]bool{"": true, "/0": false, "c/0": false, "c/5": false} {
		server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if got := req.Header.Get(clusterid.Header); got != "c/5" {
				t.Errorf("the probe sends %q", got)
			}
			if header != "" {
				w.Header().Set(clusterid.Header, header)
			}
		}))
		host, port, err := net.SplitHostPort(server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		r := &Membership{identities: newTestIdentities(t)}
		if r.config.Cluster.APIPort, err = strconv.Atoi(port); err != nil {
			t.Fatal(err)
		}
		r.identities.setIncarnation(5)
		tlsConfig := server.Client().Transport.(*http.Transport).TLSClientConfig
		r.peers = newPeers("cp1", r.config.Cluster, nil, func() *tls.Config {
			return tlsConfig
		}, slog.New(slog.DiscardHandler))
		r.peers.identities = r.identities
		r.peers.Reconnect()
		unknown := false
		r.probeIdentities(t.Context(), map[string]string{"cp2": datadir.HostPort(host, 1)},
			func(name, at string) { unknown = name == "cp2" && at == host })
		if unknown != want {
			t.Errorf("a replica that sends %q counts as a release without identities: %v", header, unknown)
		}
		if got := r.identities.abandonedAlarms(time.Now()); (len(got) == 1 && got[0].Member == "cp2") !=
			(header == "c/0") {
			t.Errorf("the alarms about a replica that sends %q: %+v", header, got)
		}
		server.Close()
	}
}

// The API compares the identity in a request. A client without the certificate of a replica cannot
// make the replica stop, and raises no alarm. F53
func TestRequestsOfOtherIncarnations(t *testing.T) {
	for _, c := range []struct {
		name, header, replica string
		code                  int
		abandoned, alarm      bool
	}{
		{"client without identities", "", "", 200, false, false},
		{"kctl that has no record", "/0", "", 200, false, false},
		{"kctl of an earlier incarnation", "c/0", "", 200, false, false},
		{"kctl of a later incarnation", "c/6", "", 421, false, false},
		{"kctl of another cluster", "d/6", "", 200, false, false},
		{"malformed identity", "c", "", 400, false, false},
		{"abandoned replica", "c/0", "cp2", 421, false, true},
		{"replica that joins", "/0", "cp2", 200, false, false},
		{"recovered replica", "c/6", "cp2", 421, true, false},
	} {
		d := newTestIdentities(t)
		d.setIncarnation(5)
		next := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if req.Header.Get(clusterid.Header) != "" {
				t.Errorf("%s: the identity header is forwarded", c.name)
			}
		})
		h := d.guardRequests(func(*http.Request) string { return c.replica })(next)
		req, w := httptest.NewRequest("GET", "/", nil), httptest.NewRecorder()
		if c.header != "" {
			req.Header.Set(clusterid.Header, c.header)
		}
		h.ServeHTTP(w, req)
		if w.Code != c.code || d.isAbandoned() != c.abandoned || (len(d.abandonedAlarms(time.Now())) > 0) != c.alarm {
			t.Errorf("%s: status %d, abandoned %v, alarms %v", c.name, w.Code, d.isAbandoned(),
				d.abandonedAlarms(time.Now()))
		}
		if got := w.Header().Get(clusterid.Header); (got == "c/5") != (c.header != "" && c.code != 400) {
			t.Errorf("%s: answered with %q", c.name, got)
		}
		w = httptest.NewRecorder()
		if h.ServeHTTP(w, httptest.NewRequest("GET", "/", nil)); (w.Code == 503) != c.abandoned {
			t.Errorf("%s: the next request gets status %d", c.name, w.Code)
		}
	}
}
