package apiserver

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/internal/wait"
)

var gadgets = custom.Resource{Group: "example.com", Kind: "Gadget", Plural: "gadgets", Singular: "gadget", ShortNames: []string{"gg"}, Namespaced: true}

func gadgetKind() *api.Kind {
	return custom.NewKind(gadgets, "v1", true, custom.NewStorage(gadgets, "v1"))
}

const gadgetsPath = "/apis/example.com/v1/namespaces/default/gadgets"

// A kind that is registered while the server runs is there in everything that clients look at, and gone from it when it
// is dropped; a watch of it ends with a 410, what is asked next is a 404.
func TestAKindComesAndGoesOverHTTP(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
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
			if a := r.call(c, "GET", path, ""); a.code == http.StatusOK && strings.Contains(a.body, want) {
				n++
			}
		}
		return n
	}
	etag := func() string {
		return r.call(c, "GET", "/apis", "", "Accept", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList").header.Get("ETag")
	}
	before := etag()
	for round := range 2 {
		if n := shown(); n != 0 {
			t.Fatalf("round %d: %d documents tell of what is not served", round, n)
		}
		if a := r.call(c, "GET", gadgetsPath, ""); a.code != http.StatusNotFound {
			t.Fatalf("round %d: %d %s", round, a.code, a.body)
		}
		k := gadgetKind()
		if err := r.cfg.Kinds.Register(k); err != nil {
			t.Fatal(err)
		}
		if n := shown(); n != len(documents) {
			t.Errorf("round %d: %d documents of %d tell of a kind that is served", round, n, len(documents))
		}
		if etag() == before {
			t.Error("the discovery document has the ETag of one without the kind")
		}
		r.useGadgets(c, round)
		lines, done := r.watchLines(c, gadgetsPath+"?watch=1")
		if err := r.cfg.Kinds.Drop(k); err != nil {
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

// useGadgets performs all verbs.
func (r *replica) useGadgets(c *http.Client, round int) {
	r.t.Helper()
	name := fmt.Sprint("g", round)
	ok := func(a answer, want ...string) {
		r.t.Helper()
		if a.code/100 != 2 {
			r.t.Fatalf("%d %s", a.code, a.body)
		}
		for _, w := range want {
			if !strings.Contains(a.body, w) {
				r.t.Fatalf("no %s in %s", w, a.body)
			}
		}
	}
	body := `{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"` + name + `"},"spec":{"size":9007199254740993},"status":{"seen":1}}`
	ok(r.call(c, "POST", gadgetsPath, body, "Content-Type", "application/json"), `"size":9007199254740993`, `"generation":1`)
	ok(r.call(c, "GET", gadgetsPath+"/"+name, ""), `"kind":"Gadget"`, `"size":9007199254740993`)
	if a := r.call(c, "GET", gadgetsPath+"/"+name, ""); strings.Contains(a.body, "seen") {
		r.t.Fatalf("a creation set the status: %s", a.body)
	}
	patch := "application/merge-patch+json"
	ok(r.call(c, "PATCH", gadgetsPath+"/"+name+"/status", `{"status":{"seen":2},"spec":{"size":1}}`, "Content-Type", patch), `"seen":2`, `"size":9007199254740993`, `"generation":1`)
	ok(r.call(c, "PATCH", gadgetsPath+"/"+name, `{"status":{"seen":3},"spec":{"size":2}}`, "Content-Type", patch), `"seen":2`, `"size":2`, `"generation":2`)
	apply := func(manager, spec string) answer {
		return r.call(c, "PATCH", gadgetsPath+"/"+name+"?fieldManager="+manager,
			`{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"`+name+`"},"spec":`+spec+`}`, "Content-Type", "application/apply-patch+yaml")
	}
	ok(apply("one", `{"owner":"x","deep":{"a":1}}`), `"owner":"x"`, `"size":2`, `"a":1`, `"manager":"one"`)
	if a := apply("two", `{"owner":"y"}`); a.code != http.StatusConflict || !strings.Contains(a.body, `conflict with \"one\": .spec.owner`) {
		r.t.Fatalf("%d %s", a.code, a.body)
	}
	if a := apply("one", `{"deep":{"a":2}}`); strings.Contains(a.body, `"owner":"x"`) || !strings.Contains(a.body, `"a":2`) {
		r.t.Fatalf("what the manager states no more stays: %d %s", a.code, a.body)
	}
	strategic := r.call(c, "PATCH", gadgetsPath+"/"+name, `{}`, "Content-Type", "application/strategic-merge-patch+json")
	if strategic.code != http.StatusUnsupportedMediaType || strings.Contains(strategic.body, "strategic") || !strings.Contains(strategic.body, "application/merge-patch+json") {
		r.t.Fatalf("%d %s", strategic.code, strategic.body)
	}
	ok(r.call(c, "GET", gadgetsPath, "", "Accept", "application/json;as=Table;g=meta.k8s.io;v=v1"), `"`+name+`"`)
	ok(r.call(c, "GET", gadgetsPath+"?fieldSelector=metadata.name="+name, ""), `"kind":"GadgetList"`, `"`+name+`"`)
	accept := "application/vnd.kubernetes.protobuf, application/json" // which is what a client of typed kinds asks for
	if a := r.call(c, "GET", gadgetsPath+"/"+name, "", "Accept", accept); a.header.Get("Content-Type") != "application/json" {
		r.t.Fatalf("%d %s %s", a.code, a.header.Get("Content-Type"), a.body)
	}
	if a := r.call(c, "GET", gadgetsPath, "", "Accept", "application/vnd.kubernetes.protobuf"); a.code != http.StatusNotAcceptable || strings.Contains(a.body, "protobuf") {
		r.t.Fatalf("%d %s", a.code, a.body)
	}
	meta := "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	if a := r.call(c, "GET", gadgetsPath, "", "Accept", meta); a.code != http.StatusOK || !strings.HasPrefix(a.body, "k8s\x00") {
		r.t.Fatalf("%d %s", a.code, a.body)
	}
	if a := r.call(c, "POST", gadgetsPath+"?fieldValidation=Strict", `{"metadata":{"name":"x","nme":"y"}}`); a.code != http.StatusBadRequest || !strings.Contains(a.body, `metadata.nme`) {
		r.t.Fatalf("%d %s", a.code, a.body)
	}
	ok(r.call(c, "DELETE", gadgetsPath+"/"+name, ""))
}

// watchLines returns the events of a watch until it ends.
func (r *replica) watchLines(c *http.Client, path string) (<-chan string, func()) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	req, err := http.NewRequestWithContext(ctx, "GET", "https://"+r.addr+path, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		r.t.Fatalf("watching %s: %v %v", path, resp, err)
	}
	lines := make(chan string, 256)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(resp.Body); s.Scan(); {
			lines <- s.Text()
		}
	}()
	return lines, func() { resp.Body.Close(); cancel() }
}

// A kind comes and goes while clients read documents and use it and others. Only its own absence is noticed.
func TestKindsComeAndGoUnderRequests(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	r.call(c, "GET", "/openapi/v2", "") // is kept for as long as the server runs
	goroutines := runtime.NumGoroutine()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var running sync.WaitGroup
	use := func(paths ...string) {
		running.Go(func() {
			c := r.adminHTTP()
			defer c.CloseIdleConnections()
			for i := 0; ctx.Err() == nil; i++ {
				path := paths[i%len(paths)]
				a := r.call(c, "GET", path, "")
				custom := strings.Contains(path, "example.com")
				if a.code != http.StatusOK && !(custom && a.code == http.StatusNotFound) || a.code == http.StatusOK && !json.Valid([]byte(a.body)) && !strings.Contains(path, "watch") {
					t.Errorf("%s: %d %.200s", path, a.code, a.body)
					return
				}
			}
		})
	}
	use("/apis", "/apis/example.com/v1", "/openapi/v3/apis/example.com/v1")
	use(gadgetsPath, "/api/v1/namespaces/default/configmaps", "/apis/example.com/v1/watch/gadgets?timeoutSeconds=1")
	for i := range 100 {
		k := gadgetKind()
		if err := r.cfg.Kinds.Register(k); err != nil {
			t.Fatal(err)
		}
		a := r.call(c, "POST", gadgetsPath, fmt.Sprintf(`{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"a%d"}}`, i), "Content-Type", "application/json")
		if a.code != http.StatusCreated {
			t.Fatalf("round %d: %d %s", i, a.code, a.body)
		}
		if err := r.cfg.Kinds.Drop(k); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	running.Wait()
	c.CloseIdleConnections()
	late, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := wait.For(late, 20*time.Millisecond, func() error {
		if n := runtime.NumGoroutine(); n > goroutines {
			return fmt.Errorf("%d goroutines, there were %d", n, goroutines)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
