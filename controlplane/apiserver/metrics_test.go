package apiserver_test

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// The series that dashboards of Kubernetes look for are there, with its labels.
func TestMetricsOfDashboards(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}})
	const updates = `apiserver_admission_step_admission_duration_seconds_count{operation="UPDATE",` +
		`rejected="false",type="validate"}`
	updated, err := strconv.Atoi(r.Series(c)[updates]) // at the start
	if err != nil {
		t.Fatal(err)
	}
	const maps = "/api/v1/namespaces/default/configmaps"
	r.Call(c, "GET", maps, "")
	r.Call(c, "POST", maps+"?dryRun=All", `{"metadata":{"name":"b"}}`)
	r.Call(c, "PATCH", maps+"/a?fieldManager=m", "apiVersion: v1\nkind: ConfigMap\n", "Content-Type",
		"application/apply-patch+yaml")
	resp, err := c.Get("https://" + r.Addr + maps +
		"?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&fieldSelector=metadata.name%3Da")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.ReadFull(resp.Body, make([]byte, 20)); err != nil { // its first event
		t.Fatal(err)
	}
	of := func(name, verb, scope string, first ...string) string {
		labels := append(first, `component="apiserver"`)
		if strings.Contains(name, "total") || strings.Contains(name, "request_duration") {
			dry := ""
			if verb == "POST" {
				dry = "All"
			}
			labels = append(labels, `dry_run="`+dry+`"`)
		}
		return name + "{" + strings.Join(append(labels, `group=""`, `resource="configmaps"`, `scope="`+scope+`"`,
			`subresource=""`,
			`verb="`+verb+`"`, `version="v1"`), ",") + "}"
	}
	r.Call(r.Unauthenticated(), "GET", maps, "", "Authorization", "Bearer nobody")
	seen := r.Series(c)
	for want, value := range map[string]string{
		of("apiserver_request_total", "LIST", "namespace",
			`code="200"`): "1",
		of("apiserver_request_total", "POST", "resource",
			`code="201"`): "1",
		of("apiserver_request_total", "APPLY", "resource",
			`code="200"`): "1",
		of("apiserver_request_duration_seconds_count", "LIST",
			"namespace"): "1",
		of("apiserver_request_sli_duration_seconds_count", "LIST",
			"namespace"): "1",
		of("apiserver_response_sizes_count", "LIST",
			"namespace"): "1",
		of("apiserver_longrunning_requests", "WATCH",
			"namespace"): "1",
		`apiserver_watch_events_total{group="",resource="configmaps",` +
			`version="v1"}`: "1",
		`apiserver_watch_events_sizes_count{group="",resource="configmaps",` +
			`version="v1"}`: "1",
		`apiserver_storage_objects{resource="configmaps"}`: "1",
		`apiserver_resource_objects{group="",` +
			`resource="configmaps"}`: "1",
		`apiserver_current_inflight_requests{request_kind="watch"}`: "1",
		`apiserver_admission_controller_admission_duration_seconds_count{name="LimitRanger",operation="CREATE",` +
			`rejected="false",type="admit"}`: "",
		`apiserver_admission_controller_admission_duration_seconds_count{name="ValidatingAdmissionWebhook",` +
			`operation="CREATE",rejected="false",type="validate"}`: "",
		updates: strconv.Itoa(updated + 1),
		`authentication_attempts{result="error"}`: "1",
		buildInfo(r): "1",
	} {
		if got, ok := seen[want]; !ok || value != "" && got != value {
			t.Errorf("%s is %q, want %s", want, got, value)
		}
	}
	text := r.Call(c, "GET", "/metrics", "").Body
	for _, want := range []string{"process_resident_memory_bytes ", "process_cpu_seconds_total ", "go_goroutines ",
		"go_memstats_alloc_bytes "} {
		if !strings.Contains(text, "\n"+want) {
			t.Errorf("no %s", want)
		}
	}
}

// buildInfo is the series of the version of a replica, with the labels of Kubernetes.
func buildInfo(r *apiservertest.Replica) string {
	v := r.Server.Settings().Process.Version
	return fmt.Sprintf("kubernetes_build_info{build_date=%q,compiler=%q,git_commit=%q,git_tree_state=%q,"+
		"git_version=%q,go_version=%q,major=%q,minor=%q,platform=%q}", v.BuildDate, v.Compiler, v.GitCommit,
		v.GitTreeState, v.GitVersion, v.GoVersion, v.Major, v.Minor, v.Platform)
}

// F133: requests to the store, the watch cache, terminated requests, the lifetime of client
// certificates and the initial events of watches have the series of kube-apiserver.
func TestMetricsOfStoreAndClients(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	before := r.Series(c)
	maps := r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}})
	const path = "/api/v1/namespaces/default/configmaps"
	r.Call(c, "PATCH", path+"/a", `{"data":{"k":"v"}}`, "Content-Type", "application/merge-patch+json")
	r.Call(c, "GET", path+"/a", "")
	r.Call(c, "GET", path, "")
	r.Call(c, "DELETE", path+"/"+maps.GetName(), "")
	if got := r.Call(c, "GET", path+"?timeout=1ns", ""); got.Code != 504 {
		t.Errorf("a list with a timeout of a nanosecond: %d %s", got.Code, got.Body)
	}
	watched := r.Call(c, "GET", path+"?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&"+
		"allowWatchBookmarks=true&timeoutSeconds=1", "")
	if !strings.Contains(watched.Body, "k8s.io/initial-events-end") {
		t.Errorf("the watch has no end of its initial events: %s", watched.Body)
	}
	seen := r.Series(c)
	number := func(series map[string]string, name string) float64 {
		n, _ := strconv.ParseFloat(series[name], 64)
		return n
	}
	const configMaps = `group="",resource="configmaps"`
	of := func(name, operation string) string {
		return name + `{group="",operation="` + operation + `",resource="configmaps"}`
	}
	for name, want := range map[string]float64{
		of("etcd_requests_total", "create"):                                                              1,
		of("etcd_requests_total", "update"):                                                              1,
		of("etcd_requests_total", "delete"):                                                              1,
		of("etcd_requests_total", "get"):                                                                 1,
		of("etcd_requests_total", "list"):                                                                3,
		of("etcd_request_errors_total", "create"):                                                        0,
		of("etcd_request_errors_total", "list"):                                                          1,
		of("etcd_request_duration_seconds_count", "create"):                                              1,
		`apiserver_watch_cache_events_received_total{` + configMaps + `}`:                                3,
		`apiserver_terminated_watchers_total{` + configMaps + `}`:                                        0,
		`apiserver_watch_list_duration_seconds_count{` + configMaps + `,scope="namespace",version="v1"}`: 1,
		`apiserver_request_terminations_total{code="504",component="apiserver",` + configMaps +
			`,scope="namespace",subresource="",verb="LIST",version="v1"}`: 1,
	} {
		_, ok := seen[name]
		if got := number(seen, name) - number(before, name); !ok || got != want {
			t.Errorf("%s has grown by %v, want %v", name, got, want)
		}
	}
	for _, name := range []string{`apiserver_watch_cache_resource_version{` + configMaps + `}`,
		`etcd_request_duration_seconds_bucket{group="",operation="create",resource="configmaps",le="60"}`,
		`apiserver_client_certificate_expiration_seconds_bucket{le="+Inf"}`} {
		if number(seen, name) == 0 {
			t.Errorf("%s is %q", name, seen[name])
		}
	}
}

// Neither kinds that come and go nor paths, verbs and names that somebody thinks up make series
// without bound.
func TestSeriesAreBounded(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	for i := range 300 {
		r.Call(c, []string{"GET", "POST", "BREW", "OPTIONS"}[i%4],
			fmt.Sprintf("/apis/g%d.example.com/v1/things/x%d", i, i), "")
	}
	before := len(r.Series(c))
	kindsOf := func(n int) (out []*api.Kind) {
		for i := range n {
			of := custom.Resource{Group: "many.example.com", Kind: fmt.Sprint("Many", i),
				Plural: fmt.Sprintf("many%ds", i), Singular: fmt.Sprint("many", i), Namespaced: true}
			out = append(out, custom.NewKind(of, "v1", false, custom.NewStorage(of, "v1")))
		}
		return out
	}
	use := func(all []*api.Kind) {
		for _, k := range all {
			r.Call(c, "GET", "/apis/many.example.com/v1/namespaces/default/"+k.Resource, "")
		}
	}
	for range 3 {
		all := kindsOf(20)
		if err := r.Kinds.Register(all...); err != nil {
			t.Fatal(err)
		}
		use(all)
		if n := len(r.Series(c)); n <= before {
			t.Fatalf("%d series with 20 more kinds, %d without", n, before)
		}
		if err := r.Kinds.Drop(all...); err != nil {
			t.Fatal(err)
		}
		r.Call(c, "GET", "/api/v1/namespaces/default/pods", "")
	}
	after := r.Series(c)
	for name := range after {
		if strings.Contains(name, "many") || strings.Contains(name, "things") || strings.Contains(name, "BREW") {
			t.Errorf("a series is left: %s", name)
		}
	}
	// What is beyond the bound is counted together.
	others := apiserver.CountOtherKinds(kindsOf(apiserver.MaxKindSeries + 5)...)
	if others != 5 {
		t.Errorf("%d kinds of 5 are counted together", others)
	}
}
