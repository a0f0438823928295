package image

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"slices"
	"time"
)

// transport speaks to registries: with a registry's own CAs where configured, and
// in clear only to those that the configuration calls insecure. (The library would
// fall back to plain HTTP for private addresses by itself.)
type transport struct {
	plain    http.RoundTripper
	byHost   map[string]http.RoundTripper
	insecure []string
}

func newTransport(cfg Config) (*transport, error) {
	t := &transport{plain: baseTransport(nil), byHost: map[string]http.RoundTripper{}, insecure: cfg.Insecure}
	for host, file := range cfg.CAs {
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("certificates for registry %s: %w", host, err)
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("certificates for registry %s: %s holds none", host, file)
		}
		t.byHost[host] = baseTransport(pool)
	}
	return t, nil
}

func baseTransport(pool *x509.CertPool) http.RoundTripper {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.ResponseHeaderTimeout = 60 * time.Second
	t.MaxIdleConnsPerHost = 8
	if pool != nil {
		t.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return t
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(q *http.Request) (*http.Response, error) {
	if q.URL.Scheme != "https" && !slices.Contains(t.insecure, q.URL.Host) {
		return nil, fmt.Errorf("registry %s: plain HTTP is not allowed (it is not configured as insecure)", q.URL.Host)
	}
	if own := t.byHost[q.URL.Host]; own != nil {
		return own.RoundTrip(q)
	}
	return t.plain.RoundTrip(q)
}
