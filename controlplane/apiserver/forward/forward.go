// Package forward hands a request of a client on to a server in the cluster, and its answer back: for aggregated APIs
// and for the proxy subresources. What the client proved itself with never travels.
//
// Bodies pass in both directions without being kept; the head of an answer is bounded in bytes and time. How long a
// whole exchange may take is the caller's to say, by the context of the request.
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

// The bounds of an answer's head, and of what is kept open.
const (
	maxHead     = 256 << 10
	headTime    = 60 * time.Second
	idleTime    = 30 * time.Second
	copyBuffer  = 32 << 10
	idlePerHost = 4
	// What is taken in of one answer under HTTP/2 that its client does not read: a watch that nobody reads stays open.
	streamBuffer = 64 << 10
)

// credentials are the headers by which clients prove who they are, or say as whom they act.
var credentials = []string{"Authorization", "Proxy-Authorization", "X-Forwarded-Client-Cert", "Impersonate-User", "Impersonate-Group", "Impersonate-Uid"}

// bearerProtocol begins the subprotocol in which browsers give a bearer token to a websocket.
const bearerProtocol = "base64url.bearer.authorization.k8s.io."

// Scrub removes from headers what the client proved itself with, and what only a proxy in front may say.
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

// scrubProtocols drops the subprotocol that is a token.
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

// Upgrades says whether a request asks for another protocol on its connection.
func Upgrades(r *http.Request) bool {
	for part := range strings.SplitSeq(strings.Join(r.Header.Values("Connection"), ","), ",") {
		if strings.EqualFold(strings.TrimSpace(part), "upgrade") {
			return true
		}
	}
	return false
}

// Transport returns a transport over connections that dial makes. base has the TLS configuration, and whether HTTP/2
// is spoken.
func Transport(dial func(ctx context.Context, network, address string) (net.Conn, error), base *http.Transport) *http.Transport {
	t := base
	t.DialContext = dial
	t.Proxy = nil
	t.TLSHandshakeTimeout = 10 * time.Second
	t.ResponseHeaderTimeout = headTime
	t.MaxResponseHeaderBytes = maxHead
	t.IdleConnTimeout = idleTime
	t.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: streamBuffer}
	t.MaxIdleConnsPerHost = idlePerHost
	t.DisableCompression = true // what the client does not ask for is not made for it
	t.ExpectContinueTimeout = time.Second
	return t
}

// Forward is how one request is handed on.
type Forward struct {
	Target    *url.URL // of the server: scheme, host, path and query as they are asked for there
	Transport http.RoundTripper
	// Head completes the headers that are sent: whom the request is from.
	Head func(h http.Header)
	// Answer may change the head of the answer, or refuse it; nil = neither.
	Answer func(*http.Response) error
	// Failed answers when there is no answer to hand back.
	Failed func(w http.ResponseWriter, r *http.Request, err error)
}

// ErrNoUpgrade says that another protocol was asked for on a connection that carries several requests.
var ErrNoUpgrade = errors.New("a connection is upgraded under HTTP/1.1 only")

// ServeHTTP implements http.Handler.
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
			if prior := p.In.Header.Values("X-Forwarded-For"); len(prior) > 0 && p.Out.Header.Get("X-Forwarded-For") != "" {
				p.Out.Header.Set("X-Forwarded-For", strings.Join(prior, ", ")+", "+p.Out.Header.Get("X-Forwarded-For"))
			}
			if f.Head != nil {
				f.Head(p.Out.Header)
			}
		},
		Transport:      f.Transport,
		FlushInterval:  -1, // watches
		ModifyResponse: f.Answer,
		ErrorHandler:   f.Failed,
		BufferPool:     buffers,
		ErrorLog:       quiet,
	}
	p.ServeHTTP(w, r)
}

// quiet drops what net/http says of connections that broke: the client is told, by a connection that breaks too.
var quiet = log.New(discard{}, "", 0)

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// buffers are shared by all that is under way.
var buffers = pool{&sync.Pool{New: func() any { b := make([]byte, copyBuffer); return &b }}}

type pool struct{ *sync.Pool }

// Get implements httputil.BufferPool.
func (p pool) Get() []byte { return *p.Pool.Get().(*[]byte) }

// Put implements httputil.BufferPool.
func (p pool) Put(b []byte) { p.Pool.Put(&b) }
