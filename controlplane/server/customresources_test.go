package server_test

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
	"keelson.dev/keelson/controlplane/server/servertest"
	"keelson.dev/keelson/internal/wait"
)

const crontabDefinition = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"crontabs.stable.example.com"},
"spec":{"group":"stable.example.com","scope":"Namespaced","names":{"plural":"crontabs","kind":"CronTab"},"versions":[{"name":"v1","served":true,"storage":true,
"schema":{"openAPIV3Schema":{"type":"object","properties":{"spec":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}}}]}}`

const crontabs = "/apis/stable.example.com/v1/namespaces/default/crontabs"

// createCustomObject creates a definition and an object of its kind, and waits until the replica
// serves the object.
func (p *plane) createCustomObject(name string) {
	p.T.Helper()
	c := p.Client(name).RESTClient()
	ctx := context.Background()
	if err :=
		c.Post().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").SetHeader("Content-Type",
			"application/json").
			Body([]byte(crontabDefinition)).Do(ctx).Error(); err != nil {
		p.T.Fatal(err)
	}
	servertest.Eventually(p.T, func() error {
		return c.Post().AbsPath(crontabs).SetHeader("Content-Type", "application/json").
			Body([]byte(`{"apiVersion":"stable.example.com/v1","kind":"CronTab","metadata":{"name":"a"}}`)).Do(ctx).
			Error()
	})
}

// objectReaders get the custom object from replicas in a loop, with a new connection each time.
// Replicas may be stopped meanwhile.
type objectReaders struct {
	stop    context.CancelFunc
	running sync.WaitGroup
	found   map[string]*atomic.Int64
	later   atomic.Int64
}

// startReaders starts to read from the replicas. A response must be 200, or 503 with Retry-After.
// Any other response fails the test.
func (p *plane) startReaders(configs map[string]*rest.Config) *objectReaders {
	p.T.Helper()
	ctx, stop := context.WithCancel(context.Background())
	r := &objectReaders{stop: stop, found: map[string]*atomic.Int64{}}
	for name, cfg := range configs {
		n := &atomic.Int64{}
		r.found[name] = n
		conf, err := rest.TLSConfigFor(cfg)
		if err != nil {
			p.T.Fatal(err)
		}
		r.running.Go(func() {
			for ctx.Err() == nil {
				code, body, after := getOnce(ctx, &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true,
					ForceAttemptHTTP2: true}, cfg.Host+crontabs+"/a")
				switch {
				case code == http.StatusOK:
					n.Add(1)
					_ = wait.Delay(ctx, 2*time.Millisecond) // leave CPU time to the starting replica
				case code == http.StatusServiceUnavailable && after != "":
					r.later.Add(1)
				case code != 0:
					p.Whole().Errorf("%s returned %d (Retry-After %q): %.300s", name, code, after, body)
					return
				}
			}
		})
	}
	p.Whole().Cleanup(func() { stop(); r.running.Wait() })
	return r
}

// getOnce sends one request; the code is 0 if there is no response.
func getOnce(ctx context.Context, tr *http.Transport, url string) (code int, body, after string) {
	defer tr.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", ""
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		_ = wait.Delay(ctx, 2*time.Millisecond) // the replica does not listen
		return 0, "", ""
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, "", ""
	}
	return resp.StatusCode, string(data), resp.Header.Get("Retry-After")
}

// awaitReads waits until a replica has returned the object the given number of times.
func (r *objectReaders) awaitReads(t *testing.T, name string, times int64) {
	t.Helper()
	from := r.found[name].Load()
	servertest.Eventually(t, func() error {
		if n := r.found[name].Load() - from; n < times {
			return fmt.Errorf("%s has found the object %d times more", name, n)
		}
		return nil
	})
}

// Objects of an established custom kind are never reported missing: not by a restarted replica, a
// rebuilt replica, or a new replica. A replica that is not ready responds with 503 and Retry-After,
// or does not listen. F75
func TestCustomKindsAreNeverMissing(t *testing.T) {
	p := newPlane(t, 2, nil)
	p.createCustomObject("cp1")
	third := p.NewConfig(3)
	newcomer := rest.CopyConfig(p.RESTConfig("cp1"))
	newcomer.Host = "https://" + net.JoinHostPort(third.Advertise, fmt.Sprint(p.Cluster.APIPort))
	r := p.startReaders(map[string]*rest.Config{"cp1": p.RESTConfig("cp1"), "cp2": p.RESTConfig("cp2"),
		"cp3": newcomer})
	r.awaitReads(t, "cp1", 5)
	r.awaitReads(t, "cp2", 5)

	// A new replica.
	if err := p.Call("cp1", "POST", api.PathClusterCompact, api.ClusterCompact{Revision: 5}, nil); err != nil {
		t.Fatal(err)
	}
	p.Join(third)
	p.StartReplica(third)
	p.AwaitReady("cp3")
	r.awaitReads(t, "cp3", 5)

	for _, name := range []string{"cp2", "cp3", "cp1"} {
		p.StopReplica(name)
		p.Restart(name)
		r.awaitReads(t, name, 5)
	}

	// A replica without data copies the data from the others.
	p.StopReplica("cp2")
	if _, err := recovery.Rebuild(p.Members["cp2"].Config.Dir(), nil); err != nil {
		t.Fatal(err)
	}
	p.Restart("cp2")
	r.awaitReads(t, "cp2", 5)
	r.stop()
	r.running.Wait()
	t.Logf("found %d, %d and %d times, %d times to be asked later",
		r.found["cp1"].Load(), r.found["cp2"].Load(), r.found["cp3"].Load(), r.later.Load())
}
