package podspec

import (
	"fmt"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const (
	notOfWindows = "cannot be set for a windows pod"
	notOfLinux   = "windows options cannot be set for a linux pod"
)

// Limits for the user name of a Windows container.
const (
	maxCredentialSpecKiB = 64
	maxUserDomain        = 256
	maxUserName          = 104
)

var (
	controlCharacter = regexp.MustCompile(`[[:cntrl:]]+`)
	netBIOSName      = regexp.MustCompile(`^[^\\/:\*\?"<>|\.][^\\/:\*\?"<>|]{0,14}$`)
	dnsDomain        = regexp.MustCompile(`^[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,` +
		`61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*$`)
	badUserCharacter = regexp.MustCompile(`["/\\:;|=,\+\*\?<>@\[\]]`)
	dotsAndSpaces    = regexp.MustCompile(`^[\. ]+$`)
)

// visitContainerSecurity calls f for every container of a pod, with the container's security
// context, which is never nil, and its path.
func visitContainerSecurity(
	s *corev1.PodSpec, fldPath *field.Path, f func(name string, c *corev1.SecurityContext, fldPath *field.Path),
) {
	visit := func(name string, c *corev1.SecurityContext, fldPath *field.Path) {
		if c == nil {
			c = &corev1.SecurityContext{}
		}
		f(name, c, fldPath)
	}
	for i := range s.InitContainers {
		visit(s.InitContainers[i].Name, s.InitContainers[i].SecurityContext, fldPath.Child("initContainers").Index(i))
	}
	for i := range s.Containers {
		visit(s.Containers[i].Name, s.Containers[i].SecurityContext, fldPath.Child("containers").Index(i))
	}
	for i := range s.EphemeralContainers {
		visit(s.EphemeralContainers[i].Name, s.EphemeralContainers[i].SecurityContext,
			fldPath.Child("ephemeralContainers").Index(i))
	}
}

// validateOS validates the operating system of a pod. It returns errors for fields that the
// operating system does not support.
func validateOS(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	errs := validateHostProcess(spec, fldPath)
	if spec.OS == nil {
		return errs
	}
	if spec.OS.Name == "" {
		return append(errs, field.Required(fldPath.Child("os", "name"), ""))
	}
	bad := fieldrules.ValidateSupported(spec.OS.Name, fldPath.Child("os"), corev1.Linux, corev1.Windows)
	if len(bad) > 0 {
		return append(errs, bad...)
	}
	if spec.OS.Name == corev1.Windows {
		return append(errs, validateWindows(spec, fldPath)...)
	}
	if c := spec.SecurityContext; c != nil && c.WindowsOptions != nil {
		errs = append(errs, field.Forbidden(fldPath.Child("securityContext", "windowsOptions"), notOfLinux))
	}
	visitContainerSecurity(spec, fldPath, func(_ string, c *corev1.SecurityContext, fldPath *field.Path) {
		if c.WindowsOptions != nil {
			errs = append(errs, field.Forbidden(fldPath.Child("securityContext", "windowsOptions"), notOfLinux))
		}
	})
	return errs
}

// validateWindows returns errors for fields of a Windows pod that only Linux supports.
func validateWindows(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	c := spec.SecurityContext
	if c == nil {
		c = &corev1.PodSecurityContext{}
	}
	errs := fieldrules.ForbidSetFields(fldPath.Child("securityContext"), notOfWindows, map[string]bool{
		"appArmorProfile": c.AppArmorProfile != nil, "seLinuxOptions": c.SELinuxOptions != nil,
		"seccompProfile": c.SeccompProfile != nil,
		"fsGroup":        c.FSGroup != nil, "fsGroupChangePolicy": c.FSGroupChangePolicy != nil,
		"sysctls":   len(c.Sysctls) > 0,
		"runAsUser": c.RunAsUser != nil, "runAsGroup": c.RunAsGroup != nil,
		"supplementalGroups":       c.SupplementalGroups != nil,
		"supplementalGroupsPolicy": c.SupplementalGroupsPolicy != nil,
		"seLinuxChangePolicy":      c.SELinuxChangePolicy != nil,
	})
	errs = append(errs, fieldrules.ForbidSetFields(fldPath, notOfWindows,
		map[string]bool{"hostUsers": spec.HostUsers != nil, "hostPID": spec.HostPID,
			"hostIPC": spec.HostIPC, "shareProcessNamespace": spec.ShareProcessNamespace != nil})...)
	visitContainerSecurity(spec, fldPath, func(_ string, c *corev1.SecurityContext, fldPath *field.Path) {
		errs = append(errs, fieldrules.ForbidSetFields(fldPath.Child("securityContext"), notOfWindows, map[string]bool{
			"appArmorProfile": c.AppArmorProfile != nil, "seLinuxOptions": c.SELinuxOptions != nil,
			"seccompProfile": c.SeccompProfile != nil,
			"capabilities":   c.Capabilities != nil, "readOnlyRootFilesystem": c.ReadOnlyRootFilesystem != nil,
			"privileged": c.Privileged != nil, "allowPrivilegeEscalation": c.AllowPrivilegeEscalation != nil,
			"procMount": c.ProcMount != nil, "runAsUser": c.RunAsUser != nil, "runAsGroup": c.RunAsGroup != nil,
		})...)
	})
	return errs
}

// validateHostProcess validates that either all containers of a pod are Windows HostProcess
// containers or none.
func validateHostProcess(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	var ofPod *bool
	if c := spec.SecurityContext; c != nil && c.WindowsOptions != nil {
		ofPod = c.WindowsOptions.HostProcess
	}
	all, host := 0, 0
	visitContainerSecurity(spec, fldPath, func(_ string, c *corev1.SecurityContext, fldPath *field.Path) {
		all++
		own := ofPod
		if o := c.WindowsOptions; o != nil && o.HostProcess != nil {
			own = o.HostProcess
			if ofPod != nil && *ofPod != *own {
				errs = append(errs, field.Invalid(fldPath.Child("securityContext", "windowsOptions", "hostProcess"),
					*own,
					fmt.Sprintf("pod hostProcess value must be identical if both are specified, was %v", *ofPod)))
			}
		}
		if ptr.Deref(own, false) {
			host++
		}
	})
	if host == 0 {
		return errs
	}
	if host != all {
		errs = append(errs, field.Invalid(fldPath, "",
			"If pod contains any hostProcess containers then all containers must be HostProcess containers"))
	}
	if !spec.HostNetwork {
		errs = append(errs, field.Invalid(fldPath.Child("hostNetwork"), false,
			"hostNetwork must be true if pod contains any hostProcess containers"))
	}
	return errs
}

// validateWindowsOptions validates the Windows options of a container's security context.
func validateWindowsOptions(o *corev1.WindowsSecurityContextOptions, fldPath *field.Path) field.ErrorList {
	if o == nil {
		return nil
	}
	var errs field.ErrorList
	if n := o.GMSACredentialSpecName; n != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("gmsaCredentialSpecName"), *n,
			utilvalidation.IsDNS1123Subdomain(*n))...)
	}
	if c := o.GMSACredentialSpec; c != nil && *c == "" {
		errs = append(errs, field.Invalid(fldPath.Child("gmsaCredentialSpec"), *c,
			"gmsaCredentialSpec cannot be an empty string"))
	} else if c != nil && len(*c) > maxCredentialSpecKiB<<10 {
		errs = append(errs, field.Invalid(fldPath.Child("gmsaCredentialSpec"), *c,
			fmt.Sprintf("gmsaCredentialSpec size must be under %d KiB", maxCredentialSpecKiB)))
	}
	if o.RunAsUserName != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("runAsUserName"), *o.RunAsUserName,
			validateWindowsUserName(*o.RunAsUserName))...)
	}
	return errs
}

// validateWindowsUserName returns messages for the errors in a user name. The name may have a
// domain and a backslash as prefix.
func validateWindowsUserName(name string) []string {
	domain, user, hasDomain := strings.Cut(name, `\`)
	if !hasDomain {
		domain, user = "", name
	}
	switch {
	case name == "":
		return []string{"runAsUserName cannot be an empty string"}
	case controlCharacter.MatchString(name):
		return []string{"runAsUserName cannot contain control characters"}
	case strings.Count(name, `\`) > 1:
		return []string{"runAsUserName cannot contain more than one backslash"}
	}
	var out []string
	if len(domain) >= maxUserDomain {
		out = append(out, fmt.Sprintf("runAsUserName's Domain length must be under %d characters", maxUserDomain))
	}
	if hasDomain && !netBIOSName.MatchString(domain) && !dnsDomain.MatchString(domain) {
		out = append(out, "runAsUserName's Domain doesn't match the NetBios nor the DNS format")
	}
	if user == "" {
		out = append(out, "runAsUserName's User cannot be empty")
	} else if len(user) > maxUserName {
		out = append(out, fmt.Sprintf("runAsUserName's User length must not be longer than %d characters", maxUserName))
	}
	if dotsAndSpaces.MatchString(user) {
		out = append(out, "runAsUserName's User cannot contain only periods or spaces")
	}
	if badUserCharacter.MatchString(user) {
		out = append(out, `runAsUserName's User cannot contain the following characters: "/\:;|=,+*?<>@[]`)
	}
	return out
}
