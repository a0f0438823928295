package horizontalpodautoscaler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/saturate"
)

// ErrNotRegistered means that no APIService assigns the group version to an API server.
var ErrNotRegistered = errors.New("no APIService points it to a Service")

// APIs is a Source that reads metrics through the API server. Resource metrics are those of
// metrics.k8s.io: of an installed metrics-server or, without a metrics-server, of this API server.
// Other metrics are those of custom.metrics.k8s.io and external.metrics.k8s.io, which installed API
// servers serve.
type APIs struct {
	Client *client.Client
	// Read returns the response of an aggregated API server to GET of a path. It returns
	// ErrNotRegistered if no APIService names a server for the path. The size of the response is
	// limited.
	Read func(ctx context.Context, path string, query url.Values) ([]byte, error)
}

var _ Source = (*APIs)(nil)

// defaultWindow is the measurement window that is assumed for a custom metric without a window.
const defaultWindow = time.Minute

// Resource implements Source with metrics.k8s.io.
func (a *APIs) Resource(
	ctx context.Context, namespace string, selector labels.Selector, name corev1.ResourceName, container string,
) (Samples, error) {
	list, err := a.podMetrics(ctx, namespace, selector)
	if err != nil {
		return nil, fmt.Errorf("unable to get metrics for resource %s: %w", name, err)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("unable to get metrics for resource %s: no metrics returned from resource metrics API",
			name)
	}
	out := make(Samples, len(list))
	for i := range list {
		m := &list[i]
		value, measured, found := sumOf(m.Containers, name, container)
		if !found && container != "" {
			return nil, fmt.Errorf("container %s not present in metrics for pod %s/%s", container, namespace, m.Name)
		}
		if measured {
			out[m.Name] = Sample{Value: value, At: m.Timestamp.Time, Window: m.Window.Duration}
		}
	}
	return out, nil
}

// sumOf returns the usage of resource name by the given containers. If container is not "", only
// the container with this name counts. found reports whether such a container exists. measured is
// false if a counted container has no value.
func sumOf(containers []metricsv1beta1.ContainerMetrics, name corev1.ResourceName, container string) (
	value int64, measured, found bool,
) {
	for _, c := range containers {
		if container != "" && c.Name != container {
			continue
		}
		q, ok := c.Usage[name]
		if !ok {
			return 0, false, true
		}
		found = true
		value = saturate.Add(value, saturate.MilliValue(&q))
	}
	return value, found, found
}

// podMetrics returns the PodMetrics of the pods that the selector matches, from an installed
// metrics-server or from this API server.
func (a *APIs) podMetrics(ctx context.Context, namespace string, selector labels.Selector) (
	[]metricsv1beta1.PodMetrics, error,
) {
	body, err := a.Read(ctx, "/apis/metrics.k8s.io/v1beta1/namespaces/"+url.PathEscape(namespace)+"/pods",
		selectorQuery("labelSelector", selector.String()))
	if err == nil {
		return decodePodMetrics(body)
	}
	if !errors.Is(err, ErrNotRegistered) {
		return nil, err
	}
	found, err := client.List[*metricsv1beta1.PodMetrics](ctx, a.Client, namespace,
		metav1.ListOptions{LabelSelector: selector.String()})
	if err != nil {
		return nil, err
	}
	out := make([]metricsv1beta1.PodMetrics, len(found))
	for i, m := range found {
		out[i] = *m
	}
	return out, nil
}

// decodePodMetrics decodes a PodMetricsList from an untrusted API server.
func decodePodMetrics(body []byte) ([]metricsv1beta1.PodMetrics, error) {
	var list struct {
		Items []struct {
			Metadata   struct{ Name string }
			Timestamp  metav1.Time
			Window     metav1.Duration
			Containers []struct {
				Name  string
				Usage map[corev1.ResourceName]quantity
			}
		}
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("reading the response of the metrics API: %w", err)
	}
	out := make([]metricsv1beta1.PodMetrics, len(list.Items))
	for i, item := range list.Items {
		m := &out[i]
		m.Name, m.Timestamp, m.Window = item.Metadata.Name, item.Timestamp, item.Window
		for _, c := range item.Containers {
			use := make(corev1.ResourceList, len(c.Usage))
			for name, q := range c.Usage {
				use[name] = q.Quantity
			}
			m.Containers = append(m.Containers, metricsv1beta1.ContainerMetrics{Name: c.Name, Usage: use})
		}
	}
	return out, nil
}

// metricValue is an item of a list of custom metrics, in either version, or of external metrics.
type metricValue struct {
	DescribedObject struct{ Name string }
	Timestamp       metav1.Time
	Window          *int64 // window in seconds, in v1beta1 and in external metrics
	WindowSeconds   *int64 // window in seconds, in v1beta2
	Value           quantity
}

func (v *metricValue) toSample() Sample {
	s := Sample{Value: saturate.MilliValue(&v.Value), At: v.Timestamp.Time, Window: defaultWindow}
	for _, w := range []*int64{v.Window, v.WindowSeconds} {
		if w != nil {
			s.Window = time.Duration(max(0, min(*w, int64(time.Hour/time.Second)))) * time.Second
		}
	}
	return s
}

// quantity is a resource.Quantity from an untrusted API server. Decoding refuses values that are
// expensive to parse.
type quantity struct{ resource.Quantity }

func (q *quantity) UnmarshalJSON(b []byte) error {
	const most, digits = 64, 3
	text := strings.Trim(string(b), `"`)
	if i := strings.IndexAny(text, "eE"); len(text) > most ||
		i >= 0 && len(strings.TrimLeft(text[i+1:], "+-0")) > digits {
		return errors.New("a value that is too long")
	}
	return q.Quantity.UnmarshalJSON(b)
}

// Pods implements Source with custom.metrics.k8s.io.
func (a *APIs) Pods(ctx context.Context, namespace string, selector labels.Selector, m autoscalingv2.MetricIdentifier) (
	Samples, error,
) {
	items, err := a.getCustomMetrics(ctx, "namespaces/"+url.PathEscape(namespace)+"/pods/*/"+url.PathEscape(m.Name),
		selector.String(), m)
	if err == nil && len(items) == 0 {
		err = errors.New("no metrics returned from custom metrics API")
	}
	if err != nil {
		return nil, fmt.Errorf("unable to get metric %s: %w", m.Name, err)
	}
	out := make(Samples, len(items))
	for i := range items {
		out[items[i].DescribedObject.Name] = items[i].toSample()
	}
	return out, nil
}

// Object implements Source with custom.metrics.k8s.io.
func (a *APIs) Object(
	ctx context.Context, namespace string, ref autoscalingv2.CrossVersionObjectReference,
	m autoscalingv2.MetricIdentifier,
) (int64, error) {
	v, err := a.getObjectMetric(ctx, namespace, ref, m)
	if err != nil {
		return 0, fmt.Errorf("unable to get metric %s: %s on %s %s: %w", m.Name, ref.Kind, namespace, ref.Name, err)
	}
	return v, nil
}

func (a *APIs) getObjectMetric(
	ctx context.Context, namespace string, ref autoscalingv2.CrossVersionObjectReference,
	m autoscalingv2.MetricIdentifier,
) (int64, error) {
	kind, err := kindOf(a.Client.Kinds(), ref)
	if err != nil {
		return 0, err
	}
	path := "namespaces/" + url.PathEscape(namespace) + "/" + kind.GroupResource().String() + "/" +
		url.PathEscape(ref.Name) + "/" + url.PathEscape(m.Name)
	if kind.Resource == "namespaces" && kind.GVK.Group == "" {
		path = "namespaces/" + url.PathEscape(ref.Name) + "/metrics/" + url.PathEscape(m.Name)
	}
	items, err := a.getCustomMetrics(ctx, path, "", m)
	switch {
	case err != nil:
		return 0, err
	case len(items) != 1:
		return 0, fmt.Errorf("the custom metrics API server returned %d results when we asked for exactly one",
			len(items))
	}
	return saturate.MilliValue(&items[0].Value), nil
}

// getCustomMetrics returns the values at a path of custom.metrics.k8s.io, in the newest registered
// version of the API. podSelector, in text form, selects the pods; "" selects nothing, for a path
// that contains the object's name.
func (a *APIs) getCustomMetrics(ctx context.Context, path, podSelector string, m autoscalingv2.MetricIdentifier) (
	[]metricValue, error,
) {
	metric, err := metav1.LabelSelectorAsSelector(m.Selector)
	if err != nil {
		return nil, fmt.Errorf("the metric's selector: %w", err)
	}
	query := selectorQuery("labelSelector", podSelector, "metricLabelSelector", metric.String())
	for _, version := range []string{"v1beta2", "v1beta1"} {
		body, err := a.Read(ctx, "/apis/custom.metrics.k8s.io/"+version+"/"+path, query)
		if errors.Is(err, ErrNotRegistered) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return decodeValues(body)
	}
	return nil, errors.New("no custom metrics API (custom.metrics.k8s.io) registered")
}

// External implements Source with external.metrics.k8s.io.
func (a *APIs) External(ctx context.Context, namespace string, m autoscalingv2.MetricIdentifier) (int64, error) {
	sum, err := a.getExternalMetric(ctx, namespace, m)
	if err != nil {
		return 0, fmt.Errorf("unable to get external metric %s/%s: %w", namespace, m.Name, err)
	}
	return sum, nil
}

func (a *APIs) getExternalMetric(ctx context.Context, namespace string, m autoscalingv2.MetricIdentifier) (
	sum int64, err error,
) {
	metric, err := metav1.LabelSelectorAsSelector(m.Selector)
	if err != nil {
		return 0, fmt.Errorf("the metric's selector: %w", err)
	}
	body, err := a.Read(ctx, "/apis/external.metrics.k8s.io/v1beta1/namespaces/"+url.PathEscape(namespace)+"/"+
		url.PathEscape(m.Name),
		selectorQuery("labelSelector", metric.String()))
	if errors.Is(err, ErrNotRegistered) {
		return 0, errors.New("no external metrics API (external.metrics.k8s.io) registered")
	}
	if err != nil {
		return 0, err
	}
	items, err := decodeValues(body)
	if err == nil && len(items) == 0 {
		err = errors.New("no metrics returned from external metrics API")
	}
	for i := range items {
		sum = saturate.Add(sum, saturate.MilliValue(&items[i].Value))
	}
	return sum, err
}

func decodeValues(body []byte) ([]metricValue, error) {
	var list struct{ Items []metricValue }
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("reading the response of the metrics API: %w", err)
	}
	return list.Items, nil
}

// selectorQuery returns the URL query with the given pairs of names and values. It omits pairs with
// an empty value.
func selectorQuery(pairs ...string) url.Values {
	q := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			q.Set(pairs[i], pairs[i+1])
		}
	}
	return q
}
