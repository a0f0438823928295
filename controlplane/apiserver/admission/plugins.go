package admission

import (
	"fmt"
	"slices"
	"strings"
)

// always lists the plugins with Kubernetes names that cannot be disabled.
var always = []string{
	"CertificateApproval", "CertificateSigning", "CertificateSubjectRestriction", "DefaultIngressClass", "DefaultStorageClass",
	"DefaultTolerationSeconds", "LimitRanger", "MutatingAdmissionPolicy", "MutatingAdmissionWebhook", "NamespaceExists",
	"NamespaceLifecycle", "NodeRestriction", "PersistentVolumeClaimResize", "PodGroupProtection", "PodGroupWorkloadExists",
	"PodSecurity", "Priority", "ResourceQuota",
	"RuntimeClass", "ServiceAccount", "StorageObjectInUseProtection", "TaintNodesByCondition",
	"ValidatingAdmissionPolicy", "ValidatingAdmissionWebhook",
}

// OnRequest lists the optional plugins, which run only if enabled.
var OnRequest = []string{DenyServiceExternalIPs, ExtendedResourceToleration, OwnerReferences, PodTolerationRestriction}

// Names of the optional plugins.
const (
	DenyServiceExternalIPs     = "DenyServiceExternalIPs"
	ExtendedResourceToleration = "ExtendedResourceToleration"
	OwnerReferences            = "OwnerReferencesPermissionEnforcement"
	PodTolerationRestriction   = "PodTolerationRestriction"
)

// instead maps plugins of Kubernetes that do not exist here to the alternative for them.
var instead = map[string]string{
	"AlwaysAdmit":                      "it does nothing; leave it out",
	"AlwaysDeny":                       "it is for tests of Kubernetes; leave it out",
	"AlwaysPullImages":                 "let a MutatingAdmissionPolicy set spec.containers[].imagePullPolicy to Always",
	"ClusterTrustBundleAttest":         "bundles of trust are attested by a right on the signer; leave it out",
	"EventRateLimit":                   "the requests of each user are bounded already, and the events of each namespace; leave it out",
	"ImagePolicyWebhook":               "let a ValidatingWebhookConfiguration ask about pods",
	"LimitPodHardAntiAffinityTopology": "let a ValidatingAdmissionPolicy refuse topology keys",
	"NamespaceAutoProvision":           "make namespaces before what is in them",
	"PodNodeSelector":                  "let a MutatingAdmissionPolicy set spec.nodeSelector",
	"PodTopologyLabels":                "pods get no labels of their nodes; leave it out",
	"NodeDeclaredFeatureValidator":     "agents declare no features; leave it out",
}

// Choose returns the optional plugins to run, from the values of --enable-admission-plugins and
// --disable-admission-plugins. An unknown or contradictory name is an error.
func Choose(enable, disable []string) ([]string, error) {
	for _, name := range disable {
		switch {
		case slices.Contains(always, name):
			return nil, fmt.Errorf("--disable-admission-plugins: %s always runs", name)
		case !slices.Contains(OnRequest, name) && instead[name] == "":
			return nil, unknownPlugin("--disable-admission-plugins", name)
		case slices.Contains(enable, name):
			return nil, fmt.Errorf("%s in enable-admission-plugins and disable-admission-plugins overlapped", name)
		}
	}
	var chosen []string
	for _, name := range enable {
		switch {
		case slices.Contains(OnRequest, name):
			if !slices.Contains(chosen, name) {
				chosen = append(chosen, name)
			}
		case slices.Contains(always, name):
		case instead[name] != "":
			return nil, fmt.Errorf("--enable-admission-plugins: there is no %s: %s", name, instead[name])
		default:
			return nil, unknownPlugin("--enable-admission-plugins", name)
		}
	}
	return chosen, nil
}

func unknownPlugin(flag, name string) error {
	return fmt.Errorf("%s: %q is unknown; on request run %s", flag, name, strings.Join(OnRequest, ", "))
}
