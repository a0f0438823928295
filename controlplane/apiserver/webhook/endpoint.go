package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"
)

// Address contains how to reach a webhook that an API object configures.
type Address struct {
	URL string // an https URL
	// ServerName is the host name in the server certificate; "" = the host of the URL.
	ServerName string
	// CA contains the CA certificates that verify the server certificate, in PEM. If it is empty,
	// the CAs of the system are used.
	CA []byte
	// Dial connects to the host of the URL. If it is nil, the resolver of the system is used, and
	// the proxy in HTTPS_PROXY if it is set. Connections by Dial never use a proxy.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// Limits of the connections to one endpoint.
const (
	maxHeader   = 64 << 10
	maxIdle     = 4
	idleTimeout = 30 * time.Second
	dialTimeout = 30 * time.Second
)

// Endpoint is a client of a webhook. It sends each request once, without retries and redirects.
// Safe for concurrent use.
type Endpoint struct {
	url       string
	transport *http.Transport
}

// NewEndpoint returns the endpoint for an address. It does not connect.
func NewEndpoint(a Address) (*Endpoint, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: a.ServerName}
	if len(a.CA) > 0 {
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(a.CA) {
			return nil, errors.New("unable to load root certificates: the bundle contains no certificate")
		}
	}
	dial, proxy := a.Dial, (func(*http.Request) (*url.URL, error))(nil)
	if dial == nil {
		// As in Kubernetes, servers outside the cluster are reached through the proxy of this
		// process.
		dial, proxy = (&net.Dialer{Timeout: dialTimeout}).DialContext, http.ProxyFromEnvironment
	}
	return &Endpoint{url: a.URL, transport: &http.Transport{
		DialContext: dial, Proxy: proxy, TLSClientConfig: conf, TLSHandshakeTimeout: dialTimeout,
		MaxIdleConnsPerHost: maxIdle, MaxConnsPerHost: maxConcurrent, IdleConnTimeout: idleTimeout,
		MaxResponseHeaderBytes: maxHeader, DisableCompression: true,
	}}, nil
}

// Ask posts a JSON request and returns the response body, which may have at most limit bytes. If
// query is not empty, it is the query of the URL. If the response is not a success, the error
// contains only its status code.
func (e *Endpoint) Ask(ctx context.Context, query string, request []byte, limit int) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url, bytes.NewReader(request))
	if err != nil {
		return nil, err
	}
	if query != "" {
		req.URL.RawQuery = query
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, */*")
	resp, err := (&http.Client{Transport: e.transport, CheckRedirect: noRedirect}).Do(req)
	if err != nil {
		return nil, err // the error contains method and URL
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, int64(limit)+1))
	// A server may respond because the connection is closed at the deadline. Such a response is
	// ignored.
	if ctx.Err() != nil {
		return nil, fmt.Errorf("asking %s: %w", e.url, context.Cause(ctx))
	}
	if resp.StatusCode < 200 || resp.StatusCode > 206 {
		return nil, fmt.Errorf("the server responded with the status code %d but did not return more information",
			resp.StatusCode)
	}
	if err != nil {
		return nil, fmt.Errorf("unexpected error when reading response body: %w", err)
	}
	if len(data) > limit {
		return nil, fmt.Errorf("the response exceeds %d bytes", limit)
	}
	return data, nil
}

func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Close closes the idle connections.
func (e *Endpoint) Close() { e.transport.CloseIdleConnections() }
