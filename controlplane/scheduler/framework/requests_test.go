package framework

import (
	"fmt"
	"math/rand/v2"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/component-helpers/resource"
)

func randomRequests(d *rand.Rand) v1.ResourceList {
	out := v1.ResourceList{}
	for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory, v1.ResourceEphemeralStorage,
		"example.com/gpu", v1.ResourcePods} {
		if d.IntN(3) == 0 {
			continue
		}
		values := []string{"0", "1", "3", "2Gi", "1500M", "7e3"}
		if d.IntN(6) == 0 {
			values = []string{"100m", "1.5", "0.5m", "0.1"}
		}
		if name == v1.ResourceCPU {
			values = []string{"0", "1", "250m", "1.5", "0.1", "2e-1"}
			if d.IntN(8) == 0 {
				values = []string{"0.5m", "0.0001", "1.2345"}
			}
		}
		out[name] = resource.MustParse(values[d.IntN(len(values))])
	}
	return out
}

func randomPod(d *rand.Rand) *v1.Pod {
	pod := &v1.Pod{}
	always := v1.ContainerRestartPolicyAlways
	for i := range 1 + d.IntN(3) {
		pod.Spec.Containers = append(pod.Spec.Containers,
			v1.Container{Name: fmt.Sprint("c", i), Resources: v1.ResourceRequirements{Requests: randomRequests(d)}})
	}
	if d.IntN(6) == 0 {
		c := v1.Container{Name: "init", Resources: v1.ResourceRequirements{Requests: randomRequests(d)}}
		if d.IntN(2) == 0 {
			c.RestartPolicy = &always
		}
		pod.Spec.InitContainers = []v1.Container{c}
	}
	if d.IntN(6) == 0 {
		pod.Spec.Overhead = randomRequests(d)
	}
	if d.IntN(6) == 0 {
		pod.Spec.Resources = &v1.ResourceRequirements{Requests: randomRequests(d)}
	}
	if d.IntN(6) == 0 {
		pod.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "c0", AllocatedResources: randomRequests(d),
			Resources: &v1.ResourceRequirements{Requests: randomRequests(d)}}}
	}
	if d.IntN(6) == 0 {
		pod.Status.AllocatedResources = randomRequests(d)
		pod.Status.Resources = &v1.ResourceRequirements{Requests: randomRequests(d)}
	}
	if d.IntN(6) == 0 {
		pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodResizePending, Reason: v1.PodReasonInfeasible}}
	}
	return pod
}

// F80: what a pod asks for is what Kubernetes' own sum says, for the pods whose sum is made the short way too.
func TestRequestsEqualKubernetes(t *testing.T) {
	plain, guessed := 0, 0
	for seed := range uint64(20000) {
		pod := randomPod(rand.New(rand.NewPCG(seed, 5)))
		got := NewPodInfo(pod)
		want := resourcesOf(podresources.PodRequests(pod, podresources.PodResourcesOptions{UseStatusResources: true,
			InPlacePodLevelResourcesVerticalScalingEnabled: true}))
		counted := podresources.PodRequests(pod, podresources.PodResourcesOptions{UseStatusResources: true,
			InPlacePodLevelResourcesVerticalScalingEnabled: true, NonMissingContainerRequests: defaultRequests})
		if !got.Requests.Equal(want) || got.CountedCPU != counted.Cpu().MilliValue() ||
			got.CountedMemory != counted.Memory().Value() {
			t.Fatalf("seed %d: %+v, counted %d and %d; want %+v, %d and %d", seed, got.Requests, got.CountedCPU,
				got.CountedMemory,
				want, counted.Cpu().MilliValue(), counted.Memory().Value())
		}
		if (&PodInfo{Pod: pod}).setPlainRequests() {
			plain++
			if got.CountedCPU != got.Requests.MilliCPU {
				guessed++
			}
		}
	}
	if plain < 1000 || guessed < 500 {
		t.Errorf("%d plain pods, %d of them with a guess: too little was seen", plain, guessed)
	}
}

// A label that everything has does not make a pod look at the terms of all applications.
func TestTermsAreFoundByWhatTellsThemApart(t *testing.T) {
	x := newPodSelectorIndex(func(p *PodSelector) *PodSelector { return p })
	var all []*PodSelector
	for i := range 500 {
		p := NewPodSelector("one", nil, nil,
			&metav1.LabelSelector{MatchLabels: map[string]string{"a": "prod", "service": fmt.Sprint(i), "z": "web"}})
		all = append(all, p)
		x.addItem(p)
	}
	for at, list := range x.buckets {
		if len(list) > 2 {
			t.Errorf("%d terms lie together at %v", len(list), at)
		}
	}
	for i, want := range all {
		found := 0
		x.forEachMatch(&podSubject{namespace: "one",
			labels: map[string]string{"a": "prod", "service": fmt.Sprint(i), "z": "web"}}, nil, func(p *PodSelector) {
			if found++; p != want {
				t.Errorf("pod %d: found %q", i, p.ID)
			}
		})
		if found != 1 {
			t.Errorf("pod %d: %d terms found", i, found)
		}
	}
	for _, p := range all {
		x.removeItem(p)
	}
	if len(x.buckets) != 0 {
		t.Errorf("%d buckets are left", len(x.buckets))
	}
}
