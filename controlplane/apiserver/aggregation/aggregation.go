// Package aggregation serves versions of groups that servers in the cluster have: an APIService names the Service.
// Requests are handed on under the name of their user, which a certificate of the cluster's front proxy CA vouches
// for. What those servers say of themselves is merged into discovery and OpenAPI, bounded, from what was heard last.
//
// Which version is whose follows from the APIService objects alone, as this replica's cache has them: one with a
// Service takes its group version away from built-in and custom kinds.
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

// Config is what a Layer is made of.
type Config struct {
	// Cached returns an APIService of this replica's cache, and all of them.
	Cached func(ctx context.Context, name string) (*apiregistrationv1.APIService, bool)
	All    func(ctx context.Context) []*apiregistrationv1.APIService
	Dialer *dialer.Dialer
	// Certificate is by which servers know this API; nil shows none.
	Certificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)
	Clock       func() time.Time
}

// Layer hands requests on. Nothing runs and nothing is made while there are no APIServices with a Service.
type Layer struct {
	cfg Config

	mu      sync.Mutex
	remotes map[string]*remote // by name of the APIService
	kept    int64              // bytes of discovery documents

	sound, doubtful asker // of servers that are held available, and of the others

	parsing sync.Mutex // of OpenAPI v2 documents, which take many times their size: one at a time
}

// New returns a layer.
func New(cfg Config) *Layer {
	l := &Layer{cfg: cfg, remotes: make(map[string]*remote)}
	l.sound.places, l.doubtful.places = maxAsking, maxAsking
	return l
}

// remote is the server of one group version, as one version of its APIService describes it.
type remote struct {
	name string
	spec apiregistrationv1.APIServiceSpec
	base url.URL // https://SERVICE.NAMESPACE.svc

	many *http.Transport // HTTP/2 where the server has it
	one  *http.Transport // HTTP/1.1, for upgrades
	err  error           // why none exist

	kept int64 // bytes of the discovery document; the layer's mu guards it

	mu        sync.Mutex // of what was heard
	discovery heard[*resources]
	index     heard[map[string]string]
	swagger   heard[*openapi.Part]
}

// Lookup returns the server that a path belongs to; false for what is served here. It looks at /apis/GROUP/VERSION and
// everything below, and at /api/v1 when a Service has that.
func (l *Layer) Lookup(ctx context.Context, path string) (*remote, bool) {
	gv, ok := versionOf(path)
	if !ok {
		return nil, false
	}
	s, ok := l.cfg.Cached(ctx, gv.Version+"."+gv.Group)
	if !ok || s.Spec.Service == nil || s.DeletionTimestamp != nil {
		return nil, false
	}
	return l.remote(s), true
}

// versionOf is the group version that a path is in.
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

// remote returns the server of an APIService, made anew when that has changed in what matters.
func (l *Layer) remote(s *apiregistrationv1.APIService) *remote {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.remotes[s.Name]
	if r != nil && sameServer(&r.spec, &s.Spec) {
		return r
	}
	if r != nil {
		l.letGo(r)
	}
	r = l.newRemote(s)
	l.remotes[s.Name] = r
	return r
}

func sameServer(a, b *apiregistrationv1.APIServiceSpec) bool {
	return a.Service.Namespace == b.Service.Namespace && a.Service.Name == b.Service.Name && port(a) == port(b) &&
		a.InsecureSkipTLSVerify == b.InsecureSkipTLSVerify && bytes.Equal(a.CABundle, b.CABundle)
}

func port(s *apiregistrationv1.APIServiceSpec) int32 {
	if s.Service.Port == nil {
		return 443
	}
	return *s.Service.Port
}

func (l *Layer) newRemote(s *apiregistrationv1.APIService) *remote {
	r := &remote{name: s.Name, spec: *s.Spec.DeepCopy()}
	host := s.Spec.Service.Name + "." + s.Spec.Service.Namespace + ".svc"
	r.base = url.URL{Scheme: "https", Host: fmt.Sprintf("%s:%d", host, port(&s.Spec))}
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
	dial := l.cfg.Dialer.ForService(s.Spec.Service.Namespace, s.Spec.Service.Name, port(&s.Spec))
	r.many = forward.Transport(dial, &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true})
	r.one = forward.Transport(dial, &http.Transport{TLSClientConfig: conf.Clone(), Protocols: http1()})
	return r
}

func http1() *http.Protocols {
	p := &http.Protocols{}
	p.SetHTTP1(true)
	return p
}

func (r *remote) close() {
	if r.err == nil {
		r.many.CloseIdleConnections()
		r.one.CloseIdleConnections()
	}
}

// letGo forgets a server. The caller holds mu.
func (l *Layer) letGo(r *remote) {
	l.kept -= r.kept
	r.kept = 0
	r.close()
}

// has says whether a server is still that of its APIService.
func (l *Layer) has(r *remote) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.remotes[r.name] == r
}

// Remotes are the servers of all APIServices with a Service; those that have gone are let go.
func (l *Layer) Remotes(ctx context.Context) []*remote {
	var out []*remote
	there := map[string]bool{}
	for _, s := range l.cfg.All(ctx) {
		if s.Spec.Service != nil && s.DeletionTimestamp == nil {
			out = append(out, l.remote(s))
			there[s.Name] = true
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, r := range l.remotes {
		if !there[name] {
			l.letGo(r)
			delete(l.remotes, name)
		}
	}
	return out
}

func (r *remote) gv() schema.GroupVersion {
	return schema.GroupVersion{Group: r.spec.Group, Version: r.spec.Version}
}

// path is that of the group version's discovery.
func (r *remote) path() string {
	if r.spec.Group == "" {
		return "/api/" + r.spec.Version
	}
	return "/apis/" + r.spec.Group + "/" + r.spec.Version
}

// errUnavailable is how Kubernetes says that a server cannot be asked.
var errUnavailable = errors.New("service unavailable")

// Serve hands a request of the user on.
func (l *Layer) Serve(w http.ResponseWriter, req *http.Request, r *remote, u api.User) {
	if r.err != nil {
		http.Error(w, r.err.Error(), http.StatusInternalServerError)
		return
	}
	if !l.available(req.Context(), r) {
		http.Error(w, errUnavailable.Error(), http.StatusServiceUnavailable)
		return
	}
	target := r.base
	target.Path, target.RawPath, target.RawQuery = req.URL.Path, req.URL.RawPath, req.URL.RawQuery
	transport := r.many
	if forward.Upgrades(req) {
		transport = r.one
	}
	forward.Forward{
		Target: &target, Transport: transport,
		Head:   func(h http.Header) { identify(h, u) },
		Answer: answer,
		Failed: func(w http.ResponseWriter, _ *http.Request, err error) { unanswered(w, err) },
	}.ServeHTTP(w, req)
}

// unanswered tells that there is no answer, and not more of why than a stranger may know.
func unanswered(w http.ResponseWriter, err error) {
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

// errRedirected is of an answer that would send clients with their credentials elsewhere.
var errRedirected = errors.New("the backend attempted to redirect this request, which is not permitted")

// answer refuses redirections to other places, and takes out what this API says itself.
func answer(resp *http.Response) error {
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

// identify says whom a request is from, by the headers that ConfigMap extension-apiserver-authentication names.
func identify(h http.Header, u api.User) {
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

// escapeKey writes a key of extra so that it is a header's name: bytes that are none of a name become %XX.
func escapeKey(key string) string {
	var b strings.Builder
	for i := range len(key) {
		c := key[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("!#$&'*+-.^_`|~", c) >= 0 {
			b.WriteByte(c)
			continue
		}
		fmt.Fprintf(&b, "%%%02X", c)
	}
	return b.String()
}
