package operator

import (
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
)

// The uses of certificates, as the certificate list names them.
const (
	UseCluster    = "cluster"     // CA of the API, of agents and of users
	UsePeers      = "replicas"    // connections between replicas
	UseFrontProxy = "front proxy" // client certificate that is presented to aggregated API servers
	UseServing    = "serving"     // serving certificate of the API and of the port for agents
)

// OwnCertificates are the certificates of this replica and the CAs that it trusts. It is also a
// prometheus.Collector of their expiry times.
type OwnCertificates struct {
	Holder string // name of this replica
	// Authorities returns the trusted CAs by use. The signing CA is the first of each use.
	Authorities func() map[string][]*x509.Certificate
	// Leaves contains, for each use, a function that returns the current certificate.
	Leaves map[string]func() (*tls.Certificate, error)
	Log    *slog.Logger
}

// List returns all certificates and CAs. It logs and omits a certificate that cannot be issued.
func (o *OwnCertificates) List() (all []api.ClusterCertificate) {
	for use, authorities := range o.Authorities() {
		for i, c := range authorities {
			if i > 0 && slices.ContainsFunc(authorities[:i], c.Equal) {
				continue // the signing CA may occur again among the trusted CAs
			}
			d := o.describeCertificate(use, c)
			d.Authority, d.Signs = true, i == 0
			all = append(all, d)
		}
	}
	for use, current := range o.Leaves {
		c, err := current()
		if err != nil {
			o.Log.Error("a certificate of this replica cannot be issued", "use", use, "error", err)
			continue
		}
		d := o.describeCertificate(use, c.Leaf)
		d.Renews = pki.RenewalTime(c.Leaf).Unix()
		all = append(all, d)
	}
	return all
}

func (o *OwnCertificates) describeCertificate(use string, c *x509.Certificate) api.ClusterCertificate {
	return api.ClusterCertificate{Use: use, Holder: o.Holder, Subject: c.Subject.CommonName, Key: pki.SPKIHash(c)[:16],
		Begins: c.NotBefore.Unix(), Expires: c.NotAfter.Unix()}
}

var expirationMetric = prometheus.NewDesc("keelson_certificate_expiration_timestamp_seconds",
	"When a certificate of this replica, or a CA that it trusts, expires, in seconds since 1970.",
	[]string{"use", "kind", "key"}, nil)

// Describe implements prometheus.Collector.
func (o *OwnCertificates) Describe(ch chan<- *prometheus.Desc) { ch <- expirationMetric }

// Collect implements prometheus.Collector.
func (o *OwnCertificates) Collect(ch chan<- prometheus.Metric) {
	for _, c := range o.List() {
		kind := "certificate"
		if c.Authority {
			kind = "authority"
		}
		ch <- prometheus.MustNewConstMetric(expirationMetric, prometheus.GaugeValue, float64(c.Expires),
			c.Use, kind, c.Key)
	}
}
