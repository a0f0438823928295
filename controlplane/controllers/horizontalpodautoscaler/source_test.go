package horizontalpodautoscaler

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/client"
)

// answers maps path and query to the responses of servers behind APIServices; other paths are not
// registered.
type answers map[string]string

func (a answers) read(_ context.Context, path string, query url.Values) ([]byte, error) {
	if body, ok := a[strings.TrimSuffix(path+"?"+query.Encode(), "?")]; ok {
		return []byte(body), nil
	}
	return nil, ErrNotRegistered
}

// own is this API's own list of metrics.
type own struct {
	api.Backend
	list []api.Object
}

func (o own) Do(_ context.Context, r *api.Request) (runtime.Object, error) {
	if r.Verb != api.VerbList || r.Kind.GVK.Kind != "PodMetrics" || r.Namespace != "n" ||
		r.List.LabelSelector != "app=web" {
		return nil, errors.New("another request was expected")
	}
	return &api.ObjectList{Items: o.list}, nil
}

func sourceOf(a answers, list ...api.Object) *APIs {
	return &APIs{Client: client.New(own{list: list}, kinds.All()), Read: a.read}
}

var (
	web  = labels.SelectorFromSet(labels.Set{"app": "web"})
	noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
)

func podMetrics(name string, containers ...string) *metricsv1beta1.PodMetrics {
	m := &metricsv1beta1.PodMetrics{ObjectMeta: metav1.ObjectMeta{Name: name}, Timestamp: metav1.NewTime(noon),
		Window: metav1.Duration{Duration: 15 * time.Second}}
	for _, text := range containers {
		c, cpu, _ := strings.Cut(text, "=")
		use := corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Mi")}
		if cpu != "" {
			use[corev1.ResourceCPU] = resource.MustParse(cpu)
		}
		m.Containers = append(m.Containers, metricsv1beta1.ContainerMetrics{Name: c, Usage: use})
	}
	return m
}

// The usage that this API returns is summed by pod, or taken from one container. A pod with an
// unmeasured container is omitted.
func TestResourcesOfThisAPI(t *testing.T) {
	s := sourceOf(nil, podMetrics("a", "app=200m", "side=50m"), podMetrics("b", "app=100m", "side="), podMetrics("c"))
	ctx := t.Context()
	got, err := s.Resource(ctx, "n", web, corev1.ResourceCPU, "")
	if want := (Sample{Value: 250, At: noon, Window: 15 * time.Second}); err != nil || len(got) != 1 ||
		got["a"] != want {
		t.Errorf("of pods: %v, %v", got, err)
	}
	if _, err = s.Resource(ctx, "n", web, corev1.ResourceCPU, "app"); err == nil ||
		!strings.Contains(err.Error(), "container app not present in metrics for pod n/c") {
		t.Errorf("of a container that c does not have: %v", err)
	}
	s = sourceOf(nil, podMetrics("a", "app=200m", "side=50m"), podMetrics("b", "app=100m", "side="))
	if got, err = s.Resource(ctx, "n", web, corev1.ResourceCPU, "side"); err != nil || len(got) != 1 ||
		got["a"].Value != 50 {
		t.Errorf("of a container: %v, %v", got, err)
	}
	if _, err = sourceOf(nil).Resource(ctx, "n", web, corev1.ResourceCPU, ""); err == nil ||
		!strings.Contains(err.Error(), "no metrics returned from resource metrics API") {
		t.Errorf("of no pods: %v", err)
	}
}

// If a metrics-server is installed, it is used instead.
func TestResourcesOfAMetricsServer(t *testing.T) {
	s :=
		sourceOf(
			answers{
				"/apis/metrics.k8s.io/v1beta1/namespaces/n/pods?labelSelector=app%3Dweb": `{"items":[{"metadata":{"name":"a"},
		"timestamp":"2026-01-02T12:00:00Z","window":"10s","containers":[{"name":"app","usage":{"cpu":"250m","memory":"2Ki"}}]}]}`},
			podMetrics("b", "app=1"))
	got, err := s.Resource(t.Context(), "n", web, corev1.ResourceMemory, "")
	if err != nil || len(got) != 1 || got["a"].Value != 2048_000 || !got["a"].At.Equal(noon) ||
		got["a"].Window != 10*time.Second {
		t.Errorf("%v, %v", got, err)
	}
}

func metric(name string, labels ...string) autoscalingv2.MetricIdentifier {
	m := autoscalingv2.MetricIdentifier{Name: name}
	if len(labels) == 2 {
		m.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{labels[0]: labels[1]}}
	}
	return m
}

// Custom and external metrics are read from the servers behind APIServices, in either version,
// under the paths that Kubernetes' clients use.
func TestMetricsOfServers(t *testing.T) {
	const custom, external = "/apis/custom.metrics.k8s.io/", "/apis/external.metrics.k8s.io/v1beta1/"
	ctx := t.Context()
	s := sourceOf(answers{
		custom + "v1beta2/namespaces/n/pods/*/rps?labelSelector=app%3Dweb&metricLabelSelector=verb%3Dget": `{"items":[
			{"describedObject":{"kind":"Pod","name":"a"},"metric":{"name":"rps"},"timestamp":"2026-01-02T12:00:00Z","windowSeconds":30,"value":"1500m"},
			{"describedObject":{"kind":"Pod","name":"b"},"metric":{"name":"rps"},"timestamp":"2026-01-02T12:00:00Z","value":"2"}]}`,
		custom +
			"v1beta1/namespaces/n/ingresses.networking.k8s.io/main/hits": `{"items":[{"describedObject":{"name":"main"},"metricName":"hits","window":5,"value":"7k"}]}`,
		custom +
			"v1beta1/namespaces/other/metrics/quota": `{"items":[{"describedObject":{"name":"other"},` +
			`"metricName":"quota","value":"3"}]}`,
		custom +
			"v1beta1/namespaces/n/services/two/hits": `{"items":[{"value":"1"},{"value":"2"}]}`,
		custom + "v1beta1/namespaces/n/services/odd/hits": `{"items":[{"value":"1e-99999999"}]}`,
		external + "namespaces/n/queue?labelSelector=name%3Dmail": `{"items":[{"metricName":"queue",` +
			`"value":"5"},{"metricName":"queue","value":"250m"}]}`,
		external + "namespaces/n/none": `{"items":[]}`,
		external + "namespaces/n/html": `<html>`,
	})
	pods, err := s.Pods(ctx, "n", web, metric("rps", "verb", "get"))
	if err != nil || len(pods) != 2 || pods["a"].Value != 1500 || pods["a"].Window != 30*time.Second ||
		pods["b"].Value != 2000 || pods["b"].Window != time.Minute {
		t.Errorf("of pods: %v, %v", pods, err)
	}
	object := func(apiVersion, kind, name, m string) (int64, error) {
		return s.Object(ctx, "n", autoscalingv2.CrossVersionObjectReference{APIVersion: apiVersion, Kind: kind,
			Name: name}, metric(m))
	}
	if v, err := object("networking.k8s.io/v1", "Ingress", "main", "hits"); err != nil || v != 7_000_000 {
		t.Errorf("of an Ingress: %d, %v", v, err)
	}
	if v, err := object("v1", "Namespace", "other", "quota"); err != nil || v != 3000 {
		t.Errorf("of a namespace: %d, %v", v, err)
	}
	for name, want := range map[string]string{"two": "returned 2 results", "odd": "too long",
		"none": "no custom metrics API (custom.metrics.k8s.io) registered"} {
		if v, err := object("v1", "Service", name, "hits"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("of Service %s: %d, %v", name, v, err)
		}
	}
	if _, err := object("example.com/v1", "Thing", "x", "hits"); err == nil ||
		!strings.Contains(err.Error(), `no matches for kind "Thing"`) {
		t.Errorf("of a kind that is not served: %v", err)
	}
	if v, err := s.External(ctx, "n", metric("queue", "name", "mail")); err != nil || v != 5250 {
		t.Errorf("external: %d, %v", v, err)
	}
	for name, want := range map[string]string{"none": "no metrics returned from external metrics API",
		"html":  "reading the response",
		"other": "no external metrics API (external.metrics.k8s.io) registered"} {
		if v, err := s.External(ctx, "n", metric(name)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("external %s: %d, %v", name, v, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"items":[{"value":"1e999","describedObject":{"name":"a"},"windowSeconds":-1}]}`))
	f.Add([]byte(`{"items":[{"metadata":{"name":"a"},"containers":[{"name":"c","usage":{"cpu":"1E"}}]}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		values, err := decodeValues(body)
		if err == nil {
			for i := range values {
				if w := values[i].toSample().Window; w < 0 || w > time.Hour {
					t.Errorf("a window of %s", w)
				}
			}
		}
		if list, err := decodePodMetrics(body); err == nil {
			for i := range list {
				sumOf(list[i].Containers, corev1.ResourceCPU, "")
			}
		}
	})
}
