package apiserver_test

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
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// F72, F73: a watch streams whole objects, as JSON, as protobuf and as table rows.
func TestWatch(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	for _, media := range []string{"application/json", "application/vnd.kubernetes.protobuf"} {
		t.Run(media, func(t *testing.T) {
			conf := r.ClientConfig("admin", api.GroupMasters)
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
			w, err := maps.Watch(ctx, metav1.ListOptions{ResourceVersion: list.ResourceVersion,
				LabelSelector: "seen=yes"})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Stop()
			name := strings.NewReplacer("/", "-", ".", "-").Replace(media)
			for _, seen := range []string{"no", "yes"} {
				m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name + "-" + seen,
					Labels: map[string]string{"seen": seen}}, Data: map[string]string{"k": "v"}}
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
	req, err := http.NewRequestWithContext(ctx, "GET",
		"https://"+r.Addr+
			"/api/v1/namespaces/default/configmaps?watch=true&timeoutSeconds=5&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
	resp, err := r.AdminHTTP().Do(req)
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
	r := apiservertest.StartReplica(t, nil)
	ctx, cancel := context.WithCancel(apiservertest.Within(t))
	defer cancel()
	factory := informers.NewSharedInformerFactory(r.Admin(), 0)
	added := make(chan string, 100)
	pods := factory.Core().V1().Pods().Informer()
	if _, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(o any) {
		added <- o.(*corev1.Pod).Name
	}}); err != nil {
		t.Fatal(err)
	}
	factory.Start(ctx.Done())
	defer func() { cancel(); factory.Shutdown() }()
	if !cache.WaitForCacheSync(ctx.Done(), pods.HasSynced) {
		t.Fatal("the informer did not sync")
	}
	r.Must(apiservertest.NewPod("late"))
	select {
	case name := <-added:
		if name != "late" {
			t.Errorf("added %s", name)
		}
	case <-ctx.Done():
		t.Fatal("the informer heard nothing")
	}
	// A revision that is no longer kept is a 410, which client-go answers with a new list.
	admin := r.Admin().CoreV1().ConfigMaps("default")
	for range apiservertest.HistoryKept + 10 {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", GenerateName: "m-"}}
		if _, err := admin.Create(ctx, m, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// The watch cache applies the writes by itself: until it has, the old revision is still kept.
	if err := r.Registry.CaughtUp(ctx); err != nil {
		t.Fatal(err)
	}
	a := r.Call(r.AdminHTTP(), "GET", "/api/v1/configmaps?watch=true&resourceVersion=2&timeoutSeconds=5", "")
	if !strings.Contains(a.Body, `"code":410`) || !strings.Contains(a.Body, `"reason":"Expired"`) {
		t.Errorf("watch of an old revision: %d %.300s", a.Code, a.Body)
	}
}

// F119: the stages of a create are measured, in order, and found by the object's trace.
func TestTimeline(t *testing.T) {
	peer := api.Stage{Name: "scheduled", Actor: "scheduler/cp2"}
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Timeline.PeerStages = func(_ context.Context, id string) []api.Stage {
			p := peer
			p.TraceID = id
			return []api.Stage{p}
		}
	})
	c := r.AdminHTTP()
	a := r.Call(c, "POST", "/api/v1/namespaces/default/pods", podJSON)
	trace := a.Header.Get("Traceparent")
	if !strings.Contains(a.Body, `"keelson.dev/traceparent":"`+trace+`"`) || api.TraceID(trace) == "" {
		t.Fatalf("trace %q: %s", trace, a.Body)
	}
	names := func(query string) (out []string) {
		t.Helper()
		var stages []api.Stage
		a := r.Call(c, "GET", "/timeline/"+api.TraceID(trace)+query, "")
		if err := json.Unmarshal([]byte(a.Body), &stages); err != nil {
			t.Fatalf("%v: %s", err, a.Body)
		}
		for i, s := range stages {
			if s.Actor == "apiserver/test" &&
				(s.Object != "pod/default/p" || i > 0 && s.Start.Before(stages[i-1].Start)) {
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
	a = r.Call(c, "POST", "/api/v1/namespaces/default/pods", strings.Replace(podJSON, `"p"`, `"q"`, 1),
		"Traceparent", mine)
	if a.Header.Get("Traceparent") != mine || !strings.Contains(a.Body, mine) {
		t.Errorf("the client's trace: %v", a.Header)
	}
	if a = r.Call(c, "POST", "/api/v1/namespaces/default/pods/p/binding",
		`{"metadata":{"name":"p"},"target":{"name":"n"}}`); a.Code != 201 {
		t.Fatalf("%d %s", a.Code, a.Body)
	}
	if got := names("?local=true"); len(got) <= 6 || got[len(got)-1] != "committed" {
		t.Errorf("with the bind: %v", got)
	}
	apiservertest.Refused(t, r.Call(r.HTTP(nil), "GET", "/timeline/x", "", "Authorization", "Bearer alice-token"), 403,
		`cannot get path "/timeline/x"`)
}

// Health tells what is not well; metrics count.
func TestHealthAndMetrics(t *testing.T) {
	sick := fmt.Errorf("the store has no leader")
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.State.Ready = func(context.Context) error {
			return sick
		}
	})
	c := r.HTTP(nil)
	if a := r.Call(c, "GET", "/livez", ""); a.Code != 200 || a.Body != "ok" {
		t.Errorf("%d %s", a.Code, a.Body)
	}
	if a := r.Call(c, "GET", "/readyz", ""); a.Code != 500 ||
		!strings.Contains(a.Body, "[-]replica failed: the store has no leader") {
		t.Errorf("%d %s", a.Code, a.Body)
	}
	if a := r.Call(c, "GET", "/readyz/registry", ""); a.Code != 200 {
		t.Errorf("%d %s", a.Code, a.Body)
	}
	sick = nil
	if a := r.Call(c, "GET", "/readyz?verbose", ""); a.Code != 200 || !strings.Contains(a.Body, "[+]authorizer ok") {
		t.Errorf("%d %s", a.Code, a.Body)
	}
	admin := r.AdminHTTP()
	r.Call(admin, "GET", "/api/v1/namespaces/default/pods/ghost", "")
	a := r.Call(admin, "GET", "/metrics", "")
	if want := `apiserver_request_total{code="404",component="apiserver",dry_run="",group="",resource="pods",` +
		`scope="resource",subresource="",verb="GET",version="v1"} 1`; !strings.Contains(a.Body, want) {
		t.Errorf("no %s", want)
	}
}

// A shutdown ends watches and lets running requests finish.
func TestShutdown(t *testing.T) {
	const deadline = 30 * time.Second // at which it cuts off what has not ended
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) { c.Serving.ShutdownDeadline = deadline })
	resp, err := r.AdminHTTP().Get("https://" + r.Addr + "/api/v1/pods?watch=true&resourceVersion=0")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	began := time.Now()
	r.StopServer()
	if _, err := io.ReadAll(resp.Body); err != nil {
		t.Errorf("the watch ended with %v", err)
	}
	err = <-r.Stopped
	r.Stopped <- err // for the clean-up
	if err != nil || time.Since(began) >= deadline {
		t.Errorf("%v after %s", err, time.Since(began))
	}
	if _, err := r.HTTP(nil).Get("https://" + r.Addr + "/livez"); err == nil {
		t.Error("it still listens")
	}
}

// Callers in this process take the same road: authorization and admission hold for them.
func TestBackendIsNoShortcut(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	kind := r.Kinds.ByType(&corev1.Pod{})
	do := func(u api.User, p *corev1.Pod) error {
		_, err := r.Server.Backend().Do(apiservertest.Within(t),
			&api.Request{User: u, Verb: api.VerbCreate, Kind: kind, Namespace: "default", Object: p})
		return err
	}
	if err := do(api.User{}, apiservertest.NewPod("a")); err == nil || !strings.Contains(err.Error(), "has no user") {
		t.Errorf("nobody: %v", err)
	}
	if err := do(api.User{Name: "eve"}, apiservertest.NewPod("a")); err == nil ||
		!strings.Contains(err.Error(), `User "eve" cannot create resource "pods"`) {
		t.Errorf("eve: %v", err)
	}
	bad := apiservertest.NewPod("a")
	bad.Spec.Containers = nil
	if err := do(api.APIServerUser(), bad); err == nil ||
		!strings.Contains(err.Error(), "spec.containers: Required value") {
		t.Errorf("without containers: %v", err)
	}
	apiservertest.Eventually(t, func() error { // once their roles have been read
		return do(api.User{Name: api.UserController, Groups: []string{api.GroupAuthenticated}},
			apiservertest.NewPod("a"))
	})
}

// The stages stand in this order: what an earlier one refuses, no later one sees.
func TestStagesInOrder(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	admin, nobody := r.AdminHTTP(), r.HTTP(nil)
	alice := []string{"Authorization", "Bearer alice-token"}
	agent := r.Cert(pki.Client(api.NodeUserPrefix+"n1", api.GroupNodes))
	const malformed, noContainers = `{`, `{"metadata":{"name":"p"},"spec":{}}`
	const here, nowhere = "/api/v1/namespaces/default/pods", "/api/v1/namespaces/nowhere/pods"
	// 1 before 2 and all others.
	apiservertest.Refused(t, r.Call(nobody, "POST", nowhere, malformed, "Authorization", "Bearer bad"), 401,
		"Unauthorized")
	// 2 before the body is read, and before 3.
	apiservertest.Refused(t, r.Call(nobody, "POST", nowhere, malformed, alice...), 403, "cannot create")
	// 3 (the namespace) before 4 (the containers).
	apiservertest.Refused(t, r.Call(admin, "POST", nowhere, noContainers), 404, `namespaces "nowhere" not found`)
	// 4 before 5 (an agent makes mirror pods only).
	apiservertest.Refused(t, r.Call(r.HTTP(&agent), "POST", here, noContainers), 422, "spec.containers: Required value")
	// 5 before 6 (the pod is there already).
	r.Must(apiservertest.NewPod("p"))
	apiservertest.Refused(t, r.Call(r.HTTP(&agent), "POST", here, podJSON), 403, "can only create mirror pods")
	apiservertest.Refused(t, r.Call(admin, "POST", here, podJSON), 409, "already exists")
}

// Only the collection inside of a namespace, or of a kind without one, can be deleted; namespaces
// only one by one.
func TestDeleteCollectionIsRefusedClusterWide(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	kept := r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kept"}})
	for _, path := range []string{"/api/v1/configmaps", "/api/v1/pods?labelSelector=a%3Db", "/apis/apps/v1/deployments",
		"/api/v1/namespaces", "/api/v1/namespaces?labelSelector=a%3Db"} {
		got := r.Call(c, "DELETE", path, "")
		if got.Code != http.StatusMethodNotAllowed || !strings.Contains(got.Body, `"MethodNotAllowed"`) {
			t.Errorf("DELETE %s: %d %s", path, got.Code, got.Body)
		}
	}
	if got := r.Call(c, "GET", "/api/v1/namespaces/default/configmaps/"+kept.GetName(), ""); got.Code != http.StatusOK {
		t.Errorf("the object is gone: %d", got.Code)
	}
	for _, path := range []string{"/api/v1/namespaces/default/configmaps", "/api/v1/persistentvolumes"} {
		if got := r.Call(c, "DELETE", path, ""); got.Code != http.StatusOK {
			t.Errorf("DELETE %s: %d %s", path, got.Code, got.Body)
		}
	}
	if list := r.Call(c, "GET", "/api/v1", ""); strings.Contains(list.Body, `"name":"namespaces"`) {
		var resources metav1.APIResourceList
		if err := json.Unmarshal([]byte(list.Body), &resources); err != nil {
			t.Fatal(err)
		}
		for _, res := range resources.APIResources {
			if res.Name == "namespaces" && slices.Contains(res.Verbs, "deletecollection") {
				t.Errorf("discovery offers %v for namespaces", res.Verbs)
			}
		}
	}
}

// Paths that can name nothing are refused with a Status, and what a client writes about itself is
// not kept whole.
func TestHostilePathsAndStrings(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	for path, code := range map[string]int{
		"//api/v1/pods":              http.StatusBadRequest,
		"/api/v1//pods":              http.StatusBadRequest,
		"/api/v1/namespaces//pods":   http.StatusBadRequest,
		"/api/v1/pods//":             http.StatusBadRequest,
		"/api/v1/namespaces/%2F%2Fx": http.StatusBadRequest,
		"/api/v1/namespaces/default/pods/" + strings.Repeat("x", 4<<10): http.StatusRequestURITooLong,
		"/" + strings.Repeat("%20", 2<<10):                              http.StatusRequestURITooLong,
	} {
		got := r.Call(c, "GET", path, "")
		if got.Code != code || !strings.Contains(got.Body, `"kind":"Status"`) {
			t.Errorf("GET %.60s: %d %.200s", path, got.Code, got.Body)
		}
	}
	const body = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"},"data":{"k":"v"}}`
	trace := "00-" + strings.Repeat("ab", 16) + "-" + strings.Repeat("cd", 8) + "-01"
	long := strings.Repeat("a", 30<<10)
	if got := r.Call(c, "POST", "/api/v1/namespaces/default/configmaps", body, "User-Agent", long, "Traceparent",
		trace); got.Code != http.StatusCreated ||
		len(got.Body) > 4096 {
		t.Errorf("%d, %d bytes", got.Code, len(got.Body))
	}
	if got := r.Call(c, "POST", "/api/v1/namespaces/default/configmaps", strings.Replace(body, `"a"`, `"b"`, 1),
		"Traceparent", long); got.Code != http.StatusCreated ||
		strings.Contains(got.Body, "aaaa") || len(got.Header.Get("Traceparent")) > 100 {
		t.Errorf("%d, %d bytes", got.Code, len(got.Body))
	}
	unknown := make([]string, 500)
	for i := range unknown {
		unknown[i] = fmt.Sprintf(`"%s%d":1`, strings.Repeat("u", 100), i)
	}
	got := r.Call(c, "POST", "/api/v1/namespaces/default/configmaps",
		`{"metadata":{"name":"c"},`+strings.Join(unknown, ",")+"}")
	size := 0
	for _, w := range got.Header.Values("Warning") {
		size += len(w)
	}
	if got.Code != http.StatusCreated || size == 0 || size > 8<<10 {
		t.Errorf("%d with %d bytes of warnings", got.Code, size)
	}
}
