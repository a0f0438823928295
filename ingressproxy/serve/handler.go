package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/ingressproxy/route"
	"keelson.dev/keelson/internal/connlimit"
)

// exchange is one request on its way.
type exchange struct {
	*Server
	state  *state
	port   uint16
	in     *http.Request
	client netip.Addr
	found  route.Found
	shares []*route.Filters // of the rule, then of the backend
	pool   *pool
	out    *recorder
	slow   atomic.Bool // the body stopped coming
	stop   func()      // ends a Read of the request's body that waits
}

// serve answers a request that came to a port.
func (s *Server) serve(port uint16, w http.ResponseWriter, r *http.Request) {
	s.going.Add(1)
	defer s.going.Done()
	place, _ := r.Context().Value(doorKey{}).(*connlimit.Conn)
	place.MarkAuthenticated()
	begun := time.Now()
	answer := &recorder{ResponseWriter: w}
	x := &exchange{Server: s, state: s.now.Load(), port: port, in: r, client: clientOf(r), out: answer}
	defer func() { x.note(answer, time.Since(begun)) }()
	select {
	case s.requests <- struct{}{}:
		defer func() { <-s.requests }()
	default:
		x.fail(answer, http.StatusServiceUnavailable, "too many requests run at this proxy")
		return
	}
	if code, why := x.refused(); code != 0 {
		x.fail(answer, code, why)
		return
	}
	var ok bool
	if x.found, ok = x.state.index.Match(port, r); !ok {
		x.fail(answer, http.StatusNotFound, "nothing is served for this host and path")
		return
	}
	x.follow(answer)
}

// refused says what no rule is asked about.
func (x *exchange) refused() (code int, why string) {
	r := x.in
	switch {
	case r.Method == http.MethodConnect:
		return http.StatusMethodNotAllowed, "this is no forward proxy"
	case climbs(r.URL.Path):
		// A rule for /public must not lead to /public/../private.
		return http.StatusBadRequest, "the path has elements . or .."
	case r.TLS != nil:
		// HTTP/2 clients use a connection for every host that its certificate names; another listener may have other rules for them.
		asked := x.state.index.Listener(x.port, route.HostOf(r.TLS.ServerName))
		if asked != x.state.index.Listener(x.port, route.HostOf(r.Host)) {
			return http.StatusMisdirectedRequest, "this connection is for another host"
		}
	}
	return 0, ""
}

func climbs(path string) bool {
	if !strings.Contains(path, "/.") {
		return false
	}
	for element := range strings.SplitSeq(path, "/") {
		if element == "." || element == ".." {
			return true
		}
	}
	return false
}

// follow does what the rule says.
func (x *exchange) follow(w *recorder) {
	rule := x.found.Rule
	x.shares = []*route.Filters{&rule.Filters}
	if x.redirected(w, &rule.Filters) {
		return
	}
	if rule.Answer != 0 {
		x.fail(w, rule.Answer, http.StatusText(rule.Answer))
		return
	}
	b, ok := route.Choose(rule.Backends, rand.Uint64())
	if !ok {
		x.fail(w, http.StatusInternalServerError, "no backend has a share of these requests")
		return
	}
	x.shares = append(x.shares, &b.Filters)
	if x.redirected(w, &b.Filters) {
		return
	}
	if b.Answer != 0 {
		x.fail(w, b.Answer, http.StatusText(b.Answer))
		return
	}
	if x.pool = x.state.pools[b.Pool]; x.pool == nil || len(x.pool.endpoints) == 0 {
		x.fail(w, http.StatusServiceUnavailable, "no endpoint is ready")
		return
	}
	r := x.in
	if upgrade := r.Header.Get("Upgrade"); upgrade != "" {
		if !upgradable(r) {
			// A backend that took h2c here would be given requests that no rule has seen.
			r.Header.Del("Upgrade")
		} else {
			select {
			case x.upgrades <- struct{}{}:
				defer func() { <-x.upgrades }()
			default:
				x.fail(w, http.StatusServiceUnavailable, "too many connections are upgraded at this proxy")
				return
			}
		}
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(x.hard, cancel)()
	if limit := rule.Timeouts.Request; limit > 0 && r.Header.Get("Upgrade") == "" {
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	r = r.WithContext(ctx)
	x.watchBody(w, r)
	x.mirror(r)
	x.proxy().ServeHTTP(w, r)
}

// upgradable says whether a request may become a connection of another kind.
func upgradable(r *http.Request) bool {
	kind := strings.ToLower(r.Header.Get("Upgrade"))
	return r.ProtoMajor == 1 && kind != "h2c" && !strings.HasPrefix(kind, "tls") && !strings.HasPrefix(kind, "http") && !strings.Contains(kind, ",")
}

func (x *exchange) redirected(w http.ResponseWriter, f *route.Filters) bool {
	if f.Redirect == nil {
		return false
	}
	w.Header().Set("Location", f.Redirect.Location(x.in, x.scheme(), x.port, x.found.Prefix()))
	w.WriteHeader(f.Redirect.Code())
	return true
}

func (x *exchange) scheme() string {
	if x.in.TLS != nil {
		return "https"
	}
	return "http"
}

// proxy hands the request to the pool.
func (x *exchange) proxy() *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite:        x.rewrite,
		Transport:      x.pool.try(x),
		FlushInterval:  -1,
		BufferPool:     &x.buffers,
		ErrorLog:       log.New(io.Discard, "", 0),
		ModifyResponse: x.answered,
		ErrorHandler:   func(w http.ResponseWriter, r *http.Request, err error) { x.explain(w, r, err) },
	}
}

func (x *exchange) rewrite(p *httputil.ProxyRequest) {
	out := p.Out
	out.Host = p.In.Host
	x.forwarded(out.Header)
	out.URL.Scheme = x.pool.scheme()
	out.URL.Host = "endpoint" // try puts an endpoint's address here
	x.filter(out, x.shares)
}

// filter changes a request for a backend.
func (x *exchange) filter(out *http.Request, filters []*route.Filters) {
	for _, f := range filters {
		f.Request.Apply(out.Header)
		if rewrite := f.Rewrite; rewrite != nil {
			if rewrite.Host != "" {
				out.Host = rewrite.Host
			}
			rewrite.Path.Apply(out.URL, x.found.Prefix())
		}
	}
}

// forwarded tells the backend who asks, and how.
func (x *exchange) forwarded(h http.Header) {
	for name := range h {
		if name == "Forwarded" || strings.HasPrefix(name, "X-Forwarded-") {
			h.Del(name)
		}
	}
	if x.trusted() {
		for name, values := range x.in.Header {
			if strings.HasPrefix(name, "X-Forwarded-") {
				h[name] = slices.Clone(values)
			}
		}
	}
	before := strings.Join(h["X-Forwarded-For"], ", ")
	client := x.client.String()
	h.Set("X-Real-Ip", client)
	if before != "" {
		first, _, _ := strings.Cut(before, ",")
		h.Set("X-Real-Ip", strings.TrimSpace(first))
		client = before + ", " + client
	}
	h.Set("X-Forwarded-For", client)
	for name, value := range map[string]string{
		"X-Forwarded-Host": x.in.Host, "X-Forwarded-Proto": x.scheme(), "X-Forwarded-Port": strconv.Itoa(int(x.port)),
	} {
		if h.Get(name) == "" {
			h.Set(name, value)
		}
	}
}

func (x *exchange) trusted() bool {
	for _, p := range x.opts.Trusted {
		if p.Contains(x.client) {
			return true
		}
	}
	return false
}

func clientOf(r *http.Request) netip.Addr {
	at, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.IPv4Unspecified()
	}
	return at.Addr().Unmap().WithZone("")
}

func (x *exchange) answered(answer *http.Response) error {
	if answer.StatusCode == http.StatusSwitchingProtocols {
		x.out.code = answer.StatusCode // it is written past the recorder
	}
	for _, f := range x.shares {
		f.Response.Apply(answer.Header)
	}
	return nil
}

// explain answers a request that no endpoint has answered.
func (x *exchange) explain(w http.ResponseWriter, r *http.Request, err error) {
	var network net.Error
	answer := w.(*recorder)
	switch {
	case x.slow.Load():
		x.fail(answer, http.StatusRequestTimeout, "the request's body stopped coming")
	case x.in.Context().Err() != nil:
		answer.code = statusGone
		panic(http.ErrAbortHandler) // without it a client that has only stopped sending would be told that all is well
	case errors.Is(err, errRefused):
		x.fail(answer, http.StatusBadGateway, "no endpoint could be connected to")
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &network) && network.Timeout():
		x.fail(answer, http.StatusGatewayTimeout, "the backend did not answer in time")
	default:
		x.fail(answer, http.StatusBadGateway, "the backend's answer was cut off or is no HTTP")
	}
	x.opts.Log.Debug("a request failed", "rule", x.ruleName(), "host", r.Host, "err", err)
}

// statusGone is noted, never sent, when the client did not wait for the answer.
const statusGone = 499

func (x *exchange) fail(w http.ResponseWriter, code int, why string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	fmt.Fprintln(w, why)
}

func (x *exchange) ruleName() string {
	if x.found.Rule == nil {
		return ""
	}
	return x.found.Rule.Name
}

func (x *exchange) note(w *recorder, took time.Duration) {
	x.metrics.note(x.ruleName(), w.code, took)
	if x.opts.Access != nil {
		x.opts.Access.Info("request", "client", x.client, "method", x.in.Method, "host", x.in.Host, "path", x.in.URL.Path,
			"proto", x.in.Proto, "code", w.code, "bytes", w.bytes, "took", took, "rule", x.ruleName())
	}
}

// recorder keeps what was answered.
type recorder struct {
	http.ResponseWriter
	code  int
	bytes int64
}

// Unwrap is for http.ResponseController.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *recorder) WriteHeader(code int) {
	if w.code == 0 && (code >= 200 || code == http.StatusSwitchingProtocols) {
		w.code = code
	}
	w.ResponseWriter.WriteHeader(code)
}

func (w *recorder) Write(p []byte) (int, error) {
	if w.code == 0 {
		w.code = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(p)
	w.bytes += int64(n)
	return n, err
}

// watchBody gives each piece of a body in HTTP/1.1 its time. Streams of HTTP/2 may be silent for as long as they like,
// as calls of gRPC are: they are few per connection, and a dead peer's connection is closed.
func (x *exchange) watchBody(w http.ResponseWriter, r *http.Request) {
	if r.Body == nil || r.Body == http.NoBody {
		return
	}
	if r.ProtoMajor != 1 {
		x.stop = func() { x.in.Body.Close() }
		return
	}
	timed := &timedBody{ReadCloser: r.Body, at: http.NewResponseController(w), limit: x.limits.BodyIdle, slow: &x.slow}
	r.Body, x.stop = timed, timed.stop // Close would wait for the Read
}

type timedBody struct {
	io.ReadCloser
	at    *http.ResponseController
	limit time.Duration
	slow  *atomic.Bool
}

func (b *timedBody) Read(p []byte) (int, error) {
	if err := b.at.SetReadDeadline(time.Now().Add(b.limit)); err != nil {
		return 0, err
	}
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		b.slow.Store(true)
		return n, err
	}
	if err != nil {
		// The server goes on reading, to learn that the client has left; that has no bound in time.
		b.at.SetReadDeadline(time.Time{})
	}
	return n, err
}

// stop ends a Read that waits for the client. Nothing more is read of the connection.
func (b *timedBody) stop() { _ = b.at.SetReadDeadline(time.Unix(1, 0)) }
