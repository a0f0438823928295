package apiserver

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
)

// loopNodes connects to servers on loopback in place of the addresses of pods.
type loopNodes struct {
	mu sync.Mutex
	at map[string]string // "node address:port" to an address on loopback
}

func (n *loopNodes) DialNode(ctx context.Context, node string, _ types.UID, address string, port int32) (net.Conn, error) {
	n.mu.Lock()
	to, ok := n.at[node+" "+net.JoinHostPort(address, strconv.Itoa(int(port)))]
	n.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("dial tcp %s: connect: connection refused", address)
	}
	return (&net.Dialer{}).DialContext(ctx, "tcp", to)
}

// behind is a replica that reaches aggregated API servers on loopback.
type behind struct {
	*replica
	nodes *loopNodes
	ca    *pki.CA // of the servers
}

func startBehind(t *testing.T) *behind {
	b := &behind{nodes: &loopNodes{at: map[string]string{}}}
	b.replica = start(t, func(c *Config) {
		c.Nodes = b.nodes
		ca, err := pki.NewCA("front proxy", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		c.FrontProxy = &FrontProxy{Certificate: ca.Rotator(pki.Client(pki.FrontProxyUser), time.Now), CA: ca.PEM, ClientCA: func() []byte { return []byte("client CA\n") }}
	})
	var err error
	if b.ca, err = pki.NewCA("servers", time.Now()); err != nil {
		t.Fatal(err)
	}
	b.must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}})
	return b
}

// extension starts a server behind a Service of namespace default, in a pod of its own.
func (b *behind) extension(name string, h http.Handler) *httptest.Server {
	b.t.Helper()
	cert, err := b.ca.Issue(pki.Profile{CommonName: name, DNSNames: []string{name + ".default.svc"}, Server: true}, time.Now())
	if err != nil {
		b.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(b.cfg.FrontProxy.CA())
	srv := httptest.NewUnstartedServer(h)
	srv.EnableHTTP2 = true
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{cert.TLS}, ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: pool}
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	b.t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	b.place(name, srv.Listener.Addr().String(), true)
	return srv
}

// place creates a Service with one endpoint: a pod with an address on loopback.
func (b *behind) place(name, loopback string, ready bool) {
	b.t.Helper()
	b.nodes.mu.Lock()
	ip := fmt.Sprintf("10.64.0.%d", len(b.nodes.at)+2)
	b.nodes.at["w1 "+ip+":8443"] = loopback
	b.nodes.mu.Unlock()
	b.must(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "https", Port: 443}}}})
	pod := b.must(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.PodSpec{NodeName: "w1", Containers: []corev1.Container{{Name: "c", Image: "i"}}}}).(*corev1.Pod).DeepCopy()
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
	if _, err := b.admin().CoreV1().Pods("default").UpdateStatus(b.t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		b.t.Fatal(err)
	}
	b.slice(name, ip, ready)
}

func (b *behind) slice(name, ip string, ready bool) {
	port, portName, tcp := int32(8443), "https", corev1.ProtocolTCP
	b.must(&discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &portName, Port: &port, Protocol: &tcp}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{ip}, Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: name}}},
	})
}

// apiService points the APIService of group version v1.GROUP to a Service and checks its
// availability once.
func (b *behind) apiService(group, service string, change func(*apiregistrationv1.APIServiceSpec)) apiregistrationv1.APIServiceCondition {
	b.t.Helper()
	spec := apiregistrationv1.APIServiceSpec{
		Service: &apiregistrationv1.ServiceReference{Namespace: "default", Name: service}, Group: group, Version: "v1",
		CABundle: b.ca.PEM(), GroupPriorityMinimum: 2000, VersionPriority: 200,
	}
	if change != nil {
		change(&spec)
	}
	b.must(&apiregistrationv1.APIService{ObjectMeta: metav1.ObjectMeta{Name: "v1." + group}, Spec: spec})
	b.await(func() bool { _, ok := b.cachedAPIService(b.t.Context(), "v1."+group); return ok })
	if err := b.CheckAPIServices(b.t.Context(), 0); err != nil {
		b.t.Fatal(err)
	}
	var s *apiregistrationv1.APIService
	b.await(func() bool {
		s, _ = b.cachedAPIService(b.t.Context(), "v1."+group)
		return len(s.Status.Conditions) == 1
	})
	return s.Status.Conditions[0]
}

// discoveryOf serves the discovery document of a group version with one resource.
func discoveryOf(group string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"%s/v1","resources":[
			{"name":"flunders","singularName":"flunder","namespaced":true,"kind":"Flunder","verbs":["create","get","list","watch"],"shortNames":["fl"]},
			{"name":"flunders/status","singularName":"","namespaced":true,"kind":"Flunder","verbs":["get"]}]}`, group)
	}
}

// A server in the cluster is found available for the reasons that Kubernetes gives, and in its words.
func TestAPIServiceAvailability(t *testing.T) {
	b := startBehind(t)
	b.extension("good", discoveryOf("good.example.com"))
	b.extension("failing", http.NotFoundHandler())
	hang := make(chan struct{})
	b.extension("hanging", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-hang:
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(func() { close(hang) })
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: discoveryOf("x")}
	go func() { _ = srv.Serve(plain) }()
	t.Cleanup(func() { srv.Close() })
	b.place("plaintext", plain.Addr().String(), true)
	b.place("unready", plain.Addr().String(), false)
	b.must(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "empty"},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "https", Port: 443}}}})
	other, err := pki.NewCA("other", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, service string
		change        func(*apiregistrationv1.APIServiceSpec)
		reason        string
		message       string
	}{
		{"answering", "good", nil, "Passed", "all checks passed"},
		{"not verified", "good", func(s *apiregistrationv1.APIServiceSpec) { s.CABundle, s.InsecureSkipTLSVerify = nil, true }, "Passed", "all checks"},
		{"service missing", "nobody", nil, "ServiceNotFound", `service/nobody in "default" is not present`},
		{"port missing", "good", func(s *apiregistrationv1.APIServiceSpec) { p := int32(444); s.Service.Port = &p },
			"ServicePortError", `service/good in "default" is not listening on port 444`},
		{"endpoints missing", "empty", nil, "EndpointsNotFound", `cannot find endpointslices for service/empty in "default"`},
		{"none ready", "unready", nil, "MissingEndpoints", `endpointslices for service/unready in "default" have no addresses with port name "https"`},
		{"another authority", "good", func(s *apiregistrationv1.APIServiceSpec) { s.CABundle = other.PEM() },
			"FailedDiscoveryCheck", "certificate signed by unknown authority"},
		{"no TLS", "plaintext", nil, "FailedDiscoveryCheck", "first record does not look like a TLS handshake"},
		{"no such group", "failing", nil, "FailedDiscoveryCheck", "bad status from https://failing.default.svc:443/apis/"},
		{"a bundle that is none", "good", func(s *apiregistrationv1.APIServiceSpec) { s.CABundle = []byte("x") }, "FailedDiscoveryCheck", "unable to load root certificates"},
		{"hanging", "hanging", nil, "FailedDiscoveryCheck", "timed out waiting for https://hanging.default.svc:443"},
	} {
		t.Run(c.name, func(t *testing.T) {
			group := strings.ReplaceAll(c.name, " ", "-") + ".example.com"
			got := b.apiService(strings.ToLower(group), c.service, c.change)
			want := apiregistrationv1.ConditionFalse
			if c.reason == "Passed" {
				want = apiregistrationv1.ConditionTrue
			}
			if got.Status != want || got.Reason != c.reason || !strings.Contains(got.Message, c.message) {
				t.Errorf("%+v", got)
			}
			code := b.call(b.adminHTTP(), "GET", "/apis/"+strings.ToLower(group)+"/v1", "").code
			if (want == apiregistrationv1.ConditionTrue) != (code == 200) {
				t.Errorf("a request: %d", code)
			}
		})
	}
}

// recorder records the headers of all requests.
type recorder struct {
	mu   sync.Mutex
	seen []*http.Request
	next http.Handler
}

func (h *recorder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	h.seen = append(h.seen, r.Clone(context.Background()))
	h.mu.Unlock()
	h.next.ServeHTTP(w, r)
}

// What clients prove themselves with never reaches a server in the cluster; who they are does, under this API's certificate.
func TestCredentialsDoNotTravel(t *testing.T) {
	b := startBehind(t)
	rec := &recorder{next: discoveryOf("rec.example.com")}
	b.extension("rec", rec)
	b.apiService("rec.example.com", "rec", nil)
	rec.seen = nil
	headers := []string{"Authorization", "Bearer alice-token", "Proxy-Authorization", "Basic c2VjcmV0", "X-Remote-User", "root",
		"X-Remote-Group", "system:masters", "X-Remote-Extra-Scopes", "all", "X-Custom", "kept"}
	b.must(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "makes-flunders"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"rec.example.com"}, Resources: []string{"flunders"}, Verbs: []string{"create"}}}})
	b.must(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "alice-makes-flunders"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "makes-flunders"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "alice"}}})
	b.await(func() bool {
		d, _ := b.chain.authorizer.Authorize(t.Context(), &authz.Attributes{User: api.User{Name: "alice"}, Verb: "create",
			APIGroup: "rec.example.com", APIVersion: "v1", Resource: "flunders", Namespace: "default"})
		return d == authz.Allow
	})
	got := b.call(b.stranger(), "POST", "/apis/rec.example.com/v1/namespaces/default/flunders?dryRun=All", `{"a":1}`, headers...)
	if got.code != 200 || len(rec.seen) != 1 {
		t.Fatalf("%d %s, %d requests", got.code, got.body, len(rec.seen))
	}
	r := rec.seen[0]
	dump := fmt.Sprint(r.Header)
	for _, secret := range []string{"alice-token", "c2VjcmV0", "root", "masters", "Scopes"} {
		if strings.Contains(dump, secret) {
			t.Errorf("%q travelled: %s", secret, dump)
		}
	}
	if r.Header.Get("X-Remote-User") != "alice" || !slices.Equal(r.Header["X-Remote-Group"], []string{"dev-team", "system:authenticated"}) ||
		r.Header.Get("X-Custom") != "kept" || r.URL.RawQuery != "dryRun=All" {
		t.Errorf("%v %s", r.Header, r.URL)
	}
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 || r.TLS.PeerCertificates[0].Subject.CommonName != pki.FrontProxyUser {
		t.Error("this API did not show its certificate")
	}
	// Who may not is not handed on.
	if got := b.call(b.stranger(), "DELETE", "/apis/rec.example.com/v1/namespaces/default/flunders/x", "", headers[:2]...); got.code != 403 || len(rec.seen) != 1 {
		t.Errorf("%d, %d requests", got.code, len(rec.seen))
	}
}

// heard repeats a request until the response contains the text, because documents of API servers
// are fetched in the background.
func (b *behind) heard(path, text string, headers ...string) (a answer) {
	b.t.Helper()
	b.await(func() bool {
		a = b.call(b.adminHTTP(), "GET", path, "", headers...)
		return strings.Contains(a.body, text)
	})
	return a
}

// await waits until a condition that follows from stored objects is true.
func (r *replica) await(so func() bool) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	if err := wait.For(ctx, time.Millisecond, func() error {
		if !so() {
			return errors.New("not yet")
		}
		return nil
	}); err != nil {
		r.t.Fatal(err)
	}
}

// Discovery has what servers in the cluster have, in the order of the priorities; one that is gone is stale.
func TestDiscoveryIsMerged(t *testing.T) {
	b := startBehind(t)
	srv := b.extension("good", discoveryOf("good.example.com"))
	b.apiService("good.example.com", "good", func(s *apiregistrationv1.APIServiceSpec) { s.GroupPriorityMinimum = 17900 })
	b.apiService("gone.example.com", "nobody", nil)
	const v2 = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json"
	type found struct {
		Items []struct {
			Metadata struct{ Name string }
			Versions []struct {
				Version, Freshness string
				Resources          []struct {
					Resource, SingularResource string
					Subresources               []struct{ Subresource string }
				}
			}
		}
	}
	read := func() (f found, etag string) {
		a := b.call(b.adminHTTP(), "GET", "/apis", "", "Accept", v2)
		if err := json.Unmarshal([]byte(a.body), &f); err != nil {
			t.Fatal(err)
		}
		return f, a.header.Get("ETag")
	}
	b.heard("/apis", `"flunders"`, "Accept", v2)
	f, etag := read()
	names := []string{}
	for _, g := range f.Items {
		names = append(names, g.Metadata.Name)
	}
	at, apps, gone := slices.Index(names, "good.example.com"), slices.Index(names, "apps"), slices.Index(names, "gone.example.com")
	if at < 0 || at > apps || gone < apps {
		t.Fatalf("order: %v", names)
	}
	v := f.Items[at].Versions[0]
	if v.Freshness != "Current" || len(v.Resources) != 1 || v.Resources[0].Resource != "flunders" || len(v.Resources[0].Subresources) != 1 {
		t.Errorf("%+v", v)
	}
	if f.Items[gone].Versions[0].Freshness != "Stale" {
		t.Errorf("%+v", f.Items[gone])
	}
	if a := b.call(b.adminHTTP(), "GET", "/apis", "", "Accept", v2, "If-None-Match", etag); a.code != 304 {
		t.Errorf("unchanged: %d", a.code)
	}
	if a := b.call(b.adminHTTP(), "GET", "/apis/good.example.com", ""); a.code != 200 || !strings.Contains(a.body, `"good.example.com/v1"`) {
		t.Errorf("the group: %d %s", a.code, a.body)
	}
	if a := b.call(b.adminHTTP(), "GET", "/apis", ""); !strings.Contains(a.body, `"gone.example.com/v1"`) {
		t.Errorf("the list: %s", a.body)
	}
	// It goes: what it had is shown on, as stale.
	srv.CloseClientConnections()
	srv.Close()
	if err := b.CheckAPIServices(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	b.await(func() bool {
		s, _ := b.cachedAPIService(t.Context(), "v1.good.example.com")
		return s.Status.Conditions[0].Status == "False"
	})
	f, again := read()
	if v := f.Items[at].Versions[0]; v.Freshness != "Stale" || len(v.Resources) != 1 || again == etag {
		t.Errorf("%+v, ETag %s", v, again)
	}
	if a := b.call(b.adminHTTP(), "GET", "/apis/good.example.com/v1/flunders", ""); a.code != 503 || strings.TrimSpace(a.body) != "service unavailable" {
		t.Errorf("%d %q", a.code, a.body)
	}
}

// A watch passes through as it comes, and ends when its server dies.
func TestWatchOfAggregatedServer(t *testing.T) {
	b := startBehind(t)
	more := make(chan string)
	srv := b.extension("watched", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			discoveryOf("watched.example.com")(w, r)
			return
		}
		for line := range more {
			fmt.Fprintln(w, line)
			_ = http.NewResponseController(w).Flush()
		}
	}))
	b.apiService("watched.example.com", "watched", nil)
	req, err := http.NewRequestWithContext(t.Context(), "GET", "https://"+b.addr+"/apis/watched.example.com/v1/flunders?watch=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() { more <- `{"type":"ADDED"}` }()
	resp, err := b.adminHTTP().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	if !lines.Scan() || lines.Text() != `{"type":"ADDED"}` {
		t.Fatalf("%q %v", lines.Text(), lines.Err())
	}
	srv.CloseClientConnections()
	if lines.Scan() {
		t.Errorf("a dead server said %q", lines.Text())
	}
	close(more)
}

// endless is a body without an end.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

// A hostile server costs its callers their answer and this replica nothing that grows.
func TestHostileAggregatedServers(t *testing.T) {
	b := startBehind(t)
	elsewhere := &recorder{next: http.NotFoundHandler()}
	thief := httptest.NewServer(elsewhere)
	t.Cleanup(thief.Close)
	hostile := map[string]http.HandlerFunc{
		"huge": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.Copy(w, io.LimitReader(endless{}, 100<<20)) },
		"heads": func(w http.ResponseWriter, _ *http.Request) {
			for i := range 2000 {
				w.Header().Set("X-"+strconv.Itoa(i), strings.Repeat("y", 1000))
			}
		},
		"away": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, thief.URL+r.URL.Path, http.StatusTemporaryRedirect)
		},
		"many": func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"resources":[%s{"name":"x"}]}`, strings.Repeat(`{"name":"y"},`, 50_000))
		},
		"junk": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `[[[[`) },
	}
	for name, h := range hostile {
		b.extension(name, h)
		b.apiService(name+".example.com", name, nil)
	}
	remotes := b.aggregation.Discover(t.Context())
	if len(remotes) != len(hostile) {
		t.Fatalf("%d servers", len(remotes))
	}
	for _, r := range remotes {
		if !r.Stale || len(r.Resources) != 0 {
			t.Errorf("%s was believed: %d resources", r.GV, len(r.Resources))
		}
	}
	if a := b.call(b.adminHTTP(), "GET", "/apis", ""); a.code != 200 {
		t.Errorf("discovery: %d", a.code)
	}
	if a := b.call(b.adminHTTP(), "GET", "/apis/heads.example.com/v1/x", ""); a.code != 503 {
		t.Errorf("endless headers: %d", a.code)
	}
	a := b.call(b.adminHTTP(), "GET", "/apis/away.example.com/v1/x", "")
	if a.header.Get("Location") != "" || a.code < 500 {
		t.Errorf("a redirection: %d %v", a.code, a.header)
	}
	if len(elsewhere.seen) > 0 {
		t.Errorf("somebody else was asked: %v", elsewhere.seen[0].Header)
	}
}

// The OpenAPI v3 index names the documents of servers in the cluster, which answer for themselves; a server may not
// speak for versions that are not its own, and one that is broken breaks nothing.
func TestOpenAPIOfAggregatedServers(t *testing.T) {
	b := startBehind(t)
	b.extension("good", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/openapi/v3":
			fmt.Fprint(w, `{"paths":{"apis/good.example.com/v1":{"serverRelativeURL":"/openapi/v3/apis/good.example.com/v1?hash=AB"},
				"api/v1":{"serverRelativeURL":"https://elsewhere.example.com/"}}}`)
		case "/openapi/v3/apis/good.example.com/v1":
			fmt.Fprintf(w, `{"openapi":"3.0.0","asked":%q}`, r.URL.RawQuery)
		default:
			discoveryOf("good.example.com")(w, r)
		}
	}))
	b.extension("bad", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/openapi") {
			_, _ = io.Copy(w, io.LimitReader(endless{}, 100<<20))
			return
		}
		discoveryOf("bad.example.com")(w, r)
	}))
	b.apiService("good.example.com", "good", nil)
	b.apiService("bad.example.com", "bad", nil)
	a := b.heard("/openapi/v3", `"/openapi/v3/apis/good.example.com/v1?hash=AB"`)
	if a.code != 200 || !strings.Contains(a.body, `"/openapi/v3/apis/good.example.com/v1?hash=AB"`) ||
		strings.Contains(a.body, "elsewhere") || strings.Contains(a.body, "bad.example.com") || !strings.Contains(a.body, `"apis/apps/v1"`) {
		t.Errorf("%d %s", a.code, a.body)
	}
	if a := b.call(b.adminHTTP(), "GET", "/openapi/v3/apis/good.example.com/v1?hash=AB", ""); a.code != 200 || !strings.Contains(a.body, `"asked":"hash=AB"`) {
		t.Errorf("%d %s", a.code, a.body)
	}
}

// What is served here has APIServices of its own, which are kept; what servers read to know this API is kept too.
func TestLocalAPIServices(t *testing.T) {
	b := startBehind(t)
	for range 2 { // the second time nothing differs
		for _, f := range []func(context.Context, uint64) error{b.EnsureAPIServices, b.CheckAPIServices, b.EnsureAuthenticationConfig} {
			if err := f(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
		}
		b.await(func() bool {
			c, ok := b.known.Get(t.Context(), "configmaps", "kube-system", authenticationConfig)
			return ok && c != nil && len(b.cachedAPIServices(t.Context())) == len(b.localAPIServices())
		})
	}
	if _, err := b.known.Fresh(t.Context(), "configmaps", "kube-system", authenticationConfig); err != nil {
		t.Fatal(err)
	}
	at := b.registry.Revision()
	for _, f := range []func(context.Context, uint64) error{b.EnsureAPIServices, b.CheckAPIServices, b.EnsureAuthenticationConfig} {
		if err := f(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
	if now := b.registry.Revision(); now != at {
		t.Errorf("%d writes though nothing differs", now-at)
	}
	s, ok := b.cachedAPIService(t.Context(), "v1.apps")
	if !ok || s.Spec.GroupPriorityMinimum != 17800 || s.Spec.VersionPriority != 15 || s.Labels[autoManaged] != "onstart" || s.Status.Conditions[0].Reason != "Local" {
		t.Errorf("%+v", s)
	}
	if s, ok = b.cachedAPIService(t.Context(), "v1."); !ok || s.Spec.GroupPriorityMinimum != 18000 || s.Spec.VersionPriority != 1 {
		t.Errorf("%+v", s)
	}
	m, err := b.admin().CoreV1().ConfigMaps("kube-system").Get(t.Context(), authenticationConfig, metav1.GetOptions{})
	if err != nil || m.Data["requestheader-allowed-names"] != `["keelson-front-proxy"]` || m.Data["client-ca-file"] != "client CA\n" {
		t.Errorf("%v %v", m, err)
	}
	if block, _ := pem.Decode([]byte(m.Data["requestheader-client-ca-file"])); block == nil {
		t.Error("no CA")
	}
}
