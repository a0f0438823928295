package pod

import (
	"context"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// notAdmitted is the reason of a pod to which a device plugin's devices cannot be given, as a kubelet's.
const notAdmitted = "UnexpectedAdmissionError"

// wantsDevices says that a container asks for devices of plugins.
func (c *Config) wantsDevices(pod *v1.Pod) (wants bool) {
	if c.Plugins == nil {
		return false
	}
	eachContainer(pod, func(spec *v1.Container) {
		for name := range spec.Resources.Limits {
			wants = wants || extended(string(name)) && c.Plugins.Manages(name)
		}
	})
	return wants
}

// unmanaged is the node without what its device plugins manage: who gives out the devices says whether there are enough.
func (c *Config) unmanaged(node *v1.Node) *v1.Node {
	if c.Plugins == nil {
		return node
	}
	out := *node
	out.Status.Allocatable = maps.Clone(node.Status.Allocatable)
	maps.DeleteFunc(out.Status.Allocatable, func(name v1.ResourceName, _ resource.Quantity) bool {
		return extended(string(name)) && c.Plugins.Manages(name)
	})
	return &out
}

// allocateDevices has the pod given its devices. A pod that cannot get them fails for good, as with a kubelet: its
// controller makes another, which is scheduled anew.
func (w *worker) allocateDevices(ctx context.Context) error {
	pod := w.pod()
	err := w.cfg.Plugins.Allocate(ctx, pod)
	if err == nil || ctx.Err() != nil {
		return err
	}
	w.refuse(pod, refusal(pod, notAdmitted, "Allocate failed due to %v, which is unexpected", err))
	return err
}

// refuse ends a pod of which nothing has been made.
func (w *worker) refuse(pod *v1.Pod, why *Stop) {
	w.mu.Lock()
	first := w.evicted == nil && w.desired.Stop == nil
	if first {
		w.evicted = why
		w.desired.Stop = why
	}
	w.mu.Unlock()
	if first {
		w.events.event(pod, "", v1.EventTypeWarning, why.Reason, why.Message)
		w.poke()
	}
}

// devicesChanged has a pod with devices looked at.
func (w *worker) devicesChanged() {
	w.mu.Lock()
	concerned := w.o.Devices.Held
	w.mu.Unlock()
	if concerned {
		w.poke()
	}
}

// lookAtDevices notes which devices the pod has, of plugins and by its claims. The lock is held.
func (w *worker) lookAtDevices() {
	health := w.cfg.Devices.Health(w.desired.Pod)
	if w.cfg.Plugins != nil {
		for c, of := range w.cfg.Plugins.Health(w.desired.Pod.UID) {
			if health == nil {
				health = map[string][]v1.ResourceStatus{}
			}
			health[c] = slices.Concat(of, health[c])
		}
	}
	w.o.Devices.Health, w.o.Devices.Held = health, health != nil
}

// withPlugins gives a container what its devices need to be seen. What the pod itself says of a variable or a path counts
// more, as with a kubelet; the annotations that the agent reads again are its own.
func withPlugins(c *cri.ContainerConfig, has agent.PluginDevices) {
	c.Envs = slices.Concat(has.Envs, c.Envs)
	c.Mounts = slices.Concat(has.Mounts, c.Mounts)
	c.Devices = append(c.Devices, has.Devices...)
	for _, d := range has.CDI {
		if !slices.ContainsFunc(c.CDIDevices, func(o *cri.CDIDevice) bool { return o.Name == d.Name }) {
			c.CDIDevices = append(c.CDIDevices, d)
		}
	}
	for k, v := range has.Annotations {
		if _, own := c.Annotations[k]; !own && !strings.HasPrefix(k, "keelson.dev/") && !strings.HasPrefix(k, "io.kubernetes.") {
			c.Annotations[k] = v
		}
	}
}
