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

// IsExtendedResource reports whether a resource has a domain other than Kubernetes' own and can be
// limited by a quota.
func IsExtendedResource(name string) bool {
	native := !strings.Contains(name, "/") || strings.Contains(name, "kubernetes.io/")
	return !native && !strings.HasPrefix(name, "requests.") && len(validation.IsQualifiedName("requests."+name)) == 0
}

// QuotaResources are the names without a domain that a quota may limit, in addition to object
// counts and huge pages.
var QuotaResources = []corev1.ResourceName{
	corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage,
	corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory, corev1.ResourceRequestsStorage, corev1.ResourceRequestsEphemeralStorage,
	corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory, corev1.ResourceLimitsEphemeralStorage,
	corev1.ResourcePods, corev1.ResourceQuotas, corev1.ResourceServices, corev1.ResourceReplicationControllers,
	corev1.ResourceSecrets, corev1.ResourcePersistentVolumeClaims, corev1.ResourceConfigMaps,
	corev1.ResourceServicesNodePorts, corev1.ResourceServicesLoadBalancers,
}

// PodResources are the QuotaResources that apply to the pods in a scope.
var PodResources = []corev1.ResourceName{
	corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourcePods, corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory,
	corev1.ResourceLimitsCPU, corev1.ResourceLimitsMemory,
}

// countedResources are resources that must be whole numbers.
var countedResources = []corev1.ResourceName{
	corev1.ResourcePods, corev1.ResourceQuotas, corev1.ResourceServices, corev1.ResourceReplicationControllers,
	corev1.ResourceSecrets, corev1.ResourceConfigMaps, corev1.ResourcePersistentVolumeClaims,
	corev1.ResourceServicesNodePorts, corev1.ResourceServicesLoadBalancers,
}

// IsHugePages reports whether a resource name has the prefix of huge pages.
func IsHugePages(n string) bool {
	return strings.HasPrefix(n, corev1.ResourceHugePagesPrefix) || strings.HasPrefix(n,
		corev1.ResourceRequestsHugePagesPrefix)
}

// ValidateResourceName validates the name of any resource.
func ValidateResourceName(name corev1.ResourceName, at *field.Path) field.ErrorList {
	n := string(name)
	if errs := fieldrules.Invalid(at, n, utilvalidation.IsQualifiedName(n)); len(errs) > 0 {
		return errs
	}
	if !strings.Contains(n, "/") && name != corev1.ResourceStorage && !slices.Contains(QuotaResources,
		name) && !IsHugePages(n) {
		return field.ErrorList{field.Invalid(at, n, "must be a standard resource type or fully qualified")}
	}
	return nil
}
