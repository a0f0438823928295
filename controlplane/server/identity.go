package server

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

// A recovery or restore gives the cluster a new identity (internal/clusterid). The record of it
// lies in the store, so that each replica of the cluster has it in its first snapshot. Replicas
// compare identities in each HTTP request between them. A replica that finds a later incarnation
// writes that to its data folder, stops its store and serves nothing but an alarm (abandoned.go).
//
// The record needs no feature level: a release that does not know it stores and replicates it like
// any other key.

const (
	identityEvery = 5 * time.Second // how often the addresses of abandoned replicas are probed
	identityAsk   = 2 * time.Second // how long a replica that starts waits for the identities of the others
	olderShown    = time.Minute     // how long an alarm stays up after the last response of an abandoned replica
)

// errAbandoned reports that the cluster of this replica has a later incarnation.
var errAbandoned = errors.New("the cluster was recovered or restored without this replica")

// olderReplica is a replica of an earlier incarnation that has sent or answered a request.
type olderReplica struct {
	name     string // "" = not known
	identity string // what it says
	first    time.Time
	last     time.Time
}

// identities compares the identity of this replica with those of its partners.
type identities struct {
	cluster, self, folder string
	log                   *slog.Logger
	abandoned             chan struct{} // closed when a later incarnation was found

	mu     sync.Mutex
	own    uint64
	known  bool // own is known
	joins  bool // the data of this replica may lack the record until it has caught up; set before Run
	empty  bool // it has no data; set before Run
	seen   bool // a replica of this cluster has sent an identity
	newest uint64
	from   string
	older  map[string]olderReplica // by host
}

func newIdentities(cfg Config, cluster datadir.Cluster) *identities {
	return &identities{cluster: cluster.ID, self: cfg.Name, folder: cfg.DataDir, log: cfg.Log.With("part", "identity"),
		abandoned: make(chan struct{}), older: map[string]olderReplica{}}
}

// current returns the identity of this replica; false while it is not known.
func (d *identities) current() (clusterid.Identity, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return clusterid.Identity{Cluster: d.cluster, Incarnation: d.own}, d.known
}

// header returns the identity to send; that of no cluster while it is not known.
func (d *identities) header() string {
	own, known := d.current()
	if !known {
		return clusterid.Identity{}.String()
	}
	return own.String()
}

// settle sets the incarnation of this replica's data.
func (d *identities) settle(own uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.own, d.known = own, true
	d.judge()
}

// observe takes the identity of another replica. name may be "".
func (d *identities) observe(theirs clusterid.Identity, host, name string) {
	if theirs.Cluster != d.cluster {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seen = true
	if theirs.Incarnation > d.newest {
		d.newest, d.from = theirs.Incarnation, host
	}
	switch {
	case !d.known:
	case theirs.Incarnation < d.own:
		d.noteOlder(host, name, "it has incarnation "+strconv.FormatUint(theirs.Incarnation, 10))
	case theirs.Incarnation == d.own:
		delete(d.older, host)
	}
	d.judge()
}

// judge ends this replica when it has seen a later incarnation. The caller holds mu.
func (d *identities) judge() {
	if !d.known || d.newest <= d.own || d.isAbandoned() {
		return
	}
	rec := datadir.AbandonedRecord{Version: datadir.IdentityVersion, Incarnation: d.own, Newest: d.newest, From: d.from,
		At: time.Now().UnixMilli()}
	if err := datadir.WriteJSON(filepath.Join(d.folder, datadir.AbandonedFile), rec); err != nil {
		d.log.Error("keeping that this replica is abandoned", "err", err)
	}
	close(d.abandoned)
}

func (d *identities) isAbandoned() bool {
	select {
	case <-d.abandoned:
		return true
	default:
		return false
	}
}

// noteOlder records a replica of an earlier incarnation for the alarms. The caller holds mu.
func (d *identities) noteOlder(host, name, says string) {
	was, known := d.older[host]
	if !known {
		if len(d.older) >= datadir.MaxAbandoned {
			return
		}
		was.first = time.Now()
		d.log.Error("an abandoned replica is running: the cluster was recovered or restored without it", "replica", name, "address", host, "says", says)
	}
	if name == "" {
		name = was.name
	}
	d.older[host] = olderReplica{name, says, was.first, time.Now()}
}

// alarms returns an alarm for each replica of an earlier incarnation that has answered within the
// last minute.
func (d *identities) alarms(now time.Time) (out []api.ClusterAlarm) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.older, func(_ string, o olderReplica) bool { return now.Sub(o.last) > olderShown })
	for _, host := range slices.Sorted(maps.Keys(d.older)) {
		o := d.older[host]
		out = append(out, api.ClusterAlarm{Kind: "abandoned", Member: o.name, Since: o.first.UnixMilli(),
			Message: fmt.Sprintf("a replica at %s runs that is no part of this cluster since its recovery or restore: %s",
				host, o.identity),
			Remedy: "on that machine stop it and run 'keelson-controlplane rebuild --server ADDRESS-OF-THIS-CLUSTER'; " +
				"where its data may have writes that are missing here, copy its data folder first"})
	}
	return out
}

// guard compares the identity of each request, and refuses all requests once this replica is
// abandoned. replicaOf returns the name of the replica that sent a request, or "".
func (d *identities) guard(replicaOf func(*http.Request) string) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			text := req.Header.Get(clusterid.Header)
			req.Header.Del(clusterid.Header) // it is not sent on to pods and extension servers
			if text != "" && !d.accepts(w, req, text, replicaOf) {
				return
			}
			if d.isAbandoned() {
				refuse(w, http.StatusServiceUnavailable, d.refusal())
				return
			}
			next.ServeHTTP(w, req)
		})
	}
}

// accepts reports whether a request with this identity is served, and refuses it otherwise.
func (d *identities) accepts(w http.ResponseWriter, req *http.Request, text string,
	replicaOf func(*http.Request) string,
) bool {
	theirs, err := clusterid.Parse(text)
	if err != nil {
		refuse(w, http.StatusBadRequest, fmt.Errorf("header %s: %w", clusterid.Header, err))
		return false
	}
	w.Header().Set(clusterid.Header, d.header())
	own, known := d.current()
	if !known {
		return true
	}
	if own != theirs && theirs.Cluster == own.Cluster {
		if name := replicaOf(req); name != "" {
			host, _, _ := net.SplitHostPort(req.RemoteAddr)
			d.observe(theirs, host, name)
			if theirs.Before(own) {
				refuse(w, http.StatusMisdirectedRequest, &clusterid.AbandonedError{Replica: name, Newest: own})
				return false
			}
		}
	}
	if own.Before(theirs) {
		refuse(w, http.StatusMisdirectedRequest, &clusterid.AbandonedError{Replica: d.self, Newest: theirs})
		return false
	}
	return true
}

func (d *identities) refusal() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return &clusterid.AbandonedError{Replica: d.self,
		Newest: clusterid.Identity{Cluster: d.cluster, Incarnation: d.newest}}
}

// replicaOf returns the name of the replica whose certificate a request was made with; "" where it
// was not made by one.
func replicaOf(req *http.Request, roots *x509.CertPool) string {
	if req.TLS == nil || len(req.TLS.PeerCertificates) == 0 {
		return ""
	}
	leaf := req.TLS.PeerCertificates[0]
	name, is := strings.CutPrefix(leaf.Subject.CommonName, replicaUser)
	if !is || !slices.Contains(leaf.Subject.Organization, api.GroupMasters) {
		return ""
	}
	usages := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: usages}); err != nil {
		return ""
	}
	return name
}

// identified is a transport to other replicas that sends this replica's identity and compares
// theirs.
type identified struct {
	*http.Transport
	ids *identities
}

func (t identified) RoundTrip(req *http.Request) (*http.Response, error) {
	if t.ids == nil {
		return t.Transport.RoundTrip(req)
	}
	req = req.Clone(req.Context())
	req.Header.Set(clusterid.Header, t.ids.header())
	resp, err := t.Transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if theirs, err := clusterid.Parse(resp.Header.Get(clusterid.Header)); err == nil {
		t.ids.observe(theirs, req.URL.Hostname(), "")
	}
	return resp, nil
}

// askIdentities compares identities with the last known members, before this replica takes part in
// raft. Members that do not answer within identityAsk are compared later.
func (r *Replica) askIdentities(ctx context.Context) error {
	members, err := r.cfg.Dir().Members()
	if err != nil {
		r.log.Warn("the identities of the last known members are not compared before this replica takes part", "err", err)
	}
	peers, err := r.toBecomeMember()
	if err != nil {
		return err
	}
	asked := map[string]string{}
	maps.Copy(asked, members)
	maps.Copy(asked, peers)
	delete(asked, r.cfg.Name)
	ctx, cancel := context.WithTimeout(ctx, identityAsk)
	defer cancel()
	r.probeIdentities(ctx, asked, func(string, string) {})
	if r.ids.joins && r.ids.empty {
		return r.ids.keepJoined()
	}
	return nil
}

// keepJoined writes down which incarnation a replica without data joins. Should it be stopped
// before it has caught up, its data may lack the record.
func (d *identities) keepJoined() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	path := filepath.Join(d.folder, datadir.JoinedFile)
	if d.seen {
		return datadir.WriteJSON(path, datadir.IdentityRecord{Version: datadir.IdentityVersion, Incarnation: d.newest})
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // of an earlier join
		return err
	}
	return nil
}

// probeIdentities sends a request to each replica, whose transport compares identities. unknown is
// called for those that answer without an identity.
func (r *Replica) probeIdentities(ctx context.Context, members map[string]string, unknown func(name, host string)) {
	var asking sync.WaitGroup
	for name, address := range members {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			continue
		}
		asking.Go(func() {
			resp, err := r.peers.get(ctx, datadir.HostPort(host, r.cluster.APIPort), "/readyz")
			if err != nil {
				return
			}
			resp.Body.Close()
			if resp.Header.Get(clusterid.Header) == "" {
				unknown(name, host)
			}
			r.ids.nameOlder(host, name)
		})
	}
	asking.Wait()
}

// nameOlder sets the name of an abandoned replica, where only its address is known.
func (d *identities) nameOlder(host, name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if o, is := d.older[host]; is && o.name == "" {
		o.name = name
		d.older[host] = o
	}
}

// watchIdentity reads the incarnation of this replica's data, and probes the replicas that are
// abandoned. It ends with errAbandoned when this replica is one of them.
func (r *Replica) watchIdentity(ctx context.Context) error {
	rec, err := r.ownIdentity(ctx)
	if err != nil {
		return err
	}
	r.ids.settle(rec.Incarnation)
	delete(rec.Abandoned, r.cfg.Name)
	for {
		select {
		case <-r.ids.abandoned:
			return errAbandoned
		case <-ctx.Done():
			return ctx.Err()
		default:
		}
		r.probeAbandoned(ctx, rec.Abandoned)
		timer := time.NewTimer(identityEvery)
		select {
		case <-r.ids.abandoned:
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

// probeAbandoned probes the addresses of abandoned replicas. A replica there that is no member,
// and is of a release that has no identity, is abandoned too.
func (r *Replica) probeAbandoned(ctx context.Context, all map[string]string) {
	if len(all) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, identityAsk)
	defer cancel()
	members := map[string]bool{}
	for _, m := range r.store.Status().Members {
		if host, _, err := net.SplitHostPort(m.Address); err == nil {
			members[host] = true
		}
	}
	r.probeIdentities(ctx, all, func(name, host string) {
		if !members[host] {
			r.ids.observeUnknown(host, name)
		}
	})
}

// observeUnknown takes that a replica which is no member is of a release without identities.
func (d *identities) observeUnknown(host, name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.noteOlder(host, name, "its release does not know identities")
}

// ownIdentity reads the record of this replica's data. A replica that has the data of a group has
// the record in its first snapshot; a replica that joins has it when it has caught up.
func (r *Replica) ownIdentity(ctx context.Context) (datadir.IdentityRecord, error) {
	var joined datadir.IdentityRecord
	known := !r.ids.joins
	if r.ids.joins && !r.ids.empty {
		found, err := datadir.ReadJSON(filepath.Join(r.cfg.DataDir, datadir.JoinedFile), &joined)
		if err != nil {
			return joined, err
		}
		known = found
	}
	rec, err := r.storedIdentity(ctx, known)
	rec.Incarnation = max(rec.Incarnation, joined.Incarnation)
	return rec, err
}

// storedIdentity reads the record in this replica's state, which is complete at once or when the
// replica has caught up.
func (r *Replica) storedIdentity(ctx context.Context, complete bool) (rec datadir.IdentityRecord, err error) {
	for !complete && !r.store.Ready() {
		if err := wait.Delay(ctx, 20*time.Millisecond); err != nil {
			return rec, err
		}
	}
	for {
		it, _, err := r.store.Get(ctx, datadir.IdentityKey, raftstore.ReadOptions{Local: true})
		switch {
		case err == nil:
			return datadir.DecodeIdentity(it.Value)
		case errors.Is(err, raftstore.ErrNotFound):
			return rec, nil
		case ctx.Err() != nil:
			return rec, ctx.Err()
		}
		if err := wait.Delay(ctx, 20*time.Millisecond); err != nil {
			return rec, err
		}
	}
}

func (d *identities) incarnation() uint64 {
	own, _ := d.current()
	return own.Incarnation
}
