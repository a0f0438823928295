package subresource_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// usageOfSome returns metrics of all objects with the label measured.
func usageOfSome(of []api.Object) (out []api.Object) {
	use := func(cpu, memory string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu),
			corev1.ResourceMemory: resource.MustParse(memory)}
	}
	window := metav1.Duration{Duration: 15 * time.Second}
	for _, o := range of {
		meta := metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName(), Labels: o.GetLabels()}
		switch {
		case o.GetLabels()["measured"] == "":
		case o.GetNamespace() == "":
			out = append(out, &metricsv1beta1.NodeMetrics{ObjectMeta: meta,
				Timestamp: metav1.NewTime(time.Unix(1000, 0)), Window: window,
				Usage: use("1500m", "2Gi")})
		default:
			out = append(out, &metricsv1beta1.PodMetrics{ObjectMeta: meta,
				Timestamp: metav1.NewTime(time.Unix(1000, 0)), Window: window,
				Containers: []metricsv1beta1.ContainerMetrics{
					{Name: "app", Usage: use("250123456n", "30Mi")}, {Name: "side", Usage: use("10m", "2Mi")}}})
		}
	}
	return out
}

// startMeasured starts a replica with a Node and pods, some with metrics.
func startMeasured(t *testing.T) *apiservertest.Replica {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) { c.State.Usage = usageOfSome })
	node := func(name string, labels map[string]string) {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2"),
			corev1.ResourceMemory: resource.MustParse("4Gi")}
		n = r.Must(n).(*corev1.Node)
		n = n.DeepCopy()
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2"),
			corev1.ResourceMemory: resource.MustParse("4Gi")}
		if _, err := r.Admin().CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	node("w1", map[string]string{"measured": "yes"})
	node("w2", nil)
	r.Must(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}})
	r.DefaultAccount("other")
	for _, p := range []struct{ namespace, name, app, measured string }{
		{"default", "a", "web", "yes"}, {"default", "b", "db", "yes"}, {"default", "young", "web", ""},
		{"other", "c", "web", "yes"},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: p.name,
			Labels: map[string]string{"app": p.app}},
			Spec: corev1.PodSpec{NodeName: "w1", Containers: []corev1.Container{{Name: "app", Image: "i"},
				{Name: "side", Image: "i"}}}}
		if p.measured != "" {
			pod.Labels["measured"] = p.measured
		}
		r.Must(pod)
	}
	return r
}

// metrics.k8s.io answers for what is stored and measured.
func TestMetricsAreServed(t *testing.T) {
	r := startMeasured(t)
	c := r.AdminHTTP()
	const at = "/apis/metrics.k8s.io/v1beta1"
	for path, want := range map[string]string{
		at + "/nodes": "w1",
		at + "/nodes?labelSelector=measured%3Dno": "",
		at + "/pods":                                       "default/a default/b other/c",
		at + "/namespaces/default/pods":                    "default/a default/b",
		at + "/namespaces/other/pods?limit=500":            "other/c",
		at + "/namespaces/none/pods":                       "",
		at + "/pods?labelSelector=app%3Dweb":               "default/a other/c",
		at + "/namespaces/default/pods?labelSelector=!app": "",
		at + "/pods?fieldSelector=metadata.name%3Dc":       "other/c",
	} {
		a := r.Call(c, "GET", path, "")
		if a.Code != 200 || a.Names(t) != want {
			t.Errorf("%s: %d, %s; want %q", path, a.Code, a.Body, want)
		}
	}
	var p metricsv1beta1.PodMetrics
	a := r.Call(c, "GET", at+"/namespaces/default/pods/a", "")
	if err := json.Unmarshal([]byte(a.Body), &p); err != nil || p.Kind != "PodMetrics" ||
		p.APIVersion != "metrics.k8s.io/v1beta1" ||
		len(p.Containers) != 2 || p.Containers[0].Usage.Cpu().MilliValue() != 251 ||
		p.Window.Duration != 15*time.Second || p.Labels["app"] != "web" {
		t.Errorf("of pod a: %v: %s", err, a.Body)
	}
	for _, path := range []string{"/nodes/w2", "/nodes/none", "/namespaces/default/pods/young",
		"/namespaces/other/pods/a"} {
		if a := r.Call(c, "GET", at+path, ""); a.Code != 404 || !strings.Contains(a.Body, `.metrics.k8s.io \"`) {
			t.Errorf("%s: %d %s", path, a.Code, a.Body)
		}
	}
	table := r.Call(c, "GET", at+"/namespaces/default/pods", "", "Accept",
		"application/json;as=Table;g=meta.k8s.io;v=v1")
	for _, want := range []string{`"name":"cpu"`, `"cells":["a","261m","32Mi","15s"]`} {
		if !strings.Contains(table.Body, want) {
			t.Errorf("the table has no %s: %s", want, table.Body)
		}
	}
	for method, path := range map[string]string{"DELETE": at + "/nodes/w1", "PUT": at + "/nodes/w1",
		"POST": at + "/namespaces/default/pods"} {
		if a := r.Call(c, method, path,
			`{"kind":"PodMetrics","apiVersion":"metrics.k8s.io/v1beta1","metadata":{"name":"x"}}`,
			"Content-Type", "application/json"); a.Code != 405 {
			t.Errorf("%s %s: %d %s", method, path, a.Code, a.Body)
		}
	}
	if a := r.Call(c, "GET", at+"/pods?watch=true", ""); a.Code != 405 {
		t.Errorf("a watch: %d %s", a.Code, a.Body)
	}
}

// Reading metrics is a right like any other, of a role that goes into view, edit and admin.
func TestMetricsAreForThoseWhoMayReadThem(t *testing.T) {
	r := startMeasured(t)
	role, err := r.Admin().RbacV1().ClusterRoles().Get(t.Context(), "system:aggregated-metrics-reader",
		metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, whole := range []string{"admin", "edit", "view"} {
		if role.Labels["rbac.authorization.k8s.io/aggregate-to-"+whole] != "true" {
			t.Errorf("the role does not go into %s: %v", whole, role.Labels)
		}
	}
	cert := r.Cert(pki.Client("bob", "dev"))
	bob := r.HTTP(&cert)
	const path = "/apis/metrics.k8s.io/v1beta1/namespaces/default/pods"
	if a := r.Call(bob, "GET", path, ""); a.Code != 403 {
		t.Errorf("without a role: %d %s", a.Code, a.Body)
	}
	r.Must(apiservertest.RoleBinding("default", "bob-reads", "ClusterRole", "system:aggregated-metrics-reader",
		apiservertest.UserSubject("bob")))
	r.Await(func() bool { return r.Call(bob, "GET", path, "").Code == 200 })
	if a := r.Call(bob, "GET", "/apis/metrics.k8s.io/v1beta1/pods", ""); a.Code != 403 {
		t.Errorf("of all namespaces: %d %s", a.Code, a.Body)
	}
}

// Stock kubectl shows what is used.
func TestKubectlTop(t *testing.T) {
	all := apiservertest.StockKubectls()
	if len(all) == 0 {
		t.Fatal("no stock kubectl on this machine")
	}
	r := startMeasured(t)
	config := r.Kubeconfig("admin", api.GroupMasters)
	for version, binary := range all {
		t.Run(version, func(t *testing.T) {
			k := &apiservertest.Kubectl{T: t, Binary: binary, Config: config, Home: t.TempDir()}
			for command, want := range map[string][]string{
				"top node":                 {"w1 1500m 75% 2048Mi 50%", "w2 <unknown>"},
				"top pod":                  {"a 261m 32Mi", "b 261m 32Mi"},
				"top pod -A -l app=web":    {"default a 261m 32Mi", "other c 261m 32Mi"},
				"top pod a --containers":   {"a app 251m 30Mi", "a side 10m 2Mi"},
				"get nodes.metrics.k8s.io": {"w1 1500m 2Gi 15s"},
				"get pods.v1beta1.metrics.k8s.io -n other": {"c 261m 32Mi 15s"},
			} {
				got := strings.Join(strings.Fields(k.Ok("", strings.Fields(command)...)), " ")
				for _, line := range want {
					if !strings.Contains(got, line) {
						t.Errorf("kubectl %s has no %q:\n%s", command, line, got)
					}
				}
			}
			if got := k.Fails("", "top", "pod", "young"); !strings.Contains(got, "not found") &&
				!strings.Contains(got, "not available") {
				t.Errorf("of a pod that was not measured: %s", got)
			}
		})
	}
}

// A metrics-server that is installed answers instead, from its APIService on, which stays as its
// manifest has it; once that is deleted the API answers itself again.
func TestInstalledMetricsServerAnswers(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	ctx := t.Context()
	const name = "v1beta1.metrics.k8s.io"
	if err := b.Replica.Setup.EnsureAPIServices(ctx, 0); err != nil {
		t.Fatal(err)
	}
	b.Replica.Await(func() bool { _, ok := b.Replica.CachedAPIService(ctx, name); return ok })
	b.Extension("metrics-server", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w,
			`{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"metrics.k8s.io/v1beta1","resources":[]}`)
	}))
	own, _ := b.Replica.CachedAPIService(ctx, name)
	if own.Spec.Service != nil {
		t.Fatalf("without a metrics-server: %+v", own.Spec)
	}
	c := b.Replica.AdminHTTP()
	const path = "/apis/metrics.k8s.io/v1beta1/nodes"
	if a := b.Replica.Call(c, "GET", path, ""); a.Code != 200 || !strings.Contains(a.Body, "NodeMetricsList") {
		t.Errorf("our own: %d %s", a.Code, a.Body)
	}
	patch := `{"metadata":{"labels":{"k8s-app":"metrics-server"}},"spec":{"insecureSkipTLSVerify":true,
		"service":{"name":"metrics-server","namespace":"default"},"groupPriorityMinimum":100,"versionPriority":100}}`
	apiService := "/apis/apiregistration.k8s.io/v1/apiservices/" + name
	if a := b.Replica.Call(c, "PATCH", apiService, patch, "Content-Type", "application/merge-patch+json"); a.Code !=
		200 {
		t.Fatalf("pointing it to a Service: %d %s", a.Code, a.Body)
	}
	served := func() *apiregistrationv1.APIService { s, _ := b.Replica.CachedAPIService(ctx, name); return s }
	b.Replica.Await(func() bool { return served().Spec.Service != nil })
	if err := b.Replica.Setup.EnsureAPIServices(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if err := b.Replica.CheckAPIServices(ctx, 0); err != nil {
		t.Fatal(err)
	}
	b.Replica.Await(func() bool { return strings.Contains(b.Replica.Call(c, "GET", path, "").Body, "APIResourceList") })
	if s := served(); s.Spec.Service == nil || s.Spec.Service.Name != "metrics-server" {
		t.Errorf("it did not stay: %+v", s.Spec)
	}
	if a := b.Replica.Call(c, "DELETE", apiService, ""); a.Code != 200 {
		t.Fatalf("deleting it: %d %s", a.Code, a.Body)
	}
	b.Replica.Await(func() bool { return strings.Contains(b.Replica.Call(c, "GET", path, "").Body, "NodeMetricsList") })
	if err := b.Replica.Setup.EnsureAPIServices(ctx, 0); err != nil {
		t.Fatal(err)
	}
	b.Replica.Await(func() bool { s, ok := b.Replica.CachedAPIService(ctx, name); return ok && s.Spec.Service == nil })
}

// A part of the replica reads aggregated APIs as a client does, and what it reads is bounded.
func TestReadAggregated(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	b.Extension("adapter", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case strings.HasSuffix(r.URL.Path, "/long"):
			fmt.Fprintf(w, `{"items":["%s"]}`, strings.Repeat("x", apiserver.MaxAggregatedBytes))
		case strings.HasSuffix(r.URL.Path, "/deep"):
			fmt.Fprint(w, strings.Repeat("[", 1<<20))
		case strings.HasSuffix(r.URL.Path, "/missing"):
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprintf(w, `{"kind":"Status","message":"no such metric\u001b[31m %s"}`, strings.Repeat("y", 1000))
		case strings.HasSuffix(r.URL.Path, "/cut"):
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, `{"items":[]}`)
		case strings.Contains(r.URL.Path, "/namespaces/"):
			fmt.Fprintf(w, `{"path":%q,"query":%q,"user":%q}`, r.URL.EscapedPath(), r.URL.RawQuery,
				r.Header.Get("X-Remote-User"))
		default:
			apiservertest.DiscoveryOf("custom.metrics.k8s.io")(w, r)
		}
	}))
	ctx := t.Context()
	u := api.User{Name: "system:serviceaccount:kube-system:horizontal-pod-autoscaler",
		Groups: []string{api.GroupMasters}}
	const at = "/apis/custom.metrics.k8s.io/v1/namespaces/default/pods/*/"
	if _, err := b.Replica.Server.Aggregated().Get(ctx, u, at+"load", nil); !errors.Is(err,
		apiserver.ErrNotAggregated) {
		t.Errorf("of no APIService: %v", err)
	}
	if _, err := b.Replica.Server.Aggregated().Get(ctx, u, "/apis/apps/v1/deployments", nil); !errors.Is(err,
		apiserver.ErrNotAggregated) {
		t.Errorf("of this API's own: %v", err)
	}
	if c := b.AddAPIService("custom.metrics.k8s.io", "adapter", nil); c.Status != apiregistrationv1.ConditionTrue {
		t.Fatalf("the server is %+v", c)
	}
	got, err := b.Replica.Server.Aggregated().Get(ctx, u, at+"a%20b", url.Values{"labelSelector": {"app=web"}})
	want := `{"path":"` + at + `a%20b","query":"labelSelector=app%3Dweb","user":"` + u.Name + `"}`
	if err != nil || string(got) != want {
		t.Errorf("read %s, %v; want %s", got, err, want)
	}
	for name, want := range map[string]string{"long": "exceeds", "deep": "nested", "missing": "404: no such metric",
		"cut": "incomplete"} {
		got, err := b.Replica.Server.Aggregated().Get(ctx, u, at+name, nil)
		if err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 400 ||
			strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%s: %.100s, %v", name, got, err)
		}
	}
	nobody := api.User{Name: "nobody", Groups: []string{api.GroupAuthenticated}}
	if _, err := b.Replica.Server.Aggregated().Get(ctx, nobody, at+"load", nil); err == nil ||
		!strings.Contains(err.Error(), "403: ") {
		t.Errorf("as somebody without the right: %v", err)
	}
}
