package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/internal/connlimit"
)

// abandonedReplica serves the API port of a replica whose cluster has a later incarnation. Its
// store does not run. Clients get the reason; an administrator gets a status with an alarm.
type abandonedReplica struct {
	cfg     Config
	cluster datadir.Cluster
	ca      *pki.ClusterCA
	rec     datadir.AbandonedRecord
}

// serveAbandoned runs until ctx ends.
func (c Config) serveAbandoned(ctx context.Context, cluster datadir.Cluster, rec datadir.AbandonedRecord) error {
	ca, err := pki.NewClusterCA(filepath.Join(c.DataDir, datadir.PKIFolder), time.Now)
	if err != nil {
		return err
	}
	r := &abandonedReplica{c, cluster, ca, rec}
	c.Log.Error("this replica serves nobody until its data is replaced", "err", r.reason())
	ln, err := net.Listen("tcp", datadir.HostPort(c.Advertise, cluster.APIPort))
	if err != nil {
		return fmt.Errorf("listening for the API: %w", err)
	}
	profile := pki.ReplicaServing(c.Name, cluster.APIServiceIP().AsSlice(), c.addresses()...)
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
			Name: r.cfg.Name, Address: datadir.HostPort(r.cfg.Advertise, r.cluster.PeerPort), Contact: -1, Version: r.cfg.Version,
			Ready: "no: " + r.reason().Error(),
		}},
	}
}
