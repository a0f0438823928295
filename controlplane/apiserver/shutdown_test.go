package apiserver_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

func podBody(name string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q},"spec":{"containers":[{"name":"c",`+
		`"image":"i"}]}}`, name)
}

// A replica that ends is unready first and answers everything meanwhile; no request that reached it
// is lost, and watches end one after the other, not to come back here.
func TestShutdownLosesNothing(t *testing.T) {
	const delay = 5 * time.Second // three new connections are made in it, on a machine that may be busy
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Serving.ShutdownDelay, c.Serving.ShutdownDeadline = delay, 20*time.Second
	})
	stopping := make(chan struct{})
	var sent, written atomic.Int32
	var writers sync.WaitGroup
	for n := range 8 {
		c := r.AdminHTTP()
		writers.Go(func() {
			for i := 0; ; i++ {
				err := create(c, r.Addr, fmt.Sprintf("p-%d-%d", n, i), &sent)
				if err == nil {
					written.Add(1)
					continue
				}
				select {
				case <-stopping:
				default:
					t.Errorf("before the shutdown: %v", err)
				}
				if strings.Contains(err.Error(), "lost") {
					t.Error(err)
				}
				return
			}
		})
	}
	ends := make(chan time.Time, 16)
	for range cap(ends) {
		resp, err := r.AdminHTTP().Get("https://" + r.Addr + "/api/v1/pods?watch=true")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer resp.Body.Close()
			_, _ = io.Copy(io.Discard, resp.Body)
			ends <- time.Now()
		}()
	}
	apiservertest.Eventually(t, func() error {
		if written.Load() < 20 {
			return fmt.Errorf("%d writes", written.Load())
		}
		return nil
	})
	close(stopping)
	r.StopServer()
	apiservertest.Eventually(t, func() error {
		a := r.Call(r.Unauthenticated(), http.MethodGet, "/readyz", "")
		if a.Code != 500 || !strings.Contains(a.Body, "[-]shutdown failed") {
			return fmt.Errorf("%d: %s", a.Code, a.Body)
		}
		return nil
	})
	if a := r.Call(r.AdminHTTP(), http.MethodGet, "/api/v1/pods?watch=true", ""); a.Code !=
		http.StatusTooManyRequests || a.Header.Get("Retry-After") == "" {
		t.Errorf("a new watch: %d: %s", a.Code, a.Body)
	}
	if a := r.Call(r.AdminHTTP(), http.MethodGet, "/api/v1/nodes", ""); a.Code != http.StatusOK {
		t.Errorf("a request to a replica that ends: %d: %s", a.Code, a.Body)
	}
	var first, last time.Time
	for range cap(ends) {
		at := <-ends
		if first.IsZero() {
			first = at
		}
		last = at
	}
	if last.Sub(first) < delay/10 {
		t.Errorf("all watches ended within %v", last.Sub(first))
	}
	err := <-r.Stopped
	r.Stopped <- err // for the clean-up
	writers.Wait()
	if err != nil || sent.Load() != written.Load() {
		t.Errorf("%v; %d requests were sent, %d answered well", err, sent.Load(), written.Load())
	}
}

// create creates a pod and counts whether its request was sent. The error contains "lost" if a sent
// request got no valid response.
func create(c *http.Client, addr, name string, sent *atomic.Int32) error {
	wrote := false
	ctx := httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{
		WroteRequest: func(i httptrace.WroteRequestInfo) { wrote = i.Err == nil },
	})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+addr+"/api/v1/namespaces/default/pods",
		bytes.NewReader([]byte(podBody(name))))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		// One that the server has told not to have begun is sent again, to whoever listens: it was
		// not lost here.
		if wrote && !errors.Is(err, syscall.ECONNREFUSED) {
			sent.Add(1)
			return fmt.Errorf("%s is lost: %w", name, err)
		}
		return err
	}
	defer resp.Body.Close()
	sent.Add(1)
	if data, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusCreated {
		return fmt.Errorf("%s is lost: %d, %s, %v", name, resp.StatusCode, data, err)
	}
	return nil
}

// The pages about the process are text, or a kind for programs, and for who may read their paths.
func TestProcessPages(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Process.Flags = map[string]string{"name": "cp1", "authorization-mode": "[]"}
	})
	admin := r.AdminHTTP()
	for path, words := range map[string]string{"/statusz": "Binary version: v1.37",
		"/flagz": "authorization-mode: []\nname: cp1\n"} {
		if a := r.Call(admin, http.MethodGet, path, ""); a.Code != 200 || !strings.Contains(a.Body, words) ||
			!strings.HasPrefix(a.Header.Get("Content-Type"), "text/plain") {
			t.Errorf("%s: %d %s", path, a.Code, a.Body)
		}
		if a := r.Call(r.HTTP(nil), http.MethodGet, path, "", "Authorization", "Bearer alice-token"); a.Code != 403 {
			t.Errorf("%s for alice: %d", path, a.Code)
		}
		if a := r.Call(admin, http.MethodGet, path, "", "Accept", "application/json"); a.Code != 406 {
			t.Errorf("%s as plain JSON: %d", path, a.Code)
		}
	}
	for accept, words := range map[string]string{
		"application/json;v=v1beta1;g=config.k8s.io;as=Flagz":  `"kind": "Flagz"`,
		"application/yaml;v=v1alpha1;g=config.k8s.io;as=Flagz": "apiVersion: config.k8s.io/v1alpha1",
	} {
		if a := r.Call(admin, http.MethodGet, "/flagz", "", "Accept", accept); a.Code != 200 ||
			!strings.Contains(a.Body, words) || !strings.Contains(a.Body, "cp1") {
			t.Errorf("%s: %d %s", accept, a.Code, a.Body)
		}
	}
	if a := r.Call(admin, http.MethodGet, "/debug/pprof/goroutine?debug=1", ""); a.Code != 200 ||
		!strings.Contains(a.Body, "goroutine profile") {
		t.Errorf("profiles: %d", a.Code)
	}
}

// Checks can be asked for one by one, and left out.
func TestChecksAreExcluded(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.State.Ready = func(context.Context) error {
			return fmt.Errorf("sick")
		}
	})
	c := r.HTTP(nil)
	for path, want := range map[string]struct {
		code  int
		words string
	}{
		"/readyz":                         {500, "[-]replica failed"},
		"/readyz?exclude=replica":         {200, "ok"},
		"/readyz?verbose&exclude=replica": {200, "[+]replica excluded: ok\n"},
		"/readyz?verbose&exclude=replica&exclude=nothing": {200,
			`warn: some health checks cannot be excluded: no matches for "nothing"`},
		"/readyz/ping":    {200, "ok"},
		"/readyz/replica": {500, "sick"},
		"/readyz/nothing": {404, ""},
		"/readyz/etcd":    {500, "sick"},
		"/readyz?verbose&exclude=replica&exclude=etcd": {200, "[+]replica excluded: ok\n"},
		"/livez?exclude=etcd":                          {200, "ok"},
		"/healthz/poststarthook/rbac/bootstrap-roles":  {200, "ok"},
		"/livez/poststarthook/crd-informer-synced":     {200, "ok"},
		"/readyz/poststarthook/nothing":                {404, ""},
		"/livez?verbose":                               {200, "[+]ping ok\nlivez check passed"},
	} {
		if a := r.Call(c, http.MethodGet, path, ""); a.Code != want.code || !strings.Contains(a.Body, want.words) {
			t.Errorf("%s: %d %q", path, a.Code, a.Body)
		}
	}
}
