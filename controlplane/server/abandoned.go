package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
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
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

func decodeIdentity(raw []byte) (rec identityRecord, err error) {
	if err := json.Unmarshal(raw, &rec); err != nil {
		return identityRecord{}, fmt.Errorf("the stored identity (%s): %w", identityKey, err)
	}
	return rec, nil
}

// identityIn returns the identity record of a state, or the zero record if it is absent or unreadable.
func identityIn(v *mvcc.View) identityRecord {
	it, ok := v.Get(identityKey)
	if !ok {
		return identityRecord{}
	}
	rec, _ := decodeIdentity(it.Value)
	return rec
}

// startIncarnation returns the operation by which a recovery or restore starts a new incarnation
// of the cluster. was is the record of the data that is replaced, and abandoned are the replicas
// that are left behind, by name.
func (c Config) startIncarnation(
	v *mvcc.View, was identityRecord, abandoned map[string]string,
) ([]raftstore.Op, error) {
	found, err := c.abandonedBy()
	if err != nil {
		return nil, err
	}
	stored := identityIn(v)
	known := max(was.Incarnation, stored.Incarnation)
	if found != nil {
		known = max(known, found.Newest)
	}
	rec := identityRecord{identityVersion, clusterid.Next(known, time.Now()), map[string]string{}}
	// The newest address of a name counts.
	for _, list := range []map[string]string{abandoned, was.Abandoned, stored.Abandoned} {
		for _, name := range slices.Sorted(maps.Keys(list)) {
			if _, has := rec.Abandoned[name]; !has && len(rec.Abandoned) < maxOlder {
				rec.Abandoned[name] = list[name]
			}
		}
	}
	value, err := json.Marshal(rec)
	if err != nil {
		return nil, err
	}
	return []raftstore.Op{raftstore.Put(identityKey, value)}, nil
}

// abandonedBy returns what this replica has written about the later incarnation that it found; nil
// when it found none.
func (c Config) abandonedBy() (*abandonedRecord, error) {
	var rec abandonedRecord
	found, err := readJSON(filepath.Join(c.DataDir, abandonedFile), &rec)
	if err != nil || !found {
		return nil, err
	}
	return &rec, nil
}

// clearAbandoned removes that record: the data of this replica is replaced.
func (c Config) clearAbandoned() error {
	if err := os.Remove(filepath.Join(c.DataDir, abandonedFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// abandonedReplica serves the API port of a replica whose cluster has a later incarnation. Its
// store does not run. Clients get the reason; an administrator gets a status with an alarm.
type abandonedReplica struct {
	cfg     Config
	cluster Cluster
	ca      *pki.ClusterCA
	rec     abandonedRecord
}

// serveAbandoned runs until ctx ends.
func (c Config) serveAbandoned(ctx context.Context, cluster Cluster, rec abandonedRecord) error {
	ca, err := pki.NewClusterCA(filepath.Join(c.DataDir, pkiFolder), time.Now)
	if err != nil {
		return err
	}
	r := &abandonedReplica{c, cluster, ca, rec}
	c.Log.Error("this replica serves nobody until its data is replaced", "err", r.reason())
	ln, err := net.Listen("tcp", at(c.Advertise, cluster.APIPort))
	if err != nil {
		return fmt.Errorf("listening for the API: %w", err)
	}
	profile := pki.ReplicaServing(c.Name, cluster.serviceIP().AsSlice(), c.addresses()...)
	conf := ca.Server(ca.Serving(profile))
	conf.NextProtos = []string{"http/1.1"}
	srv := &http.Server{Handler: r, TLSConfig: conf, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
		WriteTimeout: 10 * time.Second, IdleTimeout: 10 * time.Second, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(c.Log.Handler(), slog.LevelDebug)}
	served := make(chan error, 1)
	go func() {
		served <- srv.ServeTLS(connlimit.New(ln, connlimit.Limits{Total: 256, Unauthenticated: 128, UnauthenticatedPerSource: 32}), "", "")
	}()
	select {
	case err := <-served:
		return fmt.Errorf("serving HTTPS on %s: %w", ln.Addr(), err)
	case <-ctx.Done():
		srv.Close()
		<-served
		return nil
	}
}

func (r *abandonedReplica) identity() clusterid.Identity {
	return clusterid.Identity{Cluster: r.cluster.ID, Incarnation: r.rec.Incarnation}
}

func (r *abandonedReplica) reason() error {
	return &clusterid.AbandonedError{Replica: r.cfg.Name,
		Newest: clusterid.Identity{Cluster: r.cluster.ID, Incarnation: r.rec.Newest}}
}

// ServeHTTP implements http.Handler.
func (r *abandonedReplica) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if req.Header.Get(clusterid.Header) != "" {
		w.Header().Set(clusterid.Header, r.identity().String())
	}
	switch {
	case req.URL.Path == "/livez":
		_, _ = w.Write([]byte("ok"))
	case req.URL.Path == api.PathClusterStatus && req.Method == http.MethodGet && isMaster(req.TLS, r.ca.Pool()):
		answer(w, r.status())
	default:
		refuse(w, http.StatusServiceUnavailable, r.reason())
	}
}

// isMaster reports whether a client has a certificate of an administrator or a replica.
func isMaster(state *tls.ConnectionState, roots *x509.CertPool) bool {
	if state == nil || len(state.PeerCertificates) == 0 {
		return false
	}
	leaf := state.PeerCertificates[0]
	_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err == nil && slices.Contains(leaf.Subject.Organization, api.GroupMasters)
}

func (r *abandonedReplica) status() api.ClusterStatus {
	return api.ClusterStatus{
		Cluster: r.cluster.Name, ID: r.cluster.ID, Incarnation: r.rec.Incarnation, Answered: r.cfg.Name,
		Alarms: []api.ClusterAlarm{{Kind: "abandoned", Member: r.cfg.Name, Since: r.rec.At,
			Message: fmt.Sprintf("the cluster was recovered or restored without this replica, which a replica at %s reports: "+
				"this replica serves nobody", r.rec.From),
			Remedy: fmt.Sprintf("on the machine of %s stop it and run 'keelson-controlplane rebuild --server %s'; "+
				"where its data may have writes that are missing there, copy its data folder first", r.cfg.Name, r.rec.From)}},
		Members: []api.ClusterMember{{
			Name: r.cfg.Name, Address: at(r.cfg.Advertise, r.cluster.PeerPort), Contact: -1, Version: r.cfg.Version,
			Ready: "no: " + r.reason().Error(),
		}},
	}
}
