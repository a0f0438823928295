// Package nodemetrics computes NodeMetrics and PodMetrics from the usage that nodes report.
package nodemetrics

import (
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/nodegateway/report"
)

// List returns the NodeMetrics of the Nodes and the PodMetrics of the running pods in objects, in
// the same order. used maps node names to the resource usage that the nodes have reported. Objects
// without reported usage are skipped. Usage of a pod counts only if the node to which the pod is
// bound has reported it.
func List(objects []api.Object, used map[string]*report.NodeUsage, now time.Time) (out []api.Object) {
	for _, o := range objects {
		switch o := o.(type) {
		case *v1.Node:
			if n := used[o.Name]; n != nil && n.Node != nil {
				out = append(out, &metricsv1beta1.NodeMetrics{ObjectMeta: metricsMetadata(o, now),
					Timestamp: metav1.NewTime(n.At),
					Window:    metav1.Duration{Duration: n.Node.Window}, Usage: resourceList(*n.Node)})
			}
		case *v1.Pod:
			n := used[o.Spec.NodeName]
			if n == nil || o.Status.Phase != v1.PodRunning || len(n.Pods[o.UID]) == 0 {
				continue
			}
			m := &metricsv1beta1.PodMetrics{ObjectMeta: metricsMetadata(o, now), Timestamp: metav1.NewTime(n.At)}
			for _, c := range n.Pods[o.UID] {
				m.Containers = append(m.Containers, metricsv1beta1.ContainerMetrics{Name: c.Name,
					Usage: resourceList(c.Usage)})
				m.Window.Duration = max(m.Window.Duration, c.Window)
			}
			out = append(out, m)
		}
	}
	return out
}

// metricsMetadata returns the metadata for the metrics of o: its name and labels, and now as the
// creation time.
func metricsMetadata(o api.Object, now time.Time) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName(), Labels: o.GetLabels(),
		CreationTimestamp: metav1.NewTime(now)}
}

func resourceList(u report.Usage) v1.ResourceList {
	return v1.ResourceList{
		v1.ResourceCPU:    *resource.NewScaledQuantity(int64(u.CPU), resource.Nano),
		v1.ResourceMemory: *resource.NewQuantity(int64(u.Memory), resource.BinarySI),
	}
}
