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
func ValidateResources(r *corev1.ResourceRequirements, fldPath *field.Path) field.ErrorList {
	return validateRequirements(r, ValidateContainerResourceName, fldPath)
}

// validateRequirements validates requests and limits. validateName returns the errors in the name
// of a resource.
func validateRequirements(r *corev1.ResourceRequirements,
	validateName func(corev1.ResourceName, *field.Path) field.ErrorList, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	huge, cpuOrMemory := false, false
	for _, side := range []struct {
		list corev1.ResourceList
		at   *field.Path
	}{{r.Limits, fldPath.Child("limits")}, {r.Requests, fldPath.Child("requests")}} {
		for _, name := range fieldrules.SortedKeys(side.list) {
			q := side.list[name]
			here := side.at.Key(string(name))
			errs = append(errs, validateName(name, here)...)
			errs = append(errs, ValidateCountedQuantity(name, q, here)...)
			errs = append(errs, ValidateHugePages(name, q, here)...)
			huge = huge || strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix)
			cpuOrMemory = cpuOrMemory || name == corev1.ResourceCPU || name == corev1.ResourceMemory
		}
	}
	for _, name := range fieldrules.SortedKeys(r.Requests) {
		request := r.Requests[name]
		limit, limited := r.Limits[name]
		here := fldPath.Child("requests")
		switch {
		case limited && !IsOvercommitAllowed(name) && request.Cmp(limit) != 0:
			errs = append(errs, field.Invalid(here, request.String(),
				fmt.Sprintf("must be equal to %s limit of %s", name, limit.String())))
		case limited && request.Cmp(limit) > 0:
			errs = append(errs, field.Invalid(here, request.String(),
				fmt.Sprintf("must be less than or equal to %s limit of %s", name, limit.String())))
		case !limited && !IsOvercommitAllowed(name):
			errs = append(errs, field.Required(fldPath.Child("limits"),
				"Limit must be set for non overcommitable resources"))
		}
	}
	if huge && !cpuOrMemory {
		errs = append(errs, field.Forbidden(fldPath, "HugePages require cpu or memory"))
	}
	return errs
}

// ValidateHugePages returns an error unless the quantity is a multiple of the page size in the
// resource's name.
func ValidateHugePages(name corev1.ResourceName, quantity resource.Quantity, fldPath *field.Path) field.ErrorList {
	size, ok := strings.CutPrefix(string(name), corev1.ResourceHugePagesPrefix)
	if !ok {
		return nil
	}
	if isPageMultiple(quantity, size) {
		return nil
	}
	return field.ErrorList{field.Invalid(fldPath, quantity.String(),
		fmt.Sprintf("%s is not positive integer multiple of %s", quantity.String(), name))}
}

// isPageMultiple reports whether a quantity is a multiple of a page size and a whole number of
// bytes.
func isPageMultiple(quantity resource.Quantity, pageSize string) bool {
	if quantitytext.Check(pageSize) != nil {
		return false
	}
	page, err := resource.ParseQuantity(pageSize)
	return err == nil && page.Sign() > 0 && isWhole(page) && saturate.Value(&quantity)%saturate.Value(&page) == 0
}

// isWhole reports whether a quantity has no fraction. It does not convert the quantity to
// thousandths, because these can overflow int64.
func isWhole(quantity resource.Quantity) bool {
	quantity = quantity.DeepCopy()
	return quantity.RoundUp(0)
}

// IsOvercommitAllowed reports whether the limits of a resource may exceed its requests. They may
// for native resources other than huge pages, but not for extended resources.
func IsOvercommitAllowed(name corev1.ResourceName) bool {
	n := string(name)
	native := !strings.Contains(n, "/") || strings.Contains(n, corev1.ResourceDefaultNamespacePrefix)
	return native && !strings.HasPrefix(n, corev1.ResourceHugePagesPrefix)
}

// ValidateContainerResourceName returns the errors in the name of a resource of a container.
func ValidateContainerResourceName(name corev1.ResourceName, fldPath *field.Path) field.ErrorList {
	n := string(name)
	errs := ValidateResourceName(name, fldPath)
	native := !strings.Contains(n, "/") || strings.Contains(n, corev1.ResourceDefaultNamespacePrefix)
	switch {
	case !strings.Contains(n, "/") && !plainResources[name] && !strings.HasPrefix(n, corev1.ResourceHugePagesPrefix):
		errs = append(errs, field.Invalid(fldPath, n, "must be a standard resource for containers"))
	case !native && !IsExtendedResource(n):
		errs = append(errs, field.Invalid(fldPath, n, "doesn't follow extended resource name standard"))
	}
	return errs
}

// ValidateQuantities validates the quantities of a node's resources. As in Kubernetes, it does not
// check the names of the resources.
func ValidateQuantities(l corev1.ResourceList, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, name := range fieldrules.SortedKeys(l) {
		errs = append(errs, ValidateCountedQuantity(name, l[name], fldPath.Child(string(name)))...)
	}
	return errs
}

// ValidateCountedQuantity returns an error if a quantity is negative, or if it has a fraction and
// the resource is counted in whole numbers.
func ValidateCountedQuantity(name corev1.ResourceName, amount resource.Quantity, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if amount.Sign() < 0 {
		errs = append(errs, field.Invalid(fldPath, amount.String(), "must be greater than or equal to 0"))
	}
	if (slices.Contains(countedResources, name) || IsExtendedResource(string(name))) && !isWhole(amount) {
		errs = append(errs, field.Invalid(fldPath, amount.String(), "must be an integer"))
	}
	return errs
}
