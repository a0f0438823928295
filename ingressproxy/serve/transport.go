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

// transports are the connections to endpoints: one set for each way to speak with them.
type transports struct {
	limits Limits
	by     map[manner]*http.Transport
}

type manner struct {
	protocol route.BackendProtocol
	verify   route.Verify
	checked  bool
}

// of is called under Server.swap, as keep is.
func (t *transports) of(p route.Pool) *http.Transport {
	m := manner{protocol: p.Protocol}
	if m.protocol == "" {
		m.protocol = route.HTTP1
	}
	if p.Verify != nil && m.protocol == route.TLS {
		m.verify, m.checked = *p.Verify, true
	}
	if have := t.by[m]; have != nil {
		return have
	}
	if t.by == nil {
		t.by = map[manner]*http.Transport{}
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
		// Without Verify the pod is whom the API server names at that address, and encryption all that is wanted.
		made.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: !m.checked, ServerName: m.verify.ServerName, RootCAs: m.verify.Roots}
	default:
		made.Protocols.SetHTTP1(true)
	}
	t.by[m] = made
	return made
}

// keep closes the idle connections of all transports but those of pools. Requests that run end as they would have.
func (t *transports) keep(pools map[string]*pool) {
	used := map[*http.Transport]bool{}
	for _, p := range pools {
		used[p.transport] = true
	}
	for m, made := range t.by {
		if !used[made] {
			made.CloseIdleConnections()
			delete(t.by, m)
		}
	}
}

// tries is how many endpoints a request is offered to.
const tries = 3

var errRefused = errors.New("no endpoint could be connected to")

// attempt is the http.RoundTripper of one request.
type attempt struct {
	x    *exchange
	pool *pool
}

func (p *pool) try(x *exchange) http.RoundTripper { return &attempt{x: x, pool: p} }

// RoundTrip offers a request to endpoints until one has it. It is offered again when nothing of it was sent, or when
// it has no body and its method promises that asking twice does no harm.
func (a *attempt) RoundTrip(r *http.Request) (*http.Response, error) {
	var tried []*endpoint
	for {
		e := a.pool.pick(a.x.client, tried, time.Now())
		if e == nil {
			return nil, errRefused
		}
		tried = append(tried, e)
		answer, err := a.once(r, e)
		if err == nil {
			e.works()
			return answer, nil
		}
		if r.Context().Err() != nil {
			return nil, err
		}
		unsent := dialing(err)
		if unsent {
			e.failed(time.Now())
			a.x.metrics.refused.Inc()
		}
		again := unsent || r.Body == nil && (r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodOptions) &&
			!errors.Is(err, context.DeadlineExceeded)
		if !again {
			return nil, err
		}
		if len(tried) == tries || len(tried) == len(a.pool.endpoints) {
			if unsent {
				return nil, fmt.Errorf("%w: %w", errRefused, err)
			}
			return nil, err
		}
		a.x.metrics.again.Inc()
	}
}

func dialing(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

func (a *attempt) once(r *http.Request, e *endpoint) (*http.Response, error) {
	ctx, cancel := r.Context(), context.CancelFunc(func() {})
	if limit := a.x.backendTimeout(); limit > 0 && r.Header.Get("Upgrade") == "" {
		ctx, cancel = context.WithTimeout(ctx, limit)
	}
	out := r.WithContext(ctx)
	target := *r.URL
	target.Host = e.addr.String()
	out.URL = &target
	body := &kept{}
	if r.Body != nil {
		body.Reader, body.stop = r.Body, a.x.stop
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
	body.answered()
	if both, ok := answer.Body.(io.ReadWriteCloser); ok {
		answer.Body = &counted2{ReadWriteCloser: both, done: done}
	} else {
		answer.Body = &counted{ReadCloser: answer.Body, done: done}
	}
	return answer, nil
}

func (x *exchange) backendTimeout() time.Duration { return x.found.Rule.Timeouts.Backend }

// kept is a body that a failed try does not close. Once there is an answer, closing it ends a Read that waits: a backend that
// has said all it had to say while its client may still speak, as calls of gRPC end, would else not be heard to its end.
type kept struct {
	io.Reader
	stop func()

	mu                  sync.Mutex
	given, closed, over bool
}

func (k *kept) Read(p []byte) (int, error) {
	n, err := k.Reader.Read(p)
	if err != nil {
		k.mu.Lock()
		k.over = true
		k.mu.Unlock()
	}
	return n, err
}

// Close implements io.Closer; it stops a body only that has an answer and goes on.
func (k *kept) Close() error { return k.note(&k.closed) }

func (k *kept) answered() { _ = k.note(&k.given) }

func (k *kept) note(what *bool) error {
	k.mu.Lock()
	*what = true
	stop := k.given && k.closed && !k.over && k.stop != nil
	k.over = k.over || stop
	k.mu.Unlock()
	if stop {
		k.stop()
	}
	return nil
}

// counted is an answer's body that tells when it ends.
type counted struct {
	io.ReadCloser
	done func()
}

func (c *counted) Close() error {
	defer c.done()
	return c.ReadCloser.Close()
}

// counted2 is the same of a connection that was upgraded.
type counted2 struct {
	io.ReadWriteCloser
	done func()
}

func (c *counted2) Close() error {
	defer c.done()
	return c.ReadWriteCloser.Close()
}

// buffers are what bodies are copied through.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

func (b *buffers) Put(p []byte) { b.pool.Put(&p) }
