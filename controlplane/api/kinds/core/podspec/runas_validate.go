package podspec

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// Limits of a container's restart rules.
const (
	maxRestartRules = 20
	maxExitCodes    = 255
)

// maxHostname is the kernel's limit for the length of a host name. maxAppArmorName is PATH_MAX
// without the terminating NUL.
const (
	maxHostname     = 64
	maxAppArmorName = 4095
)

// validateRestarts validates a container's restart policy and its restart rules.
func validateRestarts(c *corev1.Container, fldPath *field.Path) field.ErrorList {
	rules := fldPath.Child("restartPolicyRules")
	if c.RestartPolicy == nil {
		if len(c.RestartPolicyRules) > 0 {
			return field.ErrorList{field.Required(fldPath.Child("restartPolicy"),
				"must specify restartPolicy when restart rules are used")}
		}
		return nil
	}
	errs := fieldrules.ValidateSupported(*c.RestartPolicy, fldPath.Child("restartPolicy"),
		corev1.ContainerRestartPolicyAlways, corev1.ContainerRestartPolicyNever, corev1.ContainerRestartPolicyOnFailure)
	if n := len(c.RestartPolicyRules); n > maxRestartRules {
		errs = append(errs, field.TooMany(rules, n, maxRestartRules))
	}
	for i, r := range c.RestartPolicyRules {
		errs = append(errs, fieldrules.ValidateSupported(r.Action, rules.Index(i).Child("action"),
			corev1.ContainerRestartRuleActionRestart, corev1.ContainerRestartRuleActionRestartAllContainers)...)
		here := rules.Index(i).Child("exitCodes")
		if r.ExitCodes == nil {
			errs = append(errs, field.Required(here, "must be specified"))
			continue
		}
		errs = append(errs, fieldrules.ValidateSupported(r.ExitCodes.Operator, here.Child("operator"),
			corev1.ContainerRestartRuleOnExitCodesOpIn, corev1.ContainerRestartRuleOnExitCodesOpNotIn)...)
		if n := len(r.ExitCodes.Values); n > maxExitCodes {
			errs = append(errs, field.TooMany(here.Child("values"), n, maxExitCodes))
		}
	}
	return errs
}

// validateStopSignal validates a container's stop signal. Which signals are valid depends on the
// pod's operating system.
func validateStopSignal(s *corev1.Signal, os *corev1.PodOS, fldPath *field.Path) field.ErrorList {
	if s == nil {
		return nil
	}
	if os == nil {
		return field.ErrorList{field.Forbidden(fldPath, "may not be set for containers with empty `spec.os.name`")}
	}
	switch {
	case os.Name == corev1.Windows && *s != corev1.SIGKILL && *s != corev1.SIGTERM:
		return field.ErrorList{field.NotSupported(fldPath, s, []corev1.Signal{corev1.SIGKILL, corev1.SIGTERM})}
	case os.Name == corev1.Linux && !slices.Contains(linuxSignals, string(*s)):
		return field.ErrorList{field.NotSupported(fldPath, s, linuxSignals)}
	}
	return nil
}

// linuxSignals are the names of all Linux signals, sorted. The names of real-time signals are
// relative to the first or the last real-time signal.
var linuxSignals = func() []string {
	all := strings.Fields("SIGABRT SIGALRM SIGBUS SIGCHLD SIGCLD SIGCONT SIGFPE SIGHUP SIGILL SIGINT SIGIO SIGIOT " +
		"SIGKILL SIGPIPE SIGPOLL " +
		"SIGPROF SIGPWR SIGQUIT SIGRTMAX SIGRTMIN SIGSEGV SIGSTKFLT SIGSTOP SIGSYS SIGTERM SIGTRAP SIGTSTP SIGTTIN " +
		"SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ")
	for i := 1; i <= 15; i++ {
		all = append(all, fmt.Sprintf("SIGRTMIN+%d", i))
	}
	for i := 1; i <= 14; i++ {
		all = append(all, fmt.Sprintf("SIGRTMAX-%d", i))
	}
	slices.Sort(all)
	return all
}()

// validateHostname validates hostnameOverride. It cannot be combined with the other fields that
// determine a pod's host name.
func validateHostname(spec *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	if spec.HostnameOverride == nil {
		return nil
	}
	fldPath, name := fldPath.Child("hostnameOverride"), *spec.HostnameOverride
	errs := fieldrules.InvalidErrors(fldPath, name, utilvalidation.IsDNS1123Subdomain(name))
	if len(name) > maxHostname {
		errs = append(errs, field.TooLong(fldPath, name, maxHostname))
	}
	if spec.HostNetwork {
		errs = append(errs, field.Forbidden(fldPath, "may not be specified when hostNetwork is true"))
	}
	if ptr.Deref(spec.SetHostnameAsFQDN, false) {
		errs = append(errs, field.Forbidden(fldPath, "may not be specified when setHostnameAsFQDN is true"))
	}
	return errs
}

func validateAppArmor(p *corev1.AppArmorProfile, fldPath *field.Path) field.ErrorList {
	if p == nil {
		return nil
	}
	if p.Type == "" {
		return field.ErrorList{field.Required(fldPath.Child("type"), "type is required when appArmorProfile is set")}
	}
	errs := fieldrules.ValidateSupported(p.Type, fldPath.Child("type"), corev1.AppArmorProfileTypeLocalhost,
		corev1.AppArmorProfileTypeRuntimeDefault,
		corev1.AppArmorProfileTypeUnconfined)
	local, name := p.Type == corev1.AppArmorProfileTypeLocalhost, ptr.Deref(p.LocalhostProfile, "")
	switch {
	case len(errs) > 0:
	case local && strings.TrimSpace(name) != name:
		errs = append(errs, field.Invalid(fldPath.Child("localhostProfile"), name,
			"must not be padded with whitespace"))
	case local && name == "":
		errs = append(errs, field.Required(fldPath.Child("localhostProfile"),
			"must be set when AppArmor type is Localhost"))
	case !local && p.LocalhostProfile != nil:
		errs = append(errs, field.Invalid(fldPath.Child("localhostProfile"), name,
			"can only be set when AppArmor type is Localhost"))
	}
	if local && len(name) > maxAppArmorName {
		errs = append(errs, field.TooLong(fldPath.Child("localhostProfile"), "", maxAppArmorName))
	}
	return errs
}

// validateMountKind validates the propagation of a volume mount and its recursive read-only mode.
// privileged reports whether the container is privileged.
func validateMountKind(m *corev1.VolumeMount, privileged bool, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if p := m.MountPropagation; p != nil {
		errs = append(errs, fieldrules.ValidateSupported(*p, fldPath.Child("mountPropagation"),
			corev1.MountPropagationBidirectional, corev1.MountPropagationHostToContainer,
			corev1.MountPropagationNone)...)
		if *p == corev1.MountPropagationBidirectional && !privileged {
			errs = append(errs, field.Forbidden(fldPath.Child("mountPropagation"),
				"Bidirectional mount propagation is available only to privileged containers"))
		}
	}
	r, here := m.RecursiveReadOnly, fldPath.Child("recursiveReadOnly")
	if r == nil {
		return errs
	}
	errs = append(errs, fieldrules.ValidateSupported(*r, here, corev1.RecursiveReadOnlyDisabled,
		corev1.RecursiveReadOnlyEnabled,
		corev1.RecursiveReadOnlyIfPossible)...)
	if *r != corev1.RecursiveReadOnlyEnabled && *r != corev1.RecursiveReadOnlyIfPossible {
		return errs
	}
	if !m.ReadOnly {
		errs = append(errs, field.Forbidden(here, "may only be specified when readOnly is true"))
	}
	if p := m.MountPropagation; p != nil && *p != corev1.MountPropagationNone {
		errs = append(errs, field.Forbidden(here,
			"may only be specified when mountPropagation is None or not specified"))
	}
	return errs
}

// resourceNames are the resources to which a resourceFieldRef can refer, in addition to huge pages.
var resourceNames = []string{"limits.cpu", "limits.ephemeral-storage", "limits.memory", "requests.cpu",
	"requests.ephemeral-storage", "requests.memory"}

const byteUnits = "1 1k 1M 1G 1T 1P 1E 1Ki 1Mi 1Gi 1Ti 1Pi 1Ei"

// validateResourceRef validates the resource and the divisor of a resourceFieldRef. inVolume is
// true in a downward API volume, where containerName is required. As in Kubernetes, errors about
// the divisor contain the resource as their value.
func validateResourceRef(r *corev1.ResourceFieldSelector, inVolume bool, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	_, kind, _ := strings.Cut(r.Resource, ".")
	huge := strings.HasPrefix(r.Resource, "limits."+corev1.ResourceHugePagesPrefix) || strings.HasPrefix(r.Resource,
		"requests."+corev1.ResourceHugePagesPrefix)
	known := slices.Contains(resourceNames, r.Resource)
	switch {
	case inVolume && r.ContainerName == "":
		errs = append(errs, field.Required(fldPath.Child("containerName"), ""))
	case r.Resource == "":
		errs = append(errs, field.Required(fldPath.Child("resource"), ""))
	case !known && !huge:
		errs = append(errs, field.NotSupported(fldPath.Child("resource"), r.Resource, resourceNames))
	}
	if r.Divisor.IsZero() || !known && !huge {
		return errs
	}
	units, shown, of := byteUnits, strings.ReplaceAll(byteUnits, " ", ", "), kind
	switch {
	case kind == "cpu":
		units, shown = "1m 1", "1m and 1"
	case kind == "ephemeral-storage":
		of = "local ephemeral storage"
	case huge:
		of = "hugepages"
	}
	if !slices.Contains(strings.Fields(units), r.Divisor.String()) {
		errs = append(errs, field.Invalid(fldPath.Child("divisor"), r.Resource,
			"only divisor's values "+shown+" are supported with the "+of+" resource"))
	}
	return errs
}
