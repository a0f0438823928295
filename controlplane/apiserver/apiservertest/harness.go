// Package apiservertest starts API servers on stores in memory, for tests of the API server and its
// subpackages.
package apiservertest

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/apiserver/bootstrap"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore/storetest"
)

// Replica is an API server on a store in memory. It serves TLS on loopback.
type Replica struct {
	Server     *apiserver.Server
	Setup      *bootstrap.Setup
	TB         testing.TB
	Kinds      *api.Kinds
	Scheme     *runtime.Scheme
	Store      *Lagging
	Registry   *registry.Registry
	Trust      *pki.Trust
	Tokens     *pki.ServiceTokens
	Addr       string
	StopServer func()
	Stopped    chan error
	bare       *http.Client
	root       *http.Client
}

// HistoryKept is the number of changes of each kind that the watch history of a Replica keeps.
const HistoryKept = 256

// StartReplica starts a replica with the bootstrap objects. change may modify the configuration of
// the API server; it may be nil. opts are further options of the registry.
func StartReplica(t testing.TB, change func(*apiserver.Config), opts ...registry.Option) *Replica {
	t.Helper()
	return StartAdjusted(t, change, func(*apiserver.Server) {}, opts...)
}

// StartAdjusted is like StartReplica. It also calls adjust with the server before the server runs.
func StartAdjusted(
	t testing.TB, change func(*apiserver.Config), adjust func(*apiserver.Server), opts ...registry.Option,
) *Replica {
	t.Helper()
	now := time.Now
	trust, err := pki.NewTrust("test", now())
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := pki.NewServiceTokens(pki.DefaultIssuer, trust.ServiceKey)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &Replica{TB: t, Kinds: kinds.All(), Scheme: api.Scheme(), Store: &Lagging{Memory: storetest.NewMemory()},
		Trust: trust, Tokens: tokens, Addr: ln.Addr().String(), Stopped: make(chan error, 1)}
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	if testing.Verbose() {
		quiet = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	all, scheme := r.Kinds, r.Scheme
	r.Registry = registry.New(r.Store, all, append([]registry.Option{registry.WithScheme(scheme),
		registry.WithLog(quiet),
		registry.WithCompanions(&corev1.Service{}, networking.ServiceCompanions),
		registry.WithHistory(HistoryKept, 16<<20)}, opts...)...)
	serving := trust.CA.Rotator(pki.ReplicaServing("test", net.ParseIP("10.96.0.1"), "127.0.0.1"), now)
	cfg := apiserver.Config{
		Name: "test", Registry: r.Registry, Kinds: all, Scheme: scheme, Log: quiet,
		Serving: apiserver.ServingConfig{Listener: ln, TLS: pki.ServerTLS(trust.Pool(), serving, now),
			ShutdownDeadline: 100 * time.Millisecond},
		Authentication: apiserver.AuthenticationConfig{ClientCAs: trust.Pool, ServiceTokens: tokens,
			Tokens: []authn.TokenVerifier{authn.NewStatic(map[string]api.User{
				"alice-token": {Name: "alice", Groups: []string{"dev-team"}},
			})}},
		Timeline: apiserver.TimelineConfig{Stages: api.NewTimeline(4096)},
	}
	if change != nil {
		change(&cfg)
	}
	cfg.Admission.Validators = append(cfg.Admission.Validators, RequireKinds(t))
	r.Server = apiserver.New(cfg)
	r.Setup = r.Server.Bootstrap()
	adjust(r.Server)
	ctx, cancel := context.WithCancel(context.Background())
	registryDone := make(chan error, 1)
	go func() { registryDone <- r.Registry.Run(ctx) }()
	serverCtx, stopServer := context.WithCancel(ctx)
	go func() { r.Stopped <- r.Server.Run(serverCtx) }()
	r.StopServer = stopServer
	t.Cleanup(func() {
		stopServer()
		if err := <-r.Stopped; err != nil {
			t.Errorf("the server ended with: %v", err)
		}
		cancel()
		<-registryDone
		r.Store.Close()
	})
	boot, done := context.WithTimeout(ctx, time.Minute)
	defer done()
	if err := r.Setup.EnsureBootstrap(boot, 0); err != nil {
		t.Fatal(err)
	}
	select {
	case <-r.Server.Ready():
	case <-boot.Done():
		t.Fatal("the authorizer did not become ready")
	}
	r.DefaultAccount("default")
	return r
}

// DefaultAccount creates the default service account of a namespace, as its controller does.
func (r *Replica) DefaultAccount(namespace string) {
	r.TB.Helper()
	r.Must(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "default"}})
}

// Must creates an object as the user of the API server. It fails the test if this is not possible.
func (r *Replica) Must(o api.Object) api.Object {
	r.TB.Helper()
	kind := r.Kinds.ByType(o)
	if kind == nil {
		r.TB.Fatalf("no kind for %T", o)
	}
	out, err := r.Server.Backend().Do(context.Background(), &api.Request{
		User: api.APIServerUser(), Verb: api.VerbCreate, Kind: kind, Namespace: o.GetNamespace(),
		Name: o.GetName(), Object: o,
	})
	if err != nil {
		r.TB.Fatalf("creating %T %s/%s: %v", o, o.GetNamespace(), o.GetName(), err)
	}
	return out.(api.Object)
}

// Cert issues a client certificate with the given profile.
func (r *Replica) Cert(p pki.Profile) tls.Certificate {
	r.TB.Helper()
	issued, err := r.Trust.CA.Issue(p, time.Now())
	if err != nil {
		r.TB.Fatal(err)
	}
	return issued.TLS
}

// ClientConfig returns a client-go configuration that authenticates as the user with a certificate.
func (r *Replica) ClientConfig(user string, groups ...string) *rest.Config {
	r.TB.Helper()
	issued, err := r.Trust.CA.Issue(pki.Client(user, groups...), time.Now())
	if err != nil {
		r.TB.Fatal(err)
	}
	return &rest.Config{
		Host: "https://" + r.Addr, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: r.Trust.CA.PEM(), CertData: issued.CertPEM,
			KeyData: issued.KeyPEM},
	}
}

// Client returns a client that authenticates as the user with a certificate.
func (r *Replica) Client(user string, groups ...string) kubernetes.Interface {
	r.TB.Helper()
	c, err := kubernetes.NewForConfig(r.ClientConfig(user, groups...))
	if err != nil {
		r.TB.Fatal(err)
	}
	return c
}

// Admin returns a client that authenticates as an administrator.
func (r *Replica) Admin() kubernetes.Interface { return r.Client("admin", api.GroupMasters) }

// HTTP returns an HTTP client with a client certificate; cert may be nil.
func (r *Replica) HTTP(cert *tls.Certificate) *http.Client {
	conf := &tls.Config{RootCAs: r.Trust.Pool()}
	if cert != nil {
		conf.Certificates = []tls.Certificate{*cert}
	}
	tr := &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true}
	r.TB.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// Unauthenticated returns an HTTP client without a certificate. All calls return the same client,
// because the number of connections of unauthenticated clients is limited.
func (r *Replica) Unauthenticated() *http.Client {
	if r.bare == nil {
		r.bare = r.HTTP(nil)
	}
	return r.bare
}

// Response is an HTTP response with its body.
type Response struct {
	Code   int
	Header http.Header
	Body   string
}

// Call sends a request with client c and returns the response. headers are pairs of name and value.
func (r *Replica) Call(c *http.Client, method, path, body string, headers ...string) Response {
	r.TB.Helper()
	req, err := http.NewRequest(method, "https://"+r.Addr+path, strings.NewReader(body))
	if err != nil {
		r.TB.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		r.TB.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		r.TB.Fatalf("%s %s: %v", method, path, err)
	}
	return Response{resp.StatusCode, resp.Header, string(data)}
}

// AdminHTTP returns a new HTTP client that authenticates as an administrator.
func (r *Replica) AdminHTTP() *http.Client {
	cert := r.Cert(pki.Client("admin", api.GroupMasters))
	return r.HTTP(&cert)
}

// SameAdmin is like AdminHTTP, but all calls return the same client, because a new client needs a
// key and a TLS handshake.
func (r *Replica) SameAdmin() *http.Client {
	if r.root == nil {
		r.root = r.AdminHTTP()
	}
	return r.root
}

// Kubeconfig writes a kubeconfig for the user and returns its path.
func (r *Replica) Kubeconfig(user string, groups ...string) string {
	r.TB.Helper()
	issued, err := r.Trust.CA.Issue(pki.Client(user, groups...), time.Now())
	if err != nil {
		r.TB.Fatal(err)
	}
	path := filepath.Join(r.TB.TempDir(), "config")
	k := pki.Kubeconfig{Cluster: "test", Server: "https://" + r.Addr, CAPEM: r.Trust.CA.PEM(), User: user,
		CertPEM: issued.CertPEM, KeyPEM: issued.KeyPEM}
	if err := k.Write(path); err != nil {
		r.TB.Fatal(err)
	}
	return path
}
