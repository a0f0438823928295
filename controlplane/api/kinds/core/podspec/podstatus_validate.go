package podspec

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const (
	notNegative    = "must be a non-negative integer"
	onePerFamily   = "may specify no more than one IP for each IP family"
	claimResource  = "claim:"
	NotInRequests  = "must match one of the container's resource requests"
	NotInClaimUses = "must match one of the container's resource claims as 'claim:<claimName>/<requestName>' when " +
		"container.resources.claims[*].request is set or 'claim:<claimName>' when it is empty"
)

// prepareStatus copies parts of the old status that clients of older versions omit. It makes podIP
// and podIPs consistent: if both are set and differ, podIP has precedence.
func prepareStatus(updated, old *corev1.PodStatus) {
	// The QoS class depends on the spec, which a status update cannot change.
	builder.SetDefault(&updated.QOSClass, old.QOSClass)
	switch {
	case updated.PodIP != "" && (len(updated.PodIPs) == 0 || updated.PodIPs[0].IP != updated.PodIP):
		updated.PodIPs = []corev1.PodIP{{IP: updated.PodIP}}
	case updated.PodIP == "" && len(updated.PodIPs) > 0:
		updated.PodIP = updated.PodIPs[0].IP
	}
	if updated.ResourceClaimStatuses == nil {
		updated.ResourceClaimStatuses = old.ResourceClaimStatuses
	}
	setDefaultFrom(&updated.ExtendedResourceClaimStatus, old.ExtendedResourceClaimStatus)
	if updated.NodeAllocatableResourceClaimStatuses == nil {
		updated.NodeAllocatableResourceClaimStatuses = old.NodeAllocatableResourceClaimStatuses
	}
	builder.SetDefault(&updated.ObservedGeneration, old.ObservedGeneration)
	observed := map[corev1.PodConditionType][]int64{}
	for _, c := range old.Conditions {
		observed[c.Type] = append(observed[c.Type], c.ObservedGeneration)
	}
	for i := range updated.Conditions {
		c := &updated.Conditions[i]
		if old := observed[c.Type]; len(old) > 0 { // a condition type can occur more than once
			builder.SetDefault(&c.ObservedGeneration, old[0])
			observed[c.Type] = old[1:]
		}
	}
}

// setDefaultFrom sets the target to old if the target is nil.
func setDefaultFrom[T any](target **T, old *T) {
	if *target == nil {
		*target = old
	}
}

// validatePodStatusUpdate validates the status that a node or a controller reports for a pod.
func validatePodStatusUpdate(obj, old *corev1.Pod) field.ErrorList {
	fldPath, updated, previous := field.NewPath("status"), &obj.Status, &old.Status
	errs := validatePodConditions(updated.Conditions, fldPath.Child("conditions"))
	errs = append(errs, validateNomination(obj, old, fldPath.Child("nominatedNodeName"))...)
	if updated.ObservedGeneration < 0 {
		errs = append(errs, field.Invalid(fldPath.Child("observedGeneration"), updated.ObservedGeneration, notNegative))
	}
	if previous.QOSClass != "" && updated.QOSClass != previous.QOSClass {
		errs = append(errs, field.Invalid(fldPath.Child("qosClass"), updated.QOSClass, "field is immutable"))
	}
	if api.IsTerminalPhase(previous.Phase) && !api.IsTerminalPhase(updated.Phase) {
		errs = append(errs, field.Invalid(fldPath.Child("phase"), updated.Phase,
			fmt.Sprintf("a pod that has %s cannot run again", previous.Phase)))
	}
	errs = append(errs, validateTransitions(old, updated, fldPath)...)
	errs = append(errs, validateClaimStatuses(obj, fldPath.Child("resourceClaimStatuses"))...)
	errs = append(errs, validateExtendedClaim(updated.ExtendedResourceClaimStatus, &obj.Spec,
		fldPath.Child("extendedResourceClaimStatus"))...)
	errs = append(errs, validateStatusAddresses(updated, previous, fldPath)...)
	for _, l := range statusLists(updated) {
		errs = append(errs, validateContainerUsers(l.list, obj.Spec.OS, fldPath.Child(l.name))...)
	}
	errs = append(errs, validateAllocated(updated.ContainerStatuses, obj.Spec.Containers, updated,
		fldPath.Child("containerStatuses"))...)
	errs = append(errs, validateAllocated(updated.InitContainerStatuses, obj.Spec.InitContainers, updated,
		fldPath.Child("initContainerStatuses"))...)
	for i, s := range updated.EphemeralContainerStatuses {
		if len(s.AllocatedResourcesStatus) > 0 {
			errs = append(errs,
				field.Forbidden(fldPath.Child("ephemeralContainerStatuses").Index(i).Child("allocatedResourcesStatus"),
					"must not be specified in container status"))
		}
	}
	return errs
}

// namedStatuses is a list of container statuses, with the name of the status field that contains
// it.
type namedStatuses struct {
	name string
	list []corev1.ContainerStatus
}

func statusLists(s *corev1.PodStatus) []namedStatuses {
	return []namedStatuses{{"containerStatuses", s.ContainerStatuses},
		{"initContainerStatuses", s.InitContainerStatuses},
		{"ephemeralContainerStatuses", s.EphemeralContainerStatuses}}
}

// validatePodConditions validates the types of the conditions. As in Kubernetes, the path of an
// error ends in "Type", not "type".
func validatePodConditions(conditions []corev1.PodCondition, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, c := range conditions {
		if c.ObservedGeneration < 0 {
			errs = append(errs, field.Invalid(fldPath.Index(i).Child("observedGeneration"),
				c.ObservedGeneration, notNegative))
		}
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Index(i).Child("Type"), string(c.Type),
			utilvalidation.IsQualifiedName(string(c.Type)))...)
	}
	return errs
}

// validateNomination validates a change of nominatedNodeName. A pod that is bound to a node cannot
// be nominated to run on a node.
func validateNomination(obj, old *corev1.Pod, fldPath *field.Path) field.ErrorList {
	name := obj.Status.NominatedNodeName
	if name == "" || name == old.Status.NominatedNodeName {
		return nil
	}
	errs := fieldrules.InvalidErrors(fldPath, name, validation.NameIsDNSSubdomain(name, false))
	if old.Spec.NodeName != "" {
		errs = append(errs, field.Forbidden(fldPath, "may not be set on pods that are already bound to a node"))
	}
	return errs
}

// isFinallyTerminated reports whether a container that exited with the given code may not restart.
// list is the field of the pod's status that contains the container's status.
func isFinallyTerminated(spec *corev1.PodSpec, list, container string, exitCode int32) bool {
	var containers []corev1.Container
	switch list {
	case "containerStatuses":
		containers = spec.Containers
	case "initContainerStatuses":
		containers = spec.InitContainers
	}
	i := slices.IndexFunc(containers, func(c corev1.Container) bool { return c.Name == container })
	return i < 0 || !isRestarted(&containers[i], spec.RestartPolicy, exitCode)
}

// isRestarted reports whether a container restarts after the given exit code. It restarts if one of
// its restart rules matches the exit code. Otherwise, the container's restart policy decides, or
// podPolicy if the container has no policy.
func isRestarted(container *corev1.Container, podPolicy corev1.RestartPolicy, exitCode int32) bool {
	policy := podPolicy
	if container.RestartPolicy != nil {
		for _, r := range container.RestartPolicyRules {
			if e := r.ExitCodes; e != nil && slices.Contains(e.Values,
				exitCode) == (e.Operator == corev1.ContainerRestartRuleOnExitCodesOpIn) {
				return true
			}
		}
		policy = corev1.RestartPolicy(*container.RestartPolicy)
	}
	switch policy {
	case corev1.RestartPolicyNever:
		return false
	case corev1.RestartPolicyOnFailure:
		return exitCode != 0
	}
	return true
}

// hasRestartAllRule reports whether a restart rule of a container restarts all containers of the
// pod, so that every terminated container may run again.
func hasRestartAllRule(spec *corev1.PodSpec) bool {
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		for _, r := range c.RestartPolicyRules {
			if r.Action == corev1.ContainerRestartRuleActionRestartAllContainers {
				return true
			}
		}
	}
	return false
}

// validateTransitions returns an error for each terminated container that may not restart and that
// the updated status reports as not terminated. As in Kubernetes, the path contains the index of
// the old status.
func validateTransitions(old *corev1.Pod, updated *corev1.PodStatus, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	lists := statusLists(updated)
	for n, previous := range statusLists(&old.Status) {
		if previous.name != "ephemeralContainerStatuses" && hasRestartAllRule(&old.Spec) {
			continue
		}
		for i, s := range previous.list {
			if s.State.Terminated == nil {
				continue
			}
			j := slices.IndexFunc(lists[n].list, func(l corev1.ContainerStatus) bool {
				return l.Name == s.Name && l.State.Terminated == nil
			})
			if j >= 0 && isFinallyTerminated(&old.Spec, previous.name, s.Name, s.State.Terminated.ExitCode) {
				errs = append(errs, field.Forbidden(fldPath.Child(previous.name).Index(i).Child("state"),
					"may not be transitioned to non-terminated state"))
			}
		}
	}
	return errs
}

// KeepTerminated returns the reported status, in which terminated containers that may not restart
// keep their stored status, as validation requires. Values that are shared with the arguments are
// not modified.
func KeepTerminated(spec *corev1.PodSpec, stored, reported *corev1.PodStatus) *corev1.PodStatus {
	out := *reported
	targets := map[string]*[]corev1.ContainerStatus{"containerStatuses": &out.ContainerStatuses,
		"initContainerStatuses":      &out.InitContainerStatuses,
		"ephemeralContainerStatuses": &out.EphemeralContainerStatuses}
	for _, previous := range statusLists(stored) {
		if previous.name != "ephemeralContainerStatuses" && hasRestartAllRule(spec) {
			continue
		}
		target, cloned := targets[previous.name], false
		for i, updated := range *target {
			j := slices.IndexFunc(previous.list, func(l corev1.ContainerStatus) bool { return l.Name == updated.Name })
			if updated.State.Terminated != nil || j < 0 || previous.list[j].State.Terminated == nil ||
				!isFinallyTerminated(spec, previous.name, updated.Name, previous.list[j].State.Terminated.ExitCode) {
				continue
			}
			if !cloned {
				*target, cloned = slices.Clone(*target), true
			}
			(*target)[i] = previous.list[j]
		}
	}
	return &out
}

// validateStatusAddresses validates the IP addresses of the pod and of its node. Addresses in the
// stored status are always valid.
func validateStatusAddresses(updated, old *corev1.PodStatus, fldPath *field.Path) field.ErrorList {
	texts := func(s *corev1.PodStatus) (pod, host []string) {
		for _, ip := range s.PodIPs {
			pod = append(pod, ip.IP)
		}
		for _, ip := range s.HostIPs {
			host = append(host, ip.IP)
		}
		return pod, host
	}
	podIPs, hostIPs := texts(updated)
	oldPodIPs, oldHostIPs := texts(old)
	pods, hosts := fldPath.Child("podIPs"), fldPath.Child("hostIPs")
	errs := validateAddressPair(podIPs, oldPodIPs, updated.PodIPs, pods)
	if (updated.PodIP == "") != (len(podIPs) == 0) {
		errs = append(errs, field.Invalid(pods, updated.PodIPs,
			"podIP and podIPs must either both be set or both be unset"))
	} else if len(podIPs) > 0 && podIPs[0] != updated.PodIP {
		errs = append(errs, field.Invalid(pods.Index(0).Child("ip"), podIPs[0], "must be equal to `podIP`"))
	}
	if len(hostIPs) > 0 && hostIPs[0] != updated.HostIP {
		errs = append(errs, field.Invalid(hosts.Index(0).Child("ip"), hostIPs[0], "must be equal to `hostIP`"))
	}
	return append(errs, validateAddressPair(hostIPs, oldHostIPs, updated.HostIPs, hosts)...)
}

// validateAddressPair validates a list of addresses. It may have at most one address of each IP
// family. stored are the stored addresses, which are always valid. errorValue is the value that
// errors contain.
func validateAddressPair(ips, stored []string, errorValue any, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	families := map[bool]bool{}
	for i, ip := range ips {
		errs = append(errs, utilvalidation.IsValidIPForLegacyField(fldPath.Index(i), ip, true, stored)...)
		a, _ := netip.ParseAddr(ip)
		families[a.Is6()] = true
	}
	if len(ips) > 2 || len(ips) == 2 && len(families) < 2 {
		errs = append(errs, field.Invalid(fldPath, errorValue, onePerFamily))
	}
	return errs
}

// validateContainerUsers validates the users of containers that a container runtime reports. Only
// Linux containers may have them.
func validateContainerUsers(list []corev1.ContainerStatus, os *corev1.PodOS, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, s := range list {
		if s.User == nil || s.User.Linux == nil {
			continue
		}
		here, u := fldPath.Index(i).Child("user", "linux"), s.User.Linux
		if os != nil && os.Name == corev1.Windows {
			errs = append(errs, field.Forbidden(here, notOfWindows))
			continue
		}
		if u.UID < 0 || u.UID > math.MaxUint32 {
			errs = append(errs, field.Invalid(here.Child("uid"), u.UID,
				fmt.Sprintf("must be between 0 and %d, inclusive", int64(math.MaxUint32))))
		}
		errs = append(errs, fieldrules.InvalidErrors(here.Child("gid"), u.GID, utilvalidation.IsValidGroupID(u.GID))...)
		for j, g := range u.SupplementalGroups {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("supplementalGroups").Index(j), g,
				utilvalidation.IsValidGroupID(g))...)
		}
	}
	return errs
}

// validateAllocated validates the health of allocated devices in container statuses. Each device
// must belong to a resource that its container requests or claims.
func validateAllocated(list []corev1.ContainerStatus, containers []corev1.Container, s *corev1.PodStatus,
	fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, status := range list {
		n := slices.IndexFunc(containers, func(c corev1.Container) bool { return c.Name == status.Name })
		for j, r := range status.AllocatedResourcesStatus {
			here := fldPath.Index(i).Child("allocatedResourcesStatus").Index(j)
			if n >= 0 {
				errs = append(errs, validateAllocatedName(r.Name, &containers[n], s, here.Child("name"))...)
			}
			errs = append(errs, validateHealths(r.Resources, here.Child("resources"))...)
		}
	}
	return errs
}

func validateAllocatedName(name corev1.ResourceName, c *corev1.Container, s *corev1.PodStatus,
	fldPath *field.Path) field.ErrorList {
	claimed, isClaim := strings.CutPrefix(string(name), claimResource)
	if !isClaim {
		if _, ok := c.Resources.Requests[name]; !ok {
			return field.ErrorList{field.Invalid(fldPath, name, NotInRequests)}
		}
		return nil
	}
	claim, request, hasRequest := strings.Cut(claimed, "/")
	for _, use := range c.Resources.Claims {
		if use.Name == claim && use.Request == request && (use.Request != "") == hasRequest {
			return nil
		}
	}
	if e := s.ExtendedResourceClaimStatus; e != nil && request != "" && e.ResourceClaimName == claim {
		for _, m := range e.RequestMappings {
			if q := c.Resources.Requests[corev1.ResourceName(m.ResourceName)]; m.ContainerName == c.Name &&
				m.RequestName == request && !q.IsZero() {
				return nil
			}
		}
	}
	return field.ErrorList{field.Invalid(fldPath, name, NotInClaimUses)}
}

func validateHealths(list []corev1.ResourceHealth, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[corev1.ResourceID]bool{}
	for i, r := range list {
		here := fldPath.Index(i)
		errs = append(errs, fieldrules.ValidateSupported(r.Health, here.Child("health"),
			corev1.ResourceHealthStatusHealthy,
			corev1.ResourceHealthStatusUnhealthy, corev1.ResourceHealthStatusUnknown)...)
		if m := r.Message; m != nil && *m == "" {
			errs = append(errs, field.Required(here.Child("message"), "must be non-empty if specified"))
		} else if m != nil && len(*m) > corev1.ResourceHealthMessageMaxLength {
			errs = append(errs, field.TooLong(here.Child("message"), "", corev1.ResourceHealthMessageMaxLength))
		}
		if seen[r.ResourceID] {
			errs = append(errs, field.Duplicate(here.Child("resourceID"), r.ResourceID))
		}
		seen[r.ResourceID] = true
	}
	return errs
}

// validateExtendedClaim validates the status of the ResourceClaim that provides extended resources
// to the containers of a pod.
func validateExtendedClaim(e *corev1.PodExtendedResourceClaimStatus, s *corev1.PodSpec,
	fldPath *field.Path) field.ErrorList {
	if e == nil {
		return nil
	}
	var errs field.ErrorList
	mappings := fldPath.Child("requestMappings")
	if len(e.RequestMappings) == 0 {
		errs = append(errs, field.Required(mappings, "at least one request mapping is required"))
	}
	containers := map[string]*corev1.Container{}
	for _, list := range [][]corev1.Container{s.InitContainers, s.Containers} {
		for i := range list {
			containers[list[i].Name] = &list[i]
		}
	}
	seen := map[corev1.ContainerExtendedResourceRequest]bool{}
	for i, m := range e.RequestMappings {
		here := mappings.Index(i)
		if c := containers[m.ContainerName]; c == nil {
			errs = append(errs, field.Invalid(here.Child("containerName"), m.ContainerName,
				"must match the name of an entry in spec.initContainers.name or spec.containers.name"))
		} else if _, ok := c.Resources.Requests[corev1.ResourceName(m.ResourceName)]; !ok {
			errs = append(errs, field.Invalid(here.Child("resourceName"), m.ResourceName,
				"must match the extended resource name of an "+
					"entry in spec.initContainers.resources.requests or spec.containers.resources.requests"))
		}
		errs = append(errs, fieldrules.ValidateDNSLabel(m.RequestName, fldPath.Child("requestName"))...)
		if seen[m] {
			errs = append(errs, field.Duplicate(here.Child("containerName"), m.ContainerName),
				field.Duplicate(here.Child("resourceName"), m.ResourceName),
				field.Duplicate(here.Child("requestName"), m.RequestName))
		}
		seen[m] = true
	}
	return append(errs, fieldrules.ValidateRequiredSubdomain(e.ResourceClaimName,
		fldPath.Child("resourceClaimName"))...)
}
