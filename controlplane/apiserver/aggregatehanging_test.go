package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

// hanging is the number of APIServices that point to servers that accept connections and never
// respond.
const hanging = 200

// hang creates these APIServices, all for one listener.
func (b *behind) hang() {
	b.t.Helper()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.t.Fatal(err)
	}
	var mu sync.Mutex
	var taken []net.Conn
	go func() {
		for {
			c, err := silent.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			taken = append(taken, c)
			mu.Unlock()
		}
	}()
	b.t.Cleanup(func() {
		silent.Close()
		mu.Lock()
		defer mu.Unlock()
		for _, c := range taken {
			c.Close()
		}
	})
	b.place("silent", silent.Addr().String(), true)
	for i := range hanging {
		group := fmt.Sprintf("g%03d.silent.example.com", i)
		b.must(&apiregistrationv1.APIService{ObjectMeta: metav1.ObjectMeta{Name: "v1." + group}, Spec: apiregistrationv1.APIServiceSpec{
			Service: &apiregistrationv1.ServiceReference{Namespace: "default", Name: "silent"}, Group: group, Version: "v1",
			CABundle: b.ca.PEM(), GroupPriorityMinimum: 2000, VersionPriority: 200,
		}})
	}
	last := fmt.Sprintf("v1.g%03d.silent.example.com", hanging-1)
	b.await(func() bool { _, ok := b.cachedAPIService(b.t.Context(), last); return ok })
}

// Two hundred servers that hang cost who asks what there is next to nothing, and this replica a bounded number of
// connections, however often it is asked: they are shown as stale, and who answers as current. F72
func TestManyHangingServers(t *testing.T) {
	b := startBehind(t)
	b.extension("good", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/openapi/v2" {
			discoveryOf("good.example.com")(w, r)
			return
		}
		fmt.Fprint(w, `{"swagger":"2.0","info":{"title":"Good","version":"v1"},"paths":{"/apis/good.example.com/v1/flunders":{"get":{
			"operationId":"listFlunders","responses":{"200":{"description":"OK"}}}}}}`)
	}))
	b.apiService("good.example.com", "good", nil)
	c := b.adminHTTP()
	// What is made here takes its time once, and what the server says is part of it.
	b.call(c, "GET", "/openapi/v3", "")
	for _, path := range []string{"/apis", "/openapi/v2"} {
		b.await(func() bool { return strings.Contains(b.call(c, "GET", path, "").body, "good.example.com") })
	}
	b.hang()
	const v2 = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json"
	before := runtime.NumGoroutine()
	var asking sync.WaitGroup
	var mu sync.Mutex
	least := map[string]time.Duration{} // by path: who waits for those that hang waits for each of them, and all do
	for i := range 40 {
		path := []string{"/apis", "/openapi/v3", "/openapi/v2", "/apis/good.example.com"}[i%4]
		asking.Go(func() {
			began := time.Now()
			a := b.call(c, "GET", path, "", "Accept", v2, "Accept-Encoding", "gzip") // no client of this process decodes megabytes meanwhile
			took := time.Since(began)
			if a.code != 200 {
				t.Errorf("GET %s: %d after %s", path, a.code, took)
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
	b.await(func() bool { return runtime.NumGoroutine()-before <= 250 })
	again := time.Hour
	for range 5 {
		began := time.Now()
		a := b.call(c, "GET", "/apis", "", "Accept", v2)
		again = min(again, time.Since(began))
		if n := strings.Count(a.body, `"freshness":"Stale"`); n != hanging {
			t.Errorf("%d are stale", n)
		}
		if _, rest, ok := strings.Cut(a.body, `"good.example.com"`); !ok || !strings.Contains(rest, `"flunders"`) {
			t.Error("the server that answers is missing")
		}
	}
	if again > time.Second {
		t.Errorf("asked again it took %s and more", again)
	}
	// Whom a request goes to is another's question: the one that answers does, those that hang cost their callers alone.
	if a := b.call(c, http.MethodGet, "/apis/good.example.com/v1", ""); a.code != 200 {
		t.Errorf("the server that answers: %d", a.code)
	}
}

// CheckAPIServices looks at all servers of APIServices once, and writes what differs of their conditions.
func (s *Server) CheckAPIServices(ctx context.Context, fence uint64) error {
	places := make(chan struct{}, maxChecks)
	var mu sync.Mutex
	var errs []error
	var all sync.WaitGroup
	for _, one := range s.cachedAPIServices(ctx) {
		if one.DeletionTimestamp != nil {
			continue
		}
		places <- struct{}{}
		all.Go(func() {
			defer func() { <-places }()
			if _, _, err := s.checkAPIService(ctx, fence, one); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// keepConditions runs KeepConditions until the test ends.
func (b *behind) keepConditions() {
	ctx, cancel := context.WithCancel(b.t.Context())
	var kept sync.WaitGroup
	kept.Go(func() { _ = b.KeepConditions(ctx, 0) })
	b.t.Cleanup(func() { cancel(); kept.Wait() })
}

// reason returns the reason of an APIService's condition in this replica's cache.
func (b *behind) reason(name string) string {
	s, ok := b.cachedAPIService(b.t.Context(), name)
	if !ok || len(s.Status.Conditions) == 0 {
		return ""
	}
	return s.Status.Conditions[0].Reason
}

// The leader finds a server that comes among two hundred that hang at once, and one that goes; each that hangs has its
// condition written once, and the rest goes on: no goroutine per server, no write without a change. F72
func TestConditionsAmongHangingServers(t *testing.T) {
	b := startBehind(t)
	b.hang()
	b.keepConditions()
	b.await(func() bool { // the first that hang have been waited for
		for i := range hanging {
			if b.reason(fmt.Sprintf("v1.g%03d.silent.example.com", i)) == "FailedDiscoveryCheck" {
				return true
			}
		}
		return false
	})
	if n := runtime.NumGoroutine(); n > 600 {
		t.Errorf("%d goroutines", n)
	}
	srv := b.extension("good", discoveryOf("good.example.com"))
	b.must(&apiregistrationv1.APIService{ObjectMeta: metav1.ObjectMeta{Name: "v1.good.example.com"}, Spec: apiregistrationv1.APIServiceSpec{
		Service: &apiregistrationv1.ServiceReference{Namespace: "default", Name: "good"}, Group: "good.example.com", Version: "v1",
		CABundle: b.ca.PEM(), GroupPriorityMinimum: 2000, VersionPriority: 200,
	}})
	b.await(func() bool { _, ok := b.cachedAPIService(t.Context(), "v1.good.example.com"); return ok })
	began := time.Now()
	tell := func() {
		s, _ := b.cachedAPIService(t.Context(), "v1.good.example.com")
		b.TouchAPIServices(s)
	}
	tell()
	b.await(func() bool { return b.reason("v1.good.example.com") == "Passed" })
	t.Logf("found available after %s", time.Since(began))
	// It goes; its Service's endpoints are told of, as they are when a pod goes.
	srv.CloseClientConnections()
	srv.Close()
	es, err := b.admin().DiscoveryV1().EndpointSlices("default").Get(t.Context(), "good", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	b.TouchAPIServices(es)
	b.await(func() bool { return b.reason("v1.good.example.com") == "FailedDiscoveryCheck" })
	t.Logf("found gone after %s", time.Since(began))
	// Nothing is written of what stays as it is.
	b.await(func() bool { s, _ := b.cachedAPIService(t.Context(), "v1.good.example.com"); return s != nil })
	s, _ := b.cachedAPIService(t.Context(), "v1.good.example.com")
	if _, written, err := b.checkAPIService(t.Context(), 0, s); err != nil || written != "" {
		t.Errorf("written again: %q %v", written, err)
	}
}

// A server that has just come, and does not know yet whom to believe, is found available a moment after it does, however
// often it was looked at in vain. F72
func TestServerThatHasJustBegun(t *testing.T) {
	b := startBehind(t)
	var asked atomic.Int32
	var believes atomic.Bool
	b.extension("late", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1); !believes.Load() {
			http.Error(w, "who are you?", http.StatusForbidden)
			return
		}
		discoveryOf("late.example.com")(w, r)
	}))
	b.must(&apiregistrationv1.APIService{ObjectMeta: metav1.ObjectMeta{Name: "v1.late.example.com"}, Spec: apiregistrationv1.APIServiceSpec{
		Service: &apiregistrationv1.ServiceReference{Namespace: "default", Name: "late"}, Group: "late.example.com", Version: "v1",
		CABundle: b.ca.PEM(), GroupPriorityMinimum: 2000, VersionPriority: 200,
	}})
	es, err := b.admin().DiscoveryV1().EndpointSlices("default").Get(t.Context(), "late", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b.keepConditions()
	for range 8 {
		before := asked.Load()
		b.TouchAPIServices(es)
		b.await(func() bool { return asked.Load() > before })
	}
	b.await(func() bool { return b.reason("v1.late.example.com") == "FailedDiscoveryCheck" })
	believes.Store(true)
	b.await(func() bool { return b.reason("v1.late.example.com") == "Passed" })
}
