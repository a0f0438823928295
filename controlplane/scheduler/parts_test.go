package scheduler

import (
	"context"
	"fmt"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
	"keelson.dev/keelson/internal/virtual"
)

func testPod(name string, change ...func(*v1.Pod)) *v1.Pod {
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)},
		Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c", Resources: v1.ResourceRequirements{
			Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("1"),
				v1.ResourceMemory: resource.MustParse("1Gi")}}}}},
	}
	for _, c := range change {
		c(pod)
	}
	return pod
}

func priority(n int32) func(*v1.Pod) { return func(pod *v1.Pod) { pod.Spec.Priority = &n } }

func testQueue(t *testing.T) *queue {
	t.Helper()
	p, err := framework.NewProfile(plugins.Default(&framework.Handle{})...)
	if err != nil {
		t.Fatal(err)
	}
	return newQueue(singleProfile(p), time.Now)
}

// Higher priority first, then first come; gated pods stay out.
func TestQueueOrder(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx := t.Context()
		q := testQueue(t)
		for _, pod := range []*v1.Pod{
			testPod("low"), testPod("high", priority(10)), testPod("later"), testPod("higher", priority(20)),
			testPod("gated", func(pod *v1.Pod) { pod.Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: "g"}} }),
		} {
			q.addOrUpdate(ctx, pod)
			time.Sleep(time.Millisecond)
		}
		for _, want := range []string{"higher", "high", "low", "later"} {
			pod, _ := q.popActive()
			if pod == nil || pod.Pod.Name != want {
				t.Fatalf("popped %v, want %s", pod, want)
			}
		}
		if pod, _ := q.popActive(); pod != nil {
			t.Fatalf("popped the gated pod %s", pod.Pod.Name)
		}
		q.addOrUpdate(ctx, testPod("gated"))
		if pod, _ := q.popActive(); pod == nil || pod.Pod.Name != "gated" {
			t.Errorf("popped %v after the gate was removed", pod)
		}
	})
}

// A refused pod waits for an event that may help, and its growing backoff; what happened during the attempt is not lost.
func TestQueueRequeue(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx := t.Context()
		q := testQueue(t)
		began := time.Now()
		pop := func(want time.Duration) *queuedPod {
			t.Helper()
			limit, cancel := context.WithTimeout(ctx, 10*time.Minute)
			defer cancel()
			pod := q.pop(limit)
			if got := time.Since(began); pod == nil || got != want {
				t.Fatalf("popped %v after %s, want after %s", pod, got, want)
			}
			return pod
		}
		node := &v1.Node{}
		full := map[string]bool{"NodeResourcesFit": true}
		q.addOrUpdate(ctx, testPod("p"))
		pod := pop(0)
		q.requeueFailed(ctx, pod, full)
		q.handleEvent(ctx, framework.NodeLabels, node) // cannot help against a lack of CPU
		if pod, _ := q.popActive(); pod != nil {
			t.Fatal("moved by an event that does not help")
		}
		q.handleEvent(ctx, framework.PodRemoved, testPod("other"))
		pod = pop(100 * time.Millisecond) // helps, once the backoff is over
		q.handleEvent(ctx, framework.NodeAdded, node)
		q.requeueFailed(ctx, pod, full)
		pod = pop(300 * time.Millisecond) // the event came during the attempt: 200 ms of backoff and again
		q.requeueFailed(ctx, pod, nil)    // an error, not a refusal: again after the backoff
		pod = pop(700 * time.Millisecond)
		q.requeueFailed(ctx, pod, full)
		time.Sleep(maxWaitInQueue)
		q.requeueOverdue(ctx)
		if pod, _ = q.popActive(); pod == nil {
			t.Fatal("a pod that has waited long enough was not tried anyway")
		}
		q.markBinding(pod)
		q.removePod(pod.Pod.UID)
		q.requeueFailed(ctx, pod, nil) // bound and gone: nothing comes back
		if pod, _ := q.popActive(); pod != nil || len(q.pods)+len(q.waiting)+len(q.inProgress) != 0 {
			t.Errorf("left over: %v, %d pods", pod, len(q.pods))
		}
	})
}

// An update of the pod that matters ends its wait, its own condition does not.
func TestQueueUpdate(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx := t.Context()
		q := testQueue(t)
		q.addOrUpdate(ctx, testPod("p"))
		pod, _ := q.popActive()
		q.requeueFailed(ctx, pod, map[string]bool{"NodeAffinity": true})
		time.Sleep(time.Second)
		q.addOrUpdate(ctx, testPod("p", func(pod *v1.Pod) {
			pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse}}
		}))
		if pod, _ := q.popActive(); pod != nil {
			t.Fatal("its own condition brought the pod back")
		}
		q.addOrUpdate(ctx, testPod("p", func(pod *v1.Pod) { pod.Spec.NodeSelector = map[string]string{"a": "b"} }))
		if pod, _ := q.popActive(); pod == nil || pod.Pod.Spec.NodeSelector["a"] != "b" {
			t.Error("an update of the spec did not bring the pod back")
		}
		if !q.recordMessage("p", "why") || q.recordMessage("p", "why") || !q.recordMessage("p", "why else") {
			t.Error("a message is to be told when it is new")
		}
	})
}

// However nodes and pods come and go, the incremental snapshot equals one made from nothing.
func TestSnapshotIsIncremental(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := newCluster(framework.Volumes{}, nil)
		nodes := make(map[string]bool)
		pods := make(map[types.UID]string) // → node
		assumed := make(map[types.UID]bool)
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			name := fmt.Sprint("n", rapid.IntRange(0, 3).Draw(t, "node"))
			uid := types.UID(fmt.Sprint("p", rapid.IntRange(0, 7).Draw(t, "pod")))
			pod := testPod(string(uid), func(p *v1.Pod) { p.Spec.NodeName = name })
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0:
				c.setNode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
				nodes[name] = true
			case 1:
				c.removeNode(name)
				delete(nodes, name)
			case 2:
				c.addBoundPod(pod)
				pods[uid] = name
				delete(assumed, uid)
			case 3:
				if _, there := pods[uid]; c.assumePod(framework.NewPodInfo(pod), name) == there {
					t.Fatalf("assumed %s, which was placed: %v", uid, there)
				} else if !there {
					pods[uid], assumed[uid] = name, true
				}
			case 4:
				c.forgetAssumedPod(uid)
				if assumed[uid] {
					delete(pods, uid)
					delete(assumed, uid)
				}
			case 5:
				c.removePod(uid)
				delete(pods, uid)
				delete(assumed, uid)
			case 6:
				compare(t, c.takeSnapshot(), nodes, pods)
			}
		}
		c.forgetAssumed()
		for uid := range assumed {
			delete(pods, uid)
		}
		compare(t, c.takeSnapshot(), nodes, pods)
	})
}

func compare(t *rapid.T, s *framework.Snapshot, nodes map[string]bool, pods map[types.UID]string) {
	if len(s.Nodes) != len(nodes) || len(s.ByName) != len(nodes) {
		t.Fatalf("%d nodes in the list and %d by name, want %d", len(s.Nodes), len(s.ByName), len(nodes))
	}
	for i, n := range s.Nodes {
		if i > 0 && s.Nodes[i-1].Node.Name >= n.Node.Name {
			t.Fatal("nodes are not in order")
		}
		if s.ByName[n.Node.Name] != n {
			t.Fatalf("%s differs by name", n.Node.Name)
		}
		want := 0
		for _, on := range pods {
			if on == n.Node.Name {
				want++
			}
		}
		if len(n.Pods) != want || n.Requested.MilliCPU != int64(1000*want) {
			t.Fatalf("%s has %d pods that ask for %d, want %d pods", n.Node.Name, len(n.Pods),
				n.Requested.MilliCPU, want)
		}
	}
}

// A pod that waits because of other pods is woken by the right pod alone, whatever else happens in the cluster.
func TestQueueWakesByTheRightPod(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx := t.Context()
		q := testQueue(t)
		labelled := func(name, app string) *v1.Pod {
			return testPod(name, func(pod *v1.Pod) { pod.Labels = map[string]string{"app": app} })
		}
		q.addOrUpdate(ctx, testPod("waits", func(pod *v1.Pod) {
			pod.Spec.Affinity =
				&v1.Affinity{
					PodAffinity: &v1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{
						{TopologyKey: "zone",
							LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "db"}}}}}}
		}))
		pod, _ := q.popActive()
		q.requeueFailed(ctx, pod, map[string]bool{"InterPodAffinity": true})
		time.Sleep(time.Second) // its backoff is over
		web := labelled("web", "web")
		for _, e := range []struct {
			event framework.Event
			obj   any
		}{
			{framework.PodAdded, web}, {framework.PodRemoved, web},
			{framework.PodUpdated, framework.PodUpdate{Old: web, Now: web}},
			{framework.NodeAllocatable, &v1.Node{}}, {framework.ClaimChanged, &v1.PersistentVolumeClaim{}},
		} {
			q.handleEvent(ctx, e.event, e.obj)
			if pod, _ := q.popActive(); pod != nil {
				t.Fatalf("woken by %s", e.event)
			}
		}
		q.handleEvent(ctx, framework.PodAdded, labelled("db", "db"))
		if pod, _ := q.popActive(); pod == nil {
			t.Fatal("not woken by the pod that it waits for")
		}
	})
}
