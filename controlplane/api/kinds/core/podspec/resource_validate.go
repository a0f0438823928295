package podspec

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
	"keelson.dev/keelson/internal/quantitytext"
	"keelson.dev/keelson/internal/saturate"
)

// plainResources are the resources without a domain that a container may have.
var plainResources = map[corev1.ResourceName]bool{
	corev1.ResourceCPU: true, corev1.ResourceMemory: true, corev1.ResourceEphemeralStorage: true,
}

// ValidateResources validates the requests and limits of a container.
func ValidateResources(r *corev1.ResourceRequirements, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	huge, cpuOrMemory := false, false
	for _, side := range []struct {
		list corev1.ResourceList
		at   *field.Path
	}{{r.Limits, at.Child("limits")}, {r.Requests, at.Child("requests")}} {
		for _, name := range fieldrules.SortedKeys(side.list) {
			q := side.list[name]
			here := side.at.Key(string(name))
			errs = append(errs, ValidateContainerResourceName(name, here)...)
			errs = append(errs, ValidateCountedQuantity(name, q, here)...)
			errs = append(errs, ValidateHugePages(name, q, here)...)
			huge = huge || strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix)
			cpuOrMemory = cpuOrMemory || name == corev1.ResourceCPU || name == corev1.ResourceMemory
		}
	}
	for _, name := range fieldrules.SortedKeys(r.Requests) {
		request := r.Requests[name]
		limit, limited := r.Limits[name]
		here := at.Child("requests")
		switch {
		case limited && !Overcommits(name) && request.Cmp(limit) != 0:
			errs = append(errs, field.Invalid(here, request.String(), fmt.Sprintf("must be equal to %s limit of %s", name, limit.String())))
		case limited && request.Cmp(limit) > 0:
			errs = append(errs, field.Invalid(here, request.String(), fmt.Sprintf("must be less than or equal to %s limit of %s", name, limit.String())))
		case !limited && !Overcommits(name):
			errs = append(errs, field.Required(at.Child("limits"), "Limit must be set for non overcommitable resources"))
		}
	}
	if huge && !cpuOrMemory {
		errs = append(errs, field.Forbidden(at, "HugePages require cpu or memory"))
	}
	return errs
}

// ValidateHugePages returns an error unless the quantity is a multiple of the page size in the
// resource's name.
func ValidateHugePages(name corev1.ResourceName, q resource.Quantity, at *field.Path) field.ErrorList {
	size, ok := strings.CutPrefix(string(name), corev1.ResourceHugePagesPrefix)
	if !ok {
		return nil
	}
	if isPageMultiple(q, size) {
		return nil
	}
	return field.ErrorList{field.Invalid(at, q.String(), fmt.Sprintf("%s is not positive integer multiple of %s", q.String(), name))}
}

// isPageMultiple reports whether the quantity is a multiple of a page size in whole bytes.
func isPageMultiple(q resource.Quantity, size string) bool {
	if quantitytext.Check(size) != nil {
		return false
	}
	page, err := resource.ParseQuantity(size)
	return err == nil && page.Sign() > 0 && isWhole(page) && saturate.Value(&q)%saturate.Value(&page) == 0
}

// isWhole reports whether a quantity has no fraction. It does not use thousandths, because those of
// a large quantity overflow int64.
func isWhole(q resource.Quantity) bool {
	q = q.DeepCopy()
	return q.RoundUp(0)
}

// Overcommits reports whether limits of the resource may exceed requests. That is so for native
// resources other than huge pages, and not for extended resources.
func Overcommits(name corev1.ResourceName) bool {
	n := string(name)
	native := !strings.Contains(n, "/") || strings.Contains(n, corev1.ResourceDefaultNamespacePrefix)
	return native && !strings.HasPrefix(n, corev1.ResourceHugePagesPrefix)
}

// ValidateContainerResourceName returns the errors in the name of a resource of a container.
func ValidateContainerResourceName(name corev1.ResourceName, at *field.Path) field.ErrorList {
	n := string(name)
	errs := ValidateResourceName(name, at)
	native := !strings.Contains(n, "/") || strings.Contains(n, corev1.ResourceDefaultNamespacePrefix)
	switch {
	case !strings.Contains(n, "/") && !plainResources[name] && !strings.HasPrefix(n, corev1.ResourceHugePagesPrefix):
		errs = append(errs, field.Invalid(at, n, "must be a standard resource for containers"))
	case !native && !IsExtendedResource(n):
		errs = append(errs, field.Invalid(at, n, "doesn't follow extended resource name standard"))
	}
	return errs
}

// ValidateQuantities validates the resources of a node. Their names may be anything, as in
// Kubernetes.
func ValidateQuantities(l corev1.ResourceList, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, name := range fieldrules.SortedKeys(l) {
		errs = append(errs, ValidateCountedQuantity(name, l[name], at.Child(string(name)))...)
	}
	return errs
}

// ValidateCountedQuantity returns an error for a negative quantity, and for a fraction of a
// resource that is counted in whole numbers.
func ValidateCountedQuantity(name corev1.ResourceName, q resource.Quantity, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if q.Sign() < 0 {
		errs = append(errs, field.Invalid(at, q.String(), "must be greater than or equal to 0"))
	}
	if (slices.Contains(countedResources, name) || IsExtendedResource(string(name))) && !isWhole(q) {
		errs = append(errs, field.Invalid(at, q.String(), "must be an integer"))
	}
	return errs
}
