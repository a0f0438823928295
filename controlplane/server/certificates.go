package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
)

// What certificates are for.
const (
	useCluster    = "cluster"     // signs certificates of the API, of agents and of users
	usePeers      = "replicas"    // the connections between replicas
	useFrontProxy = "front proxy" // shown to aggregated APIs
	useServing    = "serving"     // the API, and the port of agents
)

// kept are the certificates that this replica keeps fresh.
type kept struct {
	authorities func() map[string][]*x509.Certificate // by use, the one that signs first
	own         map[string]func() (*tls.Certificate, error)
}

func (r *Replica) wireCertificates(serving, front *pki.Rotator) {
	r.kept = kept{
		authorities: func() map[string][]*x509.Certificate {
			return map[string][]*x509.Certificate{
				useCluster: r.clusterAuthorities(), usePeers: r.secrets.authorities.Authorities(), useFrontProxy: {r.front.Load().Cert},
			}
		},
		own: map[string]func() (*tls.Certificate, error){
			useServing: serving.Certificate, usePeers: r.secrets.authorities.Certificate, useFrontProxy: front.Certificate,
		},
	}
}

// certificates are those of this replica and of the nodes that are connected to it.
func (r *Replica) certificates() (out []api.ClusterCertificate) {
	out = r.ownCertificates()
	for node, all := range r.fleet.Certificates() {
		for _, c := range all {
			out = append(out, describeNodeCertificate(node, c))
		}
	}
	return out
}

func (r *Replica) ownCertificates() (out []api.ClusterCertificate) {
	for use, all := range r.kept.authorities() {
		for i, c := range all {
			if i > 0 && slices.ContainsFunc(all[:i], c.Equal) {
				continue // the one that signs may be in the list of those that are believed
			}
			d := describeCertificate(use, r.cfg.Name, c)
			d.Authority, d.Signs = true, i == 0
			out = append(out, d)
		}
	}
	for use, current := range r.kept.own {
		c, err := current()
		if err != nil {
			r.log.Error("a certificate of this replica cannot be had", "use", use, "error", err)
			continue
		}
		d := describeCertificate(use, r.cfg.Name, c.Leaf)
		d.Renews = pki.RenewAt(c.Leaf).Unix()
		out = append(out, d)
	}
	return out
}

func describeCertificate(use, holder string, c *x509.Certificate) api.ClusterCertificate {
	return api.ClusterCertificate{Use: use, Holder: holder, Subject: c.Subject.CommonName, Key: pki.SPKIHash(c)[:16],
		Begins: c.NotBefore.Unix(), Expires: c.NotAfter.Unix()}
}

// serveCertificates answers GET /cluster/certificates; every replica is asked for its own unless ?local=true.
func (r *Replica) serveCertificates(w http.ResponseWriter, req *http.Request) {
	if !only(w, req, http.MethodGet) {
		return
	}
	out := api.ClusterCertificates{Certificates: r.certificates(), Silent: map[string]string{}}
	if local, _ := strconv.ParseBool(req.URL.Query().Get("local")); !local {
		r.askCertificates(req.Context(), &out)
	}
	slices.SortFunc(out.Certificates, func(a, b api.ClusterCertificate) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Use, b.Use), cmp.Compare(a.Holder, b.Holder), cmp.Compare(a.Expires, b.Expires))
	})
	answer(w, out)
}

// rank puts authorities first and nodes last.
func rank(c api.ClusterCertificate) int {
	switch {
	case c.Authority:
		return 0
	case c.Node:
		return 2
	}
	return 1
}

// askCertificates adds what the other members have.
func (r *Replica) askCertificates(ctx context.Context, into *api.ClusterCertificates) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, m := range r.store.Status().Members {
		if m.ID == r.cfg.Name {
			continue
		}
		wg.Go(func() {
			part, err := r.certificatesOf(ctx, m.Address)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				into.Silent[m.ID] = reason(err)
				return
			}
			into.Certificates = append(into.Certificates, part.Certificates...)
		})
	}
	wg.Wait()
	into.Certificates = newestOfNodes(into.Certificates)
}

// maxCertificates bounds the answer of a replica: a node takes some 500 bytes.
const maxCertificates = 8 << 20

func (r *Replica) certificatesOf(ctx context.Context, peer string) (out api.ClusterCertificates, err error) {
	err = r.ownPart(ctx, peer, api.PathClusterCertificates, maxCertificates, "its release does not tell its certificates", &out)
	return out, err
}

// ownPart reads what another replica says of itself at a path, at most so many bytes. lacks says what it means that it does
// not know the path.
func (r *Replica) ownPart(ctx context.Context, peer, path string, most int64, lacks string, into any) error {
	host, _, err := net.SplitHostPort(peer)
	if err != nil {
		return err
	}
	resp, err := r.peers.get(ctx, datadir.HostPort(host, r.cluster.APIPort), path+"?local=true")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return errors.New(lacks)
	default:
		return errors.New(resp.Status)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, most)).Decode(into); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// endsSoon is how long before the end of an authority an alarm is raised: time enough to exchange it.
const endsSoon = 90 * 24 * time.Hour

// expiringAlarms name authorities that end soon. Certificates renew themselves.
func expiringAlarms(all []api.ClusterCertificate, now time.Time) (out []api.ClusterAlarm) {
	for _, c := range all {
		ends := time.Unix(c.Expires, 0)
		if !c.Authority || now.Before(ends.Add(-endsSoon)) {
			continue
		}
		remedy := "'kctl cluster rotate cluster-ca'"
		switch {
		case c.Use == useFrontProxy:
			remedy += ": that of the front proxy lasts as long"
		case c.Use == useCluster && !c.Signs:
			remedy = "'kctl cluster rotate --status' says what the exchange waits for"
		case c.Use == usePeers && !c.Signs:
			remedy = fmt.Sprintf("'keelson-controlplane peer-ca prune' on %s, once every replica uses another one", c.Holder)
		case c.Use == usePeers:
			remedy = "'kctl cluster rotate peers-ca', or by hand 'keelson-controlplane peer-ca create', then trust, use and prune on every replica"
		}
		out = append(out, api.ClusterAlarm{Kind: "expiring", Member: c.Holder, Since: ends.Add(-endsSoon).UnixMilli(), Remedy: remedy,
			Message: fmt.Sprintf("the authority %s (%s, key %s) ends %s", c.Subject, c.Use, c.Key, ends.UTC().Format(time.RFC3339))})
	}
	return out
}

var certificateEnds = prometheus.NewDesc("keelson_certificate_expiration_timestamp_seconds",
	"When a certificate of this replica, or an authority that it believes, ends, in seconds since 1970.", []string{"use", "kind", "key"}, nil)

// certificateMetrics tells when this replica's certificates end.
type certificateMetrics struct{ r *Replica }

// Describe implements prometheus.Collector.
func (certificateMetrics) Describe(ch chan<- *prometheus.Desc) { ch <- certificateEnds }

// Collect implements prometheus.Collector.
func (m certificateMetrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.r.ownCertificates() {
		kind := "certificate"
		if c.Authority {
			kind = "authority"
		}
		ch <- prometheus.MustNewConstMetric(certificateEnds, prometheus.GaugeValue, float64(c.Expires), c.Use, kind, c.Key)
	}
}
