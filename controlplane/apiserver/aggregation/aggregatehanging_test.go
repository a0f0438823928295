package aggregation_test

import (
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// F72: two hundred aggregated API servers that hang hardly delay discovery. The replica opens a
// bounded number of connections to them. Discovery marks their groups as stale, and the groups of
// servers that respond as current.
func TestManyHangingServers(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	b.Extension("good", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/openapi/v2" {
			apiservertest.DiscoveryOf("good.example.com")(w, r)
			return
		}
		fmt.Fprint(w,
			`{"swagger":"2.0","info":{"title":"Good","version":"v1"},"paths":{"/apis/good.example.com/v1/flunders":{"get":{
			"operationId":"listFlunders","responses":{"200":{"description":"OK"}}}}}}`)
	}))
	b.AddAPIService("good.example.com", "good", nil)
	c := b.Replica.AdminHTTP()
	// What is made here takes its time once, and what the server says is part of it.
	b.Replica.Call(c, "GET", "/openapi/v3", "")
	for _, path := range []string{"/apis", "/openapi/v2"} {
		b.Replica.Await(func() bool {
			return strings.Contains(b.Replica.Call(c, "GET", path, "").Body, "good.example.com")
		})
	}
	b.Hang()
	const v2 = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json"
	before := runtime.NumGoroutine()
	var asking sync.WaitGroup
	var mu sync.Mutex
	least := map[string]time.Duration{} // by path: who waits for those that hang waits for each of them, and all do
	for i := range 40 {
		path := []string{"/apis", "/openapi/v3", "/openapi/v2", "/apis/good.example.com"}[i%4]
		asking.Go(func() {
			began := time.Now()
			// no client of this process decodes megabytes meanwhile
			a := b.Replica.Call(c, "GET", path, "", "Accept", v2, "Accept-Encoding", "gzip")
			took := time.Since(began)
			if a.Code != 200 {
				t.Errorf("GET %s: %d after %s", path, a.Code, took)
			}
			mu.Lock()
			defer mu.Unlock()
			if d, ok := least[path]; !ok || took < d {
				least[path] = took
			}
		})
	}
	asking.Wait()
	for path, took := range least {
		if took > 3*time.Second {
			t.Errorf("GET %s took %s and more", path, took)
		}
	}
	// A question that is under way has the goroutines of its connection.
	b.Replica.Await(func() bool { return runtime.NumGoroutine()-before <= 250 })
	again := time.Hour
	for range 5 {
		began := time.Now()
		a := b.Replica.Call(c, "GET", "/apis", "", "Accept", v2)
		again = min(again, time.Since(began))
		if n := strings.Count(a.Body, `"freshness":"Stale"`); n != apiservertest.Hanging {
			t.Errorf("%d are stale", n)
		}
		if _, rest, ok := strings.Cut(a.Body, `"good.example.com"`); !ok || !strings.Contains(rest, `"flunders"`) {
			t.Error("the server that answers is missing")
		}
	}
	if again > time.Second {
		t.Errorf("asked again it took %s and more", again)
	}
	// Whom a request goes to is another's question: the one that answers does, those that hang cost
	// their callers alone.
	if a := b.Replica.Call(c, http.MethodGet, "/apis/good.example.com/v1", ""); a.Code != 200 {
		t.Errorf("the server that answers: %d", a.Code)
	}
}

// The leader finds a server that comes among two hundred that hang at once, and one that goes; each
// that hangs has its condition written once, and the rest goes on: no goroutine per server, no
// write without a change. F72
func TestConditionsAmongHangingServers(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	b.Hang()
	b.KeepConditions()
	b.Replica.Await(func() bool { // the first that hang have been waited for
		for i := range apiservertest.Hanging {
			if b.Reason(fmt.Sprintf("v1.g%03d.silent.example.com", i)) == "FailedDiscoveryCheck" {
				return true
			}
		}
		return false
	})
	if n := runtime.NumGoroutine(); n > 600 {
		t.Errorf("%d goroutines", n)
	}
	srv := b.Extension("good", apiservertest.DiscoveryOf("good.example.com"))
	b.Replica.Must(&apiregistrationv1.APIService{ObjectMeta: metav1.ObjectMeta{Name: "v1.good.example.com"},
		Spec: apiregistrationv1.APIServiceSpec{
			Service: &apiregistrationv1.ServiceReference{Namespace: "default", Name: "good"},
			Group:   "good.example.com", Version: "v1",
			CABundle: b.CA.PEM(), GroupPriorityMinimum: 2000, VersionPriority: 200,
		}})
	b.Replica.Await(func() bool { _, ok := b.Replica.CachedAPIService(t.Context(), "v1.good.example.com"); return ok })
	began := time.Now()
	tell := func() {
		s, _ := b.Replica.CachedAPIService(t.Context(), "v1.good.example.com")
		b.Replica.Server.Conditions().Touch(s)
	}
	tell()
	b.Replica.Await(func() bool { return b.Reason("v1.good.example.com") == "Passed" })
	t.Logf("found available after %s", time.Since(began))
	// The server stops, and its Service's endpoints are updated, as when a pod is deleted.
	srv.CloseClientConnections()
	srv.Close()
	es, err := b.Replica.Admin().DiscoveryV1().EndpointSlices("default").Get(t.Context(), "good", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	b.Replica.Server.Conditions().Touch(es)
	b.Replica.Await(func() bool { return b.Reason("v1.good.example.com") == "FailedDiscoveryCheck" })
	t.Logf("found gone after %s", time.Since(began))
	// Nothing is written of what stays as it is.
	b.Replica.Await(func() bool {
		s, _ := b.Replica.CachedAPIService(t.Context(), "v1.good.example.com")
		return s != nil
	})
	s, _ := b.Replica.CachedAPIService(t.Context(), "v1.good.example.com")
	if _, written, err := b.Replica.Server.Conditions().CheckService(t.Context(), 0, s); err != nil || written != "" {
		t.Errorf("written again: %q %v", written, err)
	}
}

// A server that has just come, and does not know yet whom to believe, is found available a moment
// after it does, however often it was looked at in vain. F72
func TestServerThatHasJustBegun(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	var asked atomic.Int32
	var believes atomic.Bool
	b.Extension("late", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1); !believes.Load() {
			http.Error(w, "who are you?", http.StatusForbidden)
			return
		}
		apiservertest.DiscoveryOf("late.example.com")(w, r)
	}))
	b.Replica.Must(&apiregistrationv1.APIService{ObjectMeta: metav1.ObjectMeta{Name: "v1.late.example.com"},
		Spec: apiregistrationv1.APIServiceSpec{
			Service: &apiregistrationv1.ServiceReference{Namespace: "default", Name: "late"},
			Group:   "late.example.com", Version: "v1",
			CABundle: b.CA.PEM(), GroupPriorityMinimum: 2000, VersionPriority: 200,
		}})
	es, err := b.Replica.Admin().DiscoveryV1().EndpointSlices("default").Get(t.Context(), "late", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b.KeepConditions()
	for range 8 {
		before := asked.Load()
		b.Replica.Server.Conditions().Touch(es)
		b.Replica.Await(func() bool { return asked.Load() > before })
	}
	b.Replica.Await(func() bool { return b.Reason("v1.late.example.com") == "FailedDiscoveryCheck" })
	believes.Store(true)
	b.Replica.Await(func() bool { return b.Reason("v1.late.example.com") == "Passed" })
}
