package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"keelson.dev/keelson/ingressproxy/route"
)

// transportCache holds the HTTP transports for connections to endpoints: one transport for each
// combination of protocol and TLS verification.
type transportCache struct {
	limits     Limits
	transports map[transportKey]*http.Transport
}

type transportKey struct {
	protocol route.BackendProtocol
	verify   route.Verify
	verified bool
}

// transportFor returns the transport for a pool. The caller must hold Server.swapMu, as for
// closeUnused.
func (t *transportCache) transportFor(p route.Pool) *http.Transport {
	m := transportKey{protocol: p.Protocol}
	if m.protocol == "" {
		m.protocol = route.HTTP1
	}
	if p.Verify != nil && m.protocol == route.TLS {
		m.verify, m.verified = *p.Verify, true
	}
	if have := t.transports[m]; have != nil {
		return have
	}
	if t.transports == nil {
		t.transports = map[transportKey]*http.Transport{}
	}
	dialer := &net.Dialer{Timeout: t.limits.Dial}
	made := &http.Transport{
		DialContext:            dialer.DialContext,
		Protocols:              new(http.Protocols),
		DisableCompression:     true,
		MaxIdleConns:           4096,
		MaxIdleConnsPerHost:    128,
		IdleConnTimeout:        60 * time.Second,
		TLSHandshakeTimeout:    t.limits.Dial,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: t.limits.AnswerHeader,
		WriteBufferSize:        32 << 10,
		ReadBufferSize:         32 << 10,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second},
	}
	switch m.protocol {
	case route.H2C:
		made.Protocols.SetUnencryptedHTTP2(true)
	case route.TLS:
		made.Protocols.SetHTTP1(true)
		made.Protocols.SetHTTP2(true)
		// Without Verify, TLS only encrypts: the endpoint's address from the API is trusted.
		made.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: !m.verified,
			ServerName: m.verify.ServerName, RootCAs: m.verify.Roots}
	default:
		made.Protocols.SetHTTP1(true)
	}
	t.transports[m] = made
	return made
}

// closeUnused closes the idle connections of all transports that no pool uses, and removes these
// transports. Running requests are not affected. The caller must hold Server.swapMu.
func (t *transportCache) closeUnused(pools map[string]*pool) {
	used := map[*http.Transport]bool{}
	for _, p := range pools {
		used[p.transport] = true
	}
	for m, made := range t.transports {
		if !used[made] {
			made.CloseIdleConnections()
			delete(t.transports, m)
		}
	}
}

// maxTries is the maximum number of endpoints that are tried for a request.
const maxTries = 3

var errRefused = errors.New("no endpoint accepts connections")

// retryTransport is the http.RoundTripper that forwards one request to an endpoint of pool. If an
// attempt fails and may be repeated, it sends the request to another endpoint, at most maxTries in
// total.
type retryTransport struct {
	exchange *exchange
	pool     *pool
}

func (p *pool) roundTripper(x *exchange) http.RoundTripper {
	return &retryTransport{exchange: x, pool: p}
}

// RoundTrip sends request r to endpoints of the pool until an endpoint responds, and returns that
// response. It tries another endpoint only if nothing of r was sent, or if r has no body and its
// method is GET, HEAD, or OPTIONS.
func (a *retryTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	var tried []*endpoint
	for {
		e := a.pool.pickEndpoint(a.exchange.client, tried, time.Now())
		if e == nil {
			return nil, errRefused
		}
		tried = append(tried, e)
		answer, err := a.tryEndpoint(r, e)
		if err == nil {
			e.clearFailures()
			return answer, nil
		}
		if r.Context().Err() != nil {
			return nil, err
		}
		unsent := isDialError(err)
		if unsent {
			e.recordDialFailure(time.Now())
			a.exchange.server.metrics.refusedConnections.Inc()
		}
		again := unsent ||
			r.Body == nil && (r.Method == http.MethodGet || r.Method == http.MethodHead ||
				r.Method == http.MethodOptions) &&
				!errors.Is(err, context.DeadlineExceeded)
		if !again {
			return nil, err
		}
		if len(tried) == maxTries || len(tried) == len(a.pool.endpoints) {
			if unsent {
				return nil, fmt.Errorf("%w: %w", errRefused, err)
			}
			return nil, err
		}
		a.exchange.server.metrics.retries.Inc()
	}
}

func isDialError(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

func (a *retryTransport) tryEndpoint(r *http.Request, e *endpoint) (*http.Response, error) {
	ctx, cancel := r.Context(), context.CancelFunc(func() {})
	if limit := a.exchange.backendTimeout(); limit > 0 && r.Header.Get("Upgrade") == "" {
		ctx, cancel = context.WithTimeout(ctx, limit)
	}
	out := r.WithContext(ctx)
	target := *r.URL
	target.Host = e.addr.String()
	out.URL = &target
	body := &requestBody{}
	if r.Body != nil {
		body.Reader, body.stop = r.Body, a.exchange.stopBodyRead
		out.Body = body
	}
	e.pending.Add(1)
	done := sync.OnceFunc(func() {
		e.pending.Add(-1)
		cancel()
	})
	answer, err := a.pool.transport.RoundTrip(out)
	if err != nil {
		done()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return nil, fmt.Errorf("endpoint %s: %w", e.addr, context.DeadlineExceeded)
		}
		return nil, fmt.Errorf("endpoint %s: %w", e.addr, err)
	}
	body.markAnswered()
	if both, ok := answer.Body.(io.ReadWriteCloser); ok {
		answer.Body = &upgradedBody{ReadWriteCloser: both, done: done}
	} else {
		answer.Body = &responseBody{ReadCloser: answer.Body, done: done}
	}
	return answer, nil
}

func (x *exchange) backendTimeout() time.Duration { return x.match.Rule.Timeouts.Backend }

// requestBody is the body of a client's request. It stays open when an attempt to send it to an
// endpoint fails, so that it can be sent to another endpoint. See Close for the time after the
// response.
type requestBody struct {
	io.Reader
	stop func()

	mu                      sync.Mutex
	answered, closed, ended bool
}

func (k *requestBody) Read(p []byte) (int, error) {
	n, err := k.Reader.Read(p)
	if err != nil {
		k.mu.Lock()
		k.ended = true
		k.mu.Unlock()
	}
	return n, err
}

// Close implements io.Closer. If the endpoint has responded and the body has not ended, Close calls
// stop, which interrupts a Read that waits for the client. Otherwise the end of the response would
// not be forwarded while the client can still send, as in gRPC calls. Before the response, Close
// has no effect; if the endpoint responds later, the Read is interrupted then.
func (k *requestBody) Close() error { return k.setFlag(&k.closed) }

func (k *requestBody) markAnswered() { _ = k.setFlag(&k.answered) }

func (k *requestBody) setFlag(what *bool) error {
	k.mu.Lock()
	*what = true
	stop := k.answered && k.closed && !k.ended && k.stop != nil
	k.ended = k.ended || stop
	k.mu.Unlock()
	if stop {
		k.stop()
	}
	return nil
}

// responseBody is a response body that calls done when it is closed.
type responseBody struct {
	io.ReadCloser
	done func()
}

func (c *responseBody) Close() error {
	defer c.done()
	return c.ReadCloser.Close()
}

// upgradedBody is the body of an upgraded connection that calls done when it is closed.
type upgradedBody struct {
	io.ReadWriteCloser
	done func()
}

func (c *upgradedBody) Close() error {
	defer c.done()
	return c.ReadWriteCloser.Close()
}

// bufferPool provides the buffers for copying bodies.
type bufferPool struct{ pool sync.Pool }

func (b *bufferPool) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

func (b *bufferPool) Put(p []byte) { b.pool.Put(&p) }
