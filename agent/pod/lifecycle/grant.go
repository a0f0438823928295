package lifecycle

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/utils/ptr"
)

// ResourceGrant is the set of resources that the node has allocated to a pod and to its containers.
// After a resize, the spec may request other resources, possibly more than the node has. Containers
// are created with the granted resources, and only a new grant changes their resources.
//
// It is stored in the pod's directory, so that a restarted agent can load it. Fields may be added,
// but no field may change its meaning; unknown fields are ignored.
type ResourceGrant struct {
	Version    int                                `json:"version"`
	Generation int64                              `json:"generation"` // generation of the pod for which it was granted
	Containers map[string]v1.ResourceRequirements `json:"containers"`
	// resources of the whole pod; nil if the pod has none, and in grants of earlier releases
	Pod      *v1.ResourceRequirements `json:"pod,omitempty"`
	InEffect bool                     `json:"settled"` // the grant is fully in effect
}

// GrantVersion is the version of the stored form of new grants.
const GrantVersion = 1

// GrantFromSpec returns a grant of the resources in the pod's spec.
func GrantFromSpec(pod *v1.Pod) ResourceGrant {
	g := ResourceGrant{Version: GrantVersion, Generation: pod.Generation,
		Containers: map[string]v1.ResourceRequirements{}, InEffect: true}
	if r := pod.Spec.Resources; r != nil {
		g.Pod = &v1.ResourceRequirements{Requests: r.Requests, Limits: r.Limits}
	}
	ForEachContainer(pod, func(c *v1.Container) {
		g.Containers[c.Name] = v1.ResourceRequirements{Requests: c.Resources.Requests, Limits: c.Resources.Limits}
	})
	return g
}

// ForEachContainer calls visit for each init container and then for each regular container of a
// pod, in the order of the spec.
func ForEachContainer(pod *v1.Pod, visit func(*v1.Container)) {
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			visit(&list[i])
		}
	}
}

// CoversSpec reports whether the resources in the pod's spec equal the grant.
func (g ResourceGrant) CoversSpec(pod *v1.Pod) bool {
	same := equalResources(ptr.Deref(g.Pod, v1.ResourceRequirements{}),
		ptr.Deref(pod.Spec.Resources, v1.ResourceRequirements{}))
	ForEachContainer(pod, func(c *v1.Container) {
		if granted, ok := g.Containers[c.Name]; ok && !equalResources(granted, c.Resources) {
			same = false
		}
	})
	return same
}

func equalResources(a, b v1.ResourceRequirements) bool {
	return equality.Semantic.DeepEqual(a.Requests, b.Requests) && equality.Semantic.DeepEqual(a.Limits, b.Limits)
}

// ApplyTo returns the pod with the granted resources in place of the requested ones.
func (g ResourceGrant) ApplyTo(pod *v1.Pod) *v1.Pod {
	if g.CoversSpec(pod) {
		return pod
	}
	out := *pod
	out.Spec.Resources = g.Pod
	replace := func(list []v1.Container) []v1.Container {
		next := make([]v1.Container, len(list))
		copy(next, list)
		for i := range next {
			if granted, ok := g.Containers[next[i].Name]; ok {
				next[i].Resources.Requests, next[i].Resources.Limits = granted.Requests, granted.Limits
			}
		}
		return next
	}
	out.Spec.InitContainers, out.Spec.Containers = replace(pod.Spec.InitContainers), replace(pod.Spec.Containers)
	return &out
}
