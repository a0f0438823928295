package apiserver

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
	"keelson.dev/keelson/controlplane/pki"
)

// usageOfSome returns metrics of all objects with the label measured.
func usageOfSome(of []api.Object) (out []api.Object) {
	use := func(cpu, memory string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
	}
	window := metav1.Duration{Duration: 15 * time.Second}
	for _, o := range of {
		meta := metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName(), Labels: o.GetLabels()}
		switch {
		case o.GetLabels()["measured"] == "":
		case o.GetNamespace() == "":
			out = append(out, &metricsv1beta1.NodeMetrics{ObjectMeta: meta, Timestamp: metav1.NewTime(time.Unix(1000, 0)), Window: window,
				Usage: use("1500m", "2Gi")})
		default:
			out = append(out, &metricsv1beta1.PodMetrics{ObjectMeta: meta, Timestamp: metav1.NewTime(time.Unix(1000, 0)), Window: window,
				Containers: []metricsv1beta1.ContainerMetrics{
					{Name: "app", Usage: use("250123456n", "30Mi")}, {Name: "side", Usage: use("10m", "2Mi")}}})
		}
	}
	return out
}

// startMeasured starts a replica with a Node and pods, some with metrics.
func startMeasured(t *testing.T) *replica {
	r := start(t, func(c *Config) { c.Usage = usageOfSome })
	node := func(name string, labels map[string]string) {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("4Gi")}
		n = r.must(n).(*corev1.Node)
		n = n.DeepCopy()
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("4Gi")}
		if _, err := r.admin().CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	node("w1", map[string]string{"measured": "yes"})
	node("w2", nil)
	r.must(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}})
	r.defaultAccount("other")
	for _, p := range []struct{ namespace, name, app, measured string }{
		{"default", "a", "web", "yes"}, {"default", "b", "db", "yes"}, {"default", "young", "web", ""}, {"other", "c", "web", "yes"},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: p.name, Labels: map[string]string{"app": p.app}},
			Spec: corev1.PodSpec{NodeName: "w1", Containers: []corev1.Container{{Name: "app", Image: "i"}, {Name: "side", Image: "i"}}}}
		if p.measured != "" {
			pod.Labels["measured"] = p.measured
		}
		r.must(pod)
	}
	return r
}

// names returns the names and namespaces of the items of a list.
func (a answer) names(t *testing.T) string {
	t.Helper()
	var list metav1.PartialObjectMetadataList
	if err := json.Unmarshal([]byte(a.body), &list); err != nil || !strings.HasSuffix(list.Kind, "List") {
		t.Fatalf("not a list: %v: %s", err, a.body)
	}
	var out []string
	for _, o := range list.Items {
		out = append(out, strings.TrimPrefix(o.Namespace+"/"+o.Name, "/"))
	}
	return strings.Join(out, " ")
}

// metrics.k8s.io answers for what is stored and measured.
func TestMetricsAreServed(t *testing.T) {
	r := startMeasured(t)
	c := r.adminHTTP()
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
		a := r.call(c, "GET", path, "")
		if a.code != 200 || a.names(t) != want {
			t.Errorf("%s: %d, %s; want %q", path, a.code, a.body, want)
		}
	}
	var p metricsv1beta1.PodMetrics
	a := r.call(c, "GET", at+"/namespaces/default/pods/a", "")
	if err := json.Unmarshal([]byte(a.body), &p); err != nil || p.Kind != "PodMetrics" || p.APIVersion != "metrics.k8s.io/v1beta1" ||
		len(p.Containers) != 2 || p.Containers[0].Usage.Cpu().MilliValue() != 251 || p.Window.Duration != 15*time.Second || p.Labels["app"] != "web" {
		t.Errorf("of pod a: %v: %s", err, a.body)
	}
	for _, path := range []string{"/nodes/w2", "/nodes/none", "/namespaces/default/pods/young", "/namespaces/other/pods/a"} {
		if a := r.call(c, "GET", at+path, ""); a.code != 404 || !strings.Contains(a.body, `.metrics.k8s.io \"`) {
			t.Errorf("%s: %d %s", path, a.code, a.body)
		}
	}
	table := r.call(c, "GET", at+"/namespaces/default/pods", "", "Accept", "application/json;as=Table;g=meta.k8s.io;v=v1")
	for _, want := range []string{`"name":"cpu"`, `"cells":["a","261m","32Mi","15s"]`} {
		if !strings.Contains(table.body, want) {
			t.Errorf("the table has no %s: %s", want, table.body)
		}
	}
	for method, path := range map[string]string{"DELETE": at + "/nodes/w1", "PUT": at + "/nodes/w1", "POST": at + "/namespaces/default/pods"} {
		if a := r.call(c, method, path, `{"kind":"PodMetrics","apiVersion":"metrics.k8s.io/v1beta1","metadata":{"name":"x"}}`,
			"Content-Type", "application/json"); a.code != 405 {
			t.Errorf("%s %s: %d %s", method, path, a.code, a.body)
		}
	}
	if a := r.call(c, "GET", at+"/pods?watch=true", ""); a.code != 405 {
		t.Errorf("a watch: %d %s", a.code, a.body)
	}
}

// Reading metrics is a right like any other, of a role that goes into view, edit and admin.
func TestMetricsAreForThoseWhoMayReadThem(t *testing.T) {
	r := startMeasured(t)
	role, err := r.admin().RbacV1().ClusterRoles().Get(t.Context(), "system:aggregated-metrics-reader", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, whole := range []string{"admin", "edit", "view"} {
		if role.Labels["rbac.authorization.k8s.io/aggregate-to-"+whole] != "true" {
			t.Errorf("the role does not go into %s: %v", whole, role.Labels)
		}
	}
	cert := r.cert(pki.Client("bob", "dev"))
	bob := r.http(&cert)
	const path = "/apis/metrics.k8s.io/v1beta1/namespaces/default/pods"
	if a := r.call(bob, "GET", path, ""); a.code != 403 {
		t.Errorf("without a role: %d %s", a.code, a.body)
	}
	r.must(roleBinding("default", "bob-reads", "ClusterRole", "system:aggregated-metrics-reader", userSubject("bob")))
	r.await(func() bool { return r.call(bob, "GET", path, "").code == 200 })
	if a := r.call(bob, "GET", "/apis/metrics.k8s.io/v1beta1/pods", ""); a.code != 403 {
		t.Errorf("of all namespaces: %d %s", a.code, a.body)
	}
}

// Stock kubectl shows what is used.
func TestKubectlTop(t *testing.T) {
	all := stockKubectls()
	if len(all) == 0 {
		t.Fatal("no stock kubectl on this machine")
	}
	r := startMeasured(t)
	config := r.kubeconfig("admin", api.GroupMasters)
	for version, binary := range all {
		t.Run(version, func(t *testing.T) {
			k := &kubectl{t: t, binary: binary, config: config, home: t.TempDir()}
			for command, want := range map[string][]string{
				"top node":                 {"w1 1500m 75% 2048Mi 50%", "w2 <unknown>"},
				"top pod":                  {"a 261m 32Mi", "b 261m 32Mi"},
				"top pod -A -l app=web":    {"default a 261m 32Mi", "other c 261m 32Mi"},
				"top pod a --containers":   {"a app 251m 30Mi", "a side 10m 2Mi"},
				"get nodes.metrics.k8s.io": {"w1 1500m 2Gi 15s"},
				"get pods.v1beta1.metrics.k8s.io -n other": {"c 261m 32Mi 15s"},
			} {
				got := strings.Join(strings.Fields(k.ok("", strings.Fields(command)...)), " ")
				for _, line := range want {
					if !strings.Contains(got, line) {
						t.Errorf("kubectl %s has no %q:\n%s", command, line, got)
					}
				}
			}
			if got := k.fails("", "top", "pod", "young"); !strings.Contains(got, "not found") && !strings.Contains(got, "not available") {
				t.Errorf("of a pod that was not measured: %s", got)
			}
		})
	}
}

// A metrics-server that is installed answers instead, from its APIService on, which stays as its manifest has it; once
// that is deleted the API answers itself again.
func TestInstalledMetricsServerAnswers(t *testing.T) {
	b := startBehind(t)
	ctx := t.Context()
	const name = "v1beta1.metrics.k8s.io"
	if err := b.EnsureAPIServices(ctx, 0); err != nil {
		t.Fatal(err)
	}
	b.await(func() bool { _, ok := b.cachedAPIService(ctx, name); return ok })
	b.extension("metrics-server", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"metrics.k8s.io/v1beta1","resources":[]}`)
	}))
	own, _ := b.cachedAPIService(ctx, name)
	if own.Spec.Service != nil {
		t.Fatalf("without a metrics-server: %+v", own.Spec)
	}
	c := b.adminHTTP()
	const path = "/apis/metrics.k8s.io/v1beta1/nodes"
	if a := b.call(c, "GET", path, ""); a.code != 200 || !strings.Contains(a.body, "NodeMetricsList") {
		t.Errorf("our own: %d %s", a.code, a.body)
	}
	patch := `{"metadata":{"labels":{"k8s-app":"metrics-server"}},"spec":{"insecureSkipTLSVerify":true,
		"service":{"name":"metrics-server","namespace":"default"},"groupPriorityMinimum":100,"versionPriority":100}}`
	apiService := "/apis/apiregistration.k8s.io/v1/apiservices/" + name
	if a := b.call(c, "PATCH", apiService, patch, "Content-Type", "application/merge-patch+json"); a.code != 200 {
		t.Fatalf("pointing it to a Service: %d %s", a.code, a.body)
	}
	served := func() *apiregistrationv1.APIService { s, _ := b.cachedAPIService(ctx, name); return s }
	b.await(func() bool { return served().Spec.Service != nil })
	if err := b.EnsureAPIServices(ctx, 0); err != nil {
		t.Fatal(err)
	}
	if err := b.CheckAPIServices(ctx, 0); err != nil {
		t.Fatal(err)
	}
	b.await(func() bool { return strings.Contains(b.call(c, "GET", path, "").body, "APIResourceList") })
	if s := served(); s.Spec.Service == nil || s.Spec.Service.Name != "metrics-server" {
		t.Errorf("it did not stay: %+v", s.Spec)
	}
	if a := b.call(c, "DELETE", apiService, ""); a.code != 200 {
		t.Fatalf("deleting it: %d %s", a.code, a.body)
	}
	b.await(func() bool { return strings.Contains(b.call(c, "GET", path, "").body, "NodeMetricsList") })
	if err := b.EnsureAPIServices(ctx, 0); err != nil {
		t.Fatal(err)
	}
	b.await(func() bool { s, ok := b.cachedAPIService(ctx, name); return ok && s.Spec.Service == nil })
}

// A part of the replica reads aggregated APIs as a client does, and what it reads is bounded.
func TestReadAggregated(t *testing.T) {
	b := startBehind(t)
	b.extension("adapter", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case strings.HasSuffix(r.URL.Path, "/long"):
			fmt.Fprintf(w, `{"items":["%s"]}`, strings.Repeat("x", readAggregatedBytes))
		case strings.HasSuffix(r.URL.Path, "/deep"):
			fmt.Fprint(w, strings.Repeat("[", 1<<20))
		case strings.HasSuffix(r.URL.Path, "/missing"):
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprintf(w, `{"kind":"Status","message":"no such metric\u001b[31m %s"}`, strings.Repeat("y", 1000))
		case strings.HasSuffix(r.URL.Path, "/cut"):
			w.Header().Set("Content-Length", "100")
			fmt.Fprint(w, `{"items":[]}`)
		case strings.Contains(r.URL.Path, "/namespaces/"):
			fmt.Fprintf(w, `{"path":%q,"query":%q,"user":%q}`, r.URL.EscapedPath(), r.URL.RawQuery, r.Header.Get("X-Remote-User"))
		default:
			discoveryOf("custom.metrics.k8s.io")(w, r)
		}
	}))
	ctx := t.Context()
	u := api.User{Name: "system:serviceaccount:kube-system:horizontal-pod-autoscaler", Groups: []string{api.GroupMasters}}
	const at = "/apis/custom.metrics.k8s.io/v1/namespaces/default/pods/*/"
	if _, err := b.ReadAggregated(ctx, u, at+"load", nil); !errors.Is(err, ErrNotAggregated) {
		t.Errorf("of no APIService: %v", err)
	}
	if _, err := b.ReadAggregated(ctx, u, "/apis/apps/v1/deployments", nil); !errors.Is(err, ErrNotAggregated) {
		t.Errorf("of this API's own: %v", err)
	}
	if c := b.apiService("custom.metrics.k8s.io", "adapter", nil); c.Status != apiregistrationv1.ConditionTrue {
		t.Fatalf("the server is %+v", c)
	}
	got, err := b.ReadAggregated(ctx, u, at+"a%20b", url.Values{"labelSelector": {"app=web"}})
	want := `{"path":"` + at + `a%20b","query":"labelSelector=app%3Dweb","user":"` + u.Name + `"}`
	if err != nil || string(got) != want {
		t.Errorf("read %s, %v; want %s", got, err, want)
	}
	for name, want := range map[string]string{"long": "more than", "deep": "nested", "missing": "404: no such metric", "cut": "cut off"} {
		got, err := b.ReadAggregated(ctx, u, at+name, nil)
		if err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 400 || strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%s: %.100s, %v", name, got, err)
		}
	}
	nobody := api.User{Name: "nobody", Groups: []string{api.GroupAuthenticated}}
	if _, err := b.ReadAggregated(ctx, nobody, at+"load", nil); err == nil || !strings.Contains(err.Error(), "403: ") {
		t.Errorf("as somebody without the right: %v", err)
	}
}
