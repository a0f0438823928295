package podspec

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"
	podresources "k8s.io/component-helpers/resource"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// defaultPodResources sets the defaults of the requests and limits of a whole pod, if the pod has
// some of them. The containers have their defaults already.
//
//   - A limit of huge pages is the sum of the containers' limits, unless the pod requests pages.
//   - With any limit, a request is the sum of the containers' requests, or else the pod's limit.
func defaultPodResources(pod *corev1.Pod) {
	r := pod.Spec.Resources
	if r == nil || len(r.Limits)+len(r.Requests) == 0 {
		return
	}
	for name, sum := range podresources.AggregateContainerLimits(pod, podresources.PodResourcesOptions{}) {
		_, requested := r.Requests[name]
		if !requested && strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
			setMissing(&r.Limits, name, sum)
		}
	}
	if len(r.Limits) == 0 {
		return
	}
	for name, sum := range podresources.AggregateContainerRequests(pod, podresources.PodResourcesOptions{}) {
		if podresources.IsSupportedPodLevelResource(name) && IsOvercommitAllowed(name) {
			setMissing(&r.Requests, name, sum)
		}
	}
	for name, limit := range r.Limits {
		if podresources.IsSupportedPodLevelResource(name) {
			setMissing(&r.Requests, name, limit)
		}
	}
}

// setMissing sets the amount of a resource in a list that does not have the resource.
func setMissing(list *corev1.ResourceList, name corev1.ResourceName, amount resource.Quantity) {
	if _, has := (*list)[name]; has {
		return
	}
	if *list == nil {
		*list = corev1.ResourceList{}
	}
	(*list)[name] = amount.DeepCopy()
}

// validatePodResources validates the requests and limits of a whole pod, and that those of its
// containers are compatible with them.
func validatePodResources(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	r := spec.Resources
	if r == nil {
		return nil
	}
	if spec.OS != nil && spec.OS.Name == corev1.Windows {
		return field.ErrorList{field.Forbidden(fldPath, "may not be set for a windows pod")}
	}
	var errs field.ErrorList
	if r.Claims != nil {
		errs = append(errs, field.Forbidden(fldPath.Child("claims"),
			"claims cannot be set for Resources at pod-level"))
	}
	errs = append(errs, validateRequirements(r, validatePodResourceName, fldPath)...)
	pod := &corev1.Pod{Spec: *spec}
	errs = append(errs, validateCovered(r.Requests, fldPath.Child("requests"), "requests",
		podresources.AggregateContainerRequests(pod, podresources.PodResourcesOptions{}))...)
	pages := podresources.AggregateContainerLimits(pod, podresources.PodResourcesOptions{})
	for name := range pages {
		if !strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
			delete(pages, name) // the containers may share the pod's limit of other resources
		}
	}
	errs = append(errs, validateCovered(r.Limits, fldPath.Child("limits"), "limits", pages)...)
	for i := range spec.Containers {
		limits := spec.Containers[i].Resources.Limits
		for _, name := range fieldrules.SortedKeys(limits) {
			limit := limits[name]
			if most, limited := r.Limits[name]; limited && limit.Cmp(most) > 0 {
				// As in Kubernetes, the path of the container is below that of the pod's resources.
				errs = append(errs, field.Invalid(
					fldPath.Child("containers").Index(i).Key(string(name)).Child("limits"), limit.String(),
					fmt.Sprintf("must be less than or equal to pod limits of %s", most.String())))
			}
		}
	}
	return errs
}

// validateCovered returns an error for each resource of which the pod has less than its containers
// together. side is "requests" or "limits".
func validateCovered(pod corev1.ResourceList, fldPath *field.Path, side string,
	containers corev1.ResourceList) field.ErrorList {
	var errs field.ErrorList
	for _, name := range fieldrules.SortedKeys(containers) {
		sum := containers[name]
		if amount, has := pod[name]; has && sum.Cmp(amount) > 0 {
			errs = append(errs, field.Invalid(fldPath.Key(string(name)), amount.String(),
				fmt.Sprintf("must be greater than or equal to aggregate container %s of %s", side, sum.String())))
		}
	}
	return errs
}

// validatePodResourceName returns the errors in the name of a resource of a whole pod.
func validatePodResourceName(name corev1.ResourceName, fldPath *field.Path) field.ErrorList {
	if errs := ValidateResourceName(name, fldPath); len(errs) > 0 {
		return errs
	}
	if podresources.IsSupportedPodLevelResource(name) {
		return nil
	}
	return field.ErrorList{field.NotSupported(fldPath, string(name),
		sets.List(podresources.SupportedPodLevelResources()))}
}
