package heartbeats

import (
	"context"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/virtual"
)

func newLease(namespace, name string) *coordinationv1.Lease {
	return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
}

// Readers get the newest heartbeat that any replica has received, also in conditions that the
// control plane set to Unknown. Stored objects, other Leases and other conditions are not changed.
// The other replicas are requested at most once per second, and only for a read. F115
func TestHeartbeatsAreRead(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		begin, asked := time.Now(), 0
		h := &Collector{
			Own: func() map[string]time.Time {
				return map[string]time.Time{"w1": begin.Add(3 * time.Second), "w2": begin}
			},
			Others: func(context.Context) []map[string]time.Time {
				asked++
				return []map[string]time.Time{nil, {"w2": begin.Add(2 * time.Second), "w1": begin}}
			},
		}
		node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"},
			Status: v1.NodeStatus{Conditions: []v1.NodeCondition{
				{Type: v1.NodeReady, Status: v1.ConditionTrue, LastHeartbeatTime: metav1.NewTime(begin)},
				{Type: v1.NodeMemoryPressure, Status: v1.ConditionUnknown, LastHeartbeatTime: metav1.NewTime(begin)},
				{Type: v1.NodeNetworkUnavailable, Status: v1.ConditionFalse, LastHeartbeatTime: metav1.NewTime(begin)},
			}}}
		nodes, leases := &api.Kind{Resource: "nodes"}, &api.Kind{Resource: "leases"}
		got := h.AddTo(t.Context(), nodes, []api.Object{node})[0].(*v1.Node)
		for i, want := range []time.Duration{3 * time.Second, 3 * time.Second, 0} {
			if at := got.Status.Conditions[i].LastHeartbeatTime.Sub(begin); at != want {
				t.Errorf("%s: heartbeat after %v, want %v", got.Status.Conditions[i].Type, at, want)
			}
		}
		if at := node.Status.Conditions[0].LastHeartbeatTime; !at.Time.Equal(begin) {
			t.Errorf("the stored object was modified: %v", at)
		}
		in := []api.Object{newLease(v1.NamespaceNodeLease, "w2"), newLease("kube-system", "w2"),
			newLease(v1.NamespaceNodeLease, "gone")}
		out := h.AddTo(t.Context(), leases, in)
		if l := out[0].(*coordinationv1.Lease); l.Spec.RenewTime == nil ||
			l.Spec.RenewTime.Sub(begin) != 2*time.Second || l.Spec.LeaseDurationSeconds == nil {
			t.Errorf("Lease of w2: %+v", l.Spec)
		}
		for i := 1; i < 3; i++ {
			if out[i] != in[i] {
				t.Errorf("%s/%s has no heartbeat and was changed", in[i].GetNamespace(), in[i].GetName())
			}
		}
		h.AddTo(t.Context(), &api.Kind{Resource: "pods"}, []api.Object{&v1.Pod{}})
		if asked != 1 {
			t.Errorf("the other replicas were requested %d times at the same time", asked)
		}
		time.Sleep(heartbeatAge)
		if h.AddTo(t.Context(), nodes, []api.Object{node}); asked != 2 {
			t.Errorf("after %v the other replicas were requested %d times", heartbeatAge, asked)
		}
	})
}

// The heartbeats of a replica that does not respond in time are kept from its last response, for a
// limited time. A canceled reader does not cancel the request for other readers.
func TestSlowReplicaKeepsHeartbeats(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		begin, slow := time.Now(), false
		h := &Collector{
			Own: func() map[string]time.Time { return map[string]time.Time{} },
			Others: func(ctx context.Context) []map[string]time.Time {
				if slow || ctx.Err() != nil {
					return []map[string]time.Time{nil}
				}
				return []map[string]time.Time{{"w1": begin.Add(2 * time.Second)}}
			},
		}
		leases := &api.Kind{Resource: "leases"}
		renewed := func(ctx context.Context) *metav1.MicroTime {
			return h.AddTo(ctx, leases,
				[]api.Object{newLease(v1.NamespaceNodeLease, "w1")})[0].(*coordinationv1.Lease).Spec.RenewTime
		}
		canceled, cancel := context.WithCancel(t.Context())
		cancel()
		if got := renewed(canceled); got == nil {
			t.Error("a canceled reader gets no heartbeats of the other replicas")
		}
		slow = true
		time.Sleep(2 * heartbeatAge)
		if got := renewed(t.Context()); got == nil || got.Sub(begin) != 2*time.Second {
			t.Errorf("with an unresponsive replica, the Lease was renewed at %v, want 2 s after the start", got)
		}
		time.Sleep(heartbeatRetention + time.Minute)
		if got := renewed(t.Context()); got != nil {
			t.Errorf("a node without a heartbeat for more than %v was renewed at %v", heartbeatRetention, got)
		}
	})
}
