package crd_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/internal/await"
)

// A kind that is registered at run time is in all documents, and a dropped kind is in none. A
// watch of a dropped kind ends with a 410, and later requests get a 404.
func TestKindIsAddedAndRemoved(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	documents := map[string]string{
		"/apis":                `"example.com"`,
		"/apis/example.com":    `"example.com/v1"`,
		"/apis/example.com/v1": `"gadgets"`,
		"/":                    `/apis/example.com/v1"`,
		"/openapi/v3":          `apis/example.com/v1`,
		"/openapi/v2":          `/apis/example.com/v1/namespaces/{namespace}/gadgets`,
	}
	shown := func() (n int) {
		for path, want := range documents {
			if a := r.Call(c, "GET", path, ""); a.Code == http.StatusOK && strings.Contains(a.Body, want) {
				n++
			}
		}
		return n
	}
	etag := func() string {
		return r.Call(c, "GET", "/apis", "", "Accept",
			"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList").Header.Get("ETag")
	}
	before := etag()
	for round := range 2 {
		if n := shown(); n != 0 {
			t.Fatalf("round %d: %d documents tell of what is not served", round, n)
		}
		if a := r.Call(c, "GET", apiservertest.GadgetsPath, ""); a.Code != http.StatusNotFound {
			t.Fatalf("round %d: %d %s", round, a.Code, a.Body)
		}
		k := apiservertest.GadgetKind()
		if err := r.Kinds.Register(k); err != nil {
			t.Fatal(err)
		}
		if n := shown(); n != len(documents) {
			t.Errorf("round %d: %d documents of %d tell of a kind that is served", round, n, len(documents))
		}
		if etag() == before {
			t.Error("the discovery document has the ETag of one without the kind")
		}
		r.UseGadgets(c, round)
		lines, done := r.WatchLines(c, apiservertest.GadgetsPath+"?watch=1")
		if err := r.Kinds.Drop(k); err != nil {
			t.Fatal(err)
		}
		var last string
		for last = range lines {
		}
		done()
		if !strings.Contains(last, `"code":410`) {
			t.Errorf("round %d: the watch ends with %s", round, last)
		}
	}
	if etag() != before {
		t.Error("the discovery document is not what it was")
	}
}

// A kind is registered and dropped while clients read documents and use this kind and others.
// Clients observe only that the kind is absent.
func TestKindsChangeUnderRequests(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	r.Call(c, "GET", "/openapi/v2", "") // is kept for as long as the server runs
	goroutines := runtime.NumGoroutine()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var running sync.WaitGroup
	use := func(paths ...string) {
		running.Go(func() {
			c := r.AdminHTTP()
			defer c.CloseIdleConnections()
			for i := 0; ctx.Err() == nil; i++ {
				path := paths[i%len(paths)]
				a := r.Call(c, "GET", path, "")
				custom := strings.Contains(path, "example.com")
				if a.Code != http.StatusOK && !(custom && a.Code == http.StatusNotFound) ||
					a.Code == http.StatusOK && !json.Valid([]byte(a.Body)) && !strings.Contains(path, "watch") {
					t.Errorf("%s: %d %.200s", path, a.Code, a.Body)
					return
				}
			}
		})
	}
	use("/apis", "/apis/example.com/v1", "/openapi/v3/apis/example.com/v1")
	use(apiservertest.GadgetsPath, "/api/v1/namespaces/default/configmaps",
		"/apis/example.com/v1/watch/gadgets?timeoutSeconds=1")
	for i := range 100 {
		k := apiservertest.GadgetKind()
		if err := r.Kinds.Register(k); err != nil {
			t.Fatal(err)
		}
		a := r.Call(c, "POST", apiservertest.GadgetsPath,
			fmt.Sprintf(`{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"a%d"}}`, i), "Content-Type",
			"application/json")
		if a.Code != http.StatusCreated {
			t.Fatalf("round %d: %d %s", i, a.Code, a.Body)
		}
		if err := r.Kinds.Drop(k); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	running.Wait()
	c.CloseIdleConnections()
	await.Until(context.Background(), t, await.Patience, 20*time.Millisecond,
		"the end of the goroutines", func() error {
			if n := runtime.NumGoroutine(); n > goroutines {
				return fmt.Errorf("%d goroutines, there were %d", n, goroutines)
			}
			return nil
		})
}
