package aggregation_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/controlplane/registry/registrytest"
)

// callers lets controllers call the aggregated APIs of a Server.
type callers struct{ *apiserver.Server }

func (c callers) Discover(ctx context.Context) ([]engine.AggregatedResource, map[schema.GroupVersion]error) {
	var all []engine.AggregatedResource
	for _, remote := range c.Aggregated().Discover(ctx) {
		for _, res := range remote.Resources {
			all = append(all, engine.AggregatedResource{GroupVersionResource: remote.GV.WithResource(res.Name),
				APIResource: res})
		}
	}
	return all, nil
}

func (c callers) Call(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error) {
	got, code, err := c.Aggregated().Call(ctx, api.User{Name: api.UserController, Groups: []string{api.GroupMasters}},
		method, path, query, body)
	if err == nil && code/100 != 2 {
		err = apierrors.NewGenericServerResponse(code, method, schema.GroupResource{}, "",
			apiserver.ErrorText(got), 0, true)
	}
	return got, err
}

const (
	cratesPath    = "/apis/strict.example.com/v1/namespaces/default/crates"
	cratesTable   = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
	mergePatch    = "application/merge-patch+json"
	cratesListing = `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"strict.example.com/v1","resources":[
		{"name":"crates","namespaced":true,"kind":"Crate","verbs":["get","list","delete","deletecollection","patch"]}]}`
)

// strict is an aggregated API server for the metadata of crates. It returns pages of one object and
// rejects media types that Kubernetes' library does not support.
type strict struct {
	mu      sync.Mutex
	objects map[string]*metav1.PartialObjectMetadata // by path
	calls   map[string]bool                          // method, Accept and Content-Type of the calls
}

func (s *strict) put(namespace, name string, owners ...metav1.OwnerReference) {
	s.objects[strings.Replace(cratesPath, "default", namespace, 1)+"/"+
		name] = &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: name, UID: types.UID("u-" + name), ResourceVersion: "1", OwnerReferences: owners}}
}

func (s *strict) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.URL.Path == "/apis/strict.example.com/v1" {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, cratesListing)
		return
	}
	if !strings.Contains(r.URL.Path, "/crates") {
		http.NotFound(w, r)
		return
	}
	s.calls[strings.Join([]string{r.Method, r.Header.Get("Accept"), r.Header.Get("Content-Type")}, " ")] = true
	if !strings.Contains(r.Header.Get("Accept"), "application/json") {
		w.WriteHeader(http.StatusNotAcceptable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	body, _ := io.ReadAll(r.Body)
	o := s.objects[r.URL.Path]
	switch {
	case strings.HasSuffix(r.URL.Path, "/crates"):
		s.collection(w, r)
	case o == nil:
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
	case r.Method == http.MethodPatch && r.Header.Get("Content-Type") != mergePatch,
		r.Method == http.MethodDelete && r.Header.Get("Content-Type") != "application/json":
		w.WriteHeader(http.StatusUnsupportedMediaType)
	case r.Method == http.MethodPatch:
		if json.Unmarshal(body, o) != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		o.ResourceVersion += "1"
		_ = json.NewEncoder(w).Encode(o)
	case r.Method == http.MethodDelete:
		var options metav1.DeleteOptions
		if p := &options.Preconditions; json.Unmarshal(body, &options) != nil || *p == nil || *(*p).UID != o.UID {
			w.WriteHeader(http.StatusConflict)
			return
		}
		delete(s.objects, r.URL.Path)
		_ = json.NewEncoder(w).Encode(o)
	default:
		_ = json.NewEncoder(w).Encode(o)
	}
}

// collection serves a list with one object, and deletes all objects of a namespace.
func (s *strict) collection(w http.ResponseWriter, r *http.Request) {
	var paths []string
	for path := range s.objects {
		if strings.HasPrefix(path, r.URL.Path+"/") || !strings.Contains(r.URL.Path, "/namespaces/") {
			paths = append(paths, path)
		}
	}
	if r.Method == http.MethodDelete {
		for _, path := range paths {
			delete(s.objects, path)
		}
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Success"}`)
		return
	}
	slices.Sort(paths)
	list := metav1.PartialObjectMetadataList{Items: []metav1.PartialObjectMetadata{}}
	at, found := slices.BinarySearch(paths, r.URL.Query().Get("continue"))
	if found {
		at++
	}
	if at < len(paths) {
		list.Items = append(list.Items, *s.objects[paths[at]])
		if at+1 < len(paths) {
			list.Continue = paths[at]
		}
	}
	_ = json.NewEncoder(w).Encode(list)
}

// P28, F71: the garbage collector and the namespace controller work with an aggregated server over
// HTTP, with media types that every server of Kubernetes' library serves.
func TestControllersOfAggregatedObjectsSendCommonMediaTypes(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	s := &strict{objects: map[string]*metav1.PartialObjectMetadata{}, calls: map[string]bool{}}
	keep := b.Replica.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "keep"}})
	kept := metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: "keep", UID: keep.GetUID()}
	gone := metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: "gone", UID: "gone"}
	s.put("default", "detached", kept, gone)
	s.put("default", "collected", gone)
	s.put("default", "stays", kept)
	s.put("short", "inside")
	b.Extension("strict", s)
	if c := b.AddAPIService("strict.example.com", "strict", nil); c.Status != "True" {
		t.Fatalf("the server is %+v", c)
	}
	b.Replica.Must(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "short"}})
	b.Replica.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "dependent",
		OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "strict.example.com/v1", Kind: "Crate", Name: "never", UID: "never"}}}})

	ctx, cancel := context.WithCancel(t.Context())
	c := client.New(registrytest.NewBackend(b.Replica.Registry), b.Replica.Kinds)
	informers := client.NewInformers(c.As(api.User{Name: api.UserController}))
	d := engine.Deps{Client: c, Informers: informers, Log: slog.New(slog.DiscardHandler),
		Timeline: api.NewTimeline(100),
		Replica:  "test", ConfirmLeadership: func(context.Context, uint64) error {
			return nil
		}, Aggregated: callers{b.Replica.Server}}
	leader := engine.NewEngine(d, engine.Options{}, garbagecollector.New(d), namespace.New(d))
	var running sync.WaitGroup
	running.Go(func() { _ = informers.Run(ctx) })
	running.Go(func() { _ = leader.Run(ctx, 0) })
	defer running.Wait()
	defer cancel()
	if err := b.Replica.Admin().CoreV1().Namespaces().Delete(ctx, "short", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.Replica.Await(func() bool {
		_, err := b.Replica.Admin().CoreV1().Namespaces().Get(ctx, "short", metav1.GetOptions{})
		_, dep := b.Replica.Admin().CoreV1().ConfigMaps("default").Get(ctx, "dependent", metav1.GetOptions{})
		s.mu.Lock()
		defer s.mu.Unlock()
		detached := s.objects[cratesPath+"/detached"]
		return apierrors.IsNotFound(err) && apierrors.IsNotFound(dep) && len(s.objects) == 2 &&
			s.objects[cratesPath+"/stays"] != nil &&
			detached != nil && len(detached.OwnerReferences) == 1
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	want := map[string]bool{
		"GET " + cratesTable + " ":                 true,
		"GET application/json ":                    true,
		"PATCH application/json " + mergePatch:     true,
		"DELETE application/json application/json": true,
	}
	for call := range s.calls {
		if !want[call] {
			t.Errorf("a call has the method, Accept and Content-Type %q", call)
		}
	}
	for call := range want {
		if !s.calls[call] {
			t.Errorf("no call has the method, Accept and Content-Type %q", call)
		}
	}
}
