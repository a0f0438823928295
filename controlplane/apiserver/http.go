package apiserver

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/internal/connlimit"
)

// ServeHTTP serves all HTTP requests. It authenticates the client (stage 1), resolves impersonation
// and passes the request to the pipeline, a proxy or a document handler. It also counts the request
// and recovers panics.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := s.cfg.Clock()
	ctx, warnings := api.WithWarnings(r.Context())
	if r.Method != http.MethodGet && strings.HasPrefix(r.URL.Path, "/api/v1/nodes") {
		ctx = podaddress.WithSource(ctx, sourceOf(r))
	}
	r = r.WithContext(ctx)
	out := &statusWriter{ResponseWriter: w, warnings: warnings}
	out.Header().Set("Cache-Control", "no-cache, private")
	if s.lifetime.closing.Err() != nil {
		out.Header().Set("Connection", "close") // the client's next request reaches another replica
	}
	var req *api.Request
	defer func() {
		if p := recover(); p != nil {
			s.handlePanic(out, r, p)
		}
		s.metrics.requests.observeRequest(req, r, out, s.cfg.Clock().Sub(began))
	}()
	// Health checks need no credentials if anonymous requests are allowed for the path.
	if checkPath(r.URL) == nil && s.cfg.Authentication.Configured.Anonymous(r.URL.Path) &&
		(healthChecks{s}).serveHealth(out, r) {
		return
	}
	req = s.serveAuthenticated(out, r, began)
}

// sourceOf returns the remote and the local address of the client's connection; the zero address if
// unknown.
func sourceOf(r *http.Request) podaddress.Source {
	remote, _ := netip.ParseAddrPort(r.RemoteAddr) // the zero address means unknown
	var local netip.AddrPort
	if a, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		local, _ = netip.ParseAddrPort(a.String())
	}
	return podaddress.NewSource(remote.Addr(), local.Addr())
}

// serveAuthenticated serves all requests except unauthenticated health checks, and writes their
// audit records. It returns the api.Request; nil if the request is not about a served resource.
func (s *Server) serveAuthenticated(writer *statusWriter, r *http.Request, began time.Time) (req *api.Request) {
	if s.cfg.Process.Audit != nil {
		ctx, record := s.cfg.Process.Audit.Begin(r.Context(), auditOrigin(r, began))
		r, writer.record = r.WithContext(ctx), record
		writer.Header().Set("Audit-Id", record.ID())
	}
	answered := false
	defer func() { writer.record.Finish(writer.code, !answered) }()
	err := checkPath(r.URL)
	if err == nil {
		err = checkTimeout(r)
	}
	if err != nil {
		s.resources.WriteError(writer, r, err)
		answered = true
		return nil
	}
	var timer *api.StageTimer // reads are not recorded in timelines
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		timer = api.StartStages("apiserver/"+s.cfg.Name, began)
		timer.EndStage("received", r.Method+" "+r.URL.Path, began)
	}
	var u, sender api.User
	u, sender, err = s.identifyUser(r)
	if lost := s.startRequestRecord(writer.record, r, u, sender); err == nil {
		err = lost
	}
	if err != nil {
		s.resources.WriteError(writer, r, err)
		answered = true
		return nil
	}
	timer.EndStage("authenticated", u.Name, s.cfg.Clock())
	s.setFlowHeaders(writer, r, u)
	if s.aggregated.serveAggregated(writer, r, u) || s.proxy.serveProxy(writer, r, u) {
		answered = true
		return nil
	}
	if t, ok := endpoints.ParsePath(r.URL.Path); ok {
		req = s.resources.Serve(writer, r, t, u, timer)
	} else {
		s.servePath(writer, r.WithContext(api.WithCaller(r.Context(), api.Caller{User: u, Sender: sender})), u)
	}
	answered = true
	return req
}

// maxHeaderBytes limits the headers of a request. The token of a large identity provider takes up
// to
// 16 KiB of it. Over HTTP/2, the headers of 400 unauthenticated connections take less than 128 MiB,
// even with the maximum number of header fields.
const maxHeaderBytes = 48 << 10

// maxPath limits the escaped path of a URL in bytes. No served path is longer.
const maxPath = 4 << 10

// checkPath returns an error for a URL path that is too long or has an empty element. It must run
// before anything parses or stores the path.
func checkPath(u *url.URL) error {
	switch {
	case len(u.EscapedPath()) > maxPath:
		return newStatus(http.StatusRequestURITooLong, "RequestURITooLong",
			fmt.Sprintf("the path of the URL is longer than %d bytes", maxPath))
	case strings.Contains(u.Path, "//"):
		return apierrors.NewBadRequest("the path of the URL has an empty part (//)")
	}
	return nil
}

// checkTimeout returns an error if the timeout in the query is not a duration. It ignores the
// timeout of long-running requests: watches, proxies, logs and streams. Like Kubernetes' request
// deadline, it runs before authentication.
func checkTimeout(r *http.Request) error {
	if !strings.Contains(r.URL.RawQuery, "timeout") {
		return nil
	}
	q := r.URL.Query()
	v := q.Get("timeout")
	if v == "" {
		return nil
	}
	if t, ok := endpoints.ParsePath(r.URL.Path); ok && endpoints.IsLongRunning(r.Method, t, q) {
		return nil
	}
	if _, err := time.ParseDuration(v); err != nil {
		return apierrors.NewBadRequest("invalid timeout specified in the request URL - " +
			api.Truncate(err.Error(), 128))
	}
	return nil
}

// identifyUser runs stage 1: it authenticates the client and resolves impersonation. sender is the
// authenticated user. u is the user as which the request is performed.
func (s *Server) identifyUser(r *http.Request) (u, sender api.User, err error) {
	began := time.Now()
	sender, err = s.authn.Authenticate(r)
	anonymous := err == authn.ErrNoCredentials && s.cfg.Authentication.Configured.Anonymous(r.URL.Path)
	s.metrics.authentication.observeAttempt(err, anonymous, time.Since(began))
	switch {
	case anonymous:
		sender = authn.Anonymous()
	case err == authn.ErrNoCredentials:
		return sender, sender, newUnauthorized("Unauthorized")
	case err != nil:
		return sender, sender, newUnauthorized("Unauthorized: " + err.Error())
	default:
		place, _ := r.Context().Value(connKey{}).(*connlimit.Conn)
		place.MarkAuthenticated()
		s.revocations.conns.recordConn(r, place)
	}
	u, err = s.resolveUser(r, sender)
	return u, sender, err
}

// servePath authorizes the path of a request and serves it, for all paths that are not resources.
func (s *Server) servePath(w http.ResponseWriter, r *http.Request, u api.User) {
	path := r.URL.Path
	err := s.pipeline.authorizeAttributes(r.Context(),
		&authz.Attributes{User: u, Verb: strings.ToLower(r.Method), Path: path}, nil)
	if err != nil {
		s.logRefusal(r, u, err)
		s.resources.WriteError(w, r, err)
		return
	}
	if h, pattern := s.paths.Handler(r); pattern != "" {
		h.ServeHTTP(w, r)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		s.resources.WriteError(w, r, newStatus(http.StatusMethodNotAllowed, "MethodNotAllowed",
			"the server does not allow this method on the requested resource"))
		return
	}
	switch {
	case healthChecks{s}.serveHealth(w, r), processPages{s}.serveProcessPage(w, r), s.aggregated.serveDiscovery(w, r),
		s.aggregated.serveOpenAPI(w, r, u):
	case path == "/version" || path == "/version/":
		writeJSON(w, s.cfg.Process.Version)
	case path == "/metrics":
		s.metrics.requests.handler.ServeHTTP(w, r)
	case path == pathSLIs:
		healthChecks{s}.serveSLIs(w, r)
	case strings.HasPrefix(path, profilePrefix+"/"):
		serveProfile(w, r, strings.TrimPrefix(path, profilePrefix+"/"))
	case strings.HasPrefix(path, api.PathTimeline+"/api"):
		s.serveTimelineOf(w, r, u, strings.TrimPrefix(path, api.PathTimeline))
	case strings.HasPrefix(path, api.PathTimeline+"/"):
		s.serveTimeline(w, r, strings.TrimPrefix(path, api.PathTimeline+"/"))
	case path == "/":
		writeJSON(w, map[string][]string{"paths": s.rootPaths()})
	case s.cfg.Authentication.ServiceTokens != nil && path == "/openid/v1/jwks":
		data, err := s.cfg.Authentication.ServiceTokens.JWKS()
		s.writeDocument(w, r, "application/jwk-set+json", data, err)
	case s.cfg.Authentication.ServiceTokens != nil && path == "/.well-known/openid-configuration":
		data, err := s.cfg.Authentication.ServiceTokens.OpenIDConfiguration("https://" + r.Host + "/openid/v1/jwks")
		s.writeDocument(w, r, "application/json", data, err)
	default:
		s.resources.WriteError(w, r, newStatus(http.StatusNotFound, "NotFound",
			"the server could not find the requested resource"))
	}
}

// logRefusal logs that a user was denied a write to one of Config.Serving.Paths. Anonymous users
// are not logged, because any client could then fill the log.
func (s *Server) logRefusal(r *http.Request, u api.User, err error) {
	if _, pattern := s.paths.Handler(r); pattern == "" || r.Method == http.MethodGet || r.Method == http.MethodHead ||
		u.Name == api.UserAnonymous {
		return
	}
	attrs := []any{"user", u.Name, "verb", r.Method, "object", r.URL.Path}
	if sender := api.CallerOf(r.Context()).Sender; sender.Name != u.Name {
		attrs = append(attrs, "sender", sender.Name)
	}
	s.cfg.Log.Warn("cluster verb", append(attrs, "outcome", "refused", "reason", err.Error())...)
}

func (s *Server) writeDocument(w http.ResponseWriter, r *http.Request, media string, data []byte, err error) {
	if err != nil {
		s.resources.WriteError(w, r, err)
		return
	}
	w.Header().Set("Content-Type", media)
	_, _ = w.Write(data)
}

func writeJSON(w http.ResponseWriter, v any) {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(data)
}

// serveTimeline serves the recorded stages of a trace as JSON: from all replicas, or with
// ?local=true only from this replica. traceID may also be a traceparent.
func (s *Server) serveTimeline(w http.ResponseWriter, r *http.Request, traceID string) {
	if id := api.TraceID(traceID); id != "" {
		traceID = id // traceID was a complete traceparent
	}
	stages := s.cfg.Timeline.Stages.StagesOfTrace(traceID)
	if local, _ := strconv.ParseBool(r.URL.Query().Get("local")); !local && s.cfg.Timeline.PeerStages != nil {
		stages = append(stages, s.cfg.Timeline.PeerStages(r.Context(), traceID)...)
	}
	if stages == nil {
		stages = []api.Stage{}
	}
	writeJSON(w, stages)
}

// serveTimelineOf serves the recorded stages of the trace that created the object at a path. The
// user must be allowed to get the object.
func (s *Server) serveTimelineOf(w http.ResponseWriter, r *http.Request, u api.User, path string) {
	t, ok := endpoints.ParsePath(path)
	kind := s.cfg.Kinds.ByResource(t.GVR)
	if !ok || kind == nil || kind.Serving.Virtual || t.Name == "" || t.Subresource != "" ||
		kind.Namespaced != (t.Namespace != "") {
		s.resources.WriteError(w, r, newStatus(http.StatusNotFound, "NotFound",
			"only objects have timelines: "+path+" is not the path of an object"))
		return
	}
	get := &api.Request{User: u, Verb: api.VerbGet, Kind: kind, Namespace: t.Namespace, Name: t.Name}
	err := s.pipeline.authorize(r.Context(), get)
	var obj api.Object
	if err == nil {
		obj, err = s.cfg.Registry.GetObject(r.Context(), get)
	}
	if err != nil {
		s.resources.WriteError(w, r, err)
		return
	}
	id := api.TraceID(obj.GetAnnotations()[api.TraceParentAnnotation])
	if id == "" {
		s.resources.WriteError(w, r, newStatus(http.StatusNotFound, "NotFound",
			fmt.Sprintf("%s %q has no trace: it was not created by a traced request", kind.Naming.Singular, t.Name)))
		return
	}
	s.serveTimeline(w, r, id)
}

func (s *Server) rootPaths() []string {
	out := []string{"/api", "/api/v1", "/apis"}
	seen := map[string]bool{}
	for _, k := range s.cfg.Kinds.Table().Visible() {
		if p := "/apis/" + k.GVK.GroupVersion().String(); k.GVK.Group != "" && !seen[p] {
			seen[p] = true
			out = append(out, p)
		}
	}
	return append(out, pathFlags, "/healthz", "/livez", "/metrics", pathSLIs, "/openapi/v2", "/openapi/v3",
		"/readyz", pathStatus, "/version")
}

// handlePanic logs the panic of a handler and responds with a 500. It panics again with
// http.ErrAbortHandler if this is the cause or if the response has already started.
func (s *Server) handlePanic(w *statusWriter, r *http.Request, cause any) {
	if cause == http.ErrAbortHandler {
		panic(cause)
	}
	s.cfg.Log.Error("a request crashed", "method", r.Method, "path", r.URL.Path, "panic", cause, "stack",
		string(debug.Stack()))
	if w.code == 0 {
		s.resources.WriteError(w, r, newStatus(http.StatusInternalServerError, "InternalError",
			fmt.Sprintf("Internal error occurred: %v", cause)))
		return
	}
	panic(http.ErrAbortHandler) // a partial response must not look complete
}

// statusWriter is an http.ResponseWriter that stores the status code and adds Warning headers
// before the response.
type statusWriter struct {
	http.ResponseWriter
	code       int
	sent       int64 // bytes of the body
	terminated bool  // the server ended the request to protect itself
	warnings   func() []string
	record     *audit.Record
}

func (w *statusWriter) WriteHeader(code int) {
	if w.code == 0 {
		w.code = code
		for _, text := range w.warnings() {
			w.Header().Add("Warning", formatWarning(text))
		}
		w.record.MarkStarted(code)
	}
	w.ResponseWriter.WriteHeader(code)
}

func (w *statusWriter) Write(data []byte) (int, error) {
	if w.code == 0 {
		w.WriteHeader(http.StatusOK)
	}
	n, err := w.ResponseWriter.Write(data)
	w.sent += int64(n)
	return n, err
}

// MarkTerminated implements endpoints.TerminationMarker.
func (w *statusWriter) MarkTerminated() { w.terminated = true }

// Unwrap returns the wrapped writer for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Hijack takes over the connection for an upgraded protocol. It implements http.Hijacker.
func (w *statusWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	w.code = http.StatusSwitchingProtocols
	w.record.MarkStarted(w.code)
	return http.NewResponseController(w.ResponseWriter).Hijack()
}

// Flush sends buffered data to the client and implements http.Flusher.
func (w *statusWriter) Flush() { _ = http.NewResponseController(w.ResponseWriter).Flush() }

// formatWarning returns the value of a Warning header: 299 - "text".
func formatWarning(text string) string {
	var b strings.Builder
	b.WriteString(`299 - "`)
	for _, c := range text {
		switch {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteRune(c)
		case c < ' ' || c == 0x7f:
			b.WriteByte(' ')
		default:
			b.WriteRune(c)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// headerTimeout is how long a client may take to send the headers of a request.
const headerTimeout = 30 * time.Second
