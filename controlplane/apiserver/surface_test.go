package apiserver

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
)

// F72, F73: a watch streams whole objects, as JSON, as protobuf and as table rows.
func TestWatch(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	for _, media := range []string{"application/json", "application/vnd.kubernetes.protobuf"} {
		t.Run(media, func(t *testing.T) {
			conf := r.config("admin", api.GroupMasters)
			conf.ContentType, conf.AcceptContentTypes = media, media
			c, err := kubernetes.NewForConfig(conf)
			if err != nil {
				t.Fatal(err)
			}
			maps := c.CoreV1().ConfigMaps("default")
			list, err := maps.List(ctx, metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			w, err := maps.Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion, LabelSelector: "seen=yes"})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Stop()
			name := strings.NewReplacer("/", "-", ".", "-").Replace(media)
			for _, seen := range []string{"no", "yes"} {
				m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name + "-" + seen, Labels: map[string]string{"seen": seen}}, Data: map[string]string{"k": "v"}}
				if _, err := maps.Create(ctx, m, metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			if err := maps.Delete(ctx, name+"-yes", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			for _, want := range []watch.EventType{watch.Added, watch.Deleted} {
				ev := <-w.ResultChan()
				m, ok := ev.Object.(*corev1.ConfigMap)
				if !ok || ev.Type != want || m.Name != name+"-yes" || m.Data["k"] != "v" {
					t.Fatalf("got %s %+v, want %s", ev.Type, ev.Object, want)
				}
			}
		})
	}
	// Rows, with the columns in the first event only.
	req, err := http.NewRequestWithContext(ctx, "GET", "https://"+r.addr+"/api/v1/namespaces/default/configmaps?watch=true&timeoutSeconds=5&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
	resp, err := r.adminHTTP().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for n := 0; lines.Scan(); n++ {
		var ev struct {
			Type   string
			Object metav1.Table
		}
		if err := json.Unmarshal(lines.Bytes(), &ev); err != nil {
			t.Fatalf("%v: %s", err, lines.Text())
		}
		if ev.Object.Kind != "Table" || (len(ev.Object.ColumnDefinitions) > 0) != (n == 0) {
			t.Errorf("event %d: %s", n, lines.Text())
		}
		if ev.Type == "BOOKMARK" {
			return
		}
	}
	t.Error("the watch ended without a bookmark")
}

// F16, F62, F76: informers of client-go run unmodified; a compacted revision is a 410.
func TestInformers(t *testing.T) {
	r := start(t, nil)
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	factory := informers.NewSharedInformerFactory(r.admin(), 0)
	added := make(chan string, 100)
	pods := factory.Core().V1().Pods().Informer()
	if _, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(o any) { added <- o.(*corev1.Pod).Name }}); err != nil {
		t.Fatal(err)
	}
	factory.Start(ctx.Done())
	defer func() { cancel(); factory.Shutdown() }()
	if !cache.WaitForCacheSync(ctx.Done(), pods.HasSynced) {
		t.Fatal("the informer did not sync")
	}
	r.must(newPod("late"))
	select {
	case name := <-added:
		if name != "late" {
			t.Errorf("added %s", name)
		}
	case <-ctx.Done():
		t.Fatal("the informer heard nothing")
	}
	// A revision that is no longer kept is a 410, which client-go answers with a new list.
	admin := r.admin().CoreV1().ConfigMaps("default")
	for range historyKept + 10 {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", GenerateName: "m-"}}
		if _, err := admin.Create(ctx, m, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// The watch cache applies the writes by itself: until it has, the old revision is still kept.
	if err := r.registry.CaughtUp(ctx); err != nil {
		t.Fatal(err)
	}
	a := r.call(r.adminHTTP(), "GET", "/api/v1/configmaps?watch=true&resourceVersion=2&timeoutSeconds=5", "")
	if !strings.Contains(a.body, `"code":410`) || !strings.Contains(a.body, `"reason":"Expired"`) {
		t.Errorf("watch of an old revision: %d %.300s", a.code, a.body)
	}
}

// F12: discovery, plain and aggregated, tells the same.
func TestDiscovery(t *testing.T) {
	r := start(t, nil)
	_, lists, err := r.admin().Discovery().ServerGroupsAndResources() // aggregated
	if err != nil {
		t.Fatal(err)
	}
	fresh := map[string]metav1.APIResource{}
	for _, l := range lists {
		for _, res := range l.APIResources {
			fresh[l.GroupVersion+"/"+res.Name] = res
		}
	}
	c := r.adminHTTP()
	plain := 0
	for _, k := range r.cfg.Kinds.All() {
		path := "/api/v1"
		if k.GVK.Group != "" {
			path = "/apis/" + k.GVK.GroupVersion().String()
		}
		var l metav1.APIResourceList
		if err := json.Unmarshal([]byte(r.call(c, "GET", path, "").body), &l); err != nil {
			t.Fatal(err)
		}
		for _, res := range l.APIResources {
			plain++
			if got, ok := fresh[l.GroupVersion+"/"+res.Name]; !ok || got.Kind != res.Kind || got.Namespaced != res.Namespaced || fmt.Sprint(got.Verbs) != fmt.Sprint(res.Verbs) {
				t.Errorf("%s %s: aggregated %+v, plain %+v", l.GroupVersion, res.Name, got, res)
			}
		}
	}
	if plain == 0 || fresh["v1/pods"].ShortNames[0] != "po" || fresh["apps/v1/deployments/scale"].Kind != "Scale" {
		t.Errorf("%d resources, pods %+v", plain, fresh["v1/pods"])
	}
	// The aggregated document is not sent twice.
	accept := "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	a := r.call(c, "GET", "/apis", "", "Accept", accept)
	if a.header.Get("ETag") == "" || !strings.Contains(a.header.Get("Content-Type"), "as=APIGroupDiscoveryList") {
		t.Errorf("%v", a.header)
	}
	if b := r.call(c, "GET", "/apis", "", "Accept", accept, "If-None-Match", a.header.Get("ETag")); b.code != 304 {
		t.Errorf("asked again: %d", b.code)
	}
}

// F40: the documents are there, refer to nothing that is missing, and have what kubectl looks for.
func TestOpenAPI(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	docs := []string{"/openapi/v2"}
	var index struct {
		Paths map[string]struct{ ServerRelativeURL string }
	}
	if err := json.Unmarshal([]byte(r.call(c, "GET", "/openapi/v3", "").body), &index); err != nil {
		t.Fatal(err)
	}
	for _, p := range index.Paths {
		docs = append(docs, p.ServerRelativeURL)
	}
	if index.Paths["apis/apps/v1"].ServerRelativeURL == "" {
		t.Errorf("%+v", index)
	}
	for _, url := range docs {
		a := r.call(c, "GET", url, "")
		var doc map[string]any
		if err := json.Unmarshal([]byte(a.body), &doc); a.code != 200 || err != nil {
			t.Fatalf("%s: %d %v", url, a.code, err)
		}
		checkRefs(t, url, doc, doc)
	}
	v2 := r.call(c, "GET", "/openapi/v2", "").body
	for _, words := range []string{`"x-kubernetes-patch-merge-key":"name"`, `"name":"fieldValidation"`, `"x-kubernetes-group-version-kind":[{"group":"apps","kind":"Deployment","version":"v1"}]`, `"/api/v1/namespaces/{namespace}/pods/{name}"`} {
		if !strings.Contains(v2, words) {
			t.Errorf("v2 lacks %s", words)
		}
	}
	doc, err := r.admin().Discovery().OpenAPISchema() // the protobuf form
	if err != nil || len(doc.GetDefinitions().GetAdditionalProperties()) < 100 {
		t.Errorf("protobuf: %v", err)
	}
	if a := r.call(c, "GET", "/openapi/v3/apis/apps/v1?hash=OLD", ""); a.code != 200 {
		t.Errorf("an old hash leads to %d", a.code) // redirected to the present one
	}
}

// checkRefs resolves every $ref of a document.
func checkRefs(t *testing.T, url string, doc map[string]any, v any) {
	t.Helper()
	switch v := v.(type) {
	case map[string]any:
		if ref, ok := v["$ref"].(string); ok {
			var at any = doc
			for _, part := range strings.Split(strings.TrimPrefix(ref, "#/"), "/") {
				m, _ := at.(map[string]any)
				at = m[part]
			}
			if at == nil {
				t.Errorf("%s refers to %s, which is not there", url, ref)
			}
		}
		for _, x := range v {
			checkRefs(t, url, doc, x)
		}
	case []any:
		for _, x := range v {
			checkRefs(t, url, doc, x)
		}
	}
}

// F119: the stages of a create are measured, in order, and found by the object's trace.
func TestTimeline(t *testing.T) {
	peer := api.Stage{Name: "scheduled", Actor: "scheduler/cp2"}
	r := start(t, func(c *Config) {
		c.PeerStages = func(_ context.Context, id string) []api.Stage { p := peer; p.TraceID = id; return []api.Stage{p} }
	})
	c := r.adminHTTP()
	a := r.call(c, "POST", "/api/v1/namespaces/default/pods", podJSON)
	trace := a.header.Get("Traceparent")
	if !strings.Contains(a.body, `"keelson.dev/traceparent":"`+trace+`"`) || api.TraceID(trace) == "" {
		t.Fatalf("trace %q: %s", trace, a.body)
	}
	names := func(query string) (out []string) {
		t.Helper()
		var stages []api.Stage
		a := r.call(c, "GET", "/timeline/"+api.TraceID(trace)+query, "")
		if err := json.Unmarshal([]byte(a.body), &stages); err != nil {
			t.Fatalf("%v: %s", err, a.body)
		}
		for i, s := range stages {
			if s.Actor == "apiserver/test" && (s.Object != "pod/default/p" || i > 0 && s.Start.Before(stages[i-1].Start)) {
				t.Errorf("stage %+v", s)
			}
			out = append(out, s.Name)
		}
		return out
	}
	const own = "[received authenticated authorized admitted validated committed]"
	if got := fmt.Sprint(names("?local=true")); got != own {
		t.Errorf("local: %s", got)
	}
	if got := fmt.Sprint(names("")); got != strings.TrimSuffix(own, "]")+" scheduled]" {
		t.Errorf("all: %s", got)
	}
	// The client's own trace is kept, and a bind joins the pod's.
	const mine = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
	a = r.call(c, "POST", "/api/v1/namespaces/default/pods", strings.Replace(podJSON, `"p"`, `"q"`, 1), "Traceparent", mine)
	if a.header.Get("Traceparent") != mine || !strings.Contains(a.body, mine) {
		t.Errorf("the client's trace: %v", a.header)
	}
	if a = r.call(c, "POST", "/api/v1/namespaces/default/pods/p/binding", `{"target":{"name":"n"}}`); a.code != 201 {
		t.Fatalf("%d %s", a.code, a.body)
	}
	if got := names("?local=true"); len(got) <= 6 || got[len(got)-1] != "committed" {
		t.Errorf("with the bind: %v", got)
	}
	refused(t, r.call(r.http(nil), "GET", "/timeline/x", "", "Authorization", "Bearer alice-token"), 403, `cannot get path "/timeline/x"`)
}

// Health tells what is not well; metrics count.
func TestHealthAndMetrics(t *testing.T) {
	sick := fmt.Errorf("the store has no leader")
	r := start(t, func(c *Config) { c.Ready = func(context.Context) error { return sick } })
	c := r.http(nil)
	if a := r.call(c, "GET", "/livez", ""); a.code != 200 || a.body != "ok" {
		t.Errorf("%d %s", a.code, a.body)
	}
	if a := r.call(c, "GET", "/readyz", ""); a.code != 500 || !strings.Contains(a.body, "[-]replica failed: the store has no leader") {
		t.Errorf("%d %s", a.code, a.body)
	}
	if a := r.call(c, "GET", "/readyz/registry", ""); a.code != 200 {
		t.Errorf("%d %s", a.code, a.body)
	}
	sick = nil
	if a := r.call(c, "GET", "/readyz?verbose", ""); a.code != 200 || !strings.Contains(a.body, "[+]authorizer ok") {
		t.Errorf("%d %s", a.code, a.body)
	}
	admin := r.adminHTTP()
	r.call(admin, "GET", "/api/v1/namespaces/default/pods/ghost", "")
	a := r.call(admin, "GET", "/metrics", "")
	if want := `apiserver_request_total{code="404",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="",verb="GET",version="v1"} 1`; !strings.Contains(a.body, want) {
		t.Errorf("no %s", want)
	}
}

// A shutdown ends watches and lets running requests finish.
func TestShutdown(t *testing.T) {
	const deadline = 30 * time.Second // at which it cuts off what has not ended
	r := start(t, func(c *Config) { c.ShutdownDeadline = deadline })
	resp, err := r.adminHTTP().Get("https://" + r.addr + "/api/v1/pods?watch=true&resourceVersion=0")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	began := time.Now()
	r.stop()
	if _, err := io.ReadAll(resp.Body); err != nil {
		t.Errorf("the watch ended with %v", err)
	}
	err = <-r.stopped
	r.stopped <- err // for the clean-up
	if err != nil || time.Since(began) >= deadline {
		t.Errorf("%v after %s", err, time.Since(began))
	}
	if _, err := r.http(nil).Get("https://" + r.addr + "/livez"); err == nil {
		t.Error("it still listens")
	}
}

// Callers in this process take the same road: authorization and admission hold for them.
func TestBackendIsNoShortcut(t *testing.T) {
	r := start(t, nil)
	kind := r.known.byName["pods"]
	do := func(u api.User, p *corev1.Pod) error {
		_, err := r.Backend().Do(within(t), &api.Request{User: u, Verb: api.VerbCreate, Kind: kind, Namespace: "default", Object: p})
		return err
	}
	if err := do(api.User{}, newPod("a")); err == nil || !strings.Contains(err.Error(), "names no user") {
		t.Errorf("nobody: %v", err)
	}
	if err := do(api.User{Name: "eve"}, newPod("a")); err == nil || !strings.Contains(err.Error(), `User "eve" cannot create resource "pods"`) {
		t.Errorf("eve: %v", err)
	}
	bad := newPod("a")
	bad.Spec.Containers = nil
	if err := do(itself(), bad); err == nil || !strings.Contains(err.Error(), "spec.containers: Required value") {
		t.Errorf("without containers: %v", err)
	}
	eventually(t, func() error { // once their roles have been read
		return do(api.User{Name: api.UserController, Groups: []string{api.GroupAuthenticated}}, newPod("a"))
	})
}

// The stages stand in this order: what an earlier one refuses, no later one sees.
func TestStagesInOrder(t *testing.T) {
	r := start(t, nil)
	admin, nobody := r.adminHTTP(), r.http(nil)
	alice := []string{"Authorization", "Bearer alice-token"}
	agent := r.cert(pki.Client(api.NodeUserPrefix+"n1", api.GroupNodes))
	const malformed, noContainers = `{`, `{"metadata":{"name":"p"},"spec":{}}`
	const here, nowhere = "/api/v1/namespaces/default/pods", "/api/v1/namespaces/nowhere/pods"
	// 1 before 2 and all others.
	refused(t, r.call(nobody, "POST", nowhere, malformed, "Authorization", "Bearer bad"), 401, "Unauthorized")
	// 2 before the body is read, and before 3.
	refused(t, r.call(nobody, "POST", nowhere, malformed, alice...), 403, "cannot create")
	// 3 (the namespace) before 4 (the containers).
	refused(t, r.call(admin, "POST", nowhere, noContainers), 404, `namespaces "nowhere" not found`)
	// 4 before 5 (an agent makes mirror pods only).
	refused(t, r.call(r.http(&agent), "POST", here, noContainers), 422, "spec.containers: Required value")
	// 5 before 6 (the pod is there already).
	r.must(newPod("p"))
	refused(t, r.call(r.http(&agent), "POST", here, podJSON), 403, "can only create mirror pods")
	refused(t, r.call(admin, "POST", here, podJSON), 409, "already exists")
}

// Only the collection inside of a namespace, or of a kind without one, can be deleted; namespaces only one by one.
func TestDeleteCollectionIsRefusedClusterWide(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	kept := r.must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kept"}})
	for _, path := range []string{"/api/v1/configmaps", "/api/v1/pods?labelSelector=a%3Db", "/apis/apps/v1/deployments", "/api/v1/namespaces", "/api/v1/namespaces?labelSelector=a%3Db"} {
		got := r.call(c, "DELETE", path, "")
		if got.code != http.StatusMethodNotAllowed || !strings.Contains(got.body, `"MethodNotAllowed"`) {
			t.Errorf("DELETE %s: %d %s", path, got.code, got.body)
		}
	}
	if got := r.call(c, "GET", "/api/v1/namespaces/default/configmaps/"+kept.GetName(), ""); got.code != http.StatusOK {
		t.Errorf("the object is gone: %d", got.code)
	}
	for _, path := range []string{"/api/v1/namespaces/default/configmaps", "/api/v1/persistentvolumes"} {
		if got := r.call(c, "DELETE", path, ""); got.code != http.StatusOK {
			t.Errorf("DELETE %s: %d %s", path, got.code, got.body)
		}
	}
	if list := r.call(c, "GET", "/api/v1", ""); strings.Contains(list.body, `"name":"namespaces"`) {
		var resources metav1.APIResourceList
		if err := json.Unmarshal([]byte(list.body), &resources); err != nil {
			t.Fatal(err)
		}
		for _, res := range resources.APIResources {
			if res.Name == "namespaces" && slices.Contains(res.Verbs, "deletecollection") {
				t.Errorf("discovery offers %v for namespaces", res.Verbs)
			}
		}
	}
}

// Paths that can name nothing are refused with a Status, and what a client writes about itself is not kept whole.
func TestHostilePathsAndStrings(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	for path, code := range map[string]int{
		"//api/v1/pods":              http.StatusBadRequest,
		"/api/v1//pods":              http.StatusBadRequest,
		"/api/v1/namespaces//pods":   http.StatusBadRequest,
		"/api/v1/pods//":             http.StatusBadRequest,
		"/api/v1/namespaces/%2F%2Fx": http.StatusBadRequest,
		"/api/v1/namespaces/default/pods/" + strings.Repeat("x", 4<<10): http.StatusRequestURITooLong,
		"/" + strings.Repeat("%20", 2<<10):                              http.StatusRequestURITooLong,
	} {
		got := r.call(c, "GET", path, "")
		if got.code != code || !strings.Contains(got.body, `"kind":"Status"`) {
			t.Errorf("GET %.60s: %d %.200s", path, got.code, got.body)
		}
	}
	const body = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"},"data":{"k":"v"}}`
	trace := "00-" + strings.Repeat("ab", 16) + "-" + strings.Repeat("cd", 8) + "-01"
	long := strings.Repeat("a", 30<<10)
	if got := r.call(c, "POST", "/api/v1/namespaces/default/configmaps", body, "User-Agent", long, "Traceparent", trace); got.code != http.StatusCreated ||
		len(got.body) > 4096 {
		t.Errorf("%d, %d bytes", got.code, len(got.body))
	}
	if got := r.call(c, "POST", "/api/v1/namespaces/default/configmaps", strings.Replace(body, `"a"`, `"b"`, 1), "Traceparent", long); got.code != http.StatusCreated ||
		strings.Contains(got.body, "aaaa") || len(got.header.Get("Traceparent")) > 100 {
		t.Errorf("%d, %d bytes", got.code, len(got.body))
	}
	unknown := make([]string, 500)
	for i := range unknown {
		unknown[i] = fmt.Sprintf(`"%s%d":1`, strings.Repeat("u", 100), i)
	}
	got := r.call(c, "POST", "/api/v1/namespaces/default/configmaps", `{"metadata":{"name":"c"},`+strings.Join(unknown, ",")+"}")
	size := 0
	for _, w := range got.header.Values("Warning") {
		size += len(w)
	}
	if got.code != http.StatusCreated || size == 0 || size > 8<<10 {
		t.Errorf("%d with %d bytes of warnings", got.code, size)
	}
}
