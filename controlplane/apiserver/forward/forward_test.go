package forward

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync/atomic"
	"testing"
	"time"
)

// stuck is a client that reads the headers of a response and none of its body until it is released.
type stuck struct {
	head  http.Header
	begun chan struct{}
	free  chan struct{}
}

func (s *stuck) Header() http.Header { return s.head }
func (s *stuck) WriteHeader(int)     {}
func (s *stuck) Write(p []byte) (int, error) {
	select {
	case <-s.begun:
	default:
		close(s.begun)
	}
	<-s.free
	return len(p), nil
}

// An answer that its client does not read takes little room here, however much its server would
// say.
func TestUnreadAnswerIsBounded(t *testing.T) {
	var said atomic.Int64
	full := make(chan struct{})
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 2 {
			t.Errorf("%s", r.Proto)
		}
		c, piece := http.NewResponseController(w), make([]byte, 16<<10)
		defer close(full)
		for said.Load() < 8<<20 {
			// The end of the deadline is what this is about: nothing more is taken.
			_ = c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
			if _, err := w.Write(piece); err != nil {
				return
			}
			if c.Flush() != nil {
				return
			}
			said.Add(int64(len(piece)))
		}
	}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	conf := srv.Client().Transport.(*http.Transport).TLSClientConfig
	rt := Transport(func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, srv.Listener.Addr().String())
	}, &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: true})
	defer rt.CloseIdleConnections()
	target, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	w := &stuck{head: http.Header{}, begun: make(chan struct{}), free: make(chan struct{})}
	over := make(chan struct{})
	go func() {
		defer close(over)
		defer func() { _ = recover() }() // the proxy ends a broken answer so
		Forward{Target: target, Transport: rt}.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	}()
	<-w.begun
	<-full
	if n := said.Load(); n > 512<<10 {
		t.Errorf("%d bytes were taken in of an answer that nobody reads", n)
	}
	close(w.free)
	<-over
}
