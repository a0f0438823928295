package webhook

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// Services outside the cluster are called through the proxy in the environment, if there is one.
// Services in the cluster never are. F72
func TestProxies(t *testing.T) {
	outside, err := NewEndpoint(Address{URL: "https://hooks.example.com/"})
	if err != nil {
		t.Fatal(err)
	}
	if outside.transport.Proxy == nil {
		t.Error("a URL is asked past the proxy")
	}
	inside, err := NewEndpoint(Address{URL: "https://hooks.shop.svc/",
		Dial: func(context.Context, string, string) (net.Conn, error) {
			return nil, net.ErrClosed
		}})
	if err != nil {
		t.Fatal(err)
	}
	if inside.transport.Proxy != nil {
		t.Error("a Service is asked by a proxy")
	}
}

// A closed Service keeps no connection, even with a token in each request. F72
func TestServiceIsLetGo(t *testing.T) {
	closed := make(chan struct{}, 1)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "{}")
	}))
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			closed <- struct{}{}
		}
	}
	srv.Start()
	defer srv.Close()
	s, err := New(&rest.Config{Host: srv.URL, BearerToken: "token"}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Post(t.Context(), struct{}{}, &struct{}{}); err != nil {
		t.Fatal(err)
	}
	s.Close()
	select {
	case <-closed:
	case <-time.After(time.Minute):
		t.Error("the connection is open still")
	}
}
