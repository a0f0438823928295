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

// prepareStatus copies parts of the old status that clients of older versions omit, and makes podIP
// and podIPs agree. If both are set and differ, podIP has precedence.
func prepareStatus(now, was *corev1.PodStatus) {
	// The class depends on the spec, which cannot change here.
	builder.SetDefault(&now.QOSClass, was.QOSClass)
	switch {
	case now.PodIP != "" && (len(now.PodIPs) == 0 || now.PodIPs[0].IP != now.PodIP):
		now.PodIPs = []corev1.PodIP{{IP: now.PodIP}}
	case now.PodIP == "" && len(now.PodIPs) > 0:
		now.PodIP = now.PodIPs[0].IP
	}
	if now.ResourceClaimStatuses == nil {
		now.ResourceClaimStatuses = was.ResourceClaimStatuses
	}
	setDefaultFrom(&now.ExtendedResourceClaimStatus, was.ExtendedResourceClaimStatus)
	if now.NodeAllocatableResourceClaimStatuses == nil {
		now.NodeAllocatableResourceClaimStatuses = was.NodeAllocatableResourceClaimStatuses
	}
	builder.SetDefault(&now.ObservedGeneration, was.ObservedGeneration)
	observed := map[corev1.PodConditionType][]int64{}
	for _, c := range was.Conditions {
		observed[c.Type] = append(observed[c.Type], c.ObservedGeneration)
	}
	for i := range now.Conditions {
		c := &now.Conditions[i]
		if old := observed[c.Type]; len(old) > 0 { // a type can occur more than once
			builder.SetDefault(&c.ObservedGeneration, old[0])
			observed[c.Type] = old[1:]
		}
	}
}

// setDefaultFrom sets *p to old if it is nil.
func setDefaultFrom[T any](p **T, old *T) {
	if *p == nil {
		*p = old
	}
}

// validatePodStatusUpdate validates the status that a node or a controller reports for a pod.
func validatePodStatusUpdate(obj, old *corev1.Pod) field.ErrorList {
	at, now, was := field.NewPath("status"), &obj.Status, &old.Status
	errs := validatePodConditions(now.Conditions, at.Child("conditions"))
	errs = append(errs, validateNomination(obj, old, at.Child("nominatedNodeName"))...)
	if now.ObservedGeneration < 0 {
		errs = append(errs, field.Invalid(at.Child("observedGeneration"), now.ObservedGeneration, notNegative))
	}
	if was.QOSClass != "" && now.QOSClass != was.QOSClass {
		errs = append(errs, field.Invalid(at.Child("qosClass"), now.QOSClass, "field is immutable"))
	}
	if terminalPhase(was.Phase) && !terminalPhase(now.Phase) {
		errs = append(errs, field.Invalid(at.Child("phase"), now.Phase, fmt.Sprintf("a pod that has %s cannot run again", was.Phase)))
	}
	errs = append(errs, validateTransitions(old, now, at)...)
	errs = append(errs, validateClaimStatuses(obj, at.Child("resourceClaimStatuses"))...)
	errs = append(errs, validateExtendedClaim(now.ExtendedResourceClaimStatus, &obj.Spec, at.Child("extendedResourceClaimStatus"))...)
	errs = append(errs, validateStatusAddresses(now, was, at)...)
	for _, l := range statusLists(now) {
		errs = append(errs, validateContainerUsers(l.list, obj.Spec.OS, at.Child(l.name))...)
	}
	errs = append(errs, validateAllocated(now.ContainerStatuses, obj.Spec.Containers, now, at.Child("containerStatuses"))...)
	errs = append(errs, validateAllocated(now.InitContainerStatuses, obj.Spec.InitContainers, now, at.Child("initContainerStatuses"))...)
	for i, s := range now.EphemeralContainerStatuses {
		if len(s.AllocatedResourcesStatus) > 0 {
			errs = append(errs, field.Forbidden(at.Child("ephemeralContainerStatuses").Index(i).Child("allocatedResourcesStatus"),
				"must not be specified in container status"))
		}
	}
	return errs
}

func terminalPhase(p corev1.PodPhase) bool { return p == corev1.PodSucceeded || p == corev1.PodFailed }

// namedStatuses is a list of container statuses with the name of its field.
type namedStatuses struct {
	name string
	list []corev1.ContainerStatus
}

func statusLists(s *corev1.PodStatus) []namedStatuses {
	return []namedStatuses{{"containerStatuses", s.ContainerStatuses}, {"initContainerStatuses", s.InitContainerStatuses},
		{"ephemeralContainerStatuses", s.EphemeralContainerStatuses}}
}

// validatePodConditions validates the types of the conditions. As in Kubernetes, the path of the
// type has a capital.
func validatePodConditions(conditions []corev1.PodCondition, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, c := range conditions {
		if c.ObservedGeneration < 0 {
			errs = append(errs, field.Invalid(at.Index(i).Child("observedGeneration"), c.ObservedGeneration, notNegative))
		}
		errs = append(errs, fieldrules.Invalid(at.Index(i).Child("Type"), string(c.Type),
			utilvalidation.IsQualifiedName(string(c.Type)))...)
	}
	return errs
}

// validateNomination validates a change of nominatedNodeName. A pod that is bound to a node cannot
// be nominated.
func validateNomination(obj, old *corev1.Pod, at *field.Path) field.ErrorList {
	name := obj.Status.NominatedNodeName
	if name == "" || name == old.Status.NominatedNodeName {
		return nil
	}
	errs := fieldrules.Invalid(at, name, validation.NameIsDNSSubdomain(name, false))
	if old.Spec.NodeName != "" {
		errs = append(errs, field.Forbidden(at, "may not be set on pods that are already bound to a node"))
	}
	return errs
}

// staysTerminated reports whether a container of the named list that exited with the code may not
// restart.
func staysTerminated(s *corev1.PodSpec, list, container string, exitCode int32) bool {
	var containers []corev1.Container
	switch list {
	case "containerStatuses":
		containers = s.Containers
	case "initContainerStatuses":
		containers = s.InitContainers
	}
	i := slices.IndexFunc(containers, func(c corev1.Container) bool { return c.Name == container })
	return i < 0 || !restarts(&containers[i], s.RestartPolicy, exitCode)
}

// restarts reports whether a container restarts after the exit code. The first rule for the exit
// code decides, then the container's policy, then the pod's.
func restarts(c *corev1.Container, ofPod corev1.RestartPolicy, exitCode int32) bool {
	policy := ofPod
	if c.RestartPolicy != nil {
		for _, r := range c.RestartPolicyRules {
			if e := r.ExitCodes; e != nil && slices.Contains(e.Values,
				exitCode) == (e.Operator == corev1.ContainerRestartRuleOnExitCodesOpIn) {
				return true
			}
		}
		policy = corev1.RestartPolicy(*c.RestartPolicy)
	}
	switch policy {
	case corev1.RestartPolicyNever:
		return false
	case corev1.RestartPolicyOnFailure:
		return exitCode != 0
	}
	return true
}

// restartsAll reports whether a rule of the pod restarts all its containers, so that every
// terminated container may run again.
func restartsAll(s *corev1.PodSpec) bool {
	for _, c := range slices.Concat(s.InitContainers, s.Containers) {
		for _, r := range c.RestartPolicyRules {
			if r.Action == corev1.ContainerRestartRuleActionRestartAllContainers {
				return true
			}
		}
	}
	return false
}

// validateTransitions returns errors for statuses of terminated containers that may not restart but
// are reported as not terminated. As in Kubernetes, the path has the index of the old status.
func validateTransitions(old *corev1.Pod, now *corev1.PodStatus, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	lists := statusLists(now)
	for n, was := range statusLists(&old.Status) {
		if was.name != "ephemeralContainerStatuses" && restartsAll(&old.Spec) {
			continue
		}
		for i, s := range was.list {
			if s.State.Terminated == nil {
				continue
			}
			j := slices.IndexFunc(lists[n].list, func(l corev1.ContainerStatus) bool {
				return l.Name == s.Name && l.State.Terminated == nil
			})
			if j >= 0 && staysTerminated(&old.Spec, was.name, s.Name, s.State.Terminated.ExitCode) {
				errs = append(errs, field.Forbidden(at.Child(was.name).Index(i).Child("state"), "may not be transitioned to non-terminated state"))
			}
		}
	}
	return errs
}

// KeepTerminated returns the reported status, in which terminated containers that may not restart
// keep their stored status, as validation requires. Values shared with the arguments are not
// modified.
func KeepTerminated(s *corev1.PodSpec, stored, reported *corev1.PodStatus) *corev1.PodStatus {
	out := *reported
	targets := map[string]*[]corev1.ContainerStatus{"containerStatuses": &out.ContainerStatuses,
		"initContainerStatuses": &out.InitContainerStatuses, "ephemeralContainerStatuses": &out.EphemeralContainerStatuses}
	for _, was := range statusLists(stored) {
		if was.name != "ephemeralContainerStatuses" && restartsAll(s) {
			continue
		}
		target, cloned := targets[was.name], false
		for i, now := range *target {
			j := slices.IndexFunc(was.list, func(l corev1.ContainerStatus) bool { return l.Name == now.Name })
			if now.State.Terminated != nil || j < 0 || was.list[j].State.Terminated == nil ||
				!staysTerminated(s, was.name, now.Name, was.list[j].State.Terminated.ExitCode) {
				continue
			}
			if !cloned {
				*target, cloned = slices.Clone(*target), true
			}
			(*target)[i] = was.list[j]
		}
	}
	return &out
}

// validateStatusAddresses validates the addresses of the pod and of its node. Stored addresses stay
// valid.
func validateStatusAddresses(now, was *corev1.PodStatus, at *field.Path) field.ErrorList {
	texts := func(s *corev1.PodStatus) (pod, host []string) {
		for _, ip := range s.PodIPs {
			pod = append(pod, ip.IP)
		}
		for _, ip := range s.HostIPs {
			host = append(host, ip.IP)
		}
		return pod, host
	}
	podIPs, hostIPs := texts(now)
	oldPodIPs, oldHostIPs := texts(was)
	pods, hosts := at.Child("podIPs"), at.Child("hostIPs")
	errs := validateAddressPair(podIPs, oldPodIPs, now.PodIPs, pods)
	if (now.PodIP == "") != (len(podIPs) == 0) {
		errs = append(errs, field.Invalid(pods, now.PodIPs, "podIP and podIPs must either both be set or both be unset"))
	} else if len(podIPs) > 0 && podIPs[0] != now.PodIP {
		errs = append(errs, field.Invalid(pods.Index(0).Child("ip"), podIPs[0], "must be equal to `podIP`"))
	}
	if len(hostIPs) > 0 && hostIPs[0] != now.HostIP {
		errs = append(errs, field.Invalid(hosts.Index(0).Child("ip"), hostIPs[0], "must be equal to `hostIP`"))
	}
	return append(errs, validateAddressPair(hostIPs, oldHostIPs, now.HostIPs, hosts)...)
}

// validateAddressPair validates addresses, of which there may be at most one of each family. old
// are the stored addresses; shown is the list in errors.
func validateAddressPair(ips, old []string, shown any, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	families := map[bool]bool{}
	for i, ip := range ips {
		errs = append(errs, utilvalidation.IsValidIPForLegacyField(at.Index(i), ip, true, old)...)
		a, _ := netip.ParseAddr(ip)
		families[a.Is6()] = true
	}
	if len(ips) > 2 || len(ips) == 2 && len(families) < 2 {
		errs = append(errs, field.Invalid(at, shown, onePerFamily))
	}
	return errs
}

// validateContainerUsers validates the user of Linux containers as reported by a runtime.
func validateContainerUsers(list []corev1.ContainerStatus, os *corev1.PodOS, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, s := range list {
		if s.User == nil || s.User.Linux == nil {
			continue
		}
		here, u := at.Index(i).Child("user", "linux"), s.User.Linux
		if os != nil && os.Name == corev1.Windows {
			errs = append(errs, field.Forbidden(here, notOfWindows))
			continue
		}
		if u.UID < 0 || u.UID > math.MaxUint32 {
			errs = append(errs, field.Invalid(here.Child("uid"), u.UID, fmt.Sprintf("must be between 0 and %d, inclusive", int64(math.MaxUint32))))
		}
		errs = append(errs, fieldrules.Invalid(here.Child("gid"), u.GID, utilvalidation.IsValidGroupID(u.GID))...)
		for j, g := range u.SupplementalGroups {
			errs = append(errs, fieldrules.Invalid(here.Child("supplementalGroups").Index(j), g,
				utilvalidation.IsValidGroupID(g))...)
		}
	}
	return errs
}

// validateAllocated validates the health of allocated devices. Each must belong to a resource that
// its container requests or claims.
func validateAllocated(list []corev1.ContainerStatus, containers []corev1.Container, s *corev1.PodStatus,
	at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, status := range list {
		n := slices.IndexFunc(containers, func(c corev1.Container) bool { return c.Name == status.Name })
		for j, r := range status.AllocatedResourcesStatus {
			here := at.Index(i).Child("allocatedResourcesStatus").Index(j)
			if n >= 0 {
				errs = append(errs, validateAllocatedName(r.Name, &containers[n], s, here.Child("name"))...)
			}
			errs = append(errs, validateHealths(r.Resources, here.Child("resources"))...)
		}
	}
	return errs
}

func validateAllocatedName(name corev1.ResourceName, c *corev1.Container, s *corev1.PodStatus,
	at *field.Path) field.ErrorList {
	claimed, isClaim := strings.CutPrefix(string(name), claimResource)
	if !isClaim {
		if _, ok := c.Resources.Requests[name]; !ok {
			return field.ErrorList{field.Invalid(at, name, NotInRequests)}
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
			if q := c.Resources.Requests[corev1.ResourceName(m.ResourceName)]; m.ContainerName == c.Name && m.RequestName == request && !q.IsZero() {
				return nil
			}
		}
	}
	return field.ErrorList{field.Invalid(at, name, NotInClaimUses)}
}

func validateHealths(list []corev1.ResourceHealth, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[corev1.ResourceID]bool{}
	for i, r := range list {
		here := at.Index(i)
		errs = append(errs, fieldrules.Supported(r.Health, here.Child("health"), corev1.ResourceHealthStatusHealthy,
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

// validateExtendedClaim validates the status of the claim that provides extended resources to
// containers.
func validateExtendedClaim(e *corev1.PodExtendedResourceClaimStatus, s *corev1.PodSpec,
	at *field.Path) field.ErrorList {
	if e == nil {
		return nil
	}
	var errs field.ErrorList
	mappings := at.Child("requestMappings")
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
			errs = append(errs, field.Invalid(here.Child("resourceName"), m.ResourceName, "must match the extended resource name of an "+
				"entry in spec.initContainers.resources.requests or spec.containers.resources.requests"))
		}
		errs = append(errs, fieldrules.DNSLabel(m.RequestName, at.Child("requestName"))...)
		if seen[m] {
			errs = append(errs, field.Duplicate(here.Child("containerName"), m.ContainerName),
				field.Duplicate(here.Child("resourceName"), m.ResourceName), field.Duplicate(here.Child("requestName"), m.RequestName))
		}
		seen[m] = true
	}
	return append(errs, fieldrules.RequiredSubdomain(e.ResourceClaimName, at.Child("resourceClaimName"))...)
}
