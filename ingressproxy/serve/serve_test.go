package serve

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/ingressproxy/route"
)

func TestRules(t *testing.T) {
	b := begin(t, Options{}, &route.Table{
		Listeners: []route.Listener{{Name: "http", Port: 80, Protocol: route.HTTP, Rules: []route.Rule{
			{Name: "a", Hosts: []route.Host{{Name: "a.x"}},
				Matches: []route.Match{{Path: route.PathMatch{Value: "/api"}}},
				Backends: []route.Backend{{Pool: "one", Weight: 1, Filters: route.Filters{
					Request:  route.Headers{Set: []route.Header{{Name: "Set-By", Value: "backend"}}},
					Response: route.Headers{Add: []route.Header{{Name: "By", Value: "backend"}}},
				}}}, Filters: route.Filters{
					Request: route.Headers{Set: []route.Header{{Name: "Set-By", Value: "rule"}},
						Remove: []string{"Gone"}},
					Response: route.Headers{Remove: []string{"Drop-Me"},
						Add: []route.Header{{Name: "By", Value: "rule"}}},
					Rewrite: &route.Rewrite{Host: "inner", Path: &route.PathChange{Value: "/v2", Prefix: true}},
				}},
			{Name: "b", Hosts: []route.Host{{Name: "b.x"}}, Backends: []route.Backend{{Pool: "two", Weight: 1}}},
			{Name: "move", Hosts: []route.Host{{Name: "old.x"}},
				Filters: route.Filters{Redirect: &route.Redirect{Scheme: "https", Host: "new.x", Status: 301}}},
			{Name: "fixed", Hosts: []route.Host{{Name: "fixed.x"}}, Answer: 500},
			{Name: "none", Hosts: []route.Host{{Name: "none.x"}},
				Backends: []route.Backend{{Pool: "empty", Weight: 1}}},
			{Name: "lost", Hosts: []route.Host{{Name: "lost.x"}}, Backends: []route.Backend{{Weight: 1, Answer: 500}}},
			{Name: "zero", Hosts: []route.Host{{Name: "zero.x"}}, Backends: []route.Backend{{Pool: "one"}}},
		}}},
		Pools: map[string]route.Pool{"one": at(named(t, "one")), "two": at(named(t, "two")), "empty": {}},
	})
	c := b.client(80, nil, nil)
	got := ask(t, c, "POST", "http://a.x/api/p%2Fq?k=v", "body", "Gone", "1", "Connection", "hop", "Hop", "1",
		"X-Forwarded-For", "6.6.6.6", "X-Forwarded-Prefix", "/evil", "X-Real-Ip", "6.6.6.6", "Forwarded", "for=6.6.6.6",
		"X-Forwarded-Port", "1")
	want := "one POST inner /v2/p%2Fq?k=v body| X-Forwarded-For=127.0.0.1 X-Forwarded-Host=a.x " +
		"X-Forwarded-Proto=http X-Forwarded-Port=80 X-Real-Ip=127.0.0.1 Set-By=backend"
	if got.code != 200 || got.body != want {
		t.Errorf("%d %s\nwant %s", got.code, got.body, want)
	}
	if by := got.header["By"]; fmt.Sprint(by) != "[rule backend]" || got.header.Get("Drop-Me") != "" {
		t.Errorf("the answer's headers are %v", got.header)
	}
	if got := ask(t, c, "GET", "http://b.x/", ""); got.header.Get("From") != "two" {
		t.Errorf("b.x: %+v", got)
	}
	if got := ask(t, c, "GET", "http://old.x/p?q=1", ""); got.code != 301 ||
		got.header.Get("Location") != "https://new.x/p?q=1" {
		t.Errorf("old.x: %+v", got)
	}
	for url, code := range map[string]int{
		"http://a.x/other": 404, "http://q/": 404, "http://fixed.x/": 500, "http://none.x/": 503, "http://lost.x/": 500,
		"http://zero.x/":               500,
		"http://a.x/api/%2e%2e/secret": 400, "http://a.x/api%2f..%2fsecret": 400,
	} {
		if got := ask(t, c, "GET", url, ""); got.code != code {
			t.Errorf("%s: %d %s, want %d", url, got.code, got.body, code)
		}
	}
}

// The X-Forwarded headers of a trusted proxy are kept.
func TestTrustedProxy(t *testing.T) {
	b := begin(t, Options{Trusted: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}, to(at(named(t, "one"))))
	got := ask(t, b.client(80, nil, nil), "GET", "http://a.x/", "", "X-Forwarded-For", "1.2.3.4",
		"X-Forwarded-Proto", "https")
	if want := "X-Forwarded-For=1.2.3.4, 127.0.0.1 X-Forwarded-Host=a.x X-Forwarded-Proto=https X-Forwarded-Port=80 " +
		"X-Real-Ip=1.2.3.4"; !strings.HasSuffix(got.body, want) {
		t.Errorf("%s, want %s", got.body, want)
	}
}

// Certificates are selected by server name, and a new certificate is used for the next connection.
func TestTLSByNameAndSwapped(t *testing.T) {
	one, oneRoots := certificate(t, 1, "a.x")
	two, twoRoots := certificate(t, 2, "*.y")
	three, threeRoots := certificate(t, 3, "a.x")
	table := func(a *tls.Certificate) *route.Table {
		all := to(at(named(t, "one")))
		all.Listeners[0].Name, all.Listeners[0].Port, all.Listeners[0].Protocol = "https", 443, route.HTTPS
		all.Listeners[0].Certificates = []route.Certificate{{Hosts: []route.Host{{Name: "a.x"}}, Pair: a},
			{Hosts: []route.Host{{Name: "y", Wildcard: route.OneLabel}}, Pair: two}}
		return all
	}
	b := begin(t, Options{}, table(one))
	both := func(p *http.Protocols) { p.SetHTTP1(true); p.SetHTTP2(true) }
	old := b.client(443, oneRoots, both)
	if got := ask(t, old, "GET", "https://a.x/", ""); got.proto != "HTTP/2.0" ||
		!strings.Contains(got.body, "X-Forwarded-Proto=https X-Forwarded-Port=443") {
		t.Errorf("%+v", got)
	}
	if got := ask(t, b.client(443, twoRoots, nil), "GET", "https://b.y/", ""); got.proto != "HTTP/1.1" ||
		got.code != 200 {
		t.Errorf("%+v", got)
	}
	if answer, err := b.client(443, oneRoots, nil).Get("https://q.z/"); err == nil {
		answer.Body.Close()
		t.Error("a name without a certificate is served")
	}
	b.swap(table(three))
	if got := ask(t, b.client(443, threeRoots, both), "GET", "https://a.x/", ""); got.code != 200 {
		t.Errorf("%+v", got)
	}
	if got := ask(t, old, "GET", "https://a.x/", ""); got.code != 200 {
		t.Errorf("the connection of before: %+v", got)
	}
}

// A connection to one listener serves no other listener, which has its own rules and certificates.
func TestMisdirected(t *testing.T) {
	one, roots := certificate(t, 1, "a.x", "b.x")
	p := at(named(t, "one"))
	listener := func(name string) route.Listener {
		return route.Listener{Name: name, Port: 443, Protocol: route.HTTPS, Host: route.Host{Name: name},
			Rules:        to(p).Listeners[0].Rules,
			Certificates: []route.Certificate{{Hosts: []route.Host{{}}, Pair: one}}}
	}
	b := begin(t, Options{}, &route.Table{Listeners: []route.Listener{listener("a.x"), listener("b.x")},
		Pools: map[string]route.Pool{"p": p}})
	c := b.client(443, roots, nil)
	r, _ := http.NewRequest("GET", "https://a.x/", nil)
	r.Host = "b.x"
	answer, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != 421 {
		t.Errorf("%d", answer.StatusCode)
	}
	if got := ask(t, c, "GET", "https://b.x/", ""); got.code != 200 {
		t.Errorf("%+v", got)
	}
}

func echoes(t testing.TB) netip.AddrPort {
	return backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := (&websocket.Upgrader{}).Upgrade(w, r, nil)
		if err != nil {
			return
		}
		defer c.Close()
		for {
			kind, data, err := c.ReadMessage()
			if err != nil || c.WriteMessage(kind, data) != nil {
				return
			}
		}
	}))
}

func (b *bed) socket(path string) (*websocket.Conn, *http.Response, error) {
	d := websocket.Dialer{HandshakeTimeout: 10 * time.Second}
	c, answer, err := d.DialContext(b.t.Context(), "ws://"+b.addrs[80]+path, nil)
	if err == nil {
		b.t.Cleanup(func() { c.Close() })
	}
	return c, answer, err
}

func TestWebSocket(t *testing.T) {
	b := begin(t, Options{Limits: Limits{Upgrades: 1}}, to(at(echoes(t)), func(r *route.Rule) {
		r.Timeouts = route.Timeouts{Request: time.Nanosecond, Backend: time.Nanosecond}
	}))
	c, _, err := b.socket("/")
	if err != nil {
		t.Fatal(err)
	}
	b.swap(to(at())) // an open connection is not closed with its rule
	for _, size := range []int{1, 100_000} {
		want := bytes.Repeat([]byte("x"), size)
		if err := c.WriteMessage(websocket.BinaryMessage, want); err != nil {
			t.Fatal(err)
		}
		if _, got, err := c.ReadMessage(); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%d bytes came back as %d: %v", size, len(got), err)
		}
	}
	b.swap(to(at(echoes(t))))
	if _, answer, err := b.socket("/"); err == nil || answer.StatusCode != 503 {
		t.Errorf("a second upgrade, beyond the bound: %v", err)
	}
	c.Close()
	b.wait(func() error { _, _, err := b.socket("/"); return err })
}

type raw struct{}

func (raw) Marshal(v any) ([]byte, error)   { return *v.(*[]byte), nil }
func (raw) Unmarshal(p []byte, v any) error { *v.(*[]byte) = bytes.Clone(p); return nil }
func (raw) Name() string                    { return "raw" }

// calls starts a gRPC server that echoes every message, and ends with a trailer and a status.
func calls(t testing.TB) netip.AddrPort {
	s := grpc.NewServer(grpc.ForceServerCodec(raw{}),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			stream.SetTrailer(metadata.Pairs("tail", "1"))
			for {
				var m []byte
				if err := stream.RecvMsg(&m); err == io.EOF || string(m) == "end" {
					return status.Error(codes.DataLoss, "all is said")
				} else if err != nil {
					return err
				}
				if err := stream.SendMsg(&m); err != nil {
					return err
				}
			}
		}))
	l := httptest.NewUnstartedServer(nil).Listener
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return netip.MustParseAddrPort(l.Addr().String())
}

// Messages go both ways during a call. Its trailer and status arrive, with and without TLS, whether
// the client has closed its side or not.
func TestGRPC(t *testing.T) {
	pair, roots := certificate(t, 1, "a.x")
	table := to(route.Pool{Protocol: route.H2C, Endpoints: []netip.AddrPort{calls(t)}})
	secure := table.Listeners[0]
	secure.Name, secure.Port, secure.Protocol, secure.Certificates = "https", 443, route.HTTPS,
		[]route.Certificate{{Hosts: []route.Host{{Name: "a.x"}}, Pair: pair}}
	table.Listeners = append(table.Listeners, secure)
	b := begin(t, Options{}, table)
	for port, creds := range map[uint16]credentials.TransportCredentials{80: insecure.NewCredentials(),
		443: credentials.NewTLS(&tls.Config{RootCAs: roots, ServerName: "a.x"})} {
		c, err := grpc.NewClient("passthrough:///"+b.addrs[port], grpc.WithTransportCredentials(creds),
			grpc.WithAuthority("a.x"), grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for _, early := range []bool{false, true} {
			stream, err := c.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
				"/echo.Echo/Both")
			if err != nil {
				t.Fatal(err)
			}
			for i := range 3 {
				out := fmt.Appendf(nil, "message %d", i)
				if err := stream.SendMsg(&out); err != nil {
					t.Fatal(err)
				}
				var in []byte
				if err := stream.RecvMsg(&in); err != nil || !bytes.Equal(in, out) {
					t.Fatalf("port %d: %q came back as %q: %v", port, out, in, err)
				}
			}
			if last := []byte("end"); early {
				err = stream.SendMsg(&last)
			} else {
				err = stream.CloseSend()
			}
			if err != nil {
				t.Fatal(err)
			}
			var in []byte
			if err := stream.RecvMsg(&in); status.Code(err) != codes.DataLoss ||
				fmt.Sprint(stream.Trailer()["tail"]) != "[1]" {
				t.Errorf("port %d, early %v: %v, %v", port, early, err, stream.Trailer())
			}
		}
	}
}

// No request fails while tables and their endpoints change.
func TestSwapUnderLoad(t *testing.T) {
	one, two, three := named(t, "one"), named(t, "two"), named(t, "three")
	pools := []route.Pool{at(one, two), at(two, three), at(three), at(one, three, two)}
	b := begin(t, Options{}, to(pools[0]))
	h2 := func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) }
	clients := []*http.Client{b.client(80, nil, nil), b.client(80, nil, h2)}
	var asked atomic.Int64
	var working sync.WaitGroup
	done := make(chan struct{})
	for i := range 8 {
		working.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				answer, err := clients[i%2].Post("http://a.x/", "text/plain", strings.NewReader("hello"))
				if err != nil {
					t.Error(err)
					return
				}
				io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
				if asked.Add(1); answer.StatusCode != 200 {
					t.Errorf("request %d: %d", asked.Load(), answer.StatusCode)
				}
			}
		})
	}
	for i := range 300 {
		before := asked.Load()
		b.swap(to(pools[i%len(pools)]))
		b.wait(func() error {
			if !t.Failed() && asked.Load() == before {
				return errors.New("no request is answered")
			}
			return nil
		})
	}
	close(done)
	working.Wait()
	t.Logf("%d requests during 300 swaps", asked.Load())
}

// An endpoint that refuses connections fails no request, whatever its method, and is avoided.
func TestDeadEndpoint(t *testing.T) {
	b := begin(t, Options{}, to(at(closed(t), named(t, "alive"), closed(t))))
	c := b.client(80, nil, nil)
	for i := range 60 {
		if got := ask(t, c, "POST", "http://a.x/", "body"); got.code != 200 || !strings.Contains(got.body, " body|") {
			t.Fatalf("request %d: %+v", i, got)
		}
	}
	if n := value(t, b, "keelson_entry_refused_connections_total"); n < 1 || n > 12 {
		t.Errorf("%v connections were refused in 60 requests", n)
	}
	b.swap(to(at(closed(t))))
	if got := ask(t, c, "GET", "http://a.x/", ""); got.code != 502 {
		t.Errorf("%+v", got)
	}
}

func value(t *testing.T, b *bed, name string) (sum float64) {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(b.Collector())
	all, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		for _, m := range f.Metric {
			if f.GetName() == name {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// A request that a backend has dropped is retried only if it is safe.
func TestOnlySafeRequestsAreAskedTwice(t *testing.T) {
	var asked atomic.Int32
	drops := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		asked.Add(1)
		c, _, _ := http.NewResponseController(w).Hijack()
		c.Close()
	})
	breaks := backend(t, drops)
	b := begin(t, Options{}, to(at(breaks, backend(t, drops))))
	c := b.client(80, nil, nil)
	for what, body := range map[string]string{"POST": "body", "DELETE": "", "GET": "body"} {
		asked.Store(0)
		if got := ask(t, c, what, "http://a.x/", body); got.code != 502 || asked.Load() != 1 {
			t.Errorf("%s: %+v, asked %d times", what, got, asked.Load())
		}
	}
	asked.Store(0)
	b.swap(to(at(breaks, named(t, "alive"))))
	for range 20 {
		if got := ask(t, c, "GET", "http://a.x/", ""); got.code != 200 {
			t.Fatalf("GET: %+v", got)
		}
	}
	if asked.Load() < 2 {
		t.Error("the backend that breaks was not asked")
	}
}

func TestTimeouts(t *testing.T) {
	hangs := backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	for name, limits := range map[string]route.Timeouts{"request": {Request: 30 * time.Millisecond},
		"backend": {Backend: 30 * time.Millisecond}} {
		b := begin(t, Options{}, to(at(hangs), func(r *route.Rule) { r.Timeouts = limits }))
		if got := ask(t, b.client(80, nil, nil), "GET", "http://a.x/", ""); got.code != 504 {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestMirror(t *testing.T) {
	copies := make(chan string, 10)
	other := backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		copies <- fmt.Sprintf("%s %s %s %s", r.Method, r.URL, body, r.Header.Get("X-Forwarded-For"))
	}))
	table := to(at(named(t, "one")), func(r *route.Rule) { r.Filters.Mirrors = []route.Mirror{{Pool: "copy"}} })
	table.Pools["copy"] = at(other)
	b := begin(t, Options{Limits: Limits{MirrorBytes: 8}}, table)
	c := b.client(80, nil, nil)
	for _, body := range []string{"", "short", "longer than eight"} {
		if got := ask(t, c, "PUT", "http://a.x/p", body, "X-Forwarded-For", "6.6.6.6"); got.code != 200 ||
			!strings.Contains(got.body, body+"|") {
			t.Errorf("%+v", got)
		}
	}
	got := map[string]bool{<-copies: true, <-copies: true}
	if !got["PUT /p  127.0.0.1"] || !got["PUT /p short 127.0.0.1"] {
		t.Errorf("%v", got)
	}
	if lost := value(t, b, "keelson_entry_mirrors_lost_total"); lost != 1 {
		t.Errorf("%v copies were lost", lost)
	}
}

// What runs when the server ends is finished; what does not finish is cut off in time.
func TestDrain(t *testing.T) {
	arrived, release := make(chan struct{}), make(chan struct{})
	slow := backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-release
		io.WriteString(w, "finished")
	}))
	table := to(at(slow))
	table.Listeners[0].Rules = append(table.Listeners[0].Rules,
		route.Rule{Name: "ws", Matches: []route.Match{{Path: route.PathMatch{Value: "/ws"}}},
			Backends: []route.Backend{{Pool: "ws", Weight: 1}}})
	table.Pools["ws"] = at(echoes(t))
	b := begin(t, Options{Limits: Limits{Drain: 5 * time.Second}}, table)
	socket, _, err := b.socket("/ws")
	if err != nil {
		t.Fatal(err)
	}
	answered := make(chan said, 1)
	go func() { answered <- ask(t, b.client(80, nil, nil), "GET", "http://a.x/", "") }()
	<-arrived
	b.stop()
	b.wait(func() error {
		if b.Ready() {
			return errors.New("still ready")
		}
		return nil
	})
	close(release)
	if got := <-answered; got.body != "finished" {
		t.Errorf("%+v", got)
	}
	if _, _, err := socket.ReadMessage(); err == nil {
		t.Error("the WebSocket says something")
	}
	if err := <-b.ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if answer, err := http.Get("http://" + b.addrs[80]); err == nil {
		answer.Body.Close()
		t.Error("the port is still served")
	}
}

// Answers are passed on as they come.
func TestStreaming(t *testing.T) {
	more := make(chan struct{})
	b := begin(t, Options{}, to(at(backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "first\n")
		w.(http.Flusher).Flush()
		<-more
		io.WriteString(w, "second\n")
	})))))
	answer, err := b.client(80, nil, nil).Get("http://a.x/")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	if lines.Scan(); lines.Text() != "first" {
		t.Fatalf("%q", lines.Text())
	}
	close(more)
	if lines.Scan(); lines.Text() != "second" {
		t.Fatalf("%q", lines.Text())
	}
}

// Of many clients each keeps its endpoint, and only those of an endpoint that went are moved.
func TestByClient(t *testing.T) {
	var addrs []netip.AddrPort
	for i := range 5 {
		addrs = append(addrs, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80))
	}
	var none *pool
	all := none.updatedPool(route.Pool{Endpoints: addrs, ByClient: true}, nil)
	fewer := all.updatedPool(route.Pool{Endpoints: addrs[1:], ByClient: true}, nil)
	count := map[*endpoint]int{}
	for i := range 1000 {
		client := netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)})
		e := all.pickEndpoint(client, nil, time.Now())
		count[e]++
		if other := fewer.pickEndpoint(client, nil, time.Now()); e.addr != addrs[0] && other != e {
			t.Fatalf("%s moved from %s to %s", client, e.addr, other.addr)
		}
	}
	for e, n := range count {
		if n < 120 {
			t.Errorf("%s has %d of 1000 clients", e.addr, n)
		}
	}
}
