// Package metrics describes the kinds of the API group metrics.k8s.io. Objects of these kinds are
// not stored.
package metrics

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

// The objects of NodeMetrics and PodMetrics are computed on each request, from the latest reports
// of agents.

// NodeMetricsKind returns the definition of the kind NodeMetrics.
func NodeMetricsKind() *api.Kind {
	k := builder.NewVirtual[metricsv1beta1.NodeMetrics](builder.Names{
		GroupVersion: metricsv1beta1.SchemeGroupVersion, Kind: "NodeMetrics", Plural: "nodes", Singular: "node", ClusterScoped: true})
	told[metricsv1beta1.NodeMetrics, metricsv1beta1.NodeMetricsList](k,
		func(l *metricsv1beta1.NodeMetricsList) *[]metricsv1beta1.NodeMetrics { return &l.Items })
	k.Row = builder.Row(func(m *metricsv1beta1.NodeMetrics, _ time.Time) []any {
		return used(m.Name, m.Window.Duration, m.Usage)
	})
	return k
}

// PodMetricsKind returns the definition of the kind PodMetrics.
func PodMetricsKind() *api.Kind {
	k := builder.NewVirtual[metricsv1beta1.PodMetrics](builder.Names{
		GroupVersion: metricsv1beta1.SchemeGroupVersion, Kind: "PodMetrics", Plural: "pods", Singular: "pod"})
	told[metricsv1beta1.PodMetrics, metricsv1beta1.PodMetricsList](k,
		func(l *metricsv1beta1.PodMetricsList) *[]metricsv1beta1.PodMetrics { return &l.Items })
	k.Row = builder.Row(func(m *metricsv1beta1.PodMetrics, _ time.Time) []any {
		lists := make([]corev1.ResourceList, len(m.Containers))
		for i := range m.Containers {
			lists[i] = m.Containers[i].Usage
		}
		return used(m.Name, m.Window.Duration, lists...)
	})
	return k
}

// told makes a virtual kind readable: it sets the verbs get and list, the list type and the columns
// of metrics.
func told[T, L any, P api.PtrTo[T], PL api.ListOf[L]](k *api.Kind, items func(*L) *[]T) {
	k.Verbs = []string{string(api.VerbGet), string(api.VerbList)}
	k.NewList = func() runtime.Object { return PL(new(L)) }
	k.Ops = api.OpsOf[T, L, P, PL](items)
	k.Columns = builder.Columns(builder.NameColumn, formed("cpu", "quantity"), formed("memory", "quantity"),
		formed("Window", "duration"))
}

func formed(name, format string) metav1.TableColumnDefinition {
	c := builder.StringColumn(name)
	c.Format = format
	return c
}

// used returns the table row of metrics: the sums of CPU, in millicores, and of memory.
func used(name string, window time.Duration, of ...corev1.ResourceList) []any {
	var cpu, memory resource.Quantity
	for _, one := range of {
		cpu.Add(one[corev1.ResourceCPU])
		memory.Add(one[corev1.ResourceMemory])
	}
	return []any{name, resource.NewMilliQuantity(cpu.MilliValue(), resource.DecimalSI).String(),
		memory.String(), window.String()}
}
