package image

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"
)

// registryTransport is the http.RoundTripper for registries. It trusts the system's CAs and, for
// each registry, the CA that is configured for it. It uses plain HTTP only for registries that are
// configured as insecure. (The registry library would use plain HTTP for private addresses by
// default.)
type registryTransport struct {
	plain    http.RoundTripper
	byHost   map[string]http.RoundTripper
	insecure []string
}

func newTransport(cfg Config) (*registryTransport, error) {
	t := &registryTransport{plain: baseTransport(nil), byHost: map[string]http.RoundTripper{}, insecure: cfg.Insecure}
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
			return nil, fmt.Errorf("certificates for registry %s: %s contains no certificate", host, file)
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

// RoundTrip sends a request to a registry and returns the response. A manifest in it is limited to
// maxManifest bytes. It implements http.RoundTripper.
func (t *registryTransport) RoundTrip(q *http.Request) (*http.Response, error) {
	r, err := t.roundTrip(q)
	if err == nil && readsManifest(q) {
		r.Body = &manifestBody{body: r.Body, left: maxManifest}
	}
	return r, err
}

// manifestBody is a response body that returns errLimit after maxManifest bytes.
type manifestBody struct {
	body io.ReadCloser
	left int64
}

func (m *manifestBody) Read(p []byte) (int, error) {
	n, err := m.body.Read(p[:min(int64(len(p)), m.left+1)])
	if m.left -= int64(n); m.left < 0 {
		return 0, fmt.Errorf("%w: the manifest has more than %d bytes", errLimit, maxManifest)
	}
	return n, err
}

func (m *manifestBody) Close() error { return m.body.Close() }

// readsManifest reports whether a request is for a manifest, even if a registry redirected it to
// another URL.
func readsManifest(q *http.Request) bool {
	for redirects := 0; q != nil && redirects < 32; redirects++ {
		if strings.Contains(q.URL.Path, "/manifests/") {
			return true
		}
		if q.Response == nil {
			return false
		}
		q = q.Response.Request
	}
	return false
}

func (t *registryTransport) roundTrip(q *http.Request) (*http.Response, error) {
	if q.URL.Scheme != "https" && !slices.Contains(t.insecure, q.URL.Host) {
		return nil, fmt.Errorf("registry %s: plain HTTP is not allowed (it is not configured as insecure)", q.URL.Host)
	}
	if own := t.byHost[q.URL.Host]; own != nil {
		return own.RoundTrip(q)
	}
	return t.plain.RoundTrip(q)
}
