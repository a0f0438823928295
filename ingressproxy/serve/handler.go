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

// exchange is the state of one request while it is handled: its rule, its filters and its response.
type exchange struct {
	server       *Server
	state        *servedTable
	port         uint16
	request      *http.Request
	client       netip.Addr
	match        route.Found
	filters      []*route.Filters // filters of the rule, followed by those of the chosen backend
	pool         *pool
	response     *recorder
	bodyStalled  atomic.Bool // the request body exceeded Limits.BodyIdle
	stopBodyRead func()      // interrupts a Read that waits for the request body
}

// handleRequest handles request r, which arrived on a port: it finds the rule and applies it.
func (s *Server) handleRequest(port uint16, w http.ResponseWriter, r *http.Request) {
	s.running.Add(1)
	defer s.running.Done()
	place, _ := r.Context().Value(connKey{}).(*connlimit.Conn)
	place.MarkAuthenticated()
	begun := time.Now()
	answer := &recorder{ResponseWriter: w}
	x := &exchange{server: s, state: s.current.Load(), port: port, request: r, client: clientAddress(r),
		response: answer}
	defer func() { x.recordRequest(answer, time.Since(begun)) }()
	select {
	case s.slots.requests <- struct{}{}:
		defer func() { <-s.slots.requests }()
	default:
		x.respondError(answer, http.StatusServiceUnavailable, "the proxy is handling too many requests")
		return
	}
	if code, why := x.checkRequest(); code != 0 {
		x.respondError(answer, code, why)
		return
	}
	var ok bool
	if x.match, ok = x.state.index.Match(port, r); !ok {
		x.respondError(answer, http.StatusNotFound, "no rule matches this host and path")
		return
	}
	x.applyRule(answer)
}

// checkRequest returns the status code and the reason for a request that must be refused before
// rules are evaluated. code is 0 if the request is acceptable.
func (x *exchange) checkRequest() (code int, why string) {
	r := x.request
	switch {
	case r.Method == http.MethodConnect:
		return http.StatusMethodNotAllowed, "this is not a forward proxy"
	case hasDotSegments(r.URL.Path):
		// A rule for /public must not match /public/../private.
		return http.StatusBadRequest, "the path contains . or .. elements"
	case r.TLS != nil:
		// HTTP/2 clients reuse a connection for all hosts of its certificate. The host of the
		// request may belong to another listener than the server name of the connection.
		asked := x.state.index.Listener(x.port, route.NormalizeHost(r.TLS.ServerName))
		if asked != x.state.index.Listener(x.port, route.NormalizeHost(r.Host)) {
			return http.StatusMisdirectedRequest, "this connection is for another host"
		}
	}
	return 0, ""
}

func hasDotSegments(path string) bool {
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

// applyRule handles the request according to its rule: it redirects, responds with a status code,
// or forwards the request to a backend.
func (x *exchange) applyRule(w *recorder) {
	rule := x.match.Rule
	x.filters = []*route.Filters{&rule.Filters}
	if x.sendRedirect(w, &rule.Filters) {
		return
	}
	if rule.Answer != 0 {
		x.respondError(w, rule.Answer, http.StatusText(rule.Answer))
		return
	}
	b, ok := route.ChooseBackend(rule.Backends, rand.Uint64())
	if !ok {
		x.respondError(w, http.StatusInternalServerError, "all backends of the rule have weight 0")
		return
	}
	x.filters = append(x.filters, &b.Filters)
	if x.sendRedirect(w, &b.Filters) {
		return
	}
	if b.Answer != 0 {
		x.respondError(w, b.Answer, http.StatusText(b.Answer))
		return
	}
	if x.pool = x.state.pools[b.Pool]; x.pool == nil || len(x.pool.endpoints) == 0 {
		x.respondError(w, http.StatusServiceUnavailable, "no endpoint is ready")
		return
	}
	r := x.request
	if upgrade := r.Header.Get("Upgrade"); upgrade != "" {
		if !isUpgradable(r) {
			// After an upgrade to h2c, requests would reach the backend without being matched
			// against the rules.
			r.Header.Del("Upgrade")
		} else {
			select {
			case x.server.slots.upgrades <- struct{}{}:
				defer func() { <-x.server.slots.upgrades }()
			default:
				x.respondError(w, http.StatusServiceUnavailable, "the proxy has too many upgraded connections")
				return
			}
		}
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(x.server.abortCtx, cancel)()
	if limit := rule.Timeouts.Request; limit > 0 && r.Header.Get("Upgrade") == "" {
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	r = r.WithContext(ctx)
	x.watchBody(w, r)
	x.mirrorRequest(r)
	x.reverseProxy().ServeHTTP(w, r)
}

// isUpgradable reports whether a request may upgrade its connection to another protocol, such as
// WebSocket. Upgrades to HTTP or TLS are not allowed.
func isUpgradable(r *http.Request) bool {
	kind := strings.ToLower(r.Header.Get("Upgrade"))
	return r.ProtoMajor == 1 && kind != "h2c" && !strings.HasPrefix(kind, "tls") && !strings.HasPrefix(kind, "http") &&
		!strings.Contains(kind, ",")
}

func (x *exchange) sendRedirect(w http.ResponseWriter, f *route.Filters) bool {
	if f.Redirect == nil {
		return false
	}
	w.Header().Set("Location", f.Redirect.Location(x.request, x.clientScheme(), x.port, x.match.Prefix()))
	w.WriteHeader(f.Redirect.StatusCode())
	return true
}

func (x *exchange) clientScheme() string {
	if x.request.TLS != nil {
		return "https"
	}
	return "http"
}

// reverseProxy returns the httputil.ReverseProxy that forwards this request to an endpoint of its
// pool.
func (x *exchange) reverseProxy() *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite:        x.rewriteRequest,
		Transport:      x.pool.roundTripper(x),
		FlushInterval:  -1,
		BufferPool:     &x.server.buffers,
		ErrorLog:       log.New(io.Discard, "", 0),
		ModifyResponse: x.modifyResponse,
		ErrorHandler:   func(w http.ResponseWriter, r *http.Request, err error) { x.handleProxyError(w, r, err) },
	}
}

func (x *exchange) rewriteRequest(p *httputil.ProxyRequest) {
	out := p.Out
	out.Host = p.In.Host
	x.setForwardedHeaders(out.Header)
	out.URL.Scheme = x.pool.backendScheme()
	out.URL.Host = "endpoint" // tryEndpoint replaces it by the address of an endpoint
	x.applyFilters(out, x.filters)
}

// applyFilters modifies headers, host, and path of out, the request to the backend, according to
// filters.
func (x *exchange) applyFilters(out *http.Request, filters []*route.Filters) {
	for _, f := range filters {
		f.Request.ModifyHeader(out.Header)
		if rewrite := f.Rewrite; rewrite != nil {
			if rewrite.Host != "" {
				out.Host = rewrite.Host
			}
			rewrite.Path.RewritePath(out.URL, x.match.Prefix())
		}
	}
}

// setForwardedHeaders sets X-Forwarded-* and X-Real-Ip in the header of the request to the backend.
// Existing values are kept and extended only if the client is one of Options.Trusted.
func (x *exchange) setForwardedHeaders(h http.Header) {
	for name := range h {
		if name == "Forwarded" || strings.HasPrefix(name, "X-Forwarded-") {
			h.Del(name)
		}
	}
	if x.isTrustedProxy() {
		for name, values := range x.request.Header {
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
		"X-Forwarded-Host": x.request.Host, "X-Forwarded-Proto": x.clientScheme(),
		"X-Forwarded-Port": strconv.Itoa(int(x.port)),
	} {
		if h.Get(name) == "" {
			h.Set(name, value)
		}
	}
}

func (x *exchange) isTrustedProxy() bool {
	for _, p := range x.server.opts.Trusted {
		if p.Contains(x.client) {
			return true
		}
	}
	return false
}

func clientAddress(r *http.Request) netip.Addr {
	at, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.IPv4Unspecified()
	}
	return at.Addr().Unmap().WithZone("")
}

func (x *exchange) modifyResponse(answer *http.Response) error {
	if answer.StatusCode == http.StatusSwitchingProtocols {
		x.response.code = answer.StatusCode // the response to an upgrade bypasses the recorder
	}
	for _, f := range x.filters {
		f.Response.ModifyHeader(answer.Header)
	}
	return nil
}

// handleProxyError sends the error response for a request if forwarding it failed with err.
func (x *exchange) handleProxyError(w http.ResponseWriter, r *http.Request, err error) {
	var network net.Error
	answer := w.(*recorder)
	switch {
	case x.bodyStalled.Load():
		x.respondError(answer, http.StatusRequestTimeout, "timeout while reading the request body")
	case x.request.Context().Err() != nil:
		answer.code = statusClientClosed
		// abort the connection: a client that has half-closed it must not mistake this for a
		// complete response
		panic(http.ErrAbortHandler)
	case errors.Is(err, errRefused):
		x.respondError(answer, http.StatusBadGateway, "no endpoint accepts connections")
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &network) && network.Timeout():
		x.respondError(answer, http.StatusGatewayTimeout, "the backend did not respond in time")
	default:
		x.respondError(answer, http.StatusBadGateway, "the backend's response is incomplete or not HTTP")
	}
	x.server.opts.Log.Debug("a request failed", "rule", x.ruleName(), "host", r.Host, "err", err)
}

// statusClientClosed is the status code in metrics and logs if the client closed the connection
// before the response. It is never sent.
const statusClientClosed = 499

func (x *exchange) respondError(w http.ResponseWriter, code int, why string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	fmt.Fprintln(w, why)
}

func (x *exchange) ruleName() string {
	if x.match.Rule == nil {
		return ""
	}
	return x.match.Rule.Name
}

func (x *exchange) recordRequest(w *recorder, took time.Duration) {
	x.server.metrics.observeRequest(x.ruleName(), w.code, took)
	if x.server.opts.Access != nil {
		x.server.opts.Access.Info("request", "client", x.client, "method", x.request.Method, "host", x.request.Host,
			"path", x.request.URL.Path,
			"proto", x.request.Proto, "code", w.code, "bytes", w.bytes, "took", took, "rule", x.ruleName())
	}
}

// recorder is an http.ResponseWriter that records status code and size of the response.
type recorder struct {
	http.ResponseWriter
	code  int
	bytes int64
}

// Unwrap returns the underlying ResponseWriter, for http.ResponseController.
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

// watchBody limits the time between two parts of an HTTP/1.1 request body to Limits.BodyIdle. It
// does not limit HTTP/2 streams, because gRPC calls may be idle for any time. Other limits bound
// the number of streams, and close the connection of an unresponsive peer.
func (x *exchange) watchBody(w http.ResponseWriter, r *http.Request) {
	if r.Body == nil || r.Body == http.NoBody {
		return
	}
	if r.ProtoMajor != 1 {
		x.stopBodyRead = func() { x.request.Body.Close() }
		return
	}
	timed := &timedBody{ReadCloser: r.Body, controller: http.NewResponseController(w), limit: x.server.limits.BodyIdle,
		stalled: &x.bodyStalled}
	r.Body, x.stopBodyRead = timed, timed.stopRead // Close of the body would wait for the Read
}

type timedBody struct {
	io.ReadCloser
	controller *http.ResponseController
	limit      time.Duration
	stalled    *atomic.Bool
}

func (b *timedBody) Read(p []byte) (int, error) {
	if err := b.controller.SetReadDeadline(time.Now().Add(b.limit)); err != nil {
		return 0, err
	}
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		b.stalled.Store(true)
		return n, err
	}
	if err != nil {
		// The server continues to read, to detect that the client has closed the connection. That
		// read has no deadline.
		b.controller.SetReadDeadline(time.Time{})
	}
	return n, err
}

// stopRead interrupts a Read that waits for the client. The connection cannot be read afterwards.
func (b *timedBody) stopRead() { _ = b.controller.SetReadDeadline(time.Unix(1, 0)) }
