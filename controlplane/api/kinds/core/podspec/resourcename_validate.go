package podspec

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// IsExtendedResource reports whether a name is that of an extended resource: it has a domain other
// than that of Kubernetes, and a quota can limit it.
func IsExtendedResource(name string) bool {
	native := !strings.Contains(name, "/") || strings.Contains(name, "kubernetes.io/")
	return !native && !strings.HasPrefix(name, "requests.") && len(validation.IsQualifiedName("requests."+name)) == 0
}

// QuotaResources are the resource names without a domain that a quota may limit, in addition to
// object counts and huge pages.
var QuotaResources = []corev1.ResourceName{
	corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage,
	corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory, corev1.ResourceRequestsStorage,
	corev1.ResourceRequestsEphemeralStorage,
	corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory, corev1.ResourceLimitsEphemeralStorage,
	corev1.ResourcePods, corev1.ResourceQuotas, corev1.ResourceServices, corev1.ResourceReplicationControllers,
	corev1.ResourceSecrets, corev1.ResourcePersistentVolumeClaims, corev1.ResourceConfigMaps,
	corev1.ResourceServicesNodePorts, corev1.ResourceServicesLoadBalancers,
}

// PodResources are those QuotaResources that a quota with a scope for pods may limit.
var PodResources = []corev1.ResourceName{
	corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourcePods, corev1.ResourceRequestsCPU,
	corev1.ResourceRequestsMemory,
	corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory,
}

// countedResources are the resources with quantities that must be whole numbers.
var countedResources = []corev1.ResourceName{
	corev1.ResourcePods, corev1.ResourceQuotas, corev1.ResourceServices, corev1.ResourceReplicationControllers,
	corev1.ResourceSecrets, corev1.ResourceConfigMaps, corev1.ResourcePersistentVolumeClaims,
	corev1.ResourceServicesNodePorts, corev1.ResourceServicesLoadBalancers,
}

// IsHugePages reports whether a resource name has the prefix of huge pages.
func IsHugePages(name string) bool {
	return strings.HasPrefix(name, corev1.ResourceHugePagesPrefix) || strings.HasPrefix(name,
		corev1.ResourceRequestsHugePagesPrefix)
}

// ValidateResourceName validates the name of any resource.
func ValidateResourceName(name corev1.ResourceName, fldPath *field.Path) field.ErrorList {
	n := string(name)
	if errs := fieldrules.InvalidErrors(fldPath, n, utilvalidation.IsQualifiedName(n)); len(errs) > 0 {
		return errs
	}
	if !strings.Contains(n, "/") && name != corev1.ResourceStorage && !slices.Contains(QuotaResources,
		name) && !IsHugePages(n) {
		return field.ErrorList{field.Invalid(fldPath, n, "must be a standard resource type or fully qualified")}
	}
	return nil
}
