package podspec

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// keepAllButResources resets everything in obj except the resources of the pod and of its
// containers to the stored pod, for a request to the subresource "resize". It does not change a
// container list if the container names differ from the names in the stored pod, so that validation
// rejects the list.
func keepAllButResources(obj, stored *corev1.Pod) {
	wanted, rv := obj.Spec, obj.ResourceVersion
	*obj = *stored.DeepCopy()
	obj.ResourceVersion = rv
	if len(wanted.Containers) != len(stored.Spec.Containers) ||
		len(wanted.InitContainers) != len(stored.Spec.InitContainers) {
		obj.Spec = wanted
	} else {
		obj.Spec.InitContainers = withResources(wanted.InitContainers, obj.Spec.InitContainers)
		obj.Spec.Containers = withResources(wanted.Containers, obj.Spec.Containers)
		obj.Spec.Resources = wanted.Resources
	}
	DefaultPodSpec(&obj.Spec)
	if !fieldrules.SemanticEqual(obj.Spec, stored.Spec) {
		obj.Generation++
	}
}

// withResources returns the containers of old with the resources and resize policies of the
// requested containers. It returns the requested containers if the names differ.
func withResources(requested, old []corev1.Container) []corev1.Container {
	for i := range old {
		if requested[i].Name != old[i].Name {
			return requested
		}
	}
	for i := range old {
		old[i].Resources, old[i].ResizePolicy = requested[i].Resources, requested[i].ResizePolicy
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

// validateResize validates the change that a request to the subresource "resize" makes. The whole
// pod is validated separately.
func validateResize(obj, old *corev1.Pod) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	previous := old.Status.QOSClass
	if previous == "" {
		previous = QOSClass(&old.Spec)
	}
	if previous != QOSClass(&obj.Spec) {
		errs = append(errs, field.Invalid(spec, obj.Status.QOSClass,
			"Pod QOS Class may not change as a result of resizing"))
	}
	if !isResizable(old) {
		errs = append(errs, field.Forbidden(spec, "Pod running on node without support for resize"))
	}
	if others := append(validateContainerList(obj.Spec.Containers, old.Spec.Containers, "containers"),
		validateContainerList(obj.Spec.InitContainers, old.Spec.InitContainers, "initContainers")...); len(others) > 0 {
		return append(errs, others...)
	}
	updated := obj.Spec.DeepCopy()
	errs = append(errs, validateResizedPod(updated, &old.Spec, spec.Child("resources"))...)
	errs = append(errs, validateResized(updated.Containers, old.Spec.Containers, spec.Child("containers"))...)
	for i := range updated.InitContainers {
		c, before, fldPath := &updated.InitContainers[i], &old.Spec.InitContainers[i],
			spec.Child("initContainers").Index(i)
		changed := !fieldrules.SemanticEqual(*c, *before)
		errs = append(errs, validateRemoved(&c.Resources, &before.Resources, fldPath.Child("resources"))...)
		if restoreCPUAndMemory(&c.Resources, &before.Resources); !fieldrules.SemanticEqual(*c, *before) {
			errs = append(errs, field.Forbidden(fldPath,
				"only cpu and memory resources for init or sidecar containers are mutable"))
		}
		if changed && ptr.Deref(c.RestartPolicy, "") != corev1.ContainerRestartPolicyAlways &&
			slices.ContainsFunc(c.ResizePolicy,
				func(p corev1.ContainerResizePolicy) bool { return p.RestartPolicy == corev1.RestartContainer }) {
			errs = append(errs, field.Forbidden(fldPath,
				"non-sidecar init containers with a resize policy of RestartContainer cannot be resized"))
		}
	}
	if len(errs) == 0 && !fieldrules.SemanticEqual(*updated, old.Spec) {
		errs = append(errs, field.Forbidden(spec, onlyCPUAndMemory))
	}
	return errs
}

// isResizable reports whether the node of a running pod supports resizing. Such a node reports the
// resources of running containers.
func isResizable(old *corev1.Pod) bool {
	return !slices.ContainsFunc(old.Status.ContainerStatuses, func(cs corev1.ContainerStatus) bool {
		return cs.State.Running != nil && cs.Resources == nil
	})
}

// validateContainerList returns errors unless both lists have the same containers in the same
// order.
func validateContainerList(updated, old []corev1.Container, list string) (errs field.ErrorList) {
	fldPath := field.NewPath("spec", list)
	if len(updated) != len(old) {
		return field.ErrorList{field.Forbidden(fldPath, list+" may not be added or removed on resize")}
	}
	for i := range updated {
		if updated[i].Name != old[i].Name {
			errs = append(errs, field.Forbidden(fldPath.Index(i).Child("name"),
				list+" may not be renamed or reordered on resize"))
		}
	}
	return errs
}

// validateResized validates the change of each container's resources. It then copies the resources
// that may change from old to updated, so that a comparison of the specs ignores them.
func validateResized(updated, old []corev1.Container, fldPath *field.Path) (errs field.ErrorList) {
	for i := range updated {
		errs = append(errs, validateRemoved(&updated[i].Resources, &old[i].Resources,
			fldPath.Index(i).Child("resources"))...)
		restoreCPUAndMemory(&updated[i].Resources, &old[i].Resources)
		if !fieldrules.SemanticEqual(updated[i], old[i]) {
			errs = append(errs, field.Forbidden(field.NewPath("spec"), onlyCPUAndMemory))
		}
	}
	return errs
}

// validateResizedPod validates the change of the resources of the whole pod. It then copies the
// resources that may change from old to updated, so that a comparison of the specs ignores them.
func validateResizedPod(updated, old *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	next, previous := ptr.Deref(updated.Resources, corev1.ResourceRequirements{}),
		ptr.Deref(old.Resources, corev1.ResourceRequirements{})
	errs := validateRemoved(&next, &previous, fldPath)
	restoreCPUAndMemory(&next, &previous)
	if !fieldrules.SemanticEqual(next, previous) {
		errs = append(errs, field.Forbidden(fldPath, onlyCPUAndMemory))
	}
	updated.Resources = old.Resources
	return errs
}

// validateRemoved returns an error for each request or limit that the update removes. A resize may
// only change their values.
func validateRemoved(updated, old *corev1.ResourceRequirements, fldPath *field.Path) (errs field.ErrorList) {
	for _, side := range []struct {
		name     string
		now, was corev1.ResourceList
	}{{"requests", updated.Requests, old.Requests}, {"limits", updated.Limits, old.Limits}} {
		for name := range side.was {
			if _, kept := side.now[name]; !kept {
				errs = append(errs, field.Forbidden(fldPath.Child(side.name),
					fmt.Sprintf("resource %s cannot be removed", side.name)))
				break
			}
		}
	}
	return errs
}

// restoreCPUAndMemory copies the CPU and memory of old to updated. It does not change other
// resources.
func restoreCPUAndMemory(updated, old *corev1.ResourceRequirements) {
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
	updated.Requests, updated.Limits = restore(updated.Requests, old.Requests), restore(updated.Limits, old.Limits)
}

// validateResizePolicy validates the resize policies of a container: whether it restarts when its
// resources change. podPolicy is the pod's restart policy.
func validateResizePolicy(policies []corev1.ContainerResizePolicy, podPolicy corev1.RestartPolicy,
	fldPath *field.Path) (errs field.ErrorList) {
	seen := map[corev1.ResourceName]bool{}
	for i, p := range policies {
		if seen[p.ResourceName] {
			errs = append(errs, field.Duplicate(fldPath.Index(i), p.ResourceName))
		}
		seen[p.ResourceName] = true
		errs = append(errs, fieldrules.ValidateOneOf(p.ResourceName, fldPath, corev1.ResourceCPU,
			corev1.ResourceMemory)...)
		errs = append(errs, fieldrules.ValidateOneOf(p.RestartPolicy, fldPath, corev1.NotRequired,
			corev1.RestartContainer)...)
		if podPolicy == corev1.RestartPolicyNever && p.RestartPolicy != corev1.NotRequired {
			errs = append(errs, field.Invalid(fldPath, p.RestartPolicy,
				"must be 'NotRequired' when pod `restartPolicy` is 'Never'"))
		}
	}
	return errs
}
