package apiserver

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/internal/door"
)

// quick is a pace that a test can wait for.
var quick = pace{idle: 300 * time.Millisecond, body: 300 * time.Millisecond, rate: 1 << 20, stall: 300 * time.Millisecond}

// far is when a test gives up.
const far = 20 * time.Second

// raw opens a connection without a certificate on which HTTP/1.1 is spoken by hand.
func (r *replica) raw() *tls.Conn {
	r.t.Helper()
	c, err := tls.Dial("tcp", r.addr, &tls.Config{RootCAs: r.trust.Pool(), ServerName: "127.0.0.1", NextProtos: []string{"http/1.1"}})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(far)); err != nil {
		r.t.Fatal(err)
	}
	return c
}

// ended waits until the other end closes the connection.
func ended(t *testing.T, what string, c net.Conn) {
	t.Helper()
	_, err := io.Copy(io.Discard, c)
	var late net.Error
	if errors.As(err, &late) && late.Timeout() {
		t.Errorf("%s: the connection is still there after %s", what, far)
	}
}

// A connection without a request, and one whose request is never whole, come to their end.
func TestConnectionsEnd(t *testing.T) {
	r := start(t, func(c *Config) { c.pace = quick })
	idle := r.raw()
	if _, err := io.WriteString(idle, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(idle), nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(resp, err)
	}
	ended(t, "idle after a request", idle)

	slow := r.raw()
	if _, err := io.WriteString(slow, "POST /api/v1/namespaces/default/configmaps HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer alice-token\r\n"+
		"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"); err != nil {
		t.Fatal(err)
	}
	drip := time.NewTicker(20 * time.Millisecond)
	defer drip.Stop()
	go func() {
		for range drip.C {
			if _, err := slow.Write([]byte(" ")); err != nil {
				return
			}
		}
	}()
	ended(t, "a body that drips", slow)
}

// paceServer serves a handler at the quick pace, by HTTP/2.
func paceServer(t *testing.T, h http.HandlerFunc) (*httptest.Server, *http.Client) {
	t.Helper()
	s := httptest.NewUnstartedServer(quick.paced(h))
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(s.Close)
	return s, s.Client()
}

// A stream of HTTP/2 whose client takes nothing of its answer ends; one on which nothing is said for long does not.
func TestStreamsThatStall(t *testing.T) {
	wrote := make(chan error, 1)
	s, c := paceServer(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/quiet" {
			out := http.NewResponseController(w)
			_, _ = io.WriteString(w, "first\n")
			_ = out.Flush()
			<-time.After(4 * quick.stall) // what it is about
			_, err := io.WriteString(w, "second\n")
			wrote <- errors.Join(err, out.Flush())
			return
		}
		_, err := w.Write(make([]byte, 64<<20))
		wrote <- err
	})
	resp, err := c.Get(s.URL + "/deaf")
	if err != nil || resp.ProtoMajor != 2 {
		t.Fatal(resp, err)
	}
	select {
	case err := <-wrote:
		if err == nil {
			t.Error("64 MiB were taken by a client that reads nothing")
		}
	case <-time.After(far):
		t.Fatal("the write still waits for a client that reads nothing")
	}
	resp.Body.Close()

	resp, err = c.Get(s.URL + "/quiet")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	all, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, <-wrote); err != nil || string(all) != "first\nsecond\n" {
		t.Errorf("a stream that was quiet for a while: %q %v", all, err)
	}
}

// A body that drips over HTTP/2 ends as well; one that keeps the pace may take longer than the first allowance.
func TestBodiesOfHTTP2(t *testing.T) {
	read := make(chan error, 1)
	s, c := paceServer(t, func(_ http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		read <- fmt.Errorf("%d bytes: %w", n, errors.Join(err, io.EOF))
	})
	send := func(piece string, every time.Duration, times int) error {
		body, in := io.Pipe()
		go func() {
			tick := time.NewTicker(every)
			defer tick.Stop()
			for range times {
				<-tick.C
				if _, err := io.WriteString(in, piece); err != nil {
					return
				}
			}
			in.Close()
		}()
		if resp, err := c.Post(s.URL, "text/plain", body); err == nil {
			resp.Body.Close()
		}
		return <-read
	}
	if err := send(" ", 20*time.Millisecond, 1000); !strings.Contains(err.Error(), "timeout") {
		t.Errorf("a body that drips: %v", err)
	}
	if err := send(strings.Repeat("x", 1<<20), 50*time.Millisecond, 12); !strings.Contains(err.Error(), "12582912 bytes: EOF") {
		t.Errorf("a body that keeps the pace: %v", err)
	}
}

// Connections that nobody has authenticated neither grow without bound nor keep an administrator out.
func TestIdleCrowd(t *testing.T) {
	r := start(t, func(c *Config) { c.Connections = door.Limits{All: 64, Strangers: 32, PerUnsure: 16} })
	kept := r.http(nil) // of one who was there before
	r.call(kept, "GET", "/version", "", "Authorization", "Bearer alice-token")
	var crowd []net.Conn
	for i := range 300 {
		dial := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(40+i%3))}}
		c, err := dial.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		crowd = append(crowd, c)
		defer c.Close()
	}
	if _, err := r.admin().Discovery().ServerVersion(); err != nil {
		t.Errorf("an administrator: %v", err)
	}
	open := 0
	for _, c := range crowd {
		if err := c.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		_, err := c.Read(make([]byte, 1))
		var late net.Error
		if errors.As(err, &late) && late.Timeout() {
			open++
		}
	}
	if open > 32 {
		t.Errorf("%d connections of strangers are open", open)
	}
}
