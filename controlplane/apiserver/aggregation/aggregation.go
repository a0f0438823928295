// Package aggregation implements the API aggregation layer. It proxies requests for a group version
// to the API server behind the Service of an APIService. The user of a request is passed in
// headers, which the front-proxy client certificate authenticates. Discovery and OpenAPI documents
// of these servers are merged into those of this server. The documents are limited in size and
// cached.
//
// The APIService objects in this replica's cache alone determine which server serves a group
// version. An APIService with a Service takes precedence over built-in and custom kinds.
package aggregation

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/dialer"
	"keelson.dev/keelson/controlplane/apiserver/forward"
	"keelson.dev/keelson/controlplane/apiserver/openapi"
)

// APIServices is the GroupVersionResource of APIService objects.
var APIServices = apiregistrationv1.SchemeGroupVersion.WithResource("apiservices")

// Config holds the dependencies of a Layer.
type Config struct {
	// Cached returns an APIService from this replica's cache. All returns all of them.
	Cached func(ctx context.Context, name string) (*apiregistrationv1.APIService, bool)
	All    func(ctx context.Context) []*apiregistrationv1.APIService
	Dialer *dialer.Dialer
	// Certificate returns the front-proxy client certificate; nil = no certificate is presented.
	Certificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)
	Clock       func() time.Time
}

// Layer proxies requests to aggregated API servers and caches their documents. Without APIServices
// that reference a Service, it starts no goroutines.
type Layer struct {
	cfg Config

	mu            sync.Mutex
	remotes       map[string]*remote // by name of the APIService
	documentBytes int64              // total bytes of the cached discovery documents

	availableQueue, otherQueue requestQueue // requests to servers that are available, and requests to all other servers

	parsing sync.Mutex // held while an OpenAPI v2 document is parsed, because this takes many times its size in memory
}

// New returns a Layer. It starts nothing.
func New(cfg Config) *Layer {
	l := &Layer{cfg: cfg, remotes: make(map[string]*remote)}
	l.availableQueue.limit, l.otherQueue.limit = maxRequests, maxRequests
	return l
}

// remote is the API server of one APIService, with its connections and cached documents. It is
// replaced if the server in the spec of the APIService changes.
type remote struct {
	name string
	spec apiregistrationv1.APIServiceSpec
	base url.URL // https://SERVICE.NAMESPACE.svc

	pooled    *http.Transport // HTTP/2 if the server supports it
	http1Only *http.Transport // HTTP/1.1, for upgrades
	err       error           // why the transports could not be created

	documentBytes int64 // bytes of the cached discovery document; guarded by the layer's mu

	mu        sync.Mutex // guards the cached responses
	discovery cachedDocument[*resources]
	index     cachedDocument[map[string]string]
	swagger   cachedDocument[*openapi.Part]
}

// Lookup returns the aggregated API server of a path; false if this server serves the path. It
// handles /apis/GROUP/VERSION and all paths below, and /api/VERSION if an APIService of the core
// group references a Service.
func (l *Layer) Lookup(ctx context.Context, path string) (*remote, bool) {
	gv, ok := versionOf(path)
	if !ok {
		return nil, false
	}
	s, ok := l.cfg.Cached(ctx, gv.Version+"."+gv.Group)
	if !ok || s.Spec.Service == nil || s.DeletionTimestamp != nil {
		return nil, false
	}
	return l.remoteFor(s), true
}

// versionOf returns the group version of a path, or false if the path has none.
func versionOf(path string) (schema.GroupVersion, bool) {
	parts := strings.SplitN(strings.TrimPrefix(path, "/"), "/", 4)
	switch {
	case len(parts) >= 3 && parts[0] == "apis" && parts[1] != "" && parts[2] != "":
		return schema.GroupVersion{Group: parts[1], Version: parts[2]}, true
	case len(parts) >= 2 && parts[0] == "api" && parts[1] != "":
		return schema.GroupVersion{Version: parts[1]}, true
	}
	return schema.GroupVersion{}, false
}

// remoteFor returns the API server of an APIService. It replaces the previous one if the Service,
// port or TLS settings have changed.
func (l *Layer) remoteFor(s *apiregistrationv1.APIService) *remote {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.remotes[s.Name]
	if r != nil && sameServer(&r.spec, &s.Spec) {
		return r
	}
	if r != nil {
		l.releaseRemote(r)
	}
	r = l.newRemote(s)
	l.remotes[s.Name] = r
	return r
}

func sameServer(a, b *apiregistrationv1.APIServiceSpec) bool {
	return a.Service.Namespace == b.Service.Namespace && a.Service.Name == b.Service.Name &&
		servicePort(a) == servicePort(b) &&
		a.InsecureSkipTLSVerify == b.InsecureSkipTLSVerify && bytes.Equal(a.CABundle, b.CABundle)
}

func servicePort(s *apiregistrationv1.APIServiceSpec) int32 {
	if s.Service.Port == nil {
		return 443
	}
	return *s.Service.Port
}

func (l *Layer) newRemote(s *apiregistrationv1.APIService) *remote {
	r := &remote{name: s.Name, spec: *s.Spec.DeepCopy()}
	host := s.Spec.Service.Name + "." + s.Spec.Service.Namespace + ".svc"
	r.base = url.URL{Scheme: "https", Host: fmt.Sprintf("%s:%d", host, servicePort(&s.Spec))}
	conf := &tls.Config{
		ServerName: host, InsecureSkipVerify: s.Spec.InsecureSkipTLSVerify, MinVersion: tls.VersionTLS12,
		GetClientCertificate: l.cfg.Certificate, Time: l.cfg.Clock,
	}
	if len(s.Spec.CABundle) > 0 {
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(s.Spec.CABundle) {
			r.err = errors.New("unable to load root certificates: unable to parse bytes as PEM block")
			return r
		}
	}
	dial := l.cfg.Dialer.ForService(s.Spec.Service.Namespace, s.Spec.Service.Name, servicePort(&s.Spec))
	r.pooled = forward.Transport(dial, &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true})
	r.http1Only = forward.Transport(dial, &http.Transport{TLSClientConfig: conf.Clone(), Protocols: http1()})
	return r
}

func http1() *http.Protocols {
	p := &http.Protocols{}
	p.SetHTTP1(true)
	return p
}

func (r *remote) closeConnections() {
	if r.err == nil {
		r.pooled.CloseIdleConnections()
		r.http1Only.CloseIdleConnections()
	}
}

// releaseRemote releases the connections and the cached bytes of an API server. The caller holds
// mu.
func (l *Layer) releaseRemote(r *remote) {
	l.documentBytes -= r.documentBytes
	r.documentBytes = 0
	r.closeConnections()
}

// isCurrent reports whether r is still in use: its APIService exists and references the same
// server.
func (l *Layer) isCurrent(r *remote) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.remotes[r.name] == r
}

// Remotes returns the API servers of all APIServices with a Service. It releases the API servers of
// deleted APIServices.
func (l *Layer) Remotes(ctx context.Context) []*remote {
	var out []*remote
	there := map[string]bool{}
	for _, s := range l.cfg.All(ctx) {
		if s.Spec.Service != nil && s.DeletionTimestamp == nil {
			out = append(out, l.remoteFor(s))
			there[s.Name] = true
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, r := range l.remotes {
		if !there[name] {
			l.releaseRemote(r)
			delete(l.remotes, name)
		}
	}
	return out
}

func (r *remote) groupVersion() schema.GroupVersion {
	return schema.GroupVersion{Group: r.spec.Group, Version: r.spec.Version}
}

// discoveryPath returns the discovery path of the group version.
func (r *remote) discoveryPath() string {
	if r.spec.Group == "" {
		return "/api/" + r.spec.Version
	}
	return "/apis/" + r.spec.Group + "/" + r.spec.Version
}

// errUnavailable is Kubernetes' error for an API server that cannot be reached.
var errUnavailable = errors.New("service unavailable")

// Serve proxies a request of user u to the API server r. It responds 503 if the server is
// unavailable.
func (l *Layer) Serve(w http.ResponseWriter, req *http.Request, r *remote, u api.User) {
	if r.err != nil {
		http.Error(w, r.err.Error(), http.StatusInternalServerError)
		return
	}
	if !l.isServerAvailable(req.Context(), r) {
		http.Error(w, errUnavailable.Error(), http.StatusServiceUnavailable)
		return
	}
	target := r.base
	target.Path, target.RawPath, target.RawQuery = req.URL.Path, req.URL.RawPath, req.URL.RawQuery
	transport := r.pooled
	if forward.Upgrades(req) {
		transport = r.http1Only
	}
	forward.Forward{
		Target: &target, Transport: transport,
		Head:   func(h http.Header) { setUserHeaders(h, u) },
		Answer: rewriteResponse,
		Failed: func(w http.ResponseWriter, _ *http.Request, err error) { writeProxyError(w, err) },
	}.ServeHTTP(w, req)
}

// writeProxyError writes the error response for a proxied request that failed.
func writeProxyError(w http.ResponseWriter, err error) {
	switch {
	case errors.Is(err, forward.ErrNoUpgrade):
		http.Error(w, err.Error(), http.StatusBadRequest)
	case errors.Is(err, errRedirected):
		http.Error(w, err.Error(), http.StatusBadGateway)
	case errors.Is(err, context.DeadlineExceeded):
		http.Error(w, "error trying to reach service: the server did not answer in time", http.StatusGatewayTimeout)
	default:
		http.Error(w, "error trying to reach service: "+err.Error(), http.StatusServiceUnavailable)
	}
}

// errRedirected reports a redirect to another host, which would receive the client's credentials.
var errRedirected = errors.New("the backend attempted to redirect this request, which is not permitted")

// rewriteResponse checks and changes the response of an API server. A redirect to another host is
// an error. It removes headers that this server sets itself.
func rewriteResponse(resp *http.Response) error {
	if resp.StatusCode >= 300 && resp.StatusCode < 400 && resp.StatusCode != http.StatusNotModified {
		if u, err := resp.Location(); err == nil && u.Host != resp.Request.URL.Host {
			return errRedirected
		} else if err == nil {
			resp.Header.Set("Location", (&url.URL{Path: u.Path, RawPath: u.RawPath, RawQuery: u.RawQuery}).String())
		}
	}
	for _, name := range []string{"Audit-Id", "Strict-Transport-Security", "Www-Authenticate"} {
		resp.Header.Del(name)
	}
	return nil
}

// setUserHeaders sets the headers that pass the user of a request to an aggregated API server. The
// ConfigMap extension-apiserver-authentication publishes the names of these headers.
func setUserHeaders(h http.Header, u api.User) {
	h.Set("X-Remote-User", u.Name)
	if u.UID != "" {
		h.Set("X-Remote-Uid", u.UID)
	}
	for _, g := range u.Groups {
		h.Add("X-Remote-Group", g)
	}
	for key, values := range u.Extra {
		for _, v := range values {
			h.Add("X-Remote-Extra-"+escapeKey(key), v)
		}
	}
}

// escapeKey encodes a key of the user's extra fields for use in a header name. Bytes that are not
// allowed there become %XX.
func escapeKey(key string) string {
	var b strings.Builder
	for i := range len(key) {
		c := key[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' ||
			strings.IndexByte("!#$&'*+-.^_`|~", c) >= 0 {
			b.WriteByte(c)
			continue
		}
		fmt.Fprintf(&b, "%%%02X", c)
	}
	return b.String()
}
