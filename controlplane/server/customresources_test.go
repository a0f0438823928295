package server

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/internal/wait"
)

const crontabDefinition = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"crontabs.stable.example.com"},
"spec":{"group":"stable.example.com","scope":"Namespaced","names":{"plural":"crontabs","kind":"CronTab"},"versions":[{"name":"v1","served":true,"storage":true,
"schema":{"openAPIV3Schema":{"type":"object","properties":{"spec":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}}}]}}`

const crontabs = "/apis/stable.example.com/v1/namespaces/default/crontabs"

// custom makes the definition and an object of its kind, and returns once the replica serves it.
func (p *plane) custom(name string) {
	p.t.Helper()
	c := p.client(name).RESTClient()
	ctx := context.Background()
	if err := c.Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").SetHeader("Content-Type", "application/json").
		Body([]byte(crontabDefinition)).Do(ctx).Error(); err != nil {
		p.t.Fatal(err)
	}
	eventually(p.t, func() error {
		return c.Post().AbsPath(crontabs).SetHeader("Content-Type", "application/json").
			Body([]byte(`{"apiVersion":"stable.example.com/v1","kind":"CronTab","metadata":{"name":"a"}}`)).Do(ctx).Error()
	})
}

// readers get the custom object at addresses of replicas in a loop, each time by a new connection, whether or not there is
// somebody to answer.
type readers struct {
	stop    context.CancelFunc
	running sync.WaitGroup
	found   map[string]*atomic.Int64
	later   atomic.Int64
}

// read begins to read at the replicas. Whoever answers says 200, or 503 and when to ask again; everything else fails the test.
func (p *plane) read(configs map[string]*rest.Config) *readers {
	p.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	r := &readers{stop: stop, found: map[string]*atomic.Int64{}}
	for name, cfg := range configs {
		n := &atomic.Int64{}
		r.found[name] = n
		conf, err := rest.TLSConfigFor(cfg)
		if err != nil {
			p.t.Fatal(err)
		}
		r.running.Go(func() {
			for ctx.Err() == nil {
				code, body, after := getOnce(ctx, &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true, ForceAttemptHTTP2: true}, cfg.Host+crontabs+"/a")
				switch {
				case code == http.StatusOK:
					n.Add(1)
					_ = wait.Delay(ctx, 2*time.Millisecond) // the replica that starts beside it needs a processor too
				case code == http.StatusServiceUnavailable && after != "":
					r.later.Add(1)
				case code != 0:
					p.whole.Errorf("%s answers %d (Retry-After %q): %.300s", name, code, after, body)
					return
				}
			}
		})
	}
	p.whole.Cleanup(func() { stop(); r.running.Wait() })
	return r
}

// getOnce asks once; the code is 0 when nobody answers.
func getOnce(ctx context.Context, tr *http.Transport, url string) (code int, body, after string) {
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", ""
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		_ = wait.Delay(ctx, 2*time.Millisecond) // nobody listens: the replica is down
		return 0, "", ""
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, "", ""
	}
	return resp.StatusCode, string(data), resp.Header.Get("Retry-After")
}

// more returns when the replica has answered so many times more with the object.
func (r *readers) more(t *testing.T, name string, times int64) {
	t.Helper()
	from := r.found[name].Load()
	eventually(t, func() error {
		if n := r.found[name].Load() - from; n < times {
			return fmt.Errorf("%s has found the object %d times more", name, n)
		}
		return nil
	})
}

// Objects of an established custom kind are never missing: not at a replica that starts again, not at one that has lost its
// data and gets it from the others, nor at a newcomer; a replica that is not there yet says 503 and when to ask again, or
// does not listen. F75
func TestCustomKindsAreNeverMissing(t *testing.T) {
	p := newPlane(t, 2, nil)
	p.custom("cp1")
	third := p.config(3)
	newcomer := rest.CopyConfig(p.rest("cp1"))
	newcomer.Host = "https://" + net.JoinHostPort(third.Advertise, fmt.Sprint(p.cluster.APIPort))
	r := p.read(map[string]*rest.Config{"cp1": p.rest("cp1"), "cp2": p.rest("cp2"), "cp3": newcomer})
	r.more(t, "cp1", 5)
	r.more(t, "cp2", 5)

	// A newcomer.
	if err := p.call("cp1", "POST", api.PathClusterCompact, api.ClusterCompact{Revision: 5}, nil); err != nil {
		t.Fatal(err)
	}
	p.join(third)
	p.start(third)
	p.ready("cp3")
	r.more(t, "cp3", 5)

	for _, name := range []string{"cp2", "cp3", "cp1"} {
		p.stop(name)
		p.again(name)
		r.more(t, name, 5)
	}

	// A replica that has lost its data gets it from the others.
	p.stop("cp2")
	if _, err := recovery.Rebuild(p.members["cp2"].cfg.Dir(), nil); err != nil {
		t.Fatal(err)
	}
	p.again("cp2")
	r.more(t, "cp2", 5)
	r.stop()
	r.running.Wait()
	t.Logf("found %d, %d and %d times, %d times to be asked later",
		r.found["cp1"].Load(), r.found["cp2"].Load(), r.found["cp3"].Load(), r.later.Load())
}
