package scheduler

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// A pod that is being resized counts with the most of what it asks for, was granted and has; where its node never has
// what it asks for, with what it holds. And a status that changes this is noticed.
func TestResizedPodsCountWithTheMost(t *testing.T) {
	cpus := func(n string) v1.ResourceList { return v1.ResourceList{v1.ResourceCPU: resource.MustParse(n)} }
	sized := func(asks, granted, has, reason string) *v1.Pod {
		p := testPod("a", func(pod *v1.Pod) {
			pod.Spec.NodeName, pod.Spec.Containers[0].Resources.Requests = "w1", cpus(asks)
			pod.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "c", AllocatedResources: cpus(granted),
				Resources: &v1.ResourceRequirements{Requests: cpus(has)}}}
		})
		if reason != "" {
			p.Status.Conditions = []v1.PodCondition{{Type: v1.PodResizePending, Status: v1.ConditionTrue,
				Reason: reason}}
		}
		return p
	}
	for _, c := range []struct {
		asks, granted, has, reason string
		want                       int64
	}{
		{"1", "1", "1", "", 1000}, {"3", "1", "1", "", 3000}, {"3", "1", "1", v1.PodReasonDeferred, 3000},
		{"3", "1", "1", v1.PodReasonInfeasible, 1000},
		{"1", "2", "3", "", 3000}, {"1", "2", "1", "", 2000}, {"9", "2", "3", v1.PodReasonInfeasible, 3000},
	} {
		pod := sized(c.asks, c.granted, c.has, c.reason)
		if got := framework.NewPodInfo(pod).Requests.MilliCPU; got != c.want {
			t.Errorf("%+v: counts with %d", c, got)
		}
		done := sized(c.asks, c.asks, c.asks, "")
		if same := sameForScheduling(pod, done); same != (framework.NewPodInfo(done).Requests.MilliCPU == c.want) {
			t.Errorf("%+v: the same as when it is done: %v", c, same)
		}
	}
}

// F80, F129: a pod with resources of its own counts with the most of what it requests, was allocated and has.
func TestResizedPodLevelResourcesCountWithTheMost(t *testing.T) {
	cpus := func(n string) v1.ResourceList { return v1.ResourceList{v1.ResourceCPU: resource.MustParse(n)} }
	sized := func(requested, allocated, actual, reason string) *v1.Pod {
		return testPod("a", func(pod *v1.Pod) {
			pod.Spec.NodeName, pod.Spec.Resources = "w1", &v1.ResourceRequirements{Requests: cpus(requested)}
			pod.Status.AllocatedResources = cpus(allocated)
			pod.Status.Resources = &v1.ResourceRequirements{Requests: cpus(actual)}
			if reason != "" {
				pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodResizePending, Status: v1.ConditionTrue,
					Reason: reason}}
			}
		})
	}
	for _, c := range []struct {
		requested, allocated, actual, reason string
		want                                 int64
	}{
		{"1", "1", "1", "", 1000}, {"3", "1", "1", v1.PodReasonDeferred, 3000}, {"1", "2", "3", "", 3000},
		{"1", "2", "1", "", 2000}, {"9", "2", "3", v1.PodReasonInfeasible, 3000},
	} {
		pod := sized(c.requested, c.allocated, c.actual, c.reason)
		if got := framework.NewPodInfo(pod).Requests.MilliCPU; got != c.want {
			t.Errorf("%+v: counts with %d", c, got)
		}
		done := sized(c.requested, c.requested, c.requested, "")
		if same := sameForScheduling(pod, done); same != (framework.NewPodInfo(done).Requests.MilliCPU == c.want) {
			t.Errorf("%+v: the same as when it is done: %v", c, same)
		}
	}
}
