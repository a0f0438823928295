package builtin

import (
	"fmt"
	"slices"
	"strings"
)

// alwaysEnabled lists the plugins with Kubernetes names that cannot be disabled.
var alwaysEnabled = []string{
	"CertificateApproval", "CertificateSigning", "CertificateSubjectRestriction", "DefaultIngressClass",
	"DefaultStorageClass",
	"DefaultTolerationSeconds", "LimitRanger", "MutatingAdmissionPolicy", "MutatingAdmissionWebhook", "NamespaceExists",
	"NamespaceLifecycle", "NodeDeclaredFeatureValidator", "NodeRestriction", "PersistentVolumeClaimResize",
	"PodGroupProtection", "PodGroupWorkloadExists",
	"PodSecurity", "Priority", "ResourceQuota",
	"RuntimeClass", "ServiceAccount", "StorageObjectInUseProtection", "TaintNodesByCondition",
	"ValidatingAdmissionPolicy", "ValidatingAdmissionWebhook",
}

// OnRequest lists the optional plugins that are disabled by default.
var OnRequest = []string{DenyServiceExternalIPs, ExtendedResourceToleration, OwnerReferences, PodTolerationRestriction}

// Names of the optional plugins, as in --enable-admission-plugins.
const (
	DenyServiceExternalIPs     = "DenyServiceExternalIPs"
	ExtendedResourceToleration = "ExtendedResourceToleration"
	OwnerReferences            = "OwnerReferencesPermissionEnforcement"
	PodTolerationRestriction   = "PodTolerationRestriction"
)

// unsupportedPlugins maps the names of Kubernetes plugins that do not exist here to a text about
// what replaces the plugin.
var unsupportedPlugins = map[string]string{
	"AlwaysAdmit": "it has no effect; remove it from the list",
	"AlwaysDeny":  "it exists for tests of Kubernetes; remove it from the list",
	"AlwaysPullImages": "use a MutatingAdmissionPolicy that sets " +
		"spec.containers[].imagePullPolicy to Always",
	"ClusterTrustBundleAttest": "the right to attest on the signer already controls trust bundles; remove " +
		"it from the list",
	"EventRateLimit": "requests per user and events per namespace are always limited; remove " +
		"it from the list",
	"ImagePolicyWebhook":               "use a ValidatingWebhookConfiguration for pods",
	"LimitPodHardAntiAffinityTopology": "use a ValidatingAdmissionPolicy that rejects topology keys",
	"NamespaceAutoProvision":           "create namespaces before their objects",
	"PodNodeSelector":                  "use a MutatingAdmissionPolicy that sets spec.nodeSelector",
	"PodTopologyLabels":                "node labels are not copied to pods; remove it from the list",
}

// Choose returns the optional plugins to run, from the values of --enable-admission-plugins and
// --disable-admission-plugins. An unknown or contradictory name is an error.
func Choose(enable, disable []string) ([]string, error) {
	for _, name := range disable {
		switch {
		case slices.Contains(alwaysEnabled, name):
			return nil, fmt.Errorf("--disable-admission-plugins: %s always runs", name)
		case !slices.Contains(OnRequest, name) && unsupportedPlugins[name] == "":
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
		case slices.Contains(alwaysEnabled, name):
		case unsupportedPlugins[name] != "":
			return nil, fmt.Errorf("--enable-admission-plugins: %s is not supported: %s", name,
				unsupportedPlugins[name])
		default:
			return nil, unknownPlugin("--enable-admission-plugins", name)
		}
	}
	return chosen, nil
}

func unknownPlugin(flag, name string) error {
	return fmt.Errorf("%s: unknown plugin %q; the optional plugins are %s", flag, name, strings.Join(OnRequest, ", "))
}
