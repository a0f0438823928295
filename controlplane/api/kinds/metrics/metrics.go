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
		GroupVersion: metricsv1beta1.SchemeGroupVersion, Kind: "NodeMetrics", Plural: "nodes", Singular: "node",
		ClusterScoped: true})
	makeReadable[metricsv1beta1.NodeMetrics, metricsv1beta1.NodeMetricsList](k,
		func(l *metricsv1beta1.NodeMetricsList) *[]metricsv1beta1.NodeMetrics { return &l.Items })
	k.Lists.Row = builder.Row(func(m *metricsv1beta1.NodeMetrics, _ time.Time) []any {
		return metricsRow(m.Name, m.Window.Duration, m.Usage)
	})
	return k
}

// PodMetricsKind returns the definition of the kind PodMetrics.
func PodMetricsKind() *api.Kind {
	k := builder.NewVirtual[metricsv1beta1.PodMetrics](builder.Names{
		GroupVersion: metricsv1beta1.SchemeGroupVersion, Kind: "PodMetrics", Plural: "pods", Singular: "pod"})
	makeReadable[metricsv1beta1.PodMetrics, metricsv1beta1.PodMetricsList](k,
		func(l *metricsv1beta1.PodMetricsList) *[]metricsv1beta1.PodMetrics { return &l.Items })
	k.Lists.Row = builder.Row(func(m *metricsv1beta1.PodMetrics, _ time.Time) []any {
		lists := make([]corev1.ResourceList, len(m.Containers))
		for i := range m.Containers {
			lists[i] = m.Containers[i].Usage
		}
		return metricsRow(m.Name, m.Window.Duration, lists...)
	})
	return k
}

// makeReadable makes a virtual kind readable: it sets the verbs get and list, the list type, and
// the table columns of metrics.
func makeReadable[T, L any, P api.PtrTo[T], PL api.ListOf[L]](k *api.Kind, items func(*L) *[]T) {
	k.Serving.Verbs = []string{string(api.VerbGet), string(api.VerbList)}
	k.Type.NewList = func() runtime.Object { return PL(new(L)) }
	k.Type.Ops = api.OpsOf[T, L, P, PL](items)
	k.Lists.Columns = builder.Columns(builder.NameColumn, formattedColumn("cpu", "quantity"),
		formattedColumn("memory", "quantity"),
		formattedColumn("Window", "duration"))
}

func formattedColumn(name, format string) metav1.TableColumnDefinition {
	c := builder.StringColumn(name)
	c.Format = format
	return c
}

// metricsRow returns the table row of metrics: the sums of the CPU usage, in millicores, and of the
// memory usage.
func metricsRow(name string, window time.Duration, usage ...corev1.ResourceList) []any {
	var cpu, memory resource.Quantity
	for _, one := range usage {
		cpu.Add(one[corev1.ResourceCPU])
		memory.Add(one[corev1.ResourceMemory])
	}
	return []any{name, resource.NewMilliQuantity(cpu.MilliValue(), resource.DecimalSI).String(),
		memory.String(), window.String()}
}
