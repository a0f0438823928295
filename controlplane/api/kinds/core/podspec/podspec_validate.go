// Package podspec describes the kind Pod. It contains the defaults, validation and warnings for pod
// specs, pod templates and the parts of pod specs: volumes, claims, resources, probes and
// placement.
package podspec

import (
	"fmt"
	"math"
	"regexp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/component-helpers/node/util/sysctl"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Limits of DNS settings, which are written to resolv.conf.
const (
	maxNameservers = 3
	maxSearches    = 32
	maxSearchChars = 2048
)

// validatePodSpec validates a pod spec after defaulting.
func validatePodSpec(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	volumes, errs := ValidateVolumes(spec.Volumes, fldPath.Child("volumes"))
	errs = append(errs, validateContainers(spec, volumes, fldPath)...)
	errs = append(errs, validatePodResources(spec, fldPath.Child("resources"))...)
	errs = append(errs, fieldrules.ValidateRequiredOneOf(spec.RestartPolicy, fldPath.Child("restartPolicy"),
		corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever)...)
	errs = append(errs, validateDNS(spec, fldPath)...)
	errs = append(errs, metavalidation.ValidateLabels(spec.NodeSelector, fldPath.Child("nodeSelector"))...)
	errs = append(errs, ValidateTolerations(spec.Tolerations, fldPath.Child("tolerations"))...)
	if spec.Affinity != nil {
		errs = append(errs, validateAffinity(spec.Affinity, fldPath.Child("affinity"))...)
	}
	errs = append(errs, validateSpread(spec.TopologySpreadConstraints, fldPath.Child("topologySpreadConstraints"))...)
	errs = append(errs, validatePodClaims(spec, fldPath)...)
	errs = append(errs, validateSpecNames(spec, fldPath)...)
	errs = append(errs, validateHostname(spec, fldPath)...)
	errs = append(errs, validateOS(spec, fldPath)...)
	errs = append(errs, validatePodSecurity(spec, fldPath)...)
	errs = append(errs, validateHostNamespaces(spec, fldPath)...)
	errs = append(errs, validateFileKeyVolumes(spec, fldPath)...)
	if d := spec.ActiveDeadlineSeconds; d != nil && (*d < 1 || *d > math.MaxInt32) {
		errs = append(errs, field.Invalid(fldPath.Child("activeDeadlineSeconds"), *d,
			utilvalidation.InclusiveRangeError(1, math.MaxInt32)))
	}
	if p := spec.PreemptionPolicy; p != nil {
		errs = append(errs, fieldrules.ValidateRequiredOneOf(*p, fldPath.Child("preemptionPolicy"),
			corev1.PreemptLowerPriority,
			corev1.PreemptNever)...)
	}
	if spec.Overhead != nil {
		errs = append(errs, ValidateResources(&corev1.ResourceRequirements{Limits: spec.Overhead},
			fldPath.Child("overhead"))...)
	}
	return append(errs, validateGates(spec, fldPath)...)
}

// validateSpecNames validates the names of other objects in a pod spec, and the pod's host name and
// subdomain.
func validateSpecNames(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	subdomain := func(v, name string) {
		if v != "" {
			errs = append(errs, fieldrules.InvalidErrors(fldPath.Child(name), v,
				validation.NameIsDNSSubdomain(v, false))...)
		}
	}
	subdomain(spec.ServiceAccountName, "serviceAccountName")
	subdomain(spec.NodeName, "nodeName")
	subdomain(spec.PriorityClassName, "priorityClassName")
	if n := spec.RuntimeClassName; n != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("runtimeClassName"), *n,
			validation.NameIsDNSSubdomain(*n, false))...)
	}
	if g, here := spec.SchedulingGroup, fldPath.Child("schedulingGroup"); g != nil && g.PodGroupName == nil {
		errs = append(errs, field.Invalid(here.Child("podGroupName"), g.PodGroupName,
			"must specify one of: `podGroupName`"))
	} else if g != nil {
		here = here.Child("podGroupName")
		errs = append(errs, fieldrules.InvalidErrors(here, *g.PodGroupName,
			validation.NameIsDNSSubdomain(*g.PodGroupName, false))...)
	}
	label := func(v, name string) {
		if v != "" {
			errs = append(errs, fieldrules.InvalidErrors(fldPath.Child(name), v, utilvalidation.IsDNS1123Label(v))...)
		}
	}
	label(spec.Hostname, "hostname")
	label(spec.Subdomain, "subdomain")
	for i, a := range spec.HostAliases {
		here := fldPath.Child("hostAliases").Index(i)
		errs = append(errs, utilvalidation.IsValidIP(here.Child("ip"), a.IP)...)
		for j, h := range a.Hostnames {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("hostnames").Index(j), h,
				utilvalidation.IsDNS1123Subdomain(h))...)
		}
	}
	for i, r := range spec.ReadinessGates {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("readinessGates").Index(i).Child("conditionType"),
			r.ConditionType,
			utilvalidation.IsQualifiedName(string(r.ConditionType)))...)
	}
	return errs
}

func validateDNS(s *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateRequiredOneOf(s.DNSPolicy, fldPath.Child("dnsPolicy"), corev1.DNSClusterFirstWithHostNet,
		corev1.DNSClusterFirst, corev1.DNSDefault, corev1.DNSNone)
	c, here := s.DNSConfig, fldPath.Child("dnsConfig")
	if s.DNSPolicy == corev1.DNSNone && c == nil {
		errs = append(errs, field.Required(here, "must provide `dnsConfig` when `dnsPolicy` is None"))
	} else if s.DNSPolicy == corev1.DNSNone && len(c.Nameservers) == 0 {
		errs = append(errs, field.Required(here.Child("nameservers"),
			"must provide at least one DNS nameserver when `dnsPolicy` is None"))
	}
	if c == nil {
		return errs
	}
	if len(c.Nameservers) > maxNameservers {
		errs = append(errs, field.Invalid(here.Child("nameservers"), c.Nameservers,
			fmt.Sprintf("must not have more than %d nameservers", maxNameservers)))
	}
	for i, ns := range c.Nameservers {
		errs = append(errs, utilvalidation.IsValidIP(here.Child("nameservers").Index(i), ns)...)
	}
	if len(c.Searches) > maxSearches {
		errs = append(errs, field.Invalid(here.Child("searches"), c.Searches,
			fmt.Sprintf("must not have more than %d search paths", maxSearches)))
	}
	chars := 0
	for i, d := range c.Searches {
		chars += len(d) + 1
		if d != "." {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("searches").Index(i), d,
				utilvalidation.IsDNS1123SubdomainWithUnderscore(trimFinalDot(d)))...)
		}
	}
	if chars > maxSearchChars+1 {
		errs = append(errs, field.Invalid(here.Child("searches"), c.Searches,
			"must not have more than 2048 characters (including spaces) in the search list"))
	}
	for i, o := range c.Options {
		if o.Name == "" {
			errs = append(errs, field.Required(here.Child("options").Index(i), "must not be empty"))
		}
	}
	return errs
}

func trimFinalDot(s string) string {
	if len(s) > 0 && s[len(s)-1] == '.' {
		return s[:len(s)-1]
	}
	return s
}

func validateGates(s *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, g := range s.SchedulingGates {
		here := fldPath.Child("schedulingGates").Index(i)
		errs = append(errs, fieldrules.InvalidErrors(here, g.Name, utilvalidation.IsQualifiedName(g.Name))...)
		if seen[g.Name] {
			errs = append(errs, field.Duplicate(here, g.Name))
		}
		seen[g.Name] = true
	}
	if len(s.SchedulingGates) > 0 && s.NodeName != "" {
		errs = append(errs, field.Forbidden(fldPath.Child("nodeName"),
			"cannot be set until all schedulingGates have been cleared"))
	}
	return errs
}

// sysctlName matches the name of a kernel parameter, with parts separated by dots or slashes.
var sysctlName = regexp.MustCompile(`^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$`)

const maxSysctlName = 253

func validatePodSecurity(s *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	c := s.SecurityContext
	if c == nil {
		return nil
	}
	fldPath = fldPath.Child("securityContext")
	var errs field.ErrorList
	if c.RunAsUser != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("runAsUser"), *c.RunAsUser,
			utilvalidation.IsValidUserID(*c.RunAsUser))...)
	}
	if c.RunAsGroup != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("runAsGroup"), *c.RunAsGroup,
			utilvalidation.IsValidGroupID(*c.RunAsGroup))...)
	}
	if c.FSGroup != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("fsGroup"), *c.FSGroup,
			utilvalidation.IsValidGroupID(*c.FSGroup))...)
	}
	for i, g := range c.SupplementalGroups {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("supplementalGroups").Index(i), g,
			utilvalidation.IsValidGroupID(g))...)
	}
	errs = append(errs, validateSysctls(s, fldPath.Child("sysctls"))...)
	if p := c.SELinuxChangePolicy; p != nil {
		errs = append(errs, fieldrules.ValidateSupported(*p, fldPath.Child("seLinuxChangePolicy"),
			corev1.SELinuxChangePolicyMountOption,
			corev1.SELinuxChangePolicyRecursive)...)
	}
	errs = append(errs, validateWindowsOptions(c.WindowsOptions, fldPath.Child("windowsOptions"))...)
	if p := c.SupplementalGroupsPolicy; p != nil {
		errs = append(errs, fieldrules.ValidateSupported(*p, fldPath.Child("supplementalGroupsPolicy"),
			corev1.SupplementalGroupsPolicyMerge,
			corev1.SupplementalGroupsPolicyStrict)...)
	}
	if p := c.FSGroupChangePolicy; p != nil {
		errs = append(errs, fieldrules.ValidateSupported(*p, fldPath.Child("fsGroupChangePolicy"),
			corev1.FSGroupChangeAlways,
			corev1.FSGroupChangeOnRootMismatch)...)
	}
	errs = append(errs, validateAppArmor(c.AppArmorProfile, fldPath.Child("appArmorProfile"))...)
	return append(errs, validateSeccomp(c.SeccompProfile, fldPath.Child("seccompProfile"))...)
}

// validateHostNamespaces returns errors for host namespaces that cannot be combined with each other
// or with a user namespace. As in Kubernetes, two of the paths have a capital letter.
func validateHostNamespaces(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if spec.HostPID && ptr.Deref(spec.ShareProcessNamespace, false) {
		errs = append(errs, field.Invalid(fldPath.Child("shareProcessNamespace"), *spec.ShareProcessNamespace,
			"ShareProcessNamespace and HostPID cannot both be enabled"))
	}
	if spec.HostUsers == nil || *spec.HostUsers {
		return errs
	}
	errs = append(errs, fieldrules.ForbidSetFields(fldPath, "when `hostUsers` is false",
		map[string]bool{"hostNetwork": spec.HostNetwork, "HostPID": spec.HostPID, "HostIPC": spec.HostIPC})...)
	visitContainers(spec, fldPath, func(c *corev1.Container, fldPath *field.Path) {
		if len(c.VolumeDevices) > 0 {
			errs = append(errs, field.Forbidden(fldPath.Child("volumeDevices"), "when `hostUsers` is false"))
		}
	})
	return errs
}

// validateFileKeyVolumes validates that each fileKeyRef refers to a volume of the pod that is an
// emptyDir.
func validateFileKeyVolumes(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	visitContainers(spec, fldPath, func(c *corev1.Container, fldPath *field.Path) {
		for i, e := range c.Env {
			if e.ValueFrom == nil || e.ValueFrom.FileKeyRef == nil {
				continue
			}
			name, here := e.ValueFrom.FileKeyRef.VolumeName,
				fldPath.Child("env").Index(i).Child("valueFrom", "fileKeyRef", "volumeName")
			n := slices.IndexFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
			if n < 0 {
				errs = append(errs, field.NotFound(here, name))
			} else if spec.Volumes[n].EmptyDir == nil {
				errs = append(errs, field.Invalid(here, name, "referenced volume must be of type emptyDir"))
			}
		}
	})
	return errs
}

// validateSysctls returns errors for kernel parameters (sysctls) of a namespace that the pod shares
// with its node.
func validateSysctls(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, y := range spec.SecurityContext.Sysctls {
		here := fldPath.Index(i).Child("name")
		if y.Name == "" {
			errs = append(errs, field.Required(here, ""))
		} else if len(y.Name) > maxSysctlName || !sysctlName.MatchString(y.Name) {
			errs = append(errs, field.Invalid(here, y.Name,
				fmt.Sprintf("must have at most %d characters and match regex %s", maxSysctlName, sysctlName)))
		} else if seen[y.Name] {
			errs = append(errs, field.Duplicate(here, y.Name))
		}
		seen[y.Name] = true
		switch ns, _, _ := sysctl.GetNamespace(y.Name); {
		case spec.HostNetwork && ns == sysctl.NetNamespace:
			errs = append(errs, field.Invalid(here, y.Name, "may not be specified when 'hostNetwork' is true"))
		case spec.HostIPC && ns == sysctl.IPCNamespace:
			errs = append(errs, field.Invalid(here, y.Name, "may not be specified when 'hostIPC' is true"))
		}
	}
	return errs
}

func validateSeccomp(p *corev1.SeccompProfile, fldPath *field.Path) field.ErrorList {
	if p == nil {
		return nil
	}
	var errs field.ErrorList
	if p.Type == "" {
		errs = append(errs, field.Required(fldPath.Child("type"), "type is required when seccompProfile is set"))
	} else {
		errs = append(errs, fieldrules.ValidateSupported(p.Type, fldPath.Child("type"),
			corev1.SeccompProfileTypeLocalhost,
			corev1.SeccompProfileTypeRuntimeDefault,
			corev1.SeccompProfileTypeUnconfined)...)
	}
	local := p.Type == corev1.SeccompProfileTypeLocalhost
	switch {
	case local && p.LocalhostProfile == nil:
		errs = append(errs, field.Required(fldPath.Child("localhostProfile"),
			"must be set when seccomp type is Localhost"))
	case !local && p.LocalhostProfile != nil:
		errs = append(errs, field.Invalid(fldPath.Child("localhostProfile"), p,
			"can only be set when seccomp type is Localhost"))
	case local:
		errs = append(errs, fieldrules.ValidateDescending(*p.LocalhostProfile, fldPath.Child("localhostProfile"))...)
	}
	return errs
}
