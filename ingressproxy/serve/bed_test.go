package serve

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/ingressproxy/route"
	"keelson.dev/keelson/internal/await"
)

// bed is a server with ports on loopback.
type bed struct {
	*Server
	t     *testing.T
	addrs map[uint16]string
	stop  context.CancelFunc
	ended chan error
}

func begin(t *testing.T, o Options, table *route.Table) *bed {
	t.Helper()
	b := &bed{t: t, addrs: map[uint16]string{}, ended: make(chan error, 1)}
	o.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	listeners := map[uint16]net.Listener{}
	for _, port := range []uint16{80, 443, 8080} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		listeners[port], b.addrs[port] = l, l.Addr().String()
	}
	o.Listen = func(port uint16) (net.Listener, error) { return listeners[port], nil }
	b.Server = New(o)
	b.swap(table)
	ctx, cancel := context.WithCancel(t.Context())
	b.stop = cancel
	go func() { b.ended <- b.Run(ctx); close(b.ended) }()
	t.Cleanup(func() { cancel(); <-b.ended })
	b.wait(func() error {
		if !b.Ready() {
			return errors.New("the server is not ready")
		}
		return nil
	})
	return b
}

func (b *bed) swap(table *route.Table) {
	b.t.Helper()
	if wrong := b.Swap(table); len(wrong) > 0 {
		b.t.Fatal(wrong)
	}
}

func (b *bed) wait(cond func() error) {
	b.t.Helper()
	await.Until(context.Background(), b.t, await.Patience, 5*time.Millisecond, "the ingress proxy", cond)
}

// client returns a client that reaches a port of the server under any host name.
func (b *bed) client(port uint16, roots *x509.CertPool, set func(*http.Protocols)) *http.Client {
	tr := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", b.addrs[port])
		},
		Protocols: new(http.Protocols), TLSClientConfig: &tls.Config{RootCAs: roots}, MaxIdleConnsPerHost: 64,
	}
	if set == nil {
		set = func(p *http.Protocols) { p.SetHTTP1(true) }
	}
	set(tr.Protocols)
	b.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
}

type said struct {
	code   int
	body   string
	header http.Header
	proto  string
}

func ask(t testing.TB, c *http.Client, method, url, body string, header ...string) said {
	t.Helper()
	var in io.Reader
	if body != "" {
		in = strings.NewReader(body)
	}
	r, err := http.NewRequest(method, url, in)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	answer, err := c.Do(r)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	return said{answer.StatusCode, string(text), answer.Header, answer.Proto}
}

// backend starts a server on loopback and returns its address.
func backend(t testing.TB, h http.Handler) netip.AddrPort {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return netip.MustParseAddrPort(s.Listener.Addr().String())
}

// named starts a backend that responds with its name and the request.
func named(t testing.TB, name string) netip.AddrPort {
	return backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("From", name)
		w.Header().Set("Drop-Me", "1")
		fmt.Fprintf(w, "%s %s %s %s %s|", name, r.Method, r.Host, r.RequestURI, body)
		for _, h := range []string{"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port",
			"X-Forwarded-Prefix", "X-Real-Ip", "Forwarded", "Set-By", "Gone", "Connection", "Hop"} {
			if v := r.Header[h]; v != nil {
				fmt.Fprintf(w, " %s=%s", h, strings.Join(v, ";"))
			}
		}
	}))
}

// closed returns an address without a listener.
func closed(t testing.TB) netip.AddrPort {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String())
}

// to returns a table with one rule for everything.
func to(p route.Pool, change ...func(*route.Rule)) *route.Table {
	rule := route.Rule{Name: "r", Backends: []route.Backend{{Pool: "p", Weight: 1}}}
	for _, c := range change {
		c(&rule)
	}
	return &route.Table{Listeners: []route.Listener{{Name: "http", Port: 80, Protocol: route.HTTP,
		Rules: []route.Rule{rule}}}, Pools: map[string]route.Pool{"p": p}}
}

func at(addrs ...netip.AddrPort) route.Pool { return route.Pool{Endpoints: addrs} }

// certificate returns a self-signed key pair, and a pool that trusts it.
func certificate(t testing.TB, serial int64, hosts ...string) (*tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "test"},
		DNSNames: hosts,
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, _ := x509.ParseCertificate(der)
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, roots
}
