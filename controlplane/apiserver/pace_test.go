package apiserver_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/internal/wait"
)

// quick is a short pace for tests.
var quick = apiserver.ClientPace{Idle: 300 * time.Millisecond, Body: 300 * time.Millisecond, Rate: 1 << 20,
	Stall: 300 * time.Millisecond}

// A connection without a request, and one whose request is never whole, come to their end.
func TestConnectionsEnd(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		pace := quick
		pace.Idle = 2 * time.Second // time enough for a slow client to ask
		c.SetPace(pace)
	})
	idle := r.Raw()
	if _, err := io.WriteString(idle, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(idle), nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(resp, err)
	}
	apiservertest.AwaitClosed(t, "idle after a request", idle)

	slow := r.Raw()
	if _, err := io.WriteString(slow,
		"POST /api/v1/namespaces/default/configmaps HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer alice-token\r\n"+
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
	apiservertest.AwaitClosed(t, "a body that drips", slow)
}

// pipes is a listener for connections through pipes in this process.
type pipes struct {
	come   chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.come:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}

func (p *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipes", Net: "unix"} }

func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	mine, theirs := net.Pipe()
	select {
	case p.come <- theirs:
		return mine, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// paceServer serves a handler with the quick pace over HTTP/2 in virtual time, so that slow
// machines do not matter.
func paceServer(t *testing.T, h http.HandlerFunc) *http.Client {
	t.Helper()
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	l := &pipes{come: make(chan net.Conn), closed: make(chan struct{})}
	s := &http.Server{Handler: quick.LimitHandler(h), Protocols: &protocols}
	go func() { _ = s.Serve(l) }()
	transport := &http.Transport{Protocols: &protocols, DialContext: l.dial}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		s.Close()
	})
	return &http.Client{Transport: transport}
}

// A stream of HTTP/2 whose client takes nothing of its answer ends; one on which nothing is said
// for long does not.
func TestStreamsThatStall(t *testing.T) { virtual.Test(t, streamsThatStall) }

func streamsThatStall(t *testing.T) {
	wrote := make(chan error, 1)
	c := paceServer(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/quiet" {
			out := http.NewResponseController(w)
			_, _ = io.WriteString(w, "first\n")
			_ = out.Flush()
			time.Sleep(4 * quick.Stall) // what it is about
			_, err := io.WriteString(w, "second\n")
			wrote <- errors.Join(err, out.Flush())
			return
		}
		_, err := w.Write(make([]byte, 64<<20))
		wrote <- err
	})
	resp, err := c.Get("http://x/deaf")
	if err != nil || resp.ProtoMajor != 2 {
		t.Fatal(resp, err)
	}
	if err := <-wrote; err == nil {
		t.Error("64 MiB were taken by a client that reads nothing")
	}
	resp.Body.Close()

	resp, err = c.Get("http://x/quiet")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	all, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, <-wrote); err != nil || string(all) != "first\nsecond\n" {
		t.Errorf("a stream that was quiet for a while: %q %v", all, err)
	}
}

// A body that drips over HTTP/2 ends as well; one that keeps the pace may take longer than the
// first allowance.
func TestBodiesOfHTTP2(t *testing.T) { virtual.Test(t, bodiesOfHTTP2) }

func bodiesOfHTTP2(t *testing.T) {
	read := make(chan error, 1)
	c := paceServer(t, func(_ http.ResponseWriter, r *http.Request) {
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
		if resp, err := c.Post("http://x/", "text/plain", body); err == nil {
			resp.Body.Close()
		}
		return <-read
	}
	if err := send(" ", 20*time.Millisecond, 1000); !strings.Contains(err.Error(), "timeout") {
		t.Errorf("a body that drips: %v", err)
	}
	if err := send(strings.Repeat("x", 1<<20), 250*time.Millisecond, 12); !strings.Contains(err.Error(),
		"12582912 bytes: EOF") {
		t.Errorf("a body that keeps the pace: %v", err)
	}
}

// Connections that nobody has authenticated neither grow without bound nor keep an administrator
// out.
func TestIdleCrowd(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Serving.Connections = connlimit.Limits{Total: 64, Unauthenticated: 32, UnauthenticatedPerSource: 16}
	})
	kept := r.HTTP(nil) // of one who was there before
	r.Call(kept, "GET", "/version", "", "Authorization", "Bearer alice-token")
	var crowd []net.Conn
	for i := range 300 {
		dial := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(40+i%3))}}
		c, err := dial.Dial("tcp", r.Addr)
		if err != nil {
			t.Fatal(err)
		}
		crowd = append(crowd, c)
		defer c.Close()
	}
	if _, err := r.Admin().Discovery().ServerVersion(); err != nil {
		t.Errorf("an administrator: %v", err)
	}
	if err := wait.For(apiservertest.Within(t), time.Millisecond, func() error {
		// what is closed is closed here a moment later
		open := 0
		for _, c := range crowd {
			if isOpen(t, c) {
				open++
			}
		}
		if open > 32 {
			return fmt.Errorf("%d connections of strangers are open", open)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// isOpen says whether the other end of a connection on which nothing was said has closed it, as far
// as is known here. No deadline of a read tells that: it may be over before the read has begun.
func isOpen(t *testing.T, c net.Conn) bool {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var read error
	if err := raw.Read(func(fd uintptr) bool {
		_, _, read = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return errors.Is(read, unix.EAGAIN)
}
