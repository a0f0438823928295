package serve

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"keelson.dev/keelson/ingressproxy/route"
)

// overTLS returns a table that serves a.x on port 443, and the certificate authorities of the server.
func overTLS(t *testing.T, backend netip.AddrPort) (*route.Table, *x509.CertPool) {
	pair, roots := certificate(t, 1, "a.x")
	table := to(at(backend))
	secure := table.Listeners[0]
	secure.Name, secure.Port, secure.Protocol = "https", 443, route.HTTPS
	secure.Certificates = []route.Certificate{{Hosts: []route.Host{{Name: "a.x"}}, Pair: pair}}
	table.Listeners = append(table.Listeners, secure)
	return table, roots
}

// Over TLS, a client that resets each request at once, but no faster than the server reads, receives GOAWAY when the
// bound on resets is exceeded. Other clients are served.
func TestAttackRapidResetOverTLS(t *testing.T) {
	table, roots := overTLS(t, backend(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	b := begin(t, Options{Limits: Limits{Resets: 200}}, table)
	c, err := tls.Dial("tcp", b.addrs[443], &tls.Config{RootCAs: roots, ServerName: "a.x", NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	resetUntilAway(t, c, "https")
	client := b.client(443, roots, func(p *http.Protocols) { p.SetHTTP2(true) })
	if got := ask(t, client, "GET", "https://a.x/", ""); got.code != 200 || got.proto != "HTTP/2.0" {
		t.Errorf("another client: %d, %s", got.code, got.proto)
	}
}

// Without TLS, resets of a connection of HTTP/2 are bounded as they are over TLS, and other clients are served.
func TestAttackRapidResetWithoutTLS(t *testing.T) {
	b := begin(t, Options{Limits: Limits{Resets: 200}},
		to(at(backend(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))))
	c, err := net.Dial("tcp", b.addrs[80])
	if err != nil {
		t.Fatal(err)
	}
	resetUntilAway(t, c, "http")
	for proto, set := range map[string]func(p *http.Protocols){
		"HTTP/2.0": func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) },
		"HTTP/1.1": nil,
	} {
		if got := ask(t, b.client(80, nil, set), "GET", "http://a.x/", ""); got.code != 200 || got.proto != proto {
			t.Errorf("another client: %d, %s, want 200, %s", got.code, got.proto, proto)
		}
	}
}

// resetUntilAway resets requests on a connection until it receives GOAWAY, and fails the test when it receives none.
func resetUntilAway(t *testing.T, c net.Conn, scheme string) {
	t.Helper()
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte(http2.ClientPreface)); err != nil {
		t.Fatal(err)
	}
	f := http2.NewFramer(c, c)
	if err := f.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	var header bytes.Buffer
	enc := hpack.NewEncoder(&header)
	for _, h := range [][2]string{{":method", "GET"}, {":scheme", scheme}, {":authority", "a.x"}, {":path", "/"}} {
		if err := enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]}); err != nil {
			t.Fatal(err)
		}
	}
	var away atomic.Bool
	ended, read := make(chan struct{}), make(chan struct{}, 1)
	go func() {
		defer close(ended)
		for !away.Load() {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			switch frame := frame.(type) {
			case *http2.GoAwayFrame:
				away.Store(frame.ErrCode != http2.ErrCodeNo)
			case *http2.PingFrame:
				read <- struct{}{}
			}
		}
	}()
	sent := 0
	for ; sent < 5000 && !away.Load(); sent++ {
		id := uint32(2*sent + 1)
		err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: header.Bytes(), EndStream: true,
			EndHeaders: true})
		if err != nil || f.WriteRSTStream(id, http2.ErrCodeCancel) != nil {
			break
		}
		if sent%20 > 0 {
			continue
		}
		if f.WritePing(false, [8]byte{}) != nil {
			break
		}
		select {
		case <-read:
		case <-ended:
		}
	}
	if sent == 5000 {
		c.Close()
	}
	<-ended
	if !away.Load() {
		t.Errorf("no GOAWAY after %d resets", sent)
	}
}

// A client with 100 requests at one time on one connection is served, as is one that cancels as many as a browser does.
func TestManyStreamsOverTLS(t *testing.T) {
	holdStreams(t, 443, "https://a.x/", func(p *http.Protocols) { p.SetHTTP2(true) })
}

// The same holds for a client without TLS.
func TestManyStreamsWithoutTLS(t *testing.T) {
	holdStreams(t, 80, "http://a.x/", func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })
}

func holdStreams(t *testing.T, port uint16, url string, protocols func(*http.Protocols)) {
	t.Helper()
	const streams = 100
	var arrived sync.WaitGroup
	arrived.Add(streams)
	table, roots := overTLS(t, backend(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/canceled" {
			<-r.Context().Done()
			return
		}
		arrived.Done()
		arrived.Wait()
	})))
	b := begin(t, Options{}, table)
	client := b.client(port, roots, protocols)
	for range 100 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		r, err := http.NewRequestWithContext(ctx, "GET", url+"canceled", nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Do(r); ctx.Err() == nil {
			t.Fatal(err)
		}
		cancel()
	}
	var clients sync.WaitGroup
	for range streams {
		clients.Go(func() {
			answer, err := client.Get(url)
			if err != nil {
				t.Error(err)
				return
			}
			answer.Body.Close()
			if answer.StatusCode != 200 || answer.ProtoMajor != 2 {
				t.Errorf("%s, %s", answer.Status, answer.Proto)
			}
		})
	}
	clients.Wait()
}
