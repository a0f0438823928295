package podspec

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// keepAllButResources resets everything in obj except the containers' resources to old, for a
// resize request. Lists with other containers stay as they are, so that validation rejects them.
func keepAllButResources(obj, old *corev1.Pod) {
	wanted, rv := obj.Spec, obj.ResourceVersion
	*obj = *old.DeepCopy()
	obj.ResourceVersion = rv
	if len(wanted.Containers) != len(old.Spec.Containers) || len(wanted.InitContainers) != len(old.Spec.InitContainers) {
		obj.Spec = wanted
	} else {
		obj.Spec.InitContainers = resized(wanted.InitContainers, obj.Spec.InitContainers)
		obj.Spec.Containers = resized(wanted.Containers, obj.Spec.Containers)
	}
	DefaultPodSpec(&obj.Spec)
	if !fieldrules.SemanticEqual(obj.Spec, old.Spec) {
		obj.Generation++
	}
}

// resized returns the containers of old with the resources and resize policies of wanted. It
// returns wanted if the container names differ.
func resized(wanted, old []corev1.Container) []corev1.Container {
	for i := range old {
		if wanted[i].Name != old[i].Name {
			return wanted
		}
	}
	for i := range old {
		old[i].Resources, old[i].ResizePolicy = wanted[i].Resources, wanted[i].ResizePolicy
	}
	return old
}

const onlyCPUAndMemory = "only cpu and memory resources are mutable"

// validateResizable returns an error for pods that cannot be resized: static pods and Windows pods.
func validateResizable(old *corev1.Pod) field.ErrorList {
	if _, mirror := old.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return field.ErrorList{field.Forbidden(field.NewPath(""), "static pods cannot be resized")}
	}
	if old.Spec.OS != nil && old.Spec.OS.Name == corev1.Windows {
		return field.ErrorList{field.Forbidden(field.NewPath(""), "windows pods cannot be resized")}
	}
	return nil
}

// validateResize validates a resize of a pod. The whole pod is validated separately.
func validateResize(obj, old *corev1.Pod) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	was := old.Status.QOSClass
	if was == "" {
		was = QOSClass(&old.Spec)
	}
	if was != QOSClass(&obj.Spec) {
		errs = append(errs, field.Invalid(spec, obj.Status.QOSClass, "Pod QOS Class may not change as a result of resizing"))
	}
	if !resizable(old) {
		errs = append(errs, field.Forbidden(spec, "Pod running on node without support for resize"))
	}
	if others := append(otherContainers(obj.Spec.Containers, old.Spec.Containers, "containers"),
		otherContainers(obj.Spec.InitContainers, old.Spec.InitContainers, "initContainers")...); len(others) > 0 {
		return append(errs, others...)
	}
	now := obj.Spec.DeepCopy()
	errs = append(errs, validateResized(now.Containers, old.Spec.Containers, spec.Child("containers"))...)
	for i := range now.InitContainers {
		c, before, at := &now.InitContainers[i], &old.Spec.InitContainers[i], spec.Child("initContainers").Index(i)
		changed := !fieldrules.SemanticEqual(*c, *before)
		errs = append(errs, validateRemoved(&c.Resources, &before.Resources, at.Child("resources"))...)
		if restoreCPUAndMemory(c, before); !fieldrules.SemanticEqual(*c, *before) {
			errs = append(errs, field.Forbidden(at, "only cpu and memory resources for init or sidecar containers are mutable"))
		}
		if changed && fieldrules.Deref(c.RestartPolicy) != corev1.ContainerRestartPolicyAlways && slices.ContainsFunc(c.ResizePolicy,
			func(p corev1.ContainerResizePolicy) bool { return p.RestartPolicy == corev1.RestartContainer }) {
			errs = append(errs, field.Forbidden(at, "non-sidecar init containers with a resize policy of RestartContainer cannot be resized"))
		}
	}
	if len(errs) == 0 && !fieldrules.SemanticEqual(*now, old.Spec) {
		errs = append(errs, field.Forbidden(spec, onlyCPUAndMemory))
	}
	return errs
}

// resizable reports whether the node supports resizing a running pod: it then reports the resources
// of running containers.
func resizable(old *corev1.Pod) bool {
	return !slices.ContainsFunc(old.Status.ContainerStatuses, func(cs corev1.ContainerStatus) bool {
		return cs.State.Running != nil && cs.Resources == nil
	})
}

// otherContainers returns errors unless both lists have the same containers in the same order.
func otherContainers(now, was []corev1.Container, list string) (errs field.ErrorList) {
	at := field.NewPath("spec", list)
	if len(now) != len(was) {
		return field.ErrorList{field.Forbidden(at, list+" may not be added or removed on resize")}
	}
	for i := range now {
		if now[i].Name != was[i].Name {
			errs = append(errs, field.Forbidden(at.Index(i).Child("name"), list+" may not be renamed or reordered on resize"))
		}
	}
	return errs
}

// validateResized validates the change of each container's resources, and restores the mutable
// resources in now from was.
func validateResized(now, was []corev1.Container, at *field.Path) (errs field.ErrorList) {
	for i := range now {
		errs = append(errs, validateRemoved(&now[i].Resources, &was[i].Resources, at.Index(i).Child("resources"))...)
		if restoreCPUAndMemory(&now[i], &was[i]); !fieldrules.SemanticEqual(now[i], was[i]) {
			errs = append(errs, field.Forbidden(field.NewPath("spec"), onlyCPUAndMemory))
		}
	}
	return errs
}

// validateRemoved returns an error if a request or limit is removed. It may only be changed.
func validateRemoved(now, was *corev1.ResourceRequirements, at *field.Path) (errs field.ErrorList) {
	for _, side := range []struct {
		name     string
		now, was corev1.ResourceList
	}{{"requests", now.Requests, was.Requests}, {"limits", now.Limits, was.Limits}} {
		for name := range side.was {
			if _, kept := side.now[name]; !kept {
				errs = append(errs, field.Forbidden(at.Child(side.name), fmt.Sprintf("resource %s cannot be removed", side.name)))
				break
			}
		}
	}
	return errs
}

// restoreCPUAndMemory sets the CPU and memory of c to those of was. All other fields stay
// unchanged.
func restoreCPUAndMemory(c, was *corev1.Container) {
	restore := func(now, was corev1.ResourceList) corev1.ResourceList {
		out := maps.Clone(now)
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
			delete(out, name)
			if q, had := was[name]; had {
				if out == nil {
					out = corev1.ResourceList{}
				}
				out[name] = q
			}
		}
		return out
	}
	c.Resources.Requests = restore(c.Resources.Requests, was.Resources.Requests)
	c.Resources.Limits = restore(c.Resources.Limits, was.Resources.Limits)
}

// validateResizePolicy validates the restart behavior of a container when its resources change.
// restarts is the pod's restart policy.
func validateResizePolicy(policies []corev1.ContainerResizePolicy, restarts corev1.RestartPolicy,
	at *field.Path) (errs field.ErrorList) {
	seen := map[corev1.ResourceName]bool{}
	for i, p := range policies {
		if seen[p.ResourceName] {
			errs = append(errs, field.Duplicate(at.Index(i), p.ResourceName))
		}
		seen[p.ResourceName] = true
		errs = append(errs, fieldrules.OneOf(p.ResourceName, at, corev1.ResourceCPU, corev1.ResourceMemory)...)
		errs = append(errs, fieldrules.OneOf(p.RestartPolicy, at, corev1.NotRequired, corev1.RestartContainer)...)
		if restarts == corev1.RestartPolicyNever && p.RestartPolicy != corev1.NotRequired {
			errs = append(errs, field.Invalid(at, p.RestartPolicy, "must be 'NotRequired' when pod `restartPolicy` is 'Never'"))
		}
	}
	return errs
}
