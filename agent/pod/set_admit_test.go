package pod

import (
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/internal/virtual"
)

// F95: a pod that does not fit is rejected for good, with Kubernetes' reason; a fitting one is
// admitted.
func TestNodeAdmission(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		nd := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Labels: map[string]string{"zone": "a"}},
			Status: v1.NodeStatus{Allocatable: v1.ResourceList{
				v1.ResourceCPU: resource.MustParse("2"), v1.ResourceMemory: resource.MustParse("1Gi"),
				v1.ResourcePods: resource.MustParse("10"), "example.com/none": resource.MustParse("0")}}}
		n.cfg.Node = func() *v1.Node { return nd }
		n.startAgent()
		defer func() { n.stop() }()
		cpu := func(q string) v1.Container {
			return v1.Container{Name: "app", Image: "hello:1", Ports: []v1.ContainerPort{{HostPort: 8080}},
				Resources: v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse(q)}}}
		}
		n.cluster.Put(simplePod("u1", cpu("1500m")))
		virtual.Wait()
		big := cpu("1")
		big.Ports = nil
		n.cluster.Put(simplePod("u2", big), simplePod("u3", cpu("100m")))
		far := simplePod("u4")
		far.Spec.NodeSelector = map[string]string{"zone": "b"}
		n.cluster.Put(far)
		asks := func(uid string, name v1.ResourceName) *v1.Pod {
			r := v1.ResourceList{name: resource.MustParse("1")}
			return simplePod(uid, v1.Container{Name: "app", Image: "hello:1",
				Resources: v1.ResourceRequirements{Requests: r, Limits: r}})
		}
		// A resource unknown to the node may be managed by a scheduler extender; the node does not
		// check it.
		n.cluster.Put(asks("u5", "example.com/none"), asks("u6", "example.com/outside"), asks("u7", "hugepages-2Mi"))
		time.Sleep(rejectionPatience)
		virtual.Wait()
		for uid, want := range map[types.UID]string{
			"u1": "Running||",
			"u2": "Failed|OutOfcpu|Pod was rejected: Node didn't have enough resource: cpu, requested: 1000, used: " +
				"1500, capacity: 2000",
			"u3": "Failed|NodePorts|Pod was rejected: Predicate NodePorts failed: node(s) didn't have free ports for " +
				"the requested pod ports",
			"u5": "Failed|OutOfexample.com/none|Pod was rejected: Node didn't have enough resource: " +
				"example.com/none, requested: 1, used: 0, capacity: 0",
			"u6": "Running||",
			"u7": "Failed|OutOfhugepages-2Mi|Pod was rejected: Node didn't have enough resource: hugepages-2Mi, " +
				"requested: 1, used: 0, capacity: 0",
			"u4": "Failed|NodeAffinity|Pod was rejected: Predicate NodeAffinity failed: node(s) didn't match Pod's " +
				"node affinity/selector",
		} {
			st := n.reportedPod(uid).Status
			if got := fmt.Sprintf("%s|%s|%s", st.Phase, st.Reason, st.Message); got != want {
				t.Errorf("%s: %s\nwant %s", uid, got, want)
			}
			if st.Phase == v1.PodFailed && len(st.ContainerStatuses) > 0 {
				t.Errorf("%s was refused and shows containers: %+v", uid, st.ContainerStatuses)
			}
		}
		if got := n.rt.Count("RunPodSandbox"); got != 2 {
			t.Errorf("%d sandboxes were made", got)
		}
	})
}

// A pod with a deleted object does not count against new pods, though its containers are still
// being stopped. The scheduler has considered its resources free since the deletion.
func TestForcedDeletionMakesRoom(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		nd := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}, Status: v1.NodeStatus{Allocatable: v1.ResourceList{
			v1.ResourceCPU: resource.MustParse("2"), v1.ResourceMemory: resource.MustParse("1Gi"),
			v1.ResourcePods: resource.MustParse("10")}}}
		n.cfg.Node = func() *v1.Node { return nd }
		n.cluster.HoldGates()
		n.startAgent()
		defer func() { n.stop() }()
		greedy := func(uid string) *v1.Pod {
			return simplePod(uid, v1.Container{Name: "app", Image: "hello:1",
				Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
					v1.ResourceCPU: resource.MustParse("1500m")}}})
		}
		n.cluster.Put(greedy("u1"))
		virtual.Wait()
		n.cluster.Delete(n.reportedPod("u1"))
		n.cluster.Put(greedy("u2"))
		virtual.Wait()
		if st := n.reportedPod("u2").Status; st.Phase == v1.PodFailed {
			t.Errorf("refused: %s: %s", st.Reason, st.Message)
		}
	})
}

// A pod may arrive before the node's label or resource that it was scheduled for. If the node never
// gets it, the pod is rejected without container statuses, also after an agent restart.
func TestAdmissionWaitsForTheNode(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		nd := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
		n.cfg.Node = func() *v1.Node { return nd }
		n.startAgent()
		defer func() { n.stop() }()
		selecting := simplePod("u1")
		selecting.Spec.NodeSelector = map[string]string{"disk": "ssd"}
		dongle := simplePod("u2")
		dongle.Spec.Containers[0].Resources.Requests = v1.ResourceList{"example.com/dongle": resource.MustParse("1")}
		n.cluster.Put(selecting, dongle)
		virtual.Wait()
		if got := n.reportedPod("u1").Status.Phase; got == v1.PodFailed {
			t.Error("refused before the node's labels had time to arrive")
		}
		nd = &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Labels: map[string]string{"disk": "ssd"}},
			Status: v1.NodeStatus{Allocatable: v1.ResourceList{"example.com/dongle": resource.MustParse("1")}}}
		n.cluster.Put(nd)
		virtual.Wait()
		for _, uid := range []types.UID{"u1", "u2"} {
			if got := n.reportedPod(uid).Status.Phase; got != v1.PodRunning {
				t.Errorf("%s is %s once the node says what it wants", uid, got)
			}
		}
		never := simplePod("u3")
		never.Spec.NodeSelector = map[string]string{"disk": "tape"}
		n.cluster.Put(never)
		time.Sleep(rejectionPatience)
		for _, when := range []string{"when refused", "after a restart of the agent"} {
			virtual.Wait()
			if st := n.reportedPod("u3").Status; st.Phase != v1.PodFailed || st.Reason != "NodeAffinity" ||
				len(st.ContainerStatuses) > 0 {
				t.Errorf("%s: %+v", when, st)
			}
			n.startAgent()
		}
	})
}
