package criconfig

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/agent"
)

// The paths of /proc and /sys that are hidden from, or read-only in, an unprivileged container.
var (
	maskedPaths = []string{"/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys",
		"/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi",
		"/sys/firmware", "/sys/devices/virtual/powercap"}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

func namespaceOptions(pod *v1.Pod) *cri.NamespaceOption {
	o := &cri.NamespaceOption{Network: cri.NamespaceMode_POD, Pid: cri.NamespaceMode_CONTAINER,
		Ipc: cri.NamespaceMode_POD}
	if pod.Spec.HostNetwork {
		o.Network = cri.NamespaceMode_NODE
	}
	if pod.Spec.HostIPC {
		o.Ipc = cri.NamespaceMode_NODE
	}
	switch {
	case pod.Spec.HostPID:
		o.Pid = cri.NamespaceMode_NODE
	case pod.Spec.ShareProcessNamespace != nil && *pod.Spec.ShareProcessNamespace:
		o.Pid = cri.NamespaceMode_POD
	}
	return o
}

// JoinProcesses makes a container share the process namespace of the container with the ID target.
// In a pod whose containers share one process namespace, or the node's, it changes nothing.
func JoinProcesses(config *cri.ContainerConfig, target string) {
	if o := config.GetLinux().GetSecurityContext().GetNamespaceOptions(); o.GetPid() == cri.NamespaceMode_CONTAINER {
		o.Pid, o.TargetId = cri.NamespaceMode_TARGET, target
	}
}

// securityContext merges the pod's and the container's security context. A field of the container
// takes precedence.
func securityContext(pod *v1.Pod, spec *v1.Container, seccompDefault bool) *cri.LinuxContainerSecurityContext {
	p, c := pod.Spec.SecurityContext, spec.SecurityContext
	if p == nil {
		p = &v1.PodSecurityContext{}
	}
	if c == nil {
		c = &v1.SecurityContext{}
	}
	out := &cri.LinuxContainerSecurityContext{NamespaceOptions: namespaceOptions(pod),
		SupplementalGroups: supplementalGroups(p), Capabilities: &cri.Capability{}}
	out.RunAsUser = firstInt(c.RunAsUser, p.RunAsUser)
	out.RunAsGroup = firstInt(c.RunAsGroup, p.RunAsGroup)
	if p.SupplementalGroupsPolicy != nil && *p.SupplementalGroupsPolicy == v1.SupplementalGroupsPolicyStrict {
		out.SupplementalGroupsPolicy = cri.SupplementalGroupsPolicy_Strict
	}
	out.Privileged = c.Privileged != nil && *c.Privileged
	out.ReadonlyRootfs = c.ReadOnlyRootFilesystem != nil && *c.ReadOnlyRootFilesystem
	out.NoNewPrivs = c.AllowPrivilegeEscalation != nil && !*c.AllowPrivilegeEscalation && !out.Privileged
	if c.Capabilities != nil {
		for _, n := range c.Capabilities.Add {
			out.Capabilities.AddCapabilities = append(out.Capabilities.AddCapabilities, string(n))
		}
		for _, n := range c.Capabilities.Drop {
			out.Capabilities.DropCapabilities = append(out.Capabilities.DropCapabilities, string(n))
		}
	}
	if !out.Privileged && (c.ProcMount == nil || *c.ProcMount == v1.DefaultProcMount) {
		out.MaskedPaths, out.ReadonlyPaths = slices.Clone(maskedPaths), slices.Clone(readonlyPaths)
	}
	out.Seccomp = seccompProfile(p.SeccompProfile, c.SeccompProfile, out.Privileged, seccompDefault)
	out.Apparmor = appArmorProfile(p.AppArmorProfile, c.AppArmorProfile)
	if o := firstNonNil(c.SELinuxOptions, p.SELinuxOptions); o != nil {
		out.SelinuxOptions = &cri.SELinuxOption{User: o.User, Role: o.Role, Type: o.Type, Level: o.Level}
	}
	return out
}

func supplementalGroups(context *v1.PodSecurityContext) []int64 {
	groups := slices.Clone(context.SupplementalGroups)
	if context.FSGroup != nil && !slices.Contains(groups, *context.FSGroup) {
		groups = append(groups, *context.FSGroup)
	}
	return groups
}

// addVolumeGroups adds the groups of the pod's volumes to the supplemental groups of a container,
// in ascending order.
func addVolumeGroups(out *cri.LinuxContainerSecurityContext,
	mounts map[string]agent.Mount) *cri.LinuxContainerSecurityContext {
	var groups []int64
	for _, m := range mounts {
		if m.Group != nil && !slices.Contains(out.SupplementalGroups, *m.Group) {
			groups = append(groups, *m.Group)
		}
	}
	slices.Sort(groups)
	out.SupplementalGroups = append(out.SupplementalGroups, slices.Compact(groups)...)
	return out
}

func firstNonNil[T any](a, b *T) *T {
	if a != nil {
		return a
	}
	return b
}

func firstInt(a, b *int64) *cri.Int64Value {
	if v := firstNonNil(a, b); v != nil {
		return &cri.Int64Value{Value: *v}
	}
	return nil
}

func seccompProfile(pod, container *v1.SeccompProfile, privileged, byDefault bool) *cri.SecurityProfile {
	p := firstNonNil(container, pod)
	switch {
	case privileged || p == nil && !byDefault || p != nil && p.Type == v1.SeccompProfileTypeUnconfined:
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}
	case p != nil && p.Type == v1.SeccompProfileTypeLocalhost:
		ref := ptr.Deref(p.LocalhostProfile, "")
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: ref}
	default:
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
	}
}

func appArmorProfile(pod, container *v1.AppArmorProfile) *cri.SecurityProfile {
	p := firstNonNil(container, pod)
	if p == nil {
		return nil
	}
	switch p.Type {
	case v1.AppArmorProfileTypeUnconfined:
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Unconfined}
	case v1.AppArmorProfileTypeLocalhost:
		ref := ptr.Deref(p.LocalhostProfile, "")
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_Localhost, LocalhostRef: ref}
	default:
		return &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
	}
}

// verifyNonRoot returns an error if a container with runAsNonRoot would or might run as root. user
// is the image's user.
func verifyNonRoot(pod *v1.Pod, spec *v1.Container, user string) error {
	p, c := pod.Spec.SecurityContext, spec.SecurityContext
	if p == nil {
		p = &v1.PodSecurityContext{}
	}
	if c == nil {
		c = &v1.SecurityContext{}
	}
	nonRoot := firstNonNil(c.RunAsNonRoot, p.RunAsNonRoot)
	if nonRoot == nil || !*nonRoot {
		return nil
	}
	where := fmt.Sprintf("(pod: %q, container: %s)", fmt.Sprintf("%s_%s(%s)", pod.Name, pod.Namespace, pod.UID),
		spec.Name)
	if uid := firstNonNil(c.RunAsUser, p.RunAsUser); uid != nil {
		if *uid == 0 {
			return fmt.Errorf("container's runAsUser breaks non-root policy %s", where)
		}
		return nil
	}
	name, _, _ := strings.Cut(user, ":")
	if name == "" {
		return fmt.Errorf("container has runAsNonRoot and image will run as root %s", where)
	}
	uid, err := strconv.ParseInt(name, 10, 64)
	if err != nil {
		return fmt.Errorf(
			"container has runAsNonRoot and image has non-numeric user (%s), cannot verify user is non-root %s",
			name, where)
	}
	if uid == 0 {
		return fmt.Errorf("container has runAsNonRoot and image will run as root %s", where)
	}
	return nil
}
