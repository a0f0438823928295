package podspec

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// validatePodClaims validates a pod's resource claims, and the claims that its containers use. The
// names of the entries must be DNS labels, because the names of created ResourceClaims contain
// them.
func validatePodClaims(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	subdomain := func(name *string, fldPath *field.Path) field.ErrorList {
		if name == nil {
			return nil
		}
		return fieldrules.InvalidErrors(fldPath, *name, validation.NameIsDNSSubdomain(*name, false))
	}
	var names []string
	errs := fieldrules.ValidateItems(spec.ResourceClaims, -1, fldPath.Child("resourceClaims"), nil,
		func(c corev1.PodResourceClaim, fldPath *field.Path) field.ErrorList {
			errs := fieldrules.ValidateDNSLabel(c.Name, fldPath.Child("name"))
			switch {
			case c.Name == "":
				errs = field.ErrorList{field.Required(fldPath.Child("name"), "")}
			case slices.Contains(names, c.Name):
				errs = field.ErrorList{field.Duplicate(fldPath.Child("name"), c.Name)}
			default:
				names = append(names, c.Name)
			}
			switch {
			case c.ResourceClaimName != nil && c.ResourceClaimTemplateName != nil:
				errs = append(errs, field.Invalid(fldPath, c,
					"at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified"))
			case c.ResourceClaimName == nil && c.ResourceClaimTemplateName == nil:
				errs = append(errs, field.Invalid(fldPath, c,
					"must specify one of: `resourceClaimName`, `resourceClaimTemplateName`"))
			}
			errs = append(errs, subdomain(c.ResourceClaimName, fldPath.Child("resourceClaimName"))...)
			return append(errs, subdomain(c.ResourceClaimTemplateName, fldPath.Child("resourceClaimTemplateName"))...)
		})
	slices.Sort(names)
	for _, list := range []struct {
		name       string
		containers []corev1.Container
	}{{"containers", spec.Containers}, {"initContainers", spec.InitContainers}} {
		for i := range list.containers {
			errs = append(errs, validateClaimUses(list.containers[i].Resources.Claims, names,
				fldPath.Child(list.name).Index(i).Child("resources", "claims"))...)
		}
	}
	return errs
}

// validateClaimUses validates a container's references to resource claims of its pod. podClaims are
// the names of the pod's claims.
func validateClaimUses(uses []corev1.ResourceClaim, podClaims []string, fldPath *field.Path) field.ErrorList {
	errs := validateOverlappingUses(uses, fldPath)
	return append(errs, fieldrules.ValidateItems(uses, -1, fldPath, nil,
		func(u corev1.ResourceClaim, fldPath *field.Path) field.ErrorList {
			if u.Name == "" {
				return field.ErrorList{field.Required(fldPath, "")}
			}
			var errs field.ErrorList
			if !slices.Contains(podClaims, u.Name) {
				missing := field.NotFound(fldPath, u.Name)
				missing.Detail = "must be one of the names in pod.spec.resourceClaims"
				if len(podClaims) == 0 {
					missing.Detail += " which is empty"
				} else {
					missing.Detail += ": " + strings.Join(podClaims, ", ")
				}
				errs = append(errs, missing)
			}
			if u.Request != "" {
				errs = append(errs, fieldrules.ValidateDNSLabel(u.Request, fldPath.Child("request"))...)
			}
			return errs
		})...)
}

// validateOverlappingUses returns errors if a container refers to the same request of a claim
// twice. It also returns errors if the container refers to a request of a claim and to the whole
// claim.
func validateOverlappingUses(uses []corev1.ResourceClaim, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, u := range uses {
		for _, earlier := range uses[:i] {
			switch {
			case u.Name == "" || u.Name != earlier.Name:
			case earlier.Request == "" || u.Request == "":
				errs = append(errs, field.Duplicate(fldPath.Index(i), u.Name))
			case u.Request == earlier.Request:
				errs = append(errs, field.Duplicate(fldPath.Index(i), u.Name+"/"+u.Request))
			}
		}
	}
	return errs
}

// validateClaimStatuses validates the resource claims in a pod's status. Each must belong to an
// entry in its spec.
func validateClaimStatuses(pod *corev1.Pod, fldPath *field.Path) field.ErrorList {
	seen := map[string]bool{}
	return fieldrules.ValidateItems(pod.Status.ResourceClaimStatuses, -1, fldPath, nil,
		func(s corev1.PodResourceClaimStatus, fldPath *field.Path) field.ErrorList {
			var errs field.ErrorList
			if !slices.ContainsFunc(pod.Spec.ResourceClaims,
				func(c corev1.PodResourceClaim) bool { return c.Name == s.Name }) {
				errs = append(errs, field.Invalid(fldPath.Child("name"), s.Name,
					"must match the name of an entry in `spec.resourceClaims`"))
			}
			if seen[s.Name] {
				errs = append(errs, field.Duplicate(fldPath.Child("name"), s.Name))
			}
			seen[s.Name] = true
			if s.ResourceClaimName != nil {
				errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("resourceClaimName"), *s.ResourceClaimName,
					validation.NameIsDNSSubdomain(*s.ResourceClaimName, false))...)
			}
			return errs
		})
}
