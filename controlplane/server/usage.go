package server

import (
	"context"
	"errors"
	"net/url"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/controllers/horizontalpodautoscaler"
	"keelson.dev/keelson/controlplane/nodegateway"
)

// metricsOf is the NodeMetrics of Nodes and the PodMetrics of pods of which the agents told something. Of a pod that
// node is believed to which it is bound, and no other.
func metricsOf(of []api.Object, used map[string]*nodegateway.NodeUsed, now time.Time) (out []api.Object) {
	for _, o := range of {
		switch o := o.(type) {
		case *v1.Node:
			if n := used[o.Name]; n != nil && n.Node != nil {
				out = append(out, &metricsv1beta1.NodeMetrics{ObjectMeta: metaOf(o, now), Timestamp: metav1.NewTime(n.At),
					Window: metav1.Duration{Duration: n.Node.Window}, Usage: usageOf(*n.Node)})
			}
		case *v1.Pod:
			n := used[o.Spec.NodeName]
			if n == nil || o.Status.Phase != v1.PodRunning || len(n.Pods[o.UID]) == 0 {
				continue
			}
			m := &metricsv1beta1.PodMetrics{ObjectMeta: metaOf(o, now), Timestamp: metav1.NewTime(n.At)}
			for _, c := range n.Pods[o.UID] {
				m.Containers = append(m.Containers, metricsv1beta1.ContainerMetrics{Name: c.Name, Usage: usageOf(c.Used)})
				m.Window.Duration = max(m.Window.Duration, c.Window)
			}
			out = append(out, m)
		}
	}
	return out
}

// metaOf is the metadata of metrics: they are made now and have the labels of what they are about.
func metaOf(o api.Object, now time.Time) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName(), Labels: o.GetLabels(),
		CreationTimestamp: metav1.NewTime(now)}
}

func usageOf(u nodegateway.Used) v1.ResourceList {
	return v1.ResourceList{
		v1.ResourceCPU:    *resource.NewScaledQuantity(int64(u.CPU), resource.Nano),
		v1.ResourceMemory: *resource.NewQuantity(int64(u.Memory), resource.BinarySI),
	}
}

// autoscalerMetrics is where autoscalers read theirs. Servers of metrics know the reader by the name that their manifests give
// rights to.
func (r *Replica) autoscalerMetrics() *horizontalpodautoscaler.APIs {
	u := api.User{Name: api.ServiceAccountPrefix + "kube-system:horizontal-pod-autoscaler",
		Groups: []string{api.GroupMasters, api.GroupAuthenticated}}
	return &horizontalpodautoscaler.APIs{Client: r.client.As(u), Read: func(ctx context.Context, path string, query url.Values) ([]byte, error) {
		body, err := r.api.ReadAggregated(ctx, u, path, query)
		if errors.Is(err, apiserver.ErrNotAggregated) {
			return nil, horizontalpodautoscaler.ErrNotRegistered
		}
		return body, err
	}}
}
