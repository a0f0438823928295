// Package forward proxies a request of a client to a server in the cluster and returns the
// response. It is used for aggregated APIs and for the proxy subresources. It never forwards the
// client's credentials.
//
// Request and response bodies are streamed. The size of the response headers and the time until
// they arrive are limited. The context of the request limits the total duration.
package forward

import (
	"context"
	"errors"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"time"
)

const (
	maxHead     = 256 << 10
	headTime    = 60 * time.Second
	idleTime    = 30 * time.Second
	copyBuffer  = 32 << 10
	idlePerHost = 4
	// Receive buffer of an HTTP/2 response that the client does not read. A watch stays open if its
	// client does not read.
	streamBuffer = 64 << 10
)

// credentials are the headers with which clients authenticate or impersonate.
var credentials = []string{"Authorization", "Proxy-Authorization", "X-Forwarded-Client-Cert", "Impersonate-User",
	"Impersonate-Group", "Impersonate-Uid"}

// bearerProtocol is the prefix of the WebSocket subprotocol in which browsers send a bearer token.
const bearerProtocol = "base64url.bearer.authorization.k8s.io."

// Scrub removes the client's credentials from the headers, and headers that only an authenticating
// proxy may set.
func Scrub(h http.Header) {
	for _, name := range credentials {
		h.Del(name)
	}
	for name := range h {
		lower := strings.ToLower(name)
		if strings.HasPrefix(lower, "impersonate-extra-") || strings.HasPrefix(lower, "x-remote-") {
			delete(h, name)
		}
	}
	scrubProtocols(h)
}

// scrubProtocols removes the WebSocket subprotocol that contains a bearer token from the headers.
func scrubProtocols(h http.Header) {
	const name = "Sec-Websocket-Protocol"
	values := h.Values(name)
	if len(values) == 0 {
		return
	}
	var kept []string
	for p := range strings.SplitSeq(strings.Join(values, ","), ",") {
		if p = strings.TrimSpace(p); p != "" && !strings.HasPrefix(p, bearerProtocol) {
			kept = append(kept, p)
		}
	}
	h.Del(name)
	if len(kept) > 0 {
		h.Set(name, strings.Join(kept, ", "))
	}
}

// Upgrades reports whether a request asks for a protocol upgrade.
func Upgrades(r *http.Request) bool {
	for part := range strings.SplitSeq(strings.Join(r.Header.Values("Connection"), ","), ",") {
		if strings.EqualFold(strings.TrimSpace(part), "upgrade") {
			return true
		}
	}
	return false
}

// Transport sets the limits of this package on base and returns it. dial creates the connections.
// The caller sets the TLS configuration and the HTTP versions in base.
func Transport(
	dial func(ctx context.Context, network, address string) (net.Conn, error), base *http.Transport,
) *http.Transport {
	t := base
	t.DialContext = dial
	t.Proxy = nil
	t.TLSHandshakeTimeout = 10 * time.Second
	t.ResponseHeaderTimeout = headTime
	t.MaxResponseHeaderBytes = maxHead
	t.IdleConnTimeout = idleTime
	t.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: streamBuffer}
	t.MaxIdleConnsPerHost = idlePerHost
	t.DisableCompression = true // the client negotiates compression itself
	t.ExpectContinueTimeout = time.Second
	return t
}

// Forward is an http.Handler that proxies one request.
type Forward struct {
	Target    *url.URL // URL at the server: scheme, host, path and query
	Transport http.RoundTripper
	// Head adds headers to the forwarded request, such as the user.
	Head func(h http.Header)
	// Answer may change the headers and body of the response, or return an error to reject it; may
	// be nil.
	Answer func(*http.Response) error
	// Failed writes the error response if the server does not respond or its response is rejected.
	Failed func(w http.ResponseWriter, r *http.Request, err error)
}

// ErrNoUpgrade is returned for a protocol upgrade on a connection that is not HTTP/1.1.
var ErrNoUpgrade = errors.New("connection upgrades require HTTP/1.1")

// ServeHTTP sends r to the Target with the headers of r except credentials, and copies the response
// to w. It implements http.Handler.
func (f Forward) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if Upgrades(r) && r.ProtoMajor != 1 {
		f.Failed(w, r, ErrNoUpgrade)
		return
	}
	p := &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			u := *f.Target
			p.Out.URL, p.Out.Host = &u, u.Host
			Scrub(p.Out.Header)
			p.SetXForwarded()
			if prior := p.In.Header.Values("X-Forwarded-For"); len(prior) > 0 &&
				p.Out.Header.Get("X-Forwarded-For") != "" {
				p.Out.Header.Set("X-Forwarded-For", strings.Join(prior, ", ")+", "+p.Out.Header.Get("X-Forwarded-For"))
			}
			if f.Head != nil {
				f.Head(p.Out.Header)
			}
		},
		Transport:      f.Transport,
		FlushInterval:  -1, // flushes at once, for watches
		ModifyResponse: f.Answer,
		ErrorHandler:   f.Failed,
		BufferPool:     buffers,
		ErrorLog:       quiet,
	}
	p.ServeHTTP(w, r)
}

// quiet discards messages of net/http about broken connections to the server. They are not needed,
// because the client's connection breaks too.
var quiet = log.New(discard{}, "", 0)

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// buffers are the copy buffers that all proxied requests share.
var buffers = pool{&sync.Pool{New: func() any { b := make([]byte, copyBuffer); return &b }}}

type pool struct{ *sync.Pool }

// Get implements httputil.BufferPool.
func (p pool) Get() []byte { return *p.Pool.Get().(*[]byte) }

// Put implements httputil.BufferPool.
func (p pool) Put(b []byte) { p.Pool.Put(&b) }
