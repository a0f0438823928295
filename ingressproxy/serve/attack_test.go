package serve

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"keelson.dev/keelson/internal/connlimit"
)

// dial connects to port 80 and writes a text.
func (b *bed) dial(text string) net.Conn {
	b.t.Helper()
	c, err := net.Dial("tcp", b.addrs[80])
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, text); err != nil {
		b.t.Fatal(err)
	}
	return c
}

// answer returns the status code of the response on a connection, or 0 if it is closed without one.
// The test fails if the connection stays open without a response.
func (b *bed) answer(c net.Conn) int {
	b.t.Helper()
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		b.t.Fatal("the server neither answers nor closes")
	}
	if err != nil {
		return 0
	}
	return r.StatusCode
}

func TestAttackHeaderTooLarge(t *testing.T) {
	b := begin(t, Options{Limits: Limits{HeaderBytes: 8 << 10}}, to(at(named(t, "one"))))
	c := b.dial("GET / HTTP/1.1\r\nHost: a.x\r\nBig: " + strings.Repeat("x", 16<<10) + "\r\n\r\n")
	if code := b.answer(c); code != 431 {
		t.Errorf("%d", code)
	}
}

// Request headers and bodies that arrive too slowly or not at all end with their timeouts.
func TestAttackSlow(t *testing.T) {
	limits := Limits{Header: time.Second, Idle: time.Second, BodyIdle: 100 * time.Millisecond}
	b := begin(t, Options{Limits: limits},
		to(at(backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				<-r.Context().Done() // a backend that responds after half of the body
			}
		})))))
	for name, text := range map[string]string{"nothing": "", "half a header": "GET / HTTP/1.1\r\nHost: a"} {
		if code := b.answer(b.dial(text)); code != 0 && code != 408 {
			t.Errorf("%s: %d", name, code)
		}
	}
	// On a busy machine, this test can itself be too late, and the connection is closed without a
	// response. Then it retries.
	code := 0
	for range 5 {
		if code = b.answer(b.dial("POST / HTTP/1.1\r\nHost: a.x\r\nContent-Length: 100\r\n\r\nhalf")); code != 0 {
			break
		}
	}
	if code != 408 {
		t.Errorf("half a body: %d", code)
	}
	n, err := int64(0), error(nil)
	for range 5 {
		if n, err = io.Copy(io.Discard, b.dial("GET / HTTP/1.1\r\nHost: a.x\r\n\r\n")); n > 0 {
			break
		}
	}
	if err != nil || n == 0 {
		t.Errorf("an idle connection: %d bytes, %v", n, err)
	}
}

// A client that does not read its response does not block it forever.
func TestAttackTakesNothing(t *testing.T) {
	gone := make(chan struct{})
	endless := backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(gone)
		for piece := bytes.Repeat([]byte("x"), 64<<10); r.Context().Err() == nil; {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	}))
	b := begin(t, Options{Limits: Limits{Connections: connlimit.Limits{WriteTimeout: 200 * time.Millisecond}}},
		to(at(endless)))
	b.dial("GET / HTTP/1.1\r\nHost: a.x\r\n\r\n")
	select {
	case <-gone:
	case <-time.After(time.Minute):
		t.Error("the backend still writes")
	}
}

// The number of idle connections is limited, and they do not block clients that send requests.
func TestAttackManyConnections(t *testing.T) {
	b := begin(t,
		Options{Limits: Limits{Connections: connlimit.Limits{Total: 40, PerSource: 40, Unauthenticated: 8,
			UnauthenticatedPerSource: 8}}}, to(at(named(t, "one"))))
	for range 100 {
		b.dial("")
	}
	if n := value(t, b, "keelson_entry_connections"); n > 40 {
		t.Errorf("%v connections are open", n)
	}
	b.wait(func() error {
		answer, err := b.client(80, nil, nil).Get("http://a.x/")
		if err == nil {
			answer.Body.Close()
		}
		return err
	})
	if n := value(t, b, "keelson_entry_connections_shed_total"); n < 90 {
		t.Errorf("%v connections were shed", n)
	}
}

// Requests above the limit are refused, not queued.
func TestAttackManyRequests(t *testing.T) {
	release, arrived := make(chan struct{}), make(chan struct{}, 10)
	b := begin(t, Options{Limits: Limits{Requests: 2}},
		to(at(backend(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			arrived <- struct{}{}
			<-release
		})))))
	for range 2 {
		b.dial("GET / HTTP/1.1\r\nHost: a.x\r\n\r\n")
		<-arrived
	}
	if got := ask(t, b.client(80, nil, nil), "GET", "http://a.x/", ""); got.code != 503 {
		t.Errorf("%+v", got)
	}
	close(release)
}

// HTTP/2 requests that are reset at once do not accumulate, and their connection is closed.
func TestAttackRapidReset(t *testing.T) {
	var most atomic.Int64
	var b *bed
	hangs := backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := int64(len(b.slots.requests))
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		<-r.Context().Done()
	}))
	b = begin(t, Options{Limits: Limits{Streams: 16}}, to(at(hangs)))
	c := b.dial(http2.ClientPreface)
	f := http2.NewFramer(c, c)
	if err := f.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	var header bytes.Buffer
	enc := hpack.NewEncoder(&header)
	for _, h := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", "a.x"}, {":path", "/"}} {
		enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	ended := make(chan error, 1)
	go func() {
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				ended <- err
				return
			}
			if away, ok := frame.(*http2.GoAwayFrame); ok {
				ended <- fmt.Errorf("told to go away: %v", away.ErrCode)
				return
			}
		}
	}()
	for id := uint32(1); id < 20_000; id += 2 {
		if f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: header.Bytes(), EndStream: true,
			EndHeaders: true}) != nil ||
			f.WriteRSTStream(id, http2.ErrCodeCancel) != nil {
			break
		}
	}
	select {
	case err := <-ended:
		t.Log(err)
	case <-time.After(time.Minute):
		t.Error("the connection goes on")
	}
	if n := most.Load(); n > 16 {
		t.Errorf("%d requests ran at one time", n)
	}
}

// An upgrade to HTTP/2 or TLS must not bypass the rules.
func TestAttackTunnel(t *testing.T) {
	seen := make(chan http.Header, 10)
	b := begin(t, Options{}, to(at(backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen <- r.Header.Clone()
	})))))
	for _, kind := range []string{"h2c", "H2C", "TLS/1.2", "HTTP/2.0", "websocket, h2c"} {
		c := b.dial("GET / HTTP/1.1\r\nHost: a.x\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: " +
			"AAMAAABkAAQAAP__\r\nUpgrade: " + kind + "\r\n\r\n")
		if code := b.answer(c); code != 200 {
			t.Errorf("%s: %d", kind, code)
		}
		if h := <-seen; h.Get("Upgrade") != "" || h.Get("Http2-Settings") != "" {
			t.Errorf("%s: the backend is asked with %v", kind, h)
		}
	}
	if code := b.answer(b.dial("CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n")); code != 405 {
		t.Errorf("CONNECT: %d", code)
	}
}

// Ambiguous message lengths are refused or normalized before they reach a backend.
func TestAttackSmuggling(t *testing.T) {
	var asked atomic.Int32
	b := begin(t, Options{}, to(at(backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if asked.Add(1); r.URL.Path == "/smuggled" {
			t.Error("the smuggled request has arrived")
		}
	})))))
	smuggled := "GET /smuggled HTTP/1.1\r\nHost: a.x\r\n\r\n"
	for name, text := range map[string]string{
		"two lengths": fmt.Sprintf("POST / HTTP/1.1\r\nHost: a.x\r\nContent-Length: 0\r\nContent-Length: "+
			"%d\r\n\r\n%s", len(smuggled), smuggled),
		"unknown coding": "POST / HTTP/1.1\r\nHost: a.x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" +
			smuggled,
		"space before name": "POST / HTTP/1.1\r\nHost: a.x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + smuggled,
	} {
		if code := b.answer(b.dial(text)); code < 400 {
			t.Errorf("%s: %d", name, code)
		}
	}
	if n := asked.Load(); n != 0 {
		t.Errorf("the backend was asked %d times", n)
	}
}

// A backend cannot make the proxy buffer unlimited data.
func TestAttackByBackend(t *testing.T) {
	b := begin(t, Options{Limits: Limits{AnswerHeader: 8 << 10}},
		to(at(backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Big", strings.Repeat("x", 64<<10))
		})))))
	if got := ask(t, b.client(80, nil, nil), "GET", "http://a.x/", ""); got.code != 502 {
		t.Errorf("%d", got.code)
	}
}

// Bodies have no size limit and are not buffered.
func TestLargeBody(t *testing.T) {
	const size = 64 << 20
	b := begin(t, Options{}, to(at(backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n)
	})))))
	answer, err := b.client(80, nil, nil).Post("http://a.x/", "", io.LimitReader(zeros{}, size))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if got, _ := io.ReadAll(answer.Body); string(got) != fmt.Sprint(size) {
		t.Errorf("%s of %d bytes", got, size)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// The cost of a request through the proxy, compared with a direct one.
func BenchmarkProxied(b *testing.B) {
	addr := named(b, "one")
	s := New(Options{Log: slog.New(slog.DiscardHandler)})
	s.Swap(to(at(addr)))
	front := backend(b, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.handleRequest(80, w, r) }))
	for name, target := range map[string]string{"direct": addr.String(), "proxied": front.String()} {
		b.Run(name, func(b *testing.B) {
			c := &http.Client{}
			for b.Loop() {
				if got := ask(b, c, "GET", "http://"+target+"/", ""); got.code != 200 {
					b.Fatal(got)
				}
			}
		})
	}
}
