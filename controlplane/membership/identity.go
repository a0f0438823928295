package membership

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
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

// A recovery or restore starts a new incarnation of the cluster, with a higher number
// (internal/clusterid). The number is stored under datadir.IdentityKey, so that every replica of
// the new incarnation receives it with its first snapshot. Replicas send their identity, which is
// the cluster ID and the incarnation, in every HTTP request and response between them. A replica
// that receives a later incarnation of its own cluster is abandoned: it writes abandoned.json,
// stops its store and serves only an alarm (abandoned.go).
//
// The key does not depend on a feature level: a release without support for identities stores and
// replicates it like any other key.

const (
	identityInterval   = 5 * time.Second // interval of requests to replicas that a recovery or restore has excluded
	identityTimeout    = 2 * time.Second // timeout of requests that compare the identities of replicas
	olderAlarmDuration = time.Minute     // how long an alarm about an excluded replica remains after its last message
)

// ErrAbandoned is returned by WatchIdentity if another replica has a later incarnation of the
// cluster: a recovery or restore has excluded this replica.
var ErrAbandoned = errors.New("the cluster was recovered or restored without this replica")

// olderReplica is another replica that still runs with data from before the last recovery or
// restore of the cluster. This replica has received a request or a response from it.
type olderReplica struct {
	name        string // empty if the name is not known
	description string // why its data is known to be older, for the alarm
	firstSeen   time.Time
	lastSeen    time.Time
}

// identityChecker compares the identity of this replica (cluster ID and incarnation) with the
// identities that other replicas send. Each recovery or restore of the cluster increments the
// incarnation. If two replicas have different incarnations, a recovery or restore has excluded the
// replica with the lower number.
type identityChecker struct {
	clusterID, self, dataDir string
	log                      *slog.Logger
	abandoned                chan struct{} // closed when another replica has sent a higher incarnation

	mu               sync.Mutex
	incarnation      uint64 // incarnation of the data of this replica
	incarnationKnown bool   // incarnation has been read from the data
	// this replica is joining: until it has caught up, its data may not contain the incarnation;
	// set by New
	joining           bool
	hasNoData         bool                    // this replica has no raft data; set by New
	observedAny       bool                    // another replica of this cluster has sent an identity
	newestIncarnation uint64                  // the highest incarnation that another replica has sent; 0 if unknown
	newestHost        string                  // the host of that replica
	olderReplicas     map[string]olderReplica // replicas with a lower incarnation that still run, by host
}

func newIdentityChecker(dir datadir.Dir, cluster datadir.Cluster) *identityChecker {
	return &identityChecker{clusterID: cluster.ID, self: dir.Name, dataDir: dir.Path,
		log:       dir.Log.With("part", "identity"),
		abandoned: make(chan struct{}), olderReplicas: map[string]olderReplica{}}
}

// ownIdentity returns the cluster ID and the incarnation of this replica's data. The incarnation is
// a number that each recovery or restore of the cluster increments. ownIdentity returns false until
// setIncarnation is called, because the incarnation has not been read from the data yet.
func (d *identityChecker) ownIdentity() (clusterid.Identity, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return clusterid.Identity{Cluster: d.clusterID, Incarnation: d.incarnation}, d.incarnationKnown
}

// identityHeader returns the value of the HTTP header clusterid.Header, which every request and
// response between replicas contains: the cluster ID, and the incarnation (the number that each
// recovery or restore increments). If this replica has not read the incarnation from its data yet,
// the value has an empty cluster ID, and receivers ignore it.
func (d *identityChecker) identityHeader() string {
	own, known := d.ownIdentity()
	if !known {
		return clusterid.Identity{}.String()
	}
	return own.String()
}

// setIncarnation keeps incarnation, the number that was read from this replica's data, in memory.
// From then on, ownIdentity returns it. If another replica has already sent a higher incarnation, a
// recovery or restore has excluded this replica, and setIncarnation marks it as abandoned
// (checkAbandoned).
func (d *identityChecker) setIncarnation(incarnation uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.incarnation, d.incarnationKnown = incarnation, true
	d.checkAbandoned()
}

// observeIdentity records the identity (cluster ID and incarnation) that the replica at host has
// sent. If its incarnation is lower than that of this replica, a recovery or restore has excluded
// the sender. If it is higher, this replica was excluded and is marked as abandoned. name is the
// name of the sender, or empty if it is not known. Identities of other clusters are ignored.
func (d *identityChecker) observeIdentity(identity clusterid.Identity, host, name string) {
	if identity.Cluster != d.clusterID {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.observedAny = true
	if identity.Incarnation > d.newestIncarnation {
		d.newestIncarnation, d.newestHost = identity.Incarnation, host
	}
	switch {
	case !d.incarnationKnown:
	case identity.Incarnation < d.incarnation:
		d.recordOlderReplica(host, name, "it has incarnation "+strconv.FormatUint(identity.Incarnation, 10))
	case identity.Incarnation == d.incarnation:
		delete(d.olderReplicas, host)
	}
	d.checkAbandoned()
}

// checkAbandoned checks whether another replica has sent a higher incarnation than that of this
// replica. If so, a recovery or restore of the cluster has excluded this replica. checkAbandoned
// then closes d.abandoned and writes abandoned.json. The caller holds d.mu.
func (d *identityChecker) checkAbandoned() {
	if !d.incarnationKnown || d.newestIncarnation <= d.incarnation || d.isAbandoned() {
		return
	}
	rec := datadir.AbandonedRecord{Version: datadir.IdentityVersion, Incarnation: d.incarnation,
		Newest: d.newestIncarnation, From: d.newestHost,
		At: time.Now().UnixMilli()}
	if err := datadir.WriteJSON(filepath.Join(d.dataDir, datadir.AbandonedFile), rec); err != nil {
		d.log.Error("cannot record that this replica is abandoned", "err", err)
	}
	close(d.abandoned)
}

func (d *identityChecker) isAbandoned() bool {
	select {
	case <-d.abandoned:
		return true
	default:
		return false
	}
}

// recordOlderReplica records that the replica at host still runs with data from before the last
// recovery or restore of the cluster. abandonedAlarms returns an alarm about it. At most
// datadir.MaxAbandoned replicas are recorded. The caller holds d.mu.
func (d *identityChecker) recordOlderReplica(host, name, description string) {
	was, known := d.olderReplicas[host]
	if !known {
		if len(d.olderReplicas) >= datadir.MaxAbandoned {
			return
		}
		was.firstSeen = time.Now()
		d.log.Error("an abandoned replica is running: the cluster was recovered or restored without it", "replica",
			name, "address", host, "reason", description)
	}
	if name == "" {
		name = was.name
	}
	d.olderReplicas[host] = olderReplica{name, description, was.firstSeen, time.Now()}
}

// abandonedAlarms returns an alarm for each replica that still runs although a recovery or restore
// has excluded it. Such a replica has sent a request or a response within the last
// olderAlarmDuration.
func (d *identityChecker) abandonedAlarms(now time.Time) (out []api.ClusterAlarm) {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.olderReplicas, func(_ string, o olderReplica) bool {
		return now.Sub(o.lastSeen) > olderAlarmDuration
	})
	for _, host := range slices.Sorted(maps.Keys(d.olderReplicas)) {
		o := d.olderReplicas[host]
		out = append(out, api.ClusterAlarm{Kind: "abandoned", Member: o.name, Since: o.firstSeen.UnixMilli(),
			Message: fmt.Sprintf("the replica at %s is running, but the cluster was recovered or "+
				"restored without it: %s",
				host, o.description),
			Remedy: "stop this replica and run 'keelson-controlplane rebuild --server ADDRESS-OF-THIS-CLUSTER' " +
				"on its machine; " +
				"if its data may contain writes that the cluster does not have, copy its data folder first"})
	}
	return out
}

// guardRequests returns an HTTP middleware that compares the identity header (cluster ID and
// incarnation) of each request with the identity of this replica. It refuses requests of other
// incarnations, that is, from before or after a recovery or restore of the cluster. If a recovery
// or restore has excluded this replica, it refuses all requests. senderName returns the name of the
// replica that sent a request, or "" for other clients.
func (d *identityChecker) guardRequests(senderName func(*http.Request) string) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			text := req.Header.Get(clusterid.Header)
			req.Header.Del(clusterid.Header) // the header is not forwarded to pods and extension API servers
			if text != "" && !d.acceptRequest(w, req, text, senderName) {
				return
			}
			if d.isAbandoned() {
				clusterhttp.WriteError(w, http.StatusServiceUnavailable, d.abandonedError())
				return
			}
			next.ServeHTTP(w, req)
		})
	}
}

// acceptRequest checks text, the identity header (cluster ID and incarnation) of req. If req must
// be refused, it writes the error response and returns false. It refuses a request with a higher
// incarnation than that of this replica: the cluster was recovered or restored without this
// replica. If another replica sent that request, this replica is also marked as abandoned.
// acceptRequest also refuses a request of a replica with a lower incarnation. While this replica
// does not know its own incarnation, every valid header is accepted.
func (d *identityChecker) acceptRequest(w http.ResponseWriter, req *http.Request, text string,
	senderName func(*http.Request) string,
) bool {
	identity, err := clusterid.Parse(text)
	if err != nil {
		clusterhttp.WriteError(w, http.StatusBadRequest, fmt.Errorf("header %s: %w", clusterid.Header, err))
		return false
	}
	w.Header().Set(clusterid.Header, d.identityHeader())
	own, known := d.ownIdentity()
	if !known {
		return true
	}
	if own != identity && identity.Cluster == own.Cluster {
		if name := senderName(req); name != "" {
			host, _, _ := net.SplitHostPort(req.RemoteAddr)
			d.observeIdentity(identity, host, name)
			if identity.Before(own) {
				clusterhttp.WriteError(w, http.StatusMisdirectedRequest,
					&clusterid.AbandonedError{Replica: name, Newest: own})
				return false
			}
		}
	}
	if own.Before(identity) {
		clusterhttp.WriteError(w, http.StatusMisdirectedRequest,
			&clusterid.AbandonedError{Replica: d.self, Newest: identity})
		return false
	}
	return true
}

func (d *identityChecker) abandonedError() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return &clusterid.AbandonedError{Replica: d.self,
		Newest: clusterid.Identity{Cluster: d.clusterID, Incarnation: d.newestIncarnation}}
}

// replicaNameOf returns the name of the replica that sent a request. The name is in the client
// certificate, which must be valid for a CA in roots. For requests of other clients, it returns "".
func replicaNameOf(req *http.Request, roots *x509.CertPool) string {
	if req.TLS == nil || len(req.TLS.PeerCertificates) == 0 {
		return ""
	}
	leaf := req.TLS.PeerCertificates[0]
	name, isReplica := strings.CutPrefix(leaf.Subject.CommonName, clusterhttp.ReplicaUserPrefix)
	if !isReplica || !slices.Contains(leaf.Subject.Organization, api.GroupMasters) {
		return ""
	}
	usages := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: usages}); err != nil {
		return ""
	}
	return name
}

// identityTransport is an HTTP transport for requests to other replicas. It sends this replica's
// identity (cluster ID and incarnation) in each request, and passes the identity in the response to
// identities.
type identityTransport struct {
	*http.Transport
	identities *identityChecker
}

func (t identityTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if t.identities == nil {
		return t.Transport.RoundTrip(req)
	}
	req = req.Clone(req.Context())
	req.Header.Set(clusterid.Header, t.identities.identityHeader())
	resp, err := t.Transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if identity, err := clusterid.Parse(resp.Header.Get(clusterid.Header)); err == nil {
		t.identities.observeIdentity(identity, req.URL.Hostname(), "")
	}
	return resp, nil
}

// collectIdentities sends requests to the last known members and to the replicas in peers.json, and
// records the identities (cluster ID and incarnation) in their responses. It runs before the store
// starts. When this replica has read its own incarnation, setIncarnation compares it with the
// recorded incarnations. Replicas that do not respond within identityTimeout are compared later,
// when Peers.Run sends requests to them.
func (r *Membership) collectIdentities(ctx context.Context) error {
	members, err := r.config.Dir.Members()
	if err != nil {
		r.config.Log.Warn("cannot read the last known members: their identities are not compared before "+
			"the store starts",
			"err", err)
	}
	peers, err := r.peersToJoin()
	if err != nil {
		return err
	}
	targets := map[string]string{}
	maps.Copy(targets, members)
	maps.Copy(targets, peers)
	delete(targets, r.config.Dir.Name)
	ctx, cancel := context.WithTimeout(ctx, identityTimeout)
	defer cancel()
	r.probeIdentities(ctx, targets, func(string, string) {})
	if r.identities.joining && r.identities.hasNoData {
		return r.identities.recordJoinedIncarnation()
	}
	return nil
}

// recordJoinedIncarnation writes the cluster's incarnation to joined-identity.json, on a replica
// that joins without data. The incarnation is the number that each recovery or restore increments.
// Until the replica has caught up, its data may not contain the incarnation. If the replica stops
// before that, it reads the incarnation from this file at its next start. If no other replica has
// sent an identity, recordJoinedIncarnation deletes the file of an earlier join.
func (d *identityChecker) recordJoinedIncarnation() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	path := filepath.Join(d.dataDir, datadir.JoinedFile)
	if d.observedAny {
		return datadir.WriteJSON(path, datadir.IdentityRecord{Version: datadir.IdentityVersion,
			Incarnation: d.newestIncarnation})
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) { // the file of an earlier join
		return err
	}
	return nil
}

// probeIdentities sends a request to the API of each replica in members, which maps names to peer
// addresses. identityTransport records the identity (cluster ID and incarnation) in each response.
// onMissing is called for each replica that sends a response without an identity.
func (r *Membership) probeIdentities(
	ctx context.Context, members map[string]string, onMissing func(name, host string),
) {
	var pending sync.WaitGroup
	for name, address := range members {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			continue
		}
		pending.Go(func() {
			resp, err := r.peers.getAPI(ctx, datadir.HostPort(host, r.config.Cluster.APIPort), "/readyz")
			if err != nil {
				return
			}
			resp.Body.Close()
			if resp.Header.Get(clusterid.Header) == "" {
				onMissing(name, host)
			}
			r.identities.setOlderReplicaName(host, name)
		})
	}
	pending.Wait()
}

// setOlderReplicaName sets the name of the replica at host in the record that recordOlderReplica
// has created, if that record exists and has no name.
func (d *identityChecker) setOlderReplicaName(host, name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if o, found := d.olderReplicas[host]; found && o.name == "" {
		o.name = name
		d.olderReplicas[host] = o
	}
}

// WatchIdentity reads the incarnation, a number that each recovery or restore of the cluster
// increments, from this replica's data. Then it periodically sends requests to the replicas that
// the last recovery or restore has excluded, until ctx ends. It returns ErrAbandoned when another
// replica has sent a higher incarnation than that of this replica.
func (r *Membership) WatchIdentity(ctx context.Context) error {
	rec, err := r.readOwnIdentity(ctx)
	if err != nil {
		return err
	}
	r.identities.setIncarnation(rec.Incarnation)
	delete(rec.Abandoned, r.config.Dir.Name)
	for {
		select {
		case <-r.identities.abandoned:
			return ErrAbandoned
		case <-ctx.Done():
			return ctx.Err()
		default:
		}
		r.probeAbandoned(ctx, rec.Abandoned)
		timer := time.NewTimer(identityInterval)
		select {
		case <-r.identities.abandoned:
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

// probeAbandoned finds replicas that still run although a recovery or restore has excluded them, so
// that abandonedAlarms returns alarms about them. abandoned maps their names to addresses. It sends
// a request to each address. A current release responds with its identity, which identityTransport
// records. A replica that responds without an identity has an old release; probeAbandoned records
// it, unless a member has the same host.
func (r *Membership) probeAbandoned(ctx context.Context, abandoned map[string]string) {
	if len(abandoned) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, identityTimeout)
	defer cancel()
	members := map[string]bool{}
	for _, m := range r.store.Status().Members {
		if host, _, err := net.SplitHostPort(m.Address); err == nil {
			members[host] = true
		}
	}
	r.probeIdentities(ctx, abandoned, func(name, host string) {
		if !members[host] {
			r.identities.recordWithoutIdentity(host, name)
		}
	})
}

// recordWithoutIdentity records that the replica at host still runs although a recovery or restore
// has excluded it. Its release is too old to send an identity.
func (d *identityChecker) recordWithoutIdentity(host, name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.recordOlderReplica(host, name, "its release does not send its incarnation")
}

// readOwnIdentity returns the identity record in this replica's store. It contains the incarnation
// of the cluster, and the replicas that the last recovery or restore has excluded. On a joining
// replica, readOwnIdentity waits until the replica has caught up, unless joined-identity.json
// contains the incarnation.
func (r *Membership) readOwnIdentity(ctx context.Context) (datadir.IdentityRecord, error) {
	var joined datadir.IdentityRecord
	known := !r.identities.joining
	if r.identities.joining && !r.identities.hasNoData {
		found, err := datadir.ReadJSON(filepath.Join(r.config.Dir.Path, datadir.JoinedFile), &joined)
		if err != nil {
			return joined, err
		}
		known = found
	}
	rec, err := r.readStoredIdentity(ctx, known)
	rec.Incarnation = max(rec.Incarnation, joined.Incarnation)
	return rec, err
}

// readStoredIdentity reads the identity record of the cluster from the log entries that this
// replica has applied. complete reports that these entries contain the record if it exists. If
// complete is false, readStoredIdentity first waits until this replica has caught up. If the store
// contains no record, the result is empty.
func (r *Membership) readStoredIdentity(ctx context.Context, complete bool) (rec datadir.IdentityRecord, err error) {
	for !complete && !r.store.Ready() {
		if err := wait.Delay(ctx, 20*time.Millisecond); err != nil {
			return rec, err
		}
	}
	for {
		item, _, err := r.store.Get(ctx, datadir.IdentityKey, raftstore.ReadOptions{Local: true})
		switch {
		case err == nil:
			return datadir.DecodeIdentity(item.Value)
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

// currentIncarnation returns the incarnation in this replica's data, a number that each recovery or
// restore increments. It returns 0 if the number has not been read yet.
func (d *identityChecker) currentIncarnation() uint64 {
	own, _ := d.ownIdentity()
	return own.Incarnation
}
