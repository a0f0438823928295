package apiserver_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"sort"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/pki"
)

// protobufOf returns an object in protobuf, as the clients of the benchmark send it.
func protobufOf(b *testing.B, r *apiservertest.Replica, o api.Object) []byte {
	b.Helper()
	kind := r.Kinds.ByType(o)
	kind.SetTypeMeta(o)
	data, err := r.Registry.Encoded(o, "application/vnd.kubernetes.protobuf")
	if err != nil {
		b.Fatal(err)
	}
	return data
}

// BenchmarkCreatePod creates pods over TLS on loopback, clients at a time, each
// with a connection of its own as kubelets and controllers have.
func BenchmarkCreatePod(b *testing.B) {
	for _, clients := range []int{1, 64} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			r := apiservertest.StartReplica(b, nil)
			p := apiservertest.NewPod("")
			p.GenerateName = "bench-"
			body := protobufOf(b, r, p)
			perClient(b, r, clients, func(c *http.Client) error {
				req, err := http.NewRequest("POST", "https://"+r.Addr+"/api/v1/namespaces/default/pods",
					bytes.NewReader(body))
				if err != nil {
					return err
				}
				req.Header.Set("Content-Type", "application/vnd.kubernetes.protobuf")
				req.Header.Set("Accept", "application/vnd.kubernetes.protobuf")
				return expect(c, req, http.StatusCreated)
			})
		})
	}
}

// BenchmarkGetPod reads one of 10,000 pods.
func BenchmarkGetPod(b *testing.B) {
	r := apiservertest.StartReplica(b, nil)
	fill(r, 10000)
	var n atomic.Int64
	perClient(b, r, 64, func(c *http.Client) error {
		req, err := http.NewRequest("GET", fmt.Sprintf("https://%s/api/v1/namespaces/default/pods/p%d", r.Addr,
			n.Add(1)%10000), nil)
		if err != nil {
			return err
		}
		req.Header.Set("Accept", "application/vnd.kubernetes.protobuf")
		return expect(c, req, http.StatusOK)
	})
}

// BenchmarkListPods lists 10,000 pods in protobuf.
func BenchmarkListPods(b *testing.B) {
	r := apiservertest.StartReplica(b, nil)
	fill(r, 10000)
	perClient(b, r, 1, func(c *http.Client) error {
		req, err := http.NewRequest("GET", "https://"+r.Addr+"/api/v1/pods", nil)
		if err != nil {
			return err
		}
		req.Header.Set("Accept", "application/vnd.kubernetes.protobuf")
		req.Header.Set("Accept-Encoding", "identity")
		return expect(c, req, http.StatusOK)
	})
}

func fill(r *apiservertest.Replica, n int) {
	for i := range n {
		r.Must(apiservertest.NewPod(fmt.Sprintf("p%d", i)))
	}
}

func expect(c *http.Client, req *http.Request, code int) error {
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != code {
		data, _ := io.ReadAll(resp.Body)
		return fmt.Errorf("%s: %.300s", resp.Status, data)
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// perClient divides b.N calls among clients and reports the latencies.
func perClient(b *testing.B, r *apiservertest.Replica, clients int, call func(*http.Client) error) {
	b.Helper()
	pool := make([]*http.Client, clients)
	for i := range pool {
		c := r.Cert(pki.Client("admin", api.GroupMasters))
		pool[i] = r.HTTP(&c)
		if err := call(pool[i]); err != nil { // connected before the clock runs
			b.Fatal(err)
		}
	}
	var left atomic.Int64
	left.Store(int64(b.N))
	took := make([][]time.Duration, clients)
	var wg sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	for i, c := range pool {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for left.Add(-1) >= 0 {
				began := time.Now()
				if err := call(c); err != nil {
					b.Error(err)
					return
				}
				took[i] = append(took[i], time.Since(began))
			}
		}()
	}
	wg.Wait()
	b.StopTimer()
	var all []time.Duration
	for _, t := range took {
		all = append(all, t...)
	}
	sort.Slice(all, func(i, j int) bool { return all[i] < all[j] })
	if len(all) > 0 {
		b.ReportMetric(float64(len(all))/b.Elapsed().Seconds(), "op/s")
		b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, "p50-ms")
		b.ReportMetric(float64(all[len(all)*99/100].Microseconds())/1000, "p99-ms")
	}
}

// BenchmarkAuthorize decides among 10,000 bindings (F30: p99 below 1 ms).
func BenchmarkAuthorize(b *testing.B) {
	r := apiservertest.StartReplica(b, nil)
	for i := range 10000 {
		r.Must(apiservertest.RoleBinding("default", fmt.Sprintf("b%d", i), "ClusterRole", "view",
			apiservertest.UserSubject(fmt.Sprintf("user-%d", i))))
	}
	ctx := apiservertest.Within(b)
	last := &authz.Attributes{User: api.User{Name: "user-9999"}, Verb: "list", APIVersion: "v1", Resource: "pods",
		Namespace: "default"}
	apiservertest.Eventually(b, func() error {
		if d, _ := r.Server.Authorizer().Authorize(ctx, last); d != authz.Allow {
			return fmt.Errorf("the last binding is not known yet")
		}
		return nil
	})
	b.ReportAllocs()
	b.ResetTimer()
	took := make([]time.Duration, 0, b.N)
	for range b.N {
		began := time.Now()
		if d, _ := r.Server.Authorizer().Authorize(ctx, last); d != authz.Allow {
			b.Fatal("refused")
		}
		took = append(took, time.Since(began))
	}
	sort.Slice(took, func(i, j int) bool { return took[i] < took[j] })
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
}
