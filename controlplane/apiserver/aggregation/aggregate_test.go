package aggregation_test

import (
	"bufio"
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/bootstrap"
	"keelson.dev/keelson/controlplane/pki"
)

// A server in the cluster is found available for the reasons that Kubernetes gives, and in its
// words.
func TestAPIServiceAvailability(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	b.Extension("good", apiservertest.DiscoveryOf("good.example.com"))
	b.Extension("failing", http.NotFoundHandler())
	hang := make(chan struct{})
	b.Extension("hanging", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
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
	srv := &http.Server{Handler: apiservertest.DiscoveryOf("x")}
	go func() { _ = srv.Serve(plain) }()
	t.Cleanup(func() { srv.Close() })
	b.Place("plaintext", plain.Addr().String(), true)
	b.Place("unready", plain.Addr().String(), false)
	b.Replica.Must(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "empty"},
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
		{"not verified", "good", func(s *apiregistrationv1.APIServiceSpec) {
			s.CABundle, s.InsecureSkipTLSVerify = nil, true
		}, "Passed", "all checks"},
		{"service missing", "nobody", nil, "ServiceNotFound", `service/nobody in "default" is not present`},
		{"port missing", "good", func(s *apiregistrationv1.APIServiceSpec) { p := int32(444); s.Service.Port = &p },
			"ServicePortError", `service/good in "default" is not listening on port 444`},
		{"endpoints missing", "empty", nil, "EndpointsNotFound",
			`cannot find endpointslices for service/empty in "default"`},
		{"none ready", "unready", nil, "MissingEndpoints",
			`endpointslices for service/unready in "default" have no addresses with port name "https"`},
		{"another authority", "good", func(s *apiregistrationv1.APIServiceSpec) { s.CABundle = other.PEM() },
			"FailedDiscoveryCheck", "certificate signed by unknown authority"},
		{"no TLS", "plaintext", nil, "FailedDiscoveryCheck", "first record does not look like a TLS handshake"},
		{"no such group", "failing", nil, "FailedDiscoveryCheck",
			"bad status from https://failing.default.svc:443/apis/"},
		{"a bundle that is none", "good", func(s *apiregistrationv1.APIServiceSpec) {
			s.CABundle = []byte("x")
		}, "FailedDiscoveryCheck", "unable to load root certificates"},
		{"hanging", "hanging", nil, "FailedDiscoveryCheck", "timed out waiting for https://hanging.default.svc:443"},
	} {
		t.Run(c.name, func(t *testing.T) {
			group := strings.ReplaceAll(c.name, " ", "-") + ".example.com"
			got := b.AddAPIService(strings.ToLower(group), c.service, c.change)
			want := apiregistrationv1.ConditionFalse
			if c.reason == "Passed" {
				want = apiregistrationv1.ConditionTrue
			}
			if got.Status != want || got.Reason != c.reason || !strings.Contains(got.Message, c.message) {
				t.Errorf("%+v", got)
			}
			code := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/apis/"+strings.ToLower(group)+"/v1", "").Code
			if (want == apiregistrationv1.ConditionTrue) != (code == 200) {
				t.Errorf("a request: %d", code)
			}
		})
	}
}

// What clients prove themselves with never reaches a server in the cluster; who they are does,
// under this API's certificate.
func TestCredentialsDoNotTravel(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	rec := &apiservertest.Recorder{Next: apiservertest.DiscoveryOf("rec.example.com")}
	b.Extension("rec", rec)
	b.AddAPIService("rec.example.com", "rec", nil)
	rec.Seen = nil
	headers := []string{"Authorization", "Bearer alice-token", "Proxy-Authorization", "Basic c2VjcmV0",
		"X-Remote-User", "root",
		"X-Remote-Group", "system:masters", "X-Remote-Extra-Scopes", "all", "X-Custom", "kept"}
	b.Replica.Must(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "makes-flunders"},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"rec.example.com"}, Resources: []string{"flunders"}, Verbs: []string{"create"}}}})
	b.Replica.Must(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "alice-makes-flunders"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "makes-flunders"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "alice"}}})
	b.Replica.Await(func() bool {
		d, _ := b.Replica.Server.Authorizer().Authorize(t.Context(),
			&authz.Attributes{User: api.User{Name: "alice"}, Verb: "create",
				APIGroup: "rec.example.com", APIVersion: "v1", Resource: "flunders", Namespace: "default"})
		return d == authz.Allow
	})
	got := b.Replica.Call(b.Replica.Unauthenticated(), "POST",
		"/apis/rec.example.com/v1/namespaces/default/flunders?dryRun=All", `{"a":1}`, headers...)
	if got.Code != 200 || len(rec.Seen) != 1 {
		t.Fatalf("%d %s, %d requests", got.Code, got.Body, len(rec.Seen))
	}
	r := rec.Seen[0]
	dump := fmt.Sprint(r.Header)
	for _, secret := range []string{"alice-token", "c2VjcmV0", "root", "masters", "Scopes"} {
		if strings.Contains(dump, secret) {
			t.Errorf("%q travelled: %s", secret, dump)
		}
	}
	if r.Header.Get("X-Remote-User") != "alice" ||
		!slices.Equal(r.Header["X-Remote-Group"], []string{"dev-team", "system:authenticated"}) ||
		r.Header.Get("X-Custom") != "kept" || r.URL.RawQuery != "dryRun=All" {
		t.Errorf("%v %s", r.Header, r.URL)
	}
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 ||
		r.TLS.PeerCertificates[0].Subject.CommonName != pki.FrontProxyUser {
		t.Error("this API did not show its certificate")
	}
	// Who may not is not handed on.
	if got := b.Replica.Call(b.Replica.Unauthenticated(), "DELETE",
		"/apis/rec.example.com/v1/namespaces/default/flunders/x", "", headers[:2]...); got.Code != 403 ||
		len(rec.Seen) != 1 {
		t.Errorf("%d, %d requests", got.Code, len(rec.Seen))
	}
}

// Discovery has what servers in the cluster have, in the order of the priorities; one that is gone
// is stale.
func TestDiscoveryIsMerged(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	srv := b.Extension("good", apiservertest.DiscoveryOf("good.example.com"))
	b.AddAPIService("good.example.com", "good", func(s *apiregistrationv1.APIServiceSpec) {
		s.GroupPriorityMinimum = 17900
	})
	b.AddAPIService("gone.example.com", "nobody", nil)
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
		a := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/apis", "", "Accept", v2)
		if err := json.Unmarshal([]byte(a.Body), &f); err != nil {
			t.Fatal(err)
		}
		return f, a.Header.Get("ETag")
	}
	b.Heard("/apis", `"flunders"`, "Accept", v2)
	f, etag := read()
	names := []string{}
	for _, g := range f.Items {
		names = append(names, g.Metadata.Name)
	}
	at, apps, gone := slices.Index(names, "good.example.com"), slices.Index(names, "apps"),
		slices.Index(names, "gone.example.com")
	if at < 0 || at > apps || gone < apps {
		t.Fatalf("order: %v", names)
	}
	v := f.Items[at].Versions[0]
	if v.Freshness != "Current" || len(v.Resources) != 1 || v.Resources[0].Resource != "flunders" ||
		len(v.Resources[0].Subresources) != 1 {
		t.Errorf("%+v", v)
	}
	if f.Items[gone].Versions[0].Freshness != "Stale" {
		t.Errorf("%+v", f.Items[gone])
	}
	if a := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/apis", "", "Accept", v2, "If-None-Match", etag); a.Code !=
		304 {
		t.Errorf("unchanged: %d", a.Code)
	}
	if a := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/apis/good.example.com", ""); a.Code != 200 ||
		!strings.Contains(a.Body, `"good.example.com/v1"`) {
		t.Errorf("the group: %d %s", a.Code, a.Body)
	}
	if a := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/apis", ""); !strings.Contains(a.Body,
		`"gone.example.com/v1"`) {
		t.Errorf("the list: %s", a.Body)
	}
	// It goes: what it had is shown on, as stale.
	srv.CloseClientConnections()
	srv.Close()
	if err := b.Replica.CheckAPIServices(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	b.Replica.Await(func() bool {
		s, _ := b.Replica.CachedAPIService(t.Context(), "v1.good.example.com")
		return s.Status.Conditions[0].Status == "False"
	})
	f, again := read()
	if v := f.Items[at].Versions[0]; v.Freshness != "Stale" || len(v.Resources) != 1 || again == etag {
		t.Errorf("%+v, ETag %s", v, again)
	}
	if a := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/apis/good.example.com/v1/flunders", ""); a.Code != 503 ||
		strings.TrimSpace(a.Body) != "service unavailable" {
		t.Errorf("%d %q", a.Code, a.Body)
	}
}

// A watch passes through as it comes, and ends when its server dies.
func TestWatchOfAggregatedServer(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	more := make(chan string)
	srv := b.Extension("watched", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("watch") == "" {
			apiservertest.DiscoveryOf("watched.example.com")(w, r)
			return
		}
		for line := range more {
			fmt.Fprintln(w, line)
			_ = http.NewResponseController(w).Flush()
		}
	}))
	b.AddAPIService("watched.example.com", "watched", nil)
	req, err := http.NewRequestWithContext(t.Context(), "GET",
		"https://"+b.Replica.Addr+"/apis/watched.example.com/v1/flunders?watch=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() { more <- `{"type":"ADDED"}` }()
	resp, err := b.Replica.AdminHTTP().Do(req)
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
	b := apiservertest.StartAggregated(t)
	elsewhere := &apiservertest.Recorder{Next: http.NotFoundHandler()}
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
		b.Extension(name, h)
		b.AddAPIService(name+".example.com", name, nil)
	}
	remotes := b.Replica.Server.Aggregated().Discover(t.Context())
	if len(remotes) != len(hostile) {
		t.Fatalf("%d servers", len(remotes))
	}
	for _, r := range remotes {
		if !r.Stale || len(r.Resources) != 0 {
			t.Errorf("%s was believed: %d resources", r.GV, len(r.Resources))
		}
	}
	if a := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/apis", ""); a.Code != 200 {
		t.Errorf("discovery: %d", a.Code)
	}
	if a := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/apis/heads.example.com/v1/x", ""); a.Code != 503 {
		t.Errorf("endless headers: %d", a.Code)
	}
	a := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/apis/away.example.com/v1/x", "")
	if a.Header.Get("Location") != "" || a.Code < 500 {
		t.Errorf("a redirection: %d %v", a.Code, a.Header)
	}
	if len(elsewhere.Seen) > 0 {
		t.Errorf("somebody else was asked: %v", elsewhere.Seen[0].Header)
	}
}

// The OpenAPI v3 index names the documents of servers in the cluster, which answer for themselves;
// a server may not speak for versions that are not its own, and one that is broken breaks nothing.
func TestOpenAPIOfAggregatedServers(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	b.Extension("good", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/openapi/v3":
			fmt.Fprint(w,
				`{"paths":{"apis/good.example.com/v1":{"serverRelativeURL":"/openapi/v3/apis/good.example.com/v1?hash=AB"},
				"api/v1":{"serverRelativeURL":"https://elsewhere.example.com/"}}}`)
		case "/openapi/v3/apis/good.example.com/v1":
			fmt.Fprintf(w, `{"openapi":"3.0.0","asked":%q}`, r.URL.RawQuery)
		default:
			apiservertest.DiscoveryOf("good.example.com")(w, r)
		}
	}))
	b.Extension("bad", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/openapi") {
			_, _ = io.Copy(w, io.LimitReader(endless{}, 100<<20))
			return
		}
		apiservertest.DiscoveryOf("bad.example.com")(w, r)
	}))
	b.AddAPIService("good.example.com", "good", nil)
	b.AddAPIService("bad.example.com", "bad", nil)
	a := b.Heard("/openapi/v3", `"/openapi/v3/apis/good.example.com/v1?hash=AB"`)
	if a.Code != 200 || !strings.Contains(a.Body, `"/openapi/v3/apis/good.example.com/v1?hash=AB"`) ||
		strings.Contains(a.Body, "elsewhere") || strings.Contains(a.Body, "bad.example.com") ||
		!strings.Contains(a.Body, `"apis/apps/v1"`) {
		t.Errorf("%d %s", a.Code, a.Body)
	}
	if a := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/openapi/v3/apis/good.example.com/v1?hash=AB", ""); a.Code !=
		200 || !strings.Contains(a.Body, `"asked":"hash=AB"`) {
		t.Errorf("%d %s", a.Code, a.Body)
	}
}

// What is served here has APIServices of its own, which are kept; what servers read to know this
// API is kept too.
func TestLocalAPIServices(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	configMaps := corev1.SchemeGroupVersion.WithResource("configmaps")
	for range 2 { // the second time nothing differs
		for _, f := range []func(context.Context, uint64) error{b.Replica.Setup.EnsureAPIServices,
			b.Replica.CheckAPIServices, b.Replica.Setup.EnsureAuthenticationConfig} {
			if err := f(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
		}
		b.Replica.Await(func() bool {
			_, ok := b.Replica.Cached(t.Context(), configMaps, "kube-system", bootstrap.AuthenticationConfigMap)
			return ok && len(b.Replica.CachedAPIServices(t.Context())) == len(b.Replica.Setup.LocalAPIServices())
		})
	}
	// A read without a resourceVersion reaches the store.
	if _, err := b.Replica.Admin().CoreV1().ConfigMaps("kube-system").Get(t.Context(),
		bootstrap.AuthenticationConfigMap, metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	at := b.Replica.Registry.Revision()
	for _, f := range []func(context.Context, uint64) error{b.Replica.Setup.EnsureAPIServices,
		b.Replica.CheckAPIServices, b.Replica.Setup.EnsureAuthenticationConfig} {
		if err := f(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
	if now := b.Replica.Registry.Revision(); now != at {
		t.Errorf("%d writes though nothing differs", now-at)
	}
	s, ok := b.Replica.CachedAPIService(t.Context(), "v1.apps")
	if !ok || s.Spec.GroupPriorityMinimum != 17800 || s.Spec.VersionPriority != 15 ||
		s.Labels[bootstrap.AutoManagedLabel] != "onstart" || s.Status.Conditions[0].Reason != "Local" {
		t.Errorf("%+v", s)
	}
	if s, ok = b.Replica.CachedAPIService(t.Context(), "v1."); !ok || s.Spec.GroupPriorityMinimum != 18000 ||
		s.Spec.VersionPriority != 1 {
		t.Errorf("%+v", s)
	}
	m, err := b.Replica.Admin().CoreV1().ConfigMaps("kube-system").Get(t.Context(), bootstrap.AuthenticationConfigMap,
		metav1.GetOptions{})
	if err != nil || m.Data["requestheader-allowed-names"] != `["keelson-front-proxy"]` ||
		m.Data["client-ca-file"] != "client CA\n" {
		t.Errorf("%v %v", m, err)
	}
	if block, _ := pem.Decode([]byte(m.Data["requestheader-client-ca-file"])); block == nil {
		t.Error("no CA")
	}
}
