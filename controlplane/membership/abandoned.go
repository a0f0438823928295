package membership

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
	"keelson.dev/keelson/controlplane/api/clusterhttp"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/internal/connlimit"
)

// AbandonedConfig configures ServeAbandoned, which serves the API port of a replica that a recovery
// or restore of the cluster has excluded.
type AbandonedConfig struct {
	Dir       datadir.Dir
	Version   string   // the release of this replica
	Addresses []string // names and IP addresses of the API, for the serving certificate
}

// abandonedReplica serves the API port of a replica that a recovery or restore of the cluster has
// excluded. The API server and the store of such a replica do not run.
type abandonedReplica struct {
	config  AbandonedConfig
	cluster datadir.Cluster
	ca      *pki.ClusterCA
	record  datadir.AbandonedRecord
}

// ServeAbandoned serves the API port of an abandoned replica until ctx ends. A replica is abandoned
// if the cluster was recovered or restored without it, so that its data is out of date.
// Administrators and replicas can read a cluster status that contains an alarm, and /livez returns
// "ok". All other requests receive an error with the reason why this replica does not serve.
func ServeAbandoned(
	ctx context.Context, c AbandonedConfig, cluster datadir.Cluster, rec datadir.AbandonedRecord,
) error {
	ca, err := pki.NewClusterCA(filepath.Join(c.Dir.Path, datadir.PKIFolder), time.Now)
	if err != nil {
		return err
	}
	r := &abandonedReplica{c, cluster, ca, rec}
	c.Dir.Log.Error("this replica serves no requests until its data is replaced", "err", r.abandonedError())
	ln, err := net.Listen("tcp", datadir.HostPort(c.Dir.Advertise, cluster.APIPort))
	if err != nil {
		return fmt.Errorf("listening for the API: %w", err)
	}
	profile := pki.ReplicaServing(c.Dir.Name, cluster.APIServiceIP().AsSlice(), c.Addresses...)
	conf := ca.Server(ca.ServingRotator(profile))
	conf.NextProtos = []string{"http/1.1"}
	srv := &http.Server{Handler: r, TLSConfig: conf, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
		WriteTimeout: 10 * time.Second, IdleTimeout: 10 * time.Second, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(c.Dir.Log.Handler(), slog.LevelDebug)}
	served := make(chan error, 1)
	go func() {
		served <- srv.ServeTLS(connlimit.New(ln,
			connlimit.Limits{Total: 256, Unauthenticated: 128, UnauthenticatedPerSource: 32}), "", "")
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

func (r *abandonedReplica) clusterIdentity() clusterid.Identity {
	return clusterid.Identity{Cluster: r.cluster.ID, Incarnation: r.record.Incarnation}
}

func (r *abandonedReplica) abandonedError() error {
	return &clusterid.AbandonedError{Replica: r.config.Dir.Name,
		Newest: clusterid.Identity{Cluster: r.cluster.ID, Incarnation: r.record.Newest}}
}

// ServeHTTP responds to /livez, and to administrators and replicas that read the status of the
// cluster. It refuses all other requests with 503 and an AbandonedError.
func (r *abandonedReplica) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if req.Header.Get(clusterid.Header) != "" {
		w.Header().Set(clusterid.Header, r.clusterIdentity().String())
	}
	switch {
	case req.URL.Path == "/livez":
		_, _ = w.Write([]byte("ok"))
	case req.URL.Path == api.PathClusterStatus && req.Method == http.MethodGet &&
		isAdminOrReplica(req.TLS, r.ca.Pool()):
		clusterhttp.WriteJSON(w, r.clusterStatus())
	default:
		clusterhttp.WriteError(w, http.StatusServiceUnavailable, r.abandonedError())
	}
}

// isAdminOrReplica reports whether a client has a certificate of an administrator or of a replica.
// Such certificates have the organization system:masters, and are signed by a CA in roots.
func isAdminOrReplica(state *tls.ConnectionState, roots *x509.CertPool) bool {
	if state == nil || len(state.PeerCertificates) == 0 {
		return false
	}
	leaf := state.PeerCertificates[0]
	_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err == nil && slices.Contains(leaf.Subject.Organization, api.GroupMasters)
}

func (r *abandonedReplica) clusterStatus() api.ClusterStatus {
	return api.ClusterStatus{
		Cluster: r.cluster.Name, ID: r.cluster.ID, Incarnation: r.record.Incarnation, Answered: r.config.Dir.Name,
		Alarms: []api.ClusterAlarm{{Kind: "abandoned", Member: r.config.Dir.Name, Since: r.record.At,
			Message: fmt.Sprintf("the cluster was recovered or restored without this replica, as the "+
				"replica at %s reports: "+
				"this replica serves no requests", r.record.From),
			Remedy: fmt.Sprintf("stop replica %s and run 'keelson-controlplane rebuild --server %s' on its machine; "+
				"if its data may contain writes that the cluster does not have, copy its data folder first",
				r.config.Dir.Name, r.record.From)}},
		Members: []api.ClusterMember{{
			Name: r.config.Dir.Name, Address: datadir.HostPort(r.config.Dir.Advertise, r.cluster.PeerPort), Contact: -1,
			Version: r.config.Version,
			Ready:   "no: " + r.abandonedError().Error(),
		}},
	}
}
