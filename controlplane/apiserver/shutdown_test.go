package apiserver

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
)

func podBody(name string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q},"spec":{"containers":[{"name":"c","image":"i"}]}}`, name)
}

// A replica that ends is unready first and answers everything meanwhile; no request that reached it is lost, and
// watches end one after the other, not to come back here.
func TestShutdownLosesNothing(t *testing.T) {
	const delay = 5 * time.Second // three new connections are made in it, on a machine that may be busy
	r := start(t, func(c *Config) { c.ShutdownDelay, c.ShutdownDeadline = delay, 20*time.Second })
	stopping := make(chan struct{})
	var sent, written atomic.Int32
	var writers sync.WaitGroup
	for n := range 8 {
		c := r.adminHTTP()
		writers.Go(func() {
			for i := 0; ; i++ {
				err := create(c, r.addr, fmt.Sprintf("p-%d-%d", n, i), &sent)
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
		resp, err := r.adminHTTP().Get("https://" + r.addr + "/api/v1/pods?watch=true")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer resp.Body.Close()
			_, _ = io.Copy(io.Discard, resp.Body)
			ends <- time.Now()
		}()
	}
	eventually(t, func() error {
		if written.Load() < 20 {
			return fmt.Errorf("%d writes", written.Load())
		}
		return nil
	})
	close(stopping)
	r.stop()
	eventually(t, func() error {
		a := r.call(r.stranger(), http.MethodGet, "/readyz", "")
		if a.code != 500 || !strings.Contains(a.body, "[-]shutdown failed") {
			return fmt.Errorf("%d: %s", a.code, a.body)
		}
		return nil
	})
	if a := r.call(r.adminHTTP(), http.MethodGet, "/api/v1/pods?watch=true", ""); a.code != http.StatusTooManyRequests || a.header.Get("Retry-After") == "" {
		t.Errorf("a new watch: %d: %s", a.code, a.body)
	}
	if a := r.call(r.adminHTTP(), http.MethodGet, "/api/v1/nodes", ""); a.code != http.StatusOK {
		t.Errorf("a request to a replica that ends: %d: %s", a.code, a.body)
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
	err := <-r.stopped
	r.stopped <- err // for the clean-up
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
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+addr+"/api/v1/namespaces/default/pods", bytes.NewReader([]byte(podBody(name))))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		// One that the server has told not to have begun is sent again, to whoever listens: it was not lost here.
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
	r := start(t, func(c *Config) { c.Flags = map[string]string{"name": "cp1", "authorization-mode": "[]"} })
	admin := r.adminHTTP()
	for path, words := range map[string]string{"/statusz": "Binary version: v1.37", "/flagz": "authorization-mode: []\nname: cp1\n"} {
		if a := r.call(admin, http.MethodGet, path, ""); a.code != 200 || !strings.Contains(a.body, words) || !strings.HasPrefix(a.header.Get("Content-Type"), "text/plain") {
			t.Errorf("%s: %d %s", path, a.code, a.body)
		}
		if a := r.call(r.http(nil), http.MethodGet, path, "", "Authorization", "Bearer alice-token"); a.code != 403 {
			t.Errorf("%s for alice: %d", path, a.code)
		}
		if a := r.call(admin, http.MethodGet, path, "", "Accept", "application/json"); a.code != 406 {
			t.Errorf("%s as plain JSON: %d", path, a.code)
		}
	}
	for accept, words := range map[string]string{
		"application/json;v=v1beta1;g=config.k8s.io;as=Flagz":  `"kind": "Flagz"`,
		"application/yaml;v=v1alpha1;g=config.k8s.io;as=Flagz": "apiVersion: config.k8s.io/v1alpha1",
	} {
		if a := r.call(admin, http.MethodGet, "/flagz", "", "Accept", accept); a.code != 200 || !strings.Contains(a.body, words) || !strings.Contains(a.body, "cp1") {
			t.Errorf("%s: %d %s", accept, a.code, a.body)
		}
	}
	if a := r.call(admin, http.MethodGet, "/debug/pprof/goroutine?debug=1", ""); a.code != 200 || !strings.Contains(a.body, "goroutine profile") {
		t.Errorf("profiles: %d", a.code)
	}
}

// Checks can be asked for one by one, and left out.
func TestChecksAreExcluded(t *testing.T) {
	r := start(t, func(c *Config) { c.Ready = func(context.Context) error { return fmt.Errorf("sick") } })
	c := r.http(nil)
	for path, want := range map[string]struct {
		code  int
		words string
	}{
		"/readyz":                         {500, "[-]replica failed"},
		"/readyz?exclude=replica":         {200, "ok"},
		"/readyz?verbose&exclude=replica": {200, "[+]replica excluded: ok\n"},
		"/readyz?verbose&exclude=replica&exclude=nothing": {200, `warn: some health checks cannot be excluded: no matches for "nothing"`},
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
		if a := r.call(c, http.MethodGet, path, ""); a.code != want.code || !strings.Contains(a.body, want.words) {
			t.Errorf("%s: %d %q", path, a.code, a.body)
		}
	}
}
