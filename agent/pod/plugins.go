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

// notAdmitted is the pod's status reason if its devices cannot be allocated, as in the kubelet.
const notAdmitted = "UnexpectedAdmissionError"

// wantsDevices reports whether a container requests devices that a device plugin manages.
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

// unmanaged returns the node without the resources of device plugins, because the plugin manager
// itself checks whether there are enough.
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

// allocateDevices allocates the pod's devices. If that fails, the pod fails permanently, as in a
// kubelet. Its controller creates another pod, which is scheduled again.
func (w *worker) allocateDevices(ctx context.Context) error {
	pod := w.pod()
	err := w.cfg.Plugins.Allocate(ctx, pod)
	if err == nil || ctx.Err() != nil {
		return err
	}
	w.refuse(pod, refusal(pod, notAdmitted, "Allocate failed due to %v, which is unexpected", err))
	return err
}

// refuse rejects a pod of which nothing has been created.
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

// devicesChanged wakes the worker if its pod has devices.
func (w *worker) devicesChanged() {
	w.mu.Lock()
	concerned := w.o.Devices.Held
	w.mu.Unlock()
	if concerned {
		w.poke()
	}
}

// lookAtDevices updates the health of the pod's devices, of plugins and of claims. The lock is
// held.
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

// withPlugins adds the variables, mounts, devices and annotations of allocated devices to a
// container. The pod's own variables and mounts take precedence, as in the kubelet. Annotations
// that the agent reads cannot be overridden.
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
