// Package podspec describes the kind Pod, and has the defaults, rules and warnings for pod specs,
// pod templates and the parts of pod specs: volumes, claims, resources, probes and placement.
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

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Limits of DNS and of resolv.conf.
const (
	maxNameservers = 3
	maxSearches    = 32
	maxSearchChars = 2048
)

// validatePodSpec validates a pod spec after defaulting. F38
func validatePodSpec(s *corev1.PodSpec, at *field.Path) field.ErrorList {
	volumes, errs := ValidateVolumes(s.Volumes, at.Child("volumes"))
	errs = append(errs, validateContainers(s, volumes, at)...)
	errs = append(errs, fieldrules.RequiredOneOf(s.RestartPolicy, at.Child("restartPolicy"),
		corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever)...)
	errs = append(errs, validateDNS(s, at)...)
	errs = append(errs, metavalidation.ValidateLabels(s.NodeSelector, at.Child("nodeSelector"))...)
	errs = append(errs, ValidateTolerations(s.Tolerations, at.Child("tolerations"))...)
	if s.Affinity != nil {
		errs = append(errs, validateAffinity(s.Affinity, at.Child("affinity"))...)
	}
	errs = append(errs, validateSpread(s.TopologySpreadConstraints, at.Child("topologySpreadConstraints"))...)
	errs = append(errs, validatePodClaims(s, at)...)
	errs = append(errs, validateSpecNames(s, at)...)
	errs = append(errs, validateHostname(s, at)...)
	errs = append(errs, validateOS(s, at)...)
	errs = append(errs, validatePodSecurity(s, at)...)
	errs = append(errs, validateHostNamespaces(s, at)...)
	errs = append(errs, validateFileKeyVolumes(s, at)...)
	if d := s.ActiveDeadlineSeconds; d != nil && (*d < 1 || *d > math.MaxInt32) {
		errs = append(errs, field.Invalid(at.Child("activeDeadlineSeconds"), *d, utilvalidation.InclusiveRangeError(1, math.MaxInt32)))
	}
	if p := s.PreemptionPolicy; p != nil {
		errs = append(errs, fieldrules.RequiredOneOf(*p, at.Child("preemptionPolicy"), corev1.PreemptLowerPriority,
			corev1.PreemptNever)...)
	}
	if s.Overhead != nil {
		errs = append(errs, ValidateResources(&corev1.ResourceRequirements{Limits: s.Overhead},
			at.Child("overhead"))...)
	}
	return append(errs, validateGates(s, at)...)
}

// validateSpecNames validates the names of other objects and the pod's DNS names.
func validateSpecNames(s *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	subdomain := func(v, name string) {
		if v != "" {
			errs = append(errs, fieldrules.Invalid(at.Child(name), v, validation.NameIsDNSSubdomain(v, false))...)
		}
	}
	subdomain(s.ServiceAccountName, "serviceAccountName")
	subdomain(s.NodeName, "nodeName")
	subdomain(s.PriorityClassName, "priorityClassName")
	if n := s.RuntimeClassName; n != nil {
		errs = append(errs, fieldrules.Invalid(at.Child("runtimeClassName"), *n,
			validation.NameIsDNSSubdomain(*n, false))...)
	}
	if g, here := s.SchedulingGroup, at.Child("schedulingGroup"); g != nil && g.PodGroupName == nil {
		errs = append(errs, field.Invalid(here.Child("podGroupName"), g.PodGroupName, "must specify one of: `podGroupName`"))
	} else if g != nil {
		here = here.Child("podGroupName")
		errs = append(errs, fieldrules.Invalid(here, *g.PodGroupName,
			validation.NameIsDNSSubdomain(*g.PodGroupName, false))...)
	}
	label := func(v, name string) {
		if v != "" {
			errs = append(errs, fieldrules.Invalid(at.Child(name), v, utilvalidation.IsDNS1123Label(v))...)
		}
	}
	label(s.Hostname, "hostname")
	label(s.Subdomain, "subdomain")
	for i, a := range s.HostAliases {
		here := at.Child("hostAliases").Index(i)
		errs = append(errs, utilvalidation.IsValidIP(here.Child("ip"), a.IP)...)
		for j, h := range a.Hostnames {
			errs = append(errs, fieldrules.Invalid(here.Child("hostnames").Index(j), h,
				utilvalidation.IsDNS1123Subdomain(h))...)
		}
	}
	for i, r := range s.ReadinessGates {
		errs = append(errs, fieldrules.Invalid(at.Child("readinessGates").Index(i).Child("conditionType"),
			r.ConditionType,
			utilvalidation.IsQualifiedName(string(r.ConditionType)))...)
	}
	return errs
}

func validateDNS(s *corev1.PodSpec, at *field.Path) field.ErrorList {
	errs := fieldrules.RequiredOneOf(s.DNSPolicy, at.Child("dnsPolicy"), corev1.DNSClusterFirstWithHostNet,
		corev1.DNSClusterFirst, corev1.DNSDefault, corev1.DNSNone)
	c, here := s.DNSConfig, at.Child("dnsConfig")
	if s.DNSPolicy == corev1.DNSNone && c == nil {
		errs = append(errs, field.Required(here, "must provide `dnsConfig` when `dnsPolicy` is None"))
	} else if s.DNSPolicy == corev1.DNSNone && len(c.Nameservers) == 0 {
		errs = append(errs, field.Required(here.Child("nameservers"), "must provide at least one DNS nameserver when `dnsPolicy` is None"))
	}
	if c == nil {
		return errs
	}
	if len(c.Nameservers) > maxNameservers {
		errs = append(errs, field.Invalid(here.Child("nameservers"), c.Nameservers, fmt.Sprintf("must not have more than %d nameservers", maxNameservers)))
	}
	for i, ns := range c.Nameservers {
		errs = append(errs, utilvalidation.IsValidIP(here.Child("nameservers").Index(i), ns)...)
	}
	if len(c.Searches) > maxSearches {
		errs = append(errs, field.Invalid(here.Child("searches"), c.Searches, fmt.Sprintf("must not have more than %d search paths", maxSearches)))
	}
	chars := 0
	for i, d := range c.Searches {
		chars += len(d) + 1
		if d != "." {
			errs = append(errs, fieldrules.Invalid(here.Child("searches").Index(i), d,
				utilvalidation.IsDNS1123SubdomainWithUnderscore(trimDot(d)))...)
		}
	}
	if chars > maxSearchChars+1 {
		errs = append(errs, field.Invalid(here.Child("searches"), c.Searches, "must not have more than 2048 characters (including spaces) in the search list"))
	}
	for i, o := range c.Options {
		if o.Name == "" {
			errs = append(errs, field.Required(here.Child("options").Index(i), "must not be empty"))
		}
	}
	return errs
}

func trimDot(s string) string {
	if len(s) > 0 && s[len(s)-1] == '.' {
		return s[:len(s)-1]
	}
	return s
}

func validateGates(s *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, g := range s.SchedulingGates {
		here := at.Child("schedulingGates").Index(i)
		errs = append(errs, fieldrules.Invalid(here, g.Name, utilvalidation.IsQualifiedName(g.Name))...)
		if seen[g.Name] {
			errs = append(errs, field.Duplicate(here, g.Name))
		}
		seen[g.Name] = true
	}
	if len(s.SchedulingGates) > 0 && s.NodeName != "" {
		errs = append(errs, field.Forbidden(at.Child("nodeName"), "cannot be set until all schedulingGates have been cleared"))
	}
	return errs
}

// sysctlName matches the name of a kernel parameter, with parts separated by dots or slashes.
var sysctlName = regexp.MustCompile(`^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$`)

const maxSysctlName = 253

func validatePodSecurity(s *corev1.PodSpec, at *field.Path) field.ErrorList {
	c := s.SecurityContext
	if c == nil {
		return nil
	}
	at = at.Child("securityContext")
	var errs field.ErrorList
	if c.RunAsUser != nil {
		errs = append(errs, fieldrules.Invalid(at.Child("runAsUser"), *c.RunAsUser,
			utilvalidation.IsValidUserID(*c.RunAsUser))...)
	}
	if c.RunAsGroup != nil {
		errs = append(errs, fieldrules.Invalid(at.Child("runAsGroup"), *c.RunAsGroup,
			utilvalidation.IsValidGroupID(*c.RunAsGroup))...)
	}
	if c.FSGroup != nil {
		errs = append(errs, fieldrules.Invalid(at.Child("fsGroup"), *c.FSGroup,
			utilvalidation.IsValidGroupID(*c.FSGroup))...)
	}
	for i, g := range c.SupplementalGroups {
		errs = append(errs, fieldrules.Invalid(at.Child("supplementalGroups").Index(i), g,
			utilvalidation.IsValidGroupID(g))...)
	}
	errs = append(errs, validateSysctls(s, at.Child("sysctls"))...)
	if p := c.SELinuxChangePolicy; p != nil {
		errs = append(errs, fieldrules.Supported(*p, at.Child("seLinuxChangePolicy"),
			corev1.SELinuxChangePolicyMountOption,
			corev1.SELinuxChangePolicyRecursive)...)
	}
	errs = append(errs, validateWindowsOptions(c.WindowsOptions, at.Child("windowsOptions"))...)
	if p := c.SupplementalGroupsPolicy; p != nil {
		errs = append(errs, fieldrules.Supported(*p, at.Child("supplementalGroupsPolicy"),
			corev1.SupplementalGroupsPolicyMerge,
			corev1.SupplementalGroupsPolicyStrict)...)
	}
	if p := c.FSGroupChangePolicy; p != nil {
		errs = append(errs, fieldrules.Supported(*p, at.Child("fsGroupChangePolicy"), corev1.FSGroupChangeAlways,
			corev1.FSGroupChangeOnRootMismatch)...)
	}
	errs = append(errs, validateAppArmor(c.AppArmorProfile, at.Child("appArmorProfile"))...)
	return append(errs, validateSeccomp(c.SeccompProfile, at.Child("seccompProfile"))...)
}

// validateHostNamespaces returns errors for host namespaces that exclude each other or a user
// namespace. As in Kubernetes, two paths have a capital.
func validateHostNamespaces(s *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if s.HostPID && fieldrules.IsTrue(s.ShareProcessNamespace) {
		errs = append(errs, field.Invalid(at.Child("shareProcessNamespace"), *s.ShareProcessNamespace, "ShareProcessNamespace and HostPID cannot both be enabled"))
	}
	if s.HostUsers == nil || *s.HostUsers {
		return errs
	}
	errs = append(errs, fieldrules.ForbidSet(at, "when `hostUsers` is false", map[string]bool{"hostNetwork": s.HostNetwork, "HostPID": s.HostPID, "HostIPC": s.HostIPC})...)
	eachContainerOf(s, at, func(c *corev1.Container, at *field.Path) {
		if len(c.VolumeDevices) > 0 {
			errs = append(errs, field.Forbidden(at.Child("volumeDevices"), "when `hostUsers` is false"))
		}
	})
	return errs
}

// validateFileKeyVolumes checks that fileKeyRef variables name a volume of the pod that is an
// emptyDir.
func validateFileKeyVolumes(s *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	eachContainerOf(s, at, func(c *corev1.Container, at *field.Path) {
		for i, e := range c.Env {
			if e.ValueFrom == nil || e.ValueFrom.FileKeyRef == nil {
				continue
			}
			name, here := e.ValueFrom.FileKeyRef.VolumeName, at.Child("env").Index(i).Child("valueFrom", "fileKeyRef", "volumeName")
			n := slices.IndexFunc(s.Volumes, func(v corev1.Volume) bool { return v.Name == name })
			if n < 0 {
				errs = append(errs, field.NotFound(here, name))
			} else if s.Volumes[n].EmptyDir == nil {
				errs = append(errs, field.Invalid(here, name, "referenced volume must be of type emptyDir"))
			}
		}
	})
	return errs
}

// validateSysctls returns errors for kernel parameters of a namespace that the pod shares with its
// node.
func validateSysctls(s *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, y := range s.SecurityContext.Sysctls {
		here := at.Index(i).Child("name")
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
		case s.HostNetwork && ns == sysctl.NetNamespace:
			errs = append(errs, field.Invalid(here, y.Name, "may not be specified when 'hostNetwork' is true"))
		case s.HostIPC && ns == sysctl.IPCNamespace:
			errs = append(errs, field.Invalid(here, y.Name, "may not be specified when 'hostIPC' is true"))
		}
	}
	return errs
}

func validateSeccomp(p *corev1.SeccompProfile, at *field.Path) field.ErrorList {
	if p == nil {
		return nil
	}
	var errs field.ErrorList
	if p.Type == "" {
		errs = append(errs, field.Required(at.Child("type"), "type is required when seccompProfile is set"))
	} else {
		errs = append(errs, fieldrules.Supported(p.Type, at.Child("type"), corev1.SeccompProfileTypeLocalhost,
			corev1.SeccompProfileTypeRuntimeDefault,
			corev1.SeccompProfileTypeUnconfined)...)
	}
	local := p.Type == corev1.SeccompProfileTypeLocalhost
	switch {
	case local && p.LocalhostProfile == nil:
		errs = append(errs, field.Required(at.Child("localhostProfile"), "must be set when seccomp type is Localhost"))
	case !local && p.LocalhostProfile != nil:
		errs = append(errs, field.Invalid(at.Child("localhostProfile"), p, "can only be set when seccomp type is Localhost"))
	case local:
		errs = append(errs, fieldrules.ValidateDescending(*p.LocalhostProfile, at.Child("localhostProfile"))...)
	}
	return errs
}
