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
		`authentication_attempts{result="error"}`:                                                            "1",
		fmt.Sprintf(`kubernetes_build_info{git_version=%q}`, r.Server.Settings().Process.Version.GitVersion): "1",
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
