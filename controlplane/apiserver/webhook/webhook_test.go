package webhook

import (
	"context"
	"encoding/pem"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

type message struct {
	Text string `json:"text"`
}

func serve(t *testing.T, timeout time.Duration, h http.HandlerFunc) *Service {
	t.Helper()
	srv := httptest.NewTLSServer(h)
	t.Cleanup(srv.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	s, err := New(&rest.Config{Host: srv.URL + "/ask", TLSClientConfig: rest.TLSClientConfig{CAData: ca}}, timeout)
	if err != nil {
		t.Fatal(err)
	}
	s.delay = time.Millisecond
	return s
}

// A request goes to exactly the address in the kubeconfig, with its credentials. File names are
// relative to the kubeconfig.
func TestKubeconfig(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/authn/v1" || r.Header.Get("Authorization") != "Bearer secret" ||
			r.Method != http.MethodPost {
			http.Error(w, "unexpected "+r.URL.Path, http.StatusBadRequest)
			return
		}
		_, _ = w.Write([]byte(`{"text":"hello"}`))
	}))
	defer srv.Close()
	folder := t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	if err := os.WriteFile(filepath.Join(folder, "ca.pem"), ca, 0o600); err != nil {
		t.Fatal(err)
	}
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: srv.URL + "/authn/v1", CertificateAuthority: "ca.pem"}
	conf.AuthInfos["u"] = &clientcmdapi.AuthInfo{Token: "secret"}
	conf.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	conf.CurrentContext = "x"
	path := filepath.Join(folder, "config")
	if err := clientcmd.WriteToFile(*conf, path); err != nil {
		t.Fatal(err)
	}
	s, err := FromKubeconfig(path, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var got message
	if err := s.Post(t.Context(), message{"hi"}, &got); err != nil || got.Text != "hello" {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := FromKubeconfig(filepath.Join(folder, "none"), 0); err == nil {
		t.Error("a file that is not there is a service")
	}
}

// Temporary errors are retried a few times; other errors are not.
func TestRepetitions(t *testing.T) {
	var asked atomic.Int32
	s := serve(t, time.Minute, func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) < 3 {
			http.Error(w, "not now", http.StatusInternalServerError)
			return
		}
		_, _ = w.Write([]byte(`{"text":"now"}`))
	})
	var got message
	if err := s.Post(t.Context(), message{}, &got); err != nil || got.Text != "now" {
		t.Errorf("%+v, %v", got, err)
	}
	for code, want := range map[int]int32{http.StatusTooManyRequests: attempts, http.StatusForbidden: 1,
		http.StatusFound: 1} {
		var asked atomic.Int32
		s := serve(t, time.Minute, func(w http.ResponseWriter, r *http.Request) {
			asked.Add(1)
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(code)
		})
		if err := s.Post(t.Context(), message{}, &got); err == nil || asked.Load() != want {
			t.Errorf("%d: asked %d times, want %d: %v", code, asked.Load(), want, err)
		}
	}
}

// A refused connection and a server with a wrong certificate are not retried: the caller gets the
// error at once. A broken connection is a temporary error.
func TestUnreachableService(t *testing.T) {
	broken := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = conn.Close()
		}
	}))
	defer broken.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: broken.Certificate().Raw})
	gone := httptest.NewTLSServer(nil)
	gone.Close()
	for _, c := range []struct {
		what, url string
		ca        []byte
		want      int32
	}{{"nobody listens", gone.URL, ca, 1}, {"an unknown certificate", broken.URL, nil, 1},
		{"a connection that breaks", broken.URL, ca, attempts}} {
		var dialled atomic.Int32
		s, err := New(&rest.Config{Host: c.url, TLSClientConfig: rest.TLSClientConfig{CAData: c.ca},
			Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
				dialled.Add(1)
				return (&net.Dialer{}).DialContext(ctx, network, address)
			}}, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		s.delay = time.Millisecond
		if err := s.Post(t.Context(), message{}, &message{}); err == nil || dialled.Load() != c.want {
			t.Errorf("%s: tried %d times, want %d: %v", c.what, dialled.Load(), c.want, err)
		}
	}
}

// An unresponsive service delays a caller by the timeout and no longer.
func TestHangingService(t *testing.T) {
	hang := make(chan struct{})
	s := serve(t, 50*time.Millisecond, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-hang:
		case <-r.Context().Done():
		}
	})
	defer close(hang)
	if err := s.Post(t.Context(), message{}, &message{}); !errors.Is(err, context.DeadlineExceeded) ||
		!strings.Contains(err.Error(), "did not respond within 50ms") {
		t.Errorf("%v", err)
	}
}

// A response of a gigabyte is not read.
func TestFloodingService(t *testing.T) {
	s := serve(t, time.Minute, func(w http.ResponseWriter, _ *http.Request) {
		chunk := []byte(strings.Repeat("x", 1<<20))
		for range 1 << 10 {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := s.Post(t.Context(), message{}, &message{})
	runtime.ReadMemStats(&after)
	if err == nil || !strings.Contains(err.Error(), "exceeds") {
		t.Errorf("%v", err)
	}
	if took := after.TotalAlloc - before.TotalAlloc; took > 64<<20 {
		t.Errorf("the answer took %d MiB", took>>20)
	}
}

// The number of concurrent requests is limited.
func TestQuestionsAtOnce(t *testing.T) {
	hang, under := make(chan struct{}), make(chan struct{}, 2*maxConcurrent)
	// Without TLS: on a busy machine, this many concurrent handshakes exceed the timeout of a
	// client.
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		under <- struct{}{}
		<-hang
		_, _ = w.Write([]byte(`{}`))
	}))
	defer srv.Close()
	s, err := New(&rest.Config{Host: srv.URL}, 0)
	if err != nil {
		t.Fatal(err)
	}
	s.timeout = time.Hour
	done := make(chan error, maxConcurrent)
	for range maxConcurrent {
		go func() { done <- s.Post(context.Background(), message{}, &message{}) }()
	}
	for range maxConcurrent {
		select {
		case <-under:
		case err := <-done:
			close(hang)
			t.Fatalf("a question ended before it was answered: %v", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Post(ctx, message{}, &message{}); err == nil || !strings.Contains(err.Error(), "are in progress") {
		t.Errorf("one more: %v", err)
	}
	close(hang)
	for range maxConcurrent {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
