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

// Address is where and how a service is reached whose place stands in an object.
type Address struct {
	URL string // with https
	// ServerName is whom the certificate must name; "" = the host of the URL.
	ServerName string
	// CA has the certificates that sign it, in PEM; none = those of the system.
	CA []byte
	// Dial opens a connection to the host of the URL; nil = as the system finds it, by the proxy that HTTPS_PROXY names
	// where there is one. What Dial reaches is never asked by a proxy.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// Bounds of the connections to one endpoint.
const (
	maxHeader   = 64 << 10
	maxIdle     = 4
	idleFor     = 30 * time.Second
	dialTimeout = 30 * time.Second
)

// Endpoint is a service that is asked once per question and never redirected. Safe for concurrent use.
type Endpoint struct {
	url       string
	transport *http.Transport
}

// NewEndpoint returns the endpoint at an address. Nothing is dialled.
func NewEndpoint(a Address) (*Endpoint, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: a.ServerName}
	if len(a.CA) > 0 {
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(a.CA) {
			return nil, errors.New("unable to load root certificates: there is no certificate in the bundle")
		}
	}
	dial, proxy := a.Dial, (func(*http.Request) (*url.URL, error))(nil)
	if dial == nil {
		// What stands outside of the cluster is asked by the proxy that the replica was started with, as in Kubernetes.
		dial, proxy = (&net.Dialer{Timeout: dialTimeout}).DialContext, http.ProxyFromEnvironment
	}
	return &Endpoint{url: a.URL, transport: &http.Transport{
		DialContext: dial, Proxy: proxy, TLSClientConfig: conf, TLSHandshakeTimeout: dialTimeout,
		MaxIdleConnsPerHost: maxIdle, MaxConnsPerHost: maxAtOnce, IdleConnTimeout: idleFor,
		MaxResponseHeaderBytes: maxHeader, DisableCompression: true,
	}}, nil
}

// Ask sends a question in JSON, with what is added to the URL's query, and returns the answer, which may have as many
// bytes as most. Of an answer that is no success nothing but its code is told.
func (e *Endpoint) Ask(ctx context.Context, query string, question []byte, most int) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url, bytes.NewReader(question))
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
		return nil, err // it names method and URL
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, int64(most)+1))
	// A service that sees the connection end because its time is over may say something just then, and be heard.
	if ctx.Err() != nil {
		return nil, fmt.Errorf("asking %s: %w", e.url, context.Cause(ctx))
	}
	if resp.StatusCode < 200 || resp.StatusCode > 206 {
		return nil, fmt.Errorf("the server responded with the status code %d but did not return more information", resp.StatusCode)
	}
	if err != nil {
		return nil, fmt.Errorf("unexpected error when reading response body: %w", err)
	}
	if len(data) > most {
		return nil, fmt.Errorf("the response is larger than %d bytes", most)
	}
	return data, nil
}

func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Close ends the connections that nobody uses.
func (e *Endpoint) Close() { e.transport.CloseIdleConnections() }
