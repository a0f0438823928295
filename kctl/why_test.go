package kctl

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes/scheme"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/kctl/why"
)

// aCluster serves objects by their paths; a path that ends in / is a list. What is forbidden is answered with 403.
type aCluster struct {
	objects   map[string]runtime.Object
	texts     map[string]string // what is not in the scheme
	forbidden []string

	mu    sync.Mutex
	asked []string
}

// ServeHTTP implements http.Handler.
func (a *aCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	reply := func(v any) { w.Header().Set("Content-Type", "application/json"); _ = json.NewEncoder(w).Encode(v) }
	resources := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"},
		GroupVersion: "v1"}
	for name, kind := range map[string]string{"pods": "Pod", "nodes": "Node"} {
		resources.APIResources = append(resources.APIResources,
			metav1.APIResource{Name: name, SingularName: strings.ToLower(kind), Kind: kind,
				Namespaced: kind == "Pod", Verbs: metav1.Verbs{"get", "list"}})
	}
	a.mu.Lock()
	a.asked = append(a.asked, r.URL.Path)
	a.mu.Unlock()
	switch path := r.URL.Path; {
	case path == "/api":
		reply(metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions", APIVersion: "v1"},
			Versions: []string{"v1"}})
	case path == "/apis":
		version := metav1.GroupVersionForDiscovery{GroupVersion: "autoscaling/v2", Version: "v2"}
		reply(metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"},
			Groups: []metav1.APIGroup{{Name: "autoscaling",
				Versions: []metav1.GroupVersionForDiscovery{version}, PreferredVersion: version}}})
	case path == "/apis/autoscaling/v2":
		reply(metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"},
			GroupVersion: "autoscaling/v2",
			APIResources: []metav1.APIResource{{Name: "horizontalpodautoscalers",
				SingularName: "horizontalpodautoscaler", ShortNames: []string{"hpa"},
				Kind: "HorizontalPodAutoscaler", Namespaced: true, Verbs: metav1.Verbs{"get", "list"}}}})
	case path == "/api/v1":
		reply(resources)
	case slices.Contains(a.forbidden, path):
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		reply(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure,
			Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden, Message: "not you"})
	case strings.HasPrefix(path, api.PathTimeline):
		reply([]api.Stage{{TraceID: "1", Name: "stored", Start: time.UnixMilli(0)}})
	case a.objects[path] != nil:
		w.Header().Set("Content-Type", "application/json")
		_ = scheme.Codecs.LegacyCodec(v1.SchemeGroupVersion, autoscalingv2.SchemeGroupVersion,
			appsv1.SchemeGroupVersion).Encode(a.objects[path], w)
	case a.texts[path] != "":
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(a.texts[path]))
	default:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		reply(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure,
			Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound, Message: path + " not found"})
	}
}

// runWhy runs lines of kctl against a cluster and returns what is written, and the last error.
func runWhy(t *testing.T, cluster http.Handler, line string) (string, error) {
	t.Helper()
	s := httptest.NewServer(cluster)
	defer s.Close()
	flags := genericclioptions.NewConfigFlags(false)
	flags.APIServer = &s.URL
	none, cache := filepath.Join(t.TempDir(), "none"), t.TempDir()
	if err := os.WriteFile(none, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	flags.KubeConfig, flags.CacheDir = &none, &cache
	var out bytes.Buffer
	root := &cobra.Command{Use: "kctl", SilenceErrors: true, SilenceUsage: true}
	f, streams := cmdutil.NewFactory(flags), genericiooptions.IOStreams{Out: &out, ErrOut: &out}
	root.AddCommand(whyCommand(f, streams), traceCommand(f, streams))
	root.SetArgs(strings.Fields(line))
	c, err := root.ExecuteC()
	if err != nil && !errors.Is(err, errFound) {
		fmt.Fprintln(&out, commandErrorText(c, err))
	}
	return out.String(), err
}

func aPod(name string, change func(*v1.Pod)) *v1.Pod {
	at := metav1.NewTime(time.Now().Add(-5 * time.Hour))
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: "1", CreationTimestamp: at},
		Status: v1.PodStatus{Phase: v1.PodPending,
			Conditions: []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse,
				Message: "0/2 nodes are available: 2 Insufficient cpu.", LastTransitionTime: at}}}}
	change(p)
	return p
}

func pods() *aCluster {
	return &aCluster{objects: map[string]runtime.Object{
		"/api/v1/namespaces/default/pods/waits": aPod("waits", func(*v1.Pod) {}),
		"/api/v1/namespaces/default/pods/runs": aPod("runs", func(p *v1.Pod) {
			p.Spec.NodeName, p.Status.Phase = "w1", v1.PodRunning
			p.Status.Conditions[0].Type, p.Status.Conditions[0].Status = v1.PodReady, v1.ConditionTrue
		}),
		"/api/v1/namespaces/default/events": &v1.EventList{},
		"/api/v1/pods":                      &v1.PodList{},
		"/api/v1/nodes": &v1.NodeList{Items: []v1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "w1"},
			Status: v1.NodeStatus{
				Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}}}}}},
	}}
}

// What is said, and by which error the exit code is known: none, errFound, or another. F126
func TestWhy(t *testing.T) {
	for _, c := range []struct {
		line      string
		forbidden []string
		want      []string
		found     bool
		fails     bool
	}{
		{line: "why pod/runs", want: []string{"nothing is wrong with pod default/runs: Running and Ready since 5h\n"}},
		{line: "why pod waits", found: true, want: []string{"pod default/waits: has no node, since 5h\n",
			"2 nodes: Insufficient cpu\n"}},
		{line: "why pod waits", found: true, forbidden: []string{"/api/v1/nodes", "/api/v1/pods"},
			want: []string{"2 nodes: Insufficient cpu\n",
				"not judged, for you may not read: nodes, pods in all namespaces\n"}},
		{line: "why pod/none", fails: true, want: []string{"kctl why: ", "not found"}},
		{line: "why thing/none", fails: true,
			want: []string{`kctl why: the server doesn't have a resource type "thing"`}},
		{line: "why pod/runs pod/waits", fails: true,
			want: []string{"why explains one object, and the arguments select 2: want TYPE/NAME"}},
		{line: "why pod/runs -o yaml", fails: true, want: []string{"-o yaml: want json"}},
		{line: "trace pod/runs", want: []string{"stored", "\nnow: Running and Ready since 5h\n"}},
		{line: "trace pod/waits", want: []string{"stored",
			"\nnow: pod default/waits has no node\nmore: kctl -n default why pod"}},
	} {
		cluster := pods()
		cluster.forbidden = c.forbidden
		got, err := runWhy(t, cluster, c.line)
		if errors.Is(err, errFound) != c.found || (err != nil) != (c.found || c.fails) {
			t.Errorf("kctl %s: error %v", c.line, err)
		}
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("kctl %s says %q, want %q in it", c.line, got, want)
			}
		}
	}
}

// The report in JSON is the same, for programs.
func TestWhyJSON(t *testing.T) {
	got, err := runWhy(t, pods(), "why pod/waits -o json")
	if !errors.Is(err, errFound) {
		t.Error(err)
	}
	var r why.Report
	if err := json.Unmarshal([]byte(got), &r); err != nil {
		t.Fatalf("%v in %q", err, got)
	}
	if r.Object != "pod default/waits" || len(r.Findings) != 1 || r.Findings[0].Since == nil ||
		r.Findings[0].Because != "0/2 nodes are available" {
		t.Errorf("%+v", r)
	}
}

// A pod that runs needs neither the pods of others nor claims.
func TestWhyReadsWhatItNeeds(t *testing.T) {
	cluster := pods()
	if _, err := runWhy(t, cluster, "why pod/runs"); err != nil {
		t.Fatal(err)
	}
	if slices.Contains(cluster.asked, "/api/v1/pods") ||
		!slices.Contains(cluster.asked, "/api/v1/namespaces/default/events") {
		t.Errorf("asked for %q", cluster.asked)
	}
}

// The process as a whole: its exit code, and not a word beside the report.
func TestWhyExitCode(t *testing.T) {
	s := httptest.NewServer(pods())
	defer s.Close()
	p := startKctl(t, s.URL, "why", "pod/waits")
	if err := p.Wait(); err == nil || p.ProcessState.ExitCode() != exitFound || p.stderr.Len() != 0 {
		t.Errorf("%v, exit code %d, %q", err, p.ProcessState.ExitCode(), p.stderr.String())
	}
}

// An autoscaler is explained with its target, the pods of that and which of them are measured.
func TestWhyAutoscaler(t *testing.T) {
	half, seen := int32(50), int64(0)
	h := &autoscalingv2.HorizontalPodAutoscaler{ObjectMeta: metav1.ObjectMeta{Namespace: "default",
		Name: "web", UID: "h"},
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{MaxReplicas: 3,
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1",
				Kind: "Deployment", Name: "web"},
			Metrics: []autoscalingv2.MetricSpec{{Type: autoscalingv2.ResourceMetricSourceType,
				Resource: &autoscalingv2.ResourceMetricSource{
					Name: v1.ResourceCPU, Target: autoscalingv2.MetricTarget{AverageUtilization: &half}}}}},
		Status: autoscalingv2.HorizontalPodAutoscalerStatus{ObservedGeneration: &seen,
			Conditions: []autoscalingv2.HorizontalPodAutoscalerCondition{
				{Type: autoscalingv2.ScalingActive, Status: v1.ConditionFalse, Reason: "FailedGetResourceMetric",
					Message: "no metrics"}}}}
	of := func(name string) appsv1.Deployment {
		return appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}}}
	}
	one := aPod("web-1", func(p *v1.Pod) {
		p.Status.Phase = v1.PodRunning
		p.Spec.Containers = []v1.Container{{Name: "main"}}
	})
	const deployments, podsPath, metrics = "/apis/apps/v1/namespaces/default/deployments",
		"/api/v1/namespaces/default/pods", "/apis/metrics.k8s.io/v1beta1/namespaces/default/pods"
	cluster := &aCluster{texts: map[string]string{metrics: `{"kind": "PodMetricsList", "items": []}`},
		objects: map[string]runtime.Object{
			"/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers/web": h,
			"/api/v1/namespaces/default/events":                                    &v1.EventList{},
			deployments: &appsv1.DeploymentList{
				Items: []appsv1.Deployment{of("web"), of("db")}},
			podsPath: &v1.PodList{Items: []v1.Pod{*one}},
		}}
	says := func(want ...string) {
		t.Helper()
		got, err := runWhy(t, cluster, "why hpa/web")
		if !errors.Is(err, errFound) {
			t.Error(err)
		}
		for _, text := range want {
			if !strings.Contains(got, text) {
				t.Errorf("it says %q, want %q in it", got, text)
			}
		}
	}
	says("horizontalpodautoscaler default/web: does not know the load", "pod web-1: container main asks for no cpu\n",
		"pod web-1 (Running) has no sample\n")
	cluster.texts[metrics] = `{"kind": "PodMetricsList", "items": [{"metadata": {"name": "web-1"}}]}`
	one.Spec.Containers[0].Resources.Requests = v1.ResourceList{v1.ResourceCPU: resource.MustParse("1")}
	cluster.objects[podsPath] = &v1.PodList{Items: []v1.Pod{*one}}
	says("every pod has a sample now")
	delete(cluster.texts, metrics)
	says("it does not answer: ")
	cluster.forbidden = []string{metrics}
	says("not judged, for you may not read: metrics of pods\n")
	cluster.forbidden = []string{deployments}
	says("not judged, for you may not read: the target, pods\n")
	h.Status.Conditions = []autoscalingv2.HorizontalPodAutoscalerCondition{{Type: autoscalingv2.AbleToScale,
		Status: v1.ConditionFalse, Message: "not found"}}
	cluster.forbidden, cluster.objects[deployments] = nil, &appsv1.DeploymentList{Items: []appsv1.Deployment{of("wep")}}
	says("there is no deployment web in the namespace; there is one named wep\n")
}
