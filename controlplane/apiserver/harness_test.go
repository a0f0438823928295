package apiserver

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
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore/storetest"
)

// replica is an apiserver on an in-memory store that serves TLS on loopback.
type replica struct {
	*Server
	t        testing.TB
	store    *lagging
	registry *registry.Registry
	trust    *pki.Trust
	tokens   *pki.ServiceTokens
	addr     string
	stop     func()
	stopped  chan error
	bare     *http.Client
	root     *http.Client
}

// historyKept is the number of changes of a kind in the watch history.
const historyKept = 256

// start starts a replica with the bootstrap objects. change may adjust the configuration, opts the
// registry.
func start(t testing.TB, change func(*Config), opts ...registry.Option) *replica {
	t.Helper()
	return startAdjusted(t, change, func(*Server) {}, opts...)
}

// startAdjusted is start with a function that adjusts the server before it runs.
func startAdjusted(t testing.TB, change func(*Config), adjust func(*Server), opts ...registry.Option) *replica {
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
	r := &replica{t: t, store: &lagging{Memory: storetest.NewMemory()}, trust: trust, tokens: tokens, addr: ln.Addr().String(), stopped: make(chan error, 1)}
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	if testing.Verbose() {
		quiet = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	all := kinds.All()
	scheme := api.Scheme()
	r.registry = registry.New(r.store, all, append([]registry.Option{registry.WithScheme(scheme), registry.WithLog(quiet),
		registry.WithCompanions(&corev1.Service{}, networking.ServiceCompanions), registry.WithHistory(historyKept, 16<<20)}, opts...)...)
	serving := trust.CA.Rotator(pki.ReplicaServing("test", net.ParseIP("10.96.0.1"), "127.0.0.1"), now)
	cfg := Config{
		Name: "test", Registry: r.registry, Kinds: all, Scheme: scheme, Listener: ln,
		TLS: pki.ServerTLS(trust.Pool(), serving, now), ClientCAs: trust.Pool,
		ServiceTokens: tokens, Timeline: api.NewTimeline(4096), Log: quiet, ShutdownDeadline: 100 * time.Millisecond,
		Tokens: []authn.TokenVerifier{authn.NewStatic(map[string]api.User{
			"alice-token": {Name: "alice", Groups: []string{"dev-team"}},
		})},
	}
	if change != nil {
		change(&cfg)
	}
	cfg.Validators = append(cfg.Validators, requireKinds(t))
	r.Server = New(cfg)
	adjust(r.Server)
	ctx, cancel := context.WithCancel(context.Background())
	registryDone := make(chan error, 1)
	go func() { registryDone <- r.registry.Run(ctx) }()
	serverCtx, stopServer := context.WithCancel(ctx)
	go func() { r.stopped <- r.Run(serverCtx) }()
	r.stop = stopServer
	t.Cleanup(func() {
		stopServer()
		if err := <-r.stopped; err != nil {
			t.Errorf("the server ended with: %v", err)
		}
		cancel()
		<-registryDone
		r.store.Close()
	})
	boot, done := context.WithTimeout(ctx, time.Minute)
	defer done()
	if err := r.EnsureBootstrap(boot, 0); err != nil {
		t.Fatal(err)
	}
	select {
	case <-r.Ready():
	case <-boot.Done():
		t.Fatal("the authorizer did not become ready")
	}
	r.defaultAccount("default")
	return r
}

// defaultAccount creates the default service account of a namespace, as its controller does.
func (r *replica) defaultAccount(namespace string) {
	r.t.Helper()
	r.must(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "default"}})
}

// must creates an object as the apiserver itself.
func (r *replica) must(o api.Object) api.Object {
	r.t.Helper()
	kind, err := r.kindOf(o)
	if err != nil || kind == nil {
		r.t.Fatalf("no kind for %T: %v", o, err)
	}
	out, err := r.Backend().Do(context.Background(), &api.Request{
		User: itself(), Verb: api.VerbCreate, Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName(), Object: o,
	})
	if err != nil {
		r.t.Fatalf("creating %T %s/%s: %v", o, o.GetNamespace(), o.GetName(), err)
	}
	return out.(api.Object)
}

// cert issues a client certificate.
func (r *replica) cert(p pki.Profile) tls.Certificate {
	r.t.Helper()
	issued, err := r.trust.CA.Issue(p, time.Now())
	if err != nil {
		r.t.Fatal(err)
	}
	return issued.TLS
}

// config returns a client-go configuration with a certificate of the user.
func (r *replica) config(user string, groups ...string) *rest.Config {
	r.t.Helper()
	issued, err := r.trust.CA.Issue(pki.Client(user, groups...), time.Now())
	if err != nil {
		r.t.Fatal(err)
	}
	return &rest.Config{
		Host: "https://" + r.addr, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: r.trust.CA.PEM(), CertData: issued.CertPEM, KeyData: issued.KeyPEM},
	}
}

func (r *replica) client(user string, groups ...string) kubernetes.Interface {
	r.t.Helper()
	c, err := kubernetes.NewForConfig(r.config(user, groups...))
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *replica) admin() kubernetes.Interface { return r.client("admin", api.GroupMasters) }

// http returns an HTTP client; cert may be nil.
func (r *replica) http(cert *tls.Certificate) *http.Client {
	conf := &tls.Config{RootCAs: r.trust.Pool()}
	if cert != nil {
		conf.Certificates = []tls.Certificate{*cert}
	}
	tr := &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true}
	r.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// stranger returns a client without a certificate. It is the same each time, because
// unauthenticated clients may have few connections.
func (r *replica) stranger() *http.Client {
	if r.bare == nil {
		r.bare = r.http(nil)
	}
	return r.bare
}

// answer is an HTTP response with its body.
type answer struct {
	code   int
	header http.Header
	body   string
}

// call sends a request as the administrator unless a header says otherwise.
func (r *replica) call(c *http.Client, method, path, body string, headers ...string) answer {
	r.t.Helper()
	req, err := http.NewRequest(method, "https://"+r.addr+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return answer{resp.StatusCode, resp.Header, string(data)}
}

func (r *replica) adminHTTP() *http.Client {
	cert := r.cert(pki.Client("admin", api.GroupMasters))
	return r.http(&cert)
}

// sameAdmin returns a client of the administrator. It is the same each time, because a new client
// needs a key and a handshake.
func (r *replica) sameAdmin() *http.Client {
	if r.root == nil {
		r.root = r.adminHTTP()
	}
	return r.root
}

// kubeconfig writes a kubeconfig for the user and returns its path.
func (r *replica) kubeconfig(user string, groups ...string) string {
	r.t.Helper()
	issued, err := r.trust.CA.Issue(pki.Client(user, groups...), time.Now())
	if err != nil {
		r.t.Fatal(err)
	}
	path := filepath.Join(r.t.TempDir(), "config")
	k := pki.Kubeconfig{Cluster: "test", Server: "https://" + r.addr, CAPEM: r.trust.CA.PEM(), User: user, CertPEM: issued.CertPEM, KeyPEM: issued.KeyPEM}
	if err := k.Write(path); err != nil {
		r.t.Fatal(err)
	}
	return path
}
