package podspec

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// validatePodClaims validates a pod's resource claims, and the claims that its containers use.
// Entry names must be DNS labels, because the names of created claims contain them.
func validatePodClaims(s *corev1.PodSpec, at *field.Path) field.ErrorList {
	subdomain := func(name *string, at *field.Path) field.ErrorList {
		if name == nil {
			return nil
		}
		return fieldrules.Invalid(at, *name, validation.NameIsDNSSubdomain(*name, false))
	}
	var names []string
	errs := fieldrules.Items(s.ResourceClaims, -1, at.Child("resourceClaims"), nil,
		func(c corev1.PodResourceClaim, at *field.Path) field.ErrorList {
			errs := fieldrules.DNSLabel(c.Name, at.Child("name"))
			switch {
			case c.Name == "":
				errs = field.ErrorList{field.Required(at.Child("name"), "")}
			case slices.Contains(names, c.Name):
				errs = field.ErrorList{field.Duplicate(at.Child("name"), c.Name)}
			default:
				names = append(names, c.Name)
			}
			switch {
			case c.ResourceClaimName != nil && c.ResourceClaimTemplateName != nil:
				errs = append(errs, field.Invalid(at, c, "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified"))
			case c.ResourceClaimName == nil && c.ResourceClaimTemplateName == nil:
				errs = append(errs, field.Invalid(at, c, "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`"))
			}
			errs = append(errs, subdomain(c.ResourceClaimName, at.Child("resourceClaimName"))...)
			return append(errs, subdomain(c.ResourceClaimTemplateName, at.Child("resourceClaimTemplateName"))...)
		})
	slices.Sort(names)
	for _, list := range []struct {
		name       string
		containers []corev1.Container
	}{{"containers", s.Containers}, {"initContainers", s.InitContainers}} {
		for i := range list.containers {
			errs = append(errs, validateClaimUses(list.containers[i].Resources.Claims, names, at.Child(list.name).Index(i).Child("resources", "claims"))...)
		}
	}
	return errs
}

// validateClaimUses validates a container's references to the pod's claims; names are the names of
// the pod's claims.
func validateClaimUses(uses []corev1.ResourceClaim, names []string, at *field.Path) field.ErrorList {
	errs := overlappingUses(uses, at)
	return append(errs, fieldrules.Items(uses, -1, at, nil,
		func(u corev1.ResourceClaim, at *field.Path) field.ErrorList {
			if u.Name == "" {
				return field.ErrorList{field.Required(at, "")}
			}
			var errs field.ErrorList
			if !slices.Contains(names, u.Name) {
				missing := field.NotFound(at, u.Name)
				missing.Detail = "must be one of the names in pod.spec.resourceClaims"
				if len(names) == 0 {
					missing.Detail += " which is empty"
				} else {
					missing.Detail += ": " + strings.Join(names, ", ")
				}
				errs = append(errs, missing)
			}
			if u.Request != "" {
				errs = append(errs, fieldrules.DNSLabel(u.Request, at.Child("request"))...)
			}
			return errs
		})...)
}

// overlappingUses returns errors for duplicate uses: of the same request of a claim, or of a claim
// that is also used as a whole.
func overlappingUses(uses []corev1.ResourceClaim, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, u := range uses {
		for _, earlier := range uses[:i] {
			switch {
			case u.Name == "" || u.Name != earlier.Name:
			case earlier.Request == "" || u.Request == "":
				errs = append(errs, field.Duplicate(at.Index(i), u.Name))
			case u.Request == earlier.Request:
				errs = append(errs, field.Duplicate(at.Index(i), u.Name+"/"+u.Request))
			}
		}
	}
	return errs
}

// validateClaimStatuses validates the claims in a pod's status, which must belong to entries in its
// spec.
func validateClaimStatuses(p *corev1.Pod, at *field.Path) field.ErrorList {
	seen := map[string]bool{}
	return fieldrules.Items(p.Status.ResourceClaimStatuses, -1, at, nil,
		func(s corev1.PodResourceClaimStatus, at *field.Path) field.ErrorList {
			var errs field.ErrorList
			if !slices.ContainsFunc(p.Spec.ResourceClaims,
				func(c corev1.PodResourceClaim) bool { return c.Name == s.Name }) {
				errs = append(errs, field.Invalid(at.Child("name"), s.Name, "must match the name of an entry in `spec.resourceClaims`"))
			}
			if seen[s.Name] {
				errs = append(errs, field.Duplicate(at.Child("name"), s.Name))
			}
			seen[s.Name] = true
			if s.ResourceClaimName != nil {
				errs = append(errs, fieldrules.Invalid(at.Child("resourceClaimName"), *s.ResourceClaimName,
					validation.NameIsDNSSubdomain(*s.ResourceClaimName, false))...)
			}
			return errs
		})
}
