package nodemetrics

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/nodegateway/report"
)

// Metrics are returned for stored objects only. The metrics of a pod come from its own node:
// reports of another node, or about an earlier pod of the name, are ignored.
func TestMetricsOfStoredObjects(t *testing.T) {
	now := time.Unix(2000, 0)
	u := report.Usage{CPU: 250_000_000, Memory: 3 << 20, Window: 15 * time.Second}
	claims := func(uid types.UID) map[types.UID][]report.ContainerUsage {
		return map[types.UID][]report.ContainerUsage{uid: {{Name: "app", Usage: u}}}
	}
	used := map[string]*report.NodeUsage{
		"w1": {At: now.Add(-time.Second), Node: &u, Pods: claims("own")},
		"w2": {At: now, Pods: claims("other")},
	}
	pod := func(name, uid, node string, phase v1.PodPhase) *v1.Pod {
		return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: types.UID(uid),
			Labels: map[string]string{"a": "b"}},
			Spec: v1.PodSpec{NodeName: node}, Status: v1.PodStatus{Phase: phase}}
	}
	node := func(name string) *v1.Node { return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }
	got := List([]api.Object{node("w1"), node("w2"), node("w3"), pod("p", "own", "w1", v1.PodRunning),
		pod("done", "own", "w1", v1.PodSucceeded), pod("claimed", "other", "w1", v1.PodRunning),
		pod("again", "new", "w1", v1.PodRunning),
		pod("free", "own", "", v1.PodRunning)}, used, now)
	if len(got) != 2 {
		t.Fatalf("%d metrics: %v", len(got), got)
	}
	n, ok := got[0].(*metricsv1beta1.NodeMetrics)
	if !ok || n.Name != "w1" || n.Usage.Cpu().String() != "250m" || n.Usage.Memory().String() != "3Mi" ||
		!n.Timestamp.Time.Equal(now.Add(-time.Second)) {
		t.Errorf("metrics of the node: %+v", got[0])
	}
	p, ok := got[1].(*metricsv1beta1.PodMetrics)
	if !ok || p.Namespace != "n" || p.Name != "p" || p.Labels["a"] != "b" || len(p.Containers) != 1 ||
		p.Window.Duration != 15*time.Second ||
		p.Containers[0].Name != "app" || p.Containers[0].Usage.Cpu().MilliValue() != 250 {
		t.Errorf("metrics of the pod: %+v", got[1])
	}
}
