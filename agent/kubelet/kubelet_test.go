package kubelet

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/internal/wait"
)

// authority signs certificates for tests.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{}
	a.cert, a.key = a.sign(t, &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, IsCA: true,
		KeyUsage: x509.KeyUsageCertSign})
	return a
}

func (a *authority) sign(t *testing.T, c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c.SerialNumber, c.NotBefore, c.NotAfter, c.BasicConstraintsValid = big.NewInt(7), time.Now().Add(-time.Minute),
		time.Now().Add(time.Hour), true
	parent, by := a.cert, a.key
	if parent == nil {
		parent, by = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, by)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

func (a *authority) issue(t *testing.T, usage x509.ExtKeyUsage, name string, groups ...string) tls.Certificate {
	t.Helper()
	cert, key := a.sign(t, &x509.Certificate{Subject: pkix.Name{CommonName: name, Organization: groups},
		ExtKeyUsage: []x509.ExtKeyUsage{usage},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}})
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// judge is a control plane in memory.
type judge struct {
	ca     *authority
	server tls.Certificate

	mu    sync.Mutex
	asked []agent.AccessReview
	down  bool

	revoked []byte // DER form of a certificate
}

func (j *judge) ServingCertificate() (*tls.Certificate, error) { return &j.server, nil }
func (j *judge) ClientCAs() *x509.CertPool                     { return j.ca.pool() }
func (j *judge) ReviewAccess(_ context.Context, q agent.AccessReview) (agent.AccessDecision, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.asked = append(j.asked, q)
	if j.down {
		return agent.AccessDecision{}, fmt.Errorf("%w: no replica is known", agent.ErrReviewUnavailable)
	}
	if j.revoked != nil && bytes.Equal(q.Certificate, j.revoked) {
		return agent.AccessDecision{}, nil
	}
	user := q.User
	if q.Token != "" {
		var ok bool
		if user, ok = strings.CutPrefix(q.Token, "token-of-"); !ok {
			return agent.AccessDecision{}, nil
		}
	}
	may := user == "scraper" && slices.Contains(q.Subresources, "metrics") ||
		slices.Contains(q.Groups, "system:masters") || user == "admin" ||
		user == "prober" && slices.Contains(q.Subresources, "healthz")
	return agent.AccessDecision{Authenticated: true, User: user, Allowed: may}, nil
}

func (j *judge) count() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.asked)
}

// bed is a running server and its clients.
type bed struct {
	t     *testing.T
	ca    *authority
	judge *judge
	at    string
}

func newBed(t *testing.T, change ...func(*Config)) *bed {
	t.Helper()
	ca := newAuthority(t)
	b := &bed{t: t, ca: ca, judge: &judge{ca: ca, server: ca.issue(t, x509.ExtKeyUsageServerAuth, "system:node:w1")}}
	write := func(text string) func(context.Context, io.Writer) error {
		return func(_ context.Context, w io.Writer) error { _, err := io.WriteString(w, text); return err }
	}
	cfg := Config{ServerTrust: b.judge, Resource: write("node_cpu 1\n"), Metrics: write("go_goroutines 7\n"),
		Cadvisor: write("container_last_seen 1\n"), Probes: write("prober_probe_total 1\n"),
		Configuration: func() map[string]any { return map[string]any{"maxPods": 7} },
		Summary: func(_ context.Context, w io.Writer, only bool) error {
			_, err := fmt.Fprintf(w, `{"only":%v}`, only)
			return err
		},
		Reach: func(_ context.Context, host string) Reachability { return Reachability{NoRoute: "none to " + host} },
		AgentLog: func() []byte {
			return []byte("the last line\n")
		}, Settings: func() []byte { return []byte("node-name: w1\n") }, Pods: func() []*v1.Pod {
			running := v1.PodStatus{Phase: v1.PodRunning}
			return []*v1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "a"}},
				{ObjectMeta: metav1.ObjectMeta{Name: "b"}, Status: running}}
		}}
	for _, f := range change {
		f(&cfg)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.at = ln.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- New(cfg).Serve(ctx, ln) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the server ended: %v", err)
		}
	})
	return b
}

// client connects from 127.0.0.N, optionally with a certificate.
func (b *bed) client(n byte, certs ...tls.Certificate) *http.Client {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, n)}}
	tr := &http.Transport{DialContext: d.DialContext,
		TLSClientConfig: &tls.Config{RootCAs: b.ca.pool(), Certificates: certs}}
	b.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

func (b *bed) ask(c *http.Client, method, path, token string) (int, string, http.Header) {
	b.t.Helper()
	r, err := http.NewRequest(method, "https://"+b.at+path, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.Do(r)
	if err != nil {
		return 0, err.Error(), nil
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return resp.StatusCode, string(body), resp.Header
}

// An authorized client receives the response. An unauthenticated client receives 401, an
// unauthorized client 403, and each path requires its subresource.
func TestWhoMay(t *testing.T) {
	b := newBed(t)
	other := newAuthority(t)
	plain := b.client(1)
	masters := b.client(1, b.ca.issue(t, x509.ExtKeyUsageClientAuth, "keelson-admin", "system:masters"))
	for _, c := range []struct {
		name                string
		client              *http.Client
		method, path, token string
		code                int
		want                string
	}{
		{"a stranger", plain, "GET", "/metrics/resource", "", 401, "Unauthorized"},
		{"a token of nobody", plain, "GET", "/metrics/resource", "made-up", 401, "Unauthorized"},
		{"a certificate of another authority", b.client(1,
			other.issue(t, x509.ExtKeyUsageClientAuth, "keelson-admin", "system:masters")), "GET", "/metrics", "", 401,
			"Unauthorized"},
		{"a server's certificate", b.client(1, b.ca.issue(t, x509.ExtKeyUsageServerAuth, "keelson-admin",
			"system:masters")), "GET", "/metrics", "", 401, "Unauthorized"},
		{"who may nothing", plain, "GET", "/metrics/resource", "token-of-poor", 403,
			"Forbidden (user=poor, verb=get, resource=nodes, subresource(s)=[metrics])"},
		{"a node's certificate", b.client(1, b.ca.issue(t, x509.ExtKeyUsageClientAuth, "system:node:w2",
			"system:nodes")), "GET", "/pods", "", 403, "subresource(s)=[pods proxy]"},
		{"metrics alone: resource", plain, "GET", "/metrics/resource", "token-of-scraper", 200, "node_cpu 1"},
		{"metrics alone: the agent's", plain, "GET", "/metrics", "token-of-scraper", 200, "go_goroutines 7"},
		{"metrics alone: not statistics", plain, "GET", "/stats/summary", "token-of-scraper", 403, "[stats]"},
		{"metrics alone: not pods", plain, "GET", "/pods", "token-of-scraper", 403, "[pods proxy]"},
		{"metrics alone: not the log", plain, "GET", "/logs/keelson-agent.log", "token-of-scraper", 403, "[log]"},
		{"the agent's log", masters, "GET", "/logs/keelson-agent.log", "", 200, "the last line"},
		{"metrics alone: not the settings", plain, "GET", "/logs/keelson-agent-settings.txt",
			"token-of-scraper", 403, "[log]"},
		{"the agent's settings", masters, "GET", "/logs/keelson-agent-settings.txt", "", 200, "node-name: w1"},
		{"no other log", masters, "GET", "/logs/../keelson-agent.log", "", 404, "404"},
		{"metrics alone: nor what there is", plain, "GET", "/run/x", "token-of-scraper", 403, "[proxy]"},
		{"health", plain, "GET", "/healthz", "token-of-prober", 200, "ok"},
		{"statistics", masters, "GET", "/stats/summary?only_cpu_and_memory=true", "", 200, `{"only":true}`},
		{"metrics alone: not the way to a host", plain, "GET", "/keelson/reach?host=a.example", "token-of-scraper",
			403, "[proxy]"},
		{"the way to a host", masters, "GET", "/keelson/reach?host=a.example", "", 200,
			`{"noRoute":"none to a.example"}`},
		{"the way to no host", masters, "GET", "/keelson/reach", "", 400, "want a name or an address"},
		{"the way to a long name", masters, "GET", "/keelson/reach?host=" + strings.Repeat("a", 254), "", 400,
			"at most 253 characters"},
		{"a bad flag", masters, "GET", "/stats/summary?only_cpu_and_memory=perhaps", "", 400, "want true or false"},
		{"what there is not", masters, "GET", "/exec/default/p/c", "", 404, "this node serves /healthz"},
		{"metrics alone: cAdvisor's", plain, "GET", "/metrics/cadvisor", "token-of-scraper", 200,
			"container_last_seen 1"},
		{"metrics alone: probes", plain, "GET", "/metrics/probes", "token-of-scraper", 200, "prober_probe_total 1"},
		{"metrics alone: not the configuration", plain, "GET", "/configz", "token-of-scraper", 403, "[configz proxy]"},
		{"the configuration", masters, "GET", "/configz", "", 200, `"maxPods":7`},
		{"unknown metrics", masters, "GET", "/metrics/unknown", "", 404, "/metrics/cadvisor"},
		{"a folder above", masters, "GET", "/metrics/../pods/..", "", 404, "this node serves"},
		{"written to", masters, "POST", "/pods", "", 405, "GET and HEAD requests only"},
		{"an unknown method", masters, "PURGE", "/pods", "", 405, "GET and HEAD requests only"},
	} {
		code, body, _ := b.ask(c.client, c.method, c.path, c.token)
		if code != c.code || !strings.Contains(body, c.want) {
			t.Errorf("%s: %d %s", c.name, code, body)
		}
	}
	code, body, header := b.ask(masters, "GET", "/pods", "")
	var list v1.PodList
	if err := json.Unmarshal([]byte(body), &list); err != nil || code != 200 || len(list.Items) != 2 ||
		list.Kind != "PodList" || header.Get("Content-Type") != "application/json" {
		t.Errorf("pods: %d %v %s", code, err, body)
	}
	if code, body, _ = b.ask(masters, "GET", "/runningpods/", ""); code != 200 ||
		strings.Contains(body, `"name":"a"`) || !strings.Contains(body, `"name":"b"`) {
		t.Errorf("pods that run: %d %s", code, body)
	}
}

// The control plane is queried once for many requests. While it does not respond, all clients are
// rejected with the reason.
func TestVerdictsAreRemembered(t *testing.T) {
	b := newBed(t)
	c := b.client(1)
	for range 5 {
		if code, body, _ := b.ask(c, "GET", "/metrics", "token-of-scraper"); code != 200 {
			t.Fatalf("%d %s", code, body)
		}
	}
	if n := b.judge.count(); n != 1 {
		t.Errorf("reviewed %d times", n)
	}
	b.judge.mu.Lock()
	b.judge.down = true
	b.judge.mu.Unlock()
	if code, _, _ := b.ask(c, "GET", "/metrics", "token-of-scraper"); code != 200 {
		t.Errorf("who was let in a moment ago: %d", code)
	}
	code, body, header := b.ask(c, "GET", "/metrics", "token-of-admin")
	if code != 503 || !strings.Contains(body, "the control plane") || header.Get("Retry-After") == "" ||
		strings.Contains(body, "replica is known") {
		t.Errorf("while nobody judges: %d %s", code, body)
	}
}

// A decision about a node's certificate is cached for at most two seconds, so that a revoked
// certificate is rejected by then. The certificate is part of the cache key: another certificate
// with the same name has a separate decision. F51
func TestRevokedCertificateIsRefused(t *testing.T) {
	b := newBed(t)
	stolen := b.ca.issue(t, x509.ExtKeyUsageClientAuth, "system:node:w2", "system:nodes", "system:masters")
	renewed := b.ca.issue(t, x509.ExtKeyUsageClientAuth, "system:node:w2", "system:nodes", "system:masters")
	if code, body, _ := b.ask(b.client(1, stolen), "GET", "/metrics", ""); code != 200 {
		t.Fatalf("before the revocation: %d %s", code, body)
	}
	b.judge.mu.Lock()
	b.judge.revoked = stolen.Certificate[0]
	b.judge.mu.Unlock()
	begin := time.Now()
	for {
		code, body, _ := b.ask(b.client(1, stolen), "GET", "/metrics", "")
		if code == 401 && strings.Contains(body, "revoked") {
			break
		}
		if time.Since(begin) > 20*time.Second {
			t.Fatalf("%v after the revocation: %d %s", time.Since(begin), code, body)
		}
		if err := wait.Delay(t.Context(), 50*time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
	if code, body, _ := b.ask(b.client(1, renewed), "GET", "/metrics", ""); code != 200 {
		t.Errorf("the renewed certificate: %d %s", code, body)
	}
}

// A thousand idle connections, and others that send too much, do not prevent clients from other
// addresses from connecting, and do not accumulate.
func TestIdleConnections(t *testing.T) {
	b := newBed(t, func(c *Config) {
		c.connections = connlimit.Limits{Total: 256, PerSource: 128, Unauthenticated: 64, UnauthenticatedPerSource: 32}
	})
	before := runtime.NumGoroutine()
	for range 1000 {
		conn, err := net.Dial("tcp", b.at)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	if code, body, _ := b.ask(b.client(2), "GET", "/metrics/resource", "token-of-scraper"); code != 200 {
		t.Errorf("beside them: %d %s", code, body)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := wait.For(ctx, time.Millisecond, func() error { // the closed connections must end
		if n := runtime.NumGoroutine() - before; n > 200 {
			return fmt.Errorf("%d goroutines for them", n)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	from := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 3)}}
	conn, err := tls.DialWithDialer(from, "tcp", b.at, &tls.Config{RootCAs: b.ca.pool()})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, werr := conn.Write(append([]byte("GET /metrics HTTP/1.1\r\nHost: x\r\nX: "),
		bytes.Repeat([]byte("a"), 1<<20)...))
	answer, rerr := io.ReadAll(conn)
	if !bytes.HasPrefix(answer, []byte("HTTP/1.1 431")) && werr == nil && rerr == nil {
		t.Errorf("a megabyte of header: %.60q %v %v", answer, werr, rerr)
	}
}

// The number of concurrent responses is limited; further clients are asked to retry.
func TestAnswersAtOnce(t *testing.T) {
	hold, held := make(chan struct{}), make(chan struct{}, 2*maxRequests)
	b := newBed(t, func(c *Config) {
		c.Resource = func(_ context.Context, w io.Writer) error { held <- struct{}{}; <-hold; return nil }
	})
	var wg sync.WaitGroup
	for range maxRequests {
		c := b.client(1)
		wg.Go(func() { b.ask(c, "GET", "/metrics/resource", "token-of-scraper") })
	}
	for range maxRequests {
		<-held
	}
	code, body, header := b.ask(b.client(1), "GET", "/metrics/resource", "token-of-scraper")
	if code != 429 || header.Get("Retry-After") == "" {
		t.Errorf("one more: %d %s", code, body)
	}
	close(hold)
	wg.Wait()
	if code, body, _ := b.ask(b.client(1), "GET", "/metrics", "token-of-scraper"); code != 200 {
		t.Errorf("afterwards: %d %s", code, body)
	}
}
