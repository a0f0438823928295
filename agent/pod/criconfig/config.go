package criconfig

import (
	"context"
	"fmt"
	"maps"
	"path"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
)

func podLabels(pod *v1.Pod) map[string]string {
	l := maps.Clone(pod.Labels)
	if l == nil {
		l = map[string]string{}
	}
	l[agent.LabelPodName], l[agent.LabelPodNamespace], l[agent.LabelPodUID] = pod.Name, pod.Namespace, string(pod.UID)
	return l
}

// SandboxConfig returns the CRI configuration of the pod's sandbox.
func (b *Builder) SandboxConfig(pod *v1.Pod, attempt uint32) (*cri.PodSandboxConfig, error) {
	host, err := containerHostname(pod, b.cfg.Objects.Cluster().Domain)
	if err != nil {
		return nil, err
	}
	dns, err := b.dnsConfig(pod)
	if err != nil {
		return nil, err
	}
	ann := maps.Clone(pod.Annotations)
	if ann == nil {
		ann = map[string]string{}
	}
	ann[AnnotationGrace] = strconv.FormatInt(int64(lifecycle.GracePeriod(pod)/time.Second), 10)
	c := &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: pod.Name, Namespace: pod.Namespace, Uid: string(pod.UID),
			Attempt: attempt},
		Hostname:     host,
		LogDirectory: podfiles.LogDirectory(b.cfg.Paths.Logs, pod),
		DnsConfig:    dns,
		Labels:       podLabels(pod),
		Annotations:  ann,
		Linux: &cri.LinuxPodSandboxConfig{CgroupParent: cgroupParent(b.cfg.CgroupRoot, pod),
			Resources: b.podLimits(pod), SecurityContext: b.sandboxSecurity(pod)},
	}
	if pod.Spec.HostNetwork {
		c.Hostname = ""
	}
	if sc := pod.Spec.SecurityContext; sc != nil {
		for _, s := range sc.Sysctls {
			if c.Linux.Sysctls == nil {
				c.Linux.Sysctls = map[string]string{}
			}
			c.Linux.Sysctls[strings.ReplaceAll(s.Name, "/", ".")] = s.Value
		}
	}
	if !pod.Spec.HostNetwork {
		c.PortMappings = portMappings(pod)
	}
	return c, nil
}

func (b *Builder) sandboxSecurity(pod *v1.Pod) *cri.LinuxSandboxSecurityContext {
	p := pod.Spec.SecurityContext
	if p == nil {
		p = &v1.PodSecurityContext{}
	}
	out := &cri.LinuxSandboxSecurityContext{NamespaceOptions: namespaceOptions(pod),
		SupplementalGroups: supplementalGroups(p), RunAsUser: firstInt(p.RunAsUser, nil),
		RunAsGroup: firstInt(p.RunAsGroup, nil),
		Seccomp:    seccompProfile(p.SeccompProfile, nil, false, b.cfg.SeccompDefault)}
	visit := func(spec *v1.Container) {
		if sc := spec.SecurityContext; sc != nil && sc.Privileged != nil && *sc.Privileged {
			out.Privileged = true
		}
	}
	lifecycle.ForEachContainer(pod, visit)
	for i := range pod.Spec.EphemeralContainers {
		visit(lifecycle.EphemeralSpec(pod, i))
	}
	return out
}

func portMappings(pod *v1.Pod) []*cri.PortMapping {
	var out []*cri.PortMapping
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if lifecycle.IsInitContainer(pod, list[i].Name) && !lifecycle.IsSidecar(pod, &list[i]) {
				continue
			}
			for _, p := range list[i].Ports {
				if p.HostPort != 0 {
					out = append(out, &cri.PortMapping{Protocol: criProtocol(p.Protocol),
						ContainerPort: p.ContainerPort, HostPort: p.HostPort, HostIp: p.HostIP})
				}
			}
		}
	}
	return out
}

func criProtocol(p v1.Protocol) cri.Protocol {
	switch p {
	case v1.ProtocolUDP:
		return cri.Protocol_UDP
	case v1.ProtocolSCTP:
		return cri.Protocol_SCTP
	default:
		return cri.Protocol_TCP
	}
}

// ContainerConfig returns the CRI configuration of one instance of a container. An error becomes
// the message of CreateContainerConfigError.
func (b *Builder) ContainerConfig(ctx context.Context, pod *v1.Pod, spec *v1.Container, action lifecycle.Action,
	image agent.ImageConfig, ref string, mounts map[string]agent.Mount) (*cri.ContainerConfig, error) {
	if err := verifyNonRoot(pod, spec, image.User); err != nil {
		return nil, err
	}
	envs, err := environment{objects: b.cfg.Objects, pod: pod, allocatable: b.cfg.Allocatable()}.buildVariables(spec)
	if err != nil {
		return nil, err
	}
	lookup := func(name string) (string, bool) {
		for _, e := range envs {
			if e.Key == name {
				return string(e.Value), true
			}
		}
		return "", false
	}
	m, err := b.containerMounts(ctx, pod, spec, mounts, lookup)
	if err != nil {
		return nil, err
	}
	devices, err := blockDevices(spec, mounts)
	if err != nil {
		return nil, err
	}
	c := &cri.ContainerConfig{
		Metadata:   &cri.ContainerMetadata{Name: spec.Name, Attempt: action.Attempt},
		Image:      &cri.ImageSpec{Image: ref, UserSpecifiedImage: spec.Image},
		Command:    expandEach(spec.Command, lookup),
		Args:       expandEach(spec.Args, lookup),
		WorkingDir: spec.WorkingDir,
		Envs:       envs,
		Mounts:     m,
		Devices:    devices,
		Labels:     podLabels(pod),
		LogPath:    podfiles.ContainerLogPath(spec.Name, action.Attempt),
		Stdin:      spec.Stdin, StdinOnce: spec.StdinOnce, Tty: spec.TTY,
		Linux: &cri.LinuxContainerConfig{
			Resources:       b.containerLimits(pod, spec),
			SecurityContext: addVolumeGroups(securityContext(pod, spec, b.cfg.SeccompDefault), mounts),
		},
		Annotations: map[string]string{
			AnnotationHash:            lifecycle.SpecHash(spec),
			AnnotationRestartCount:    strconv.FormatUint(uint64(action.Attempt), 10),
			agent.AnnotationTerminals: strconv.Itoa(terminalLimit(pod)),
			annotationMessagePath:     spec.TerminationMessagePath,
			annotationMessagePolicy:   string(spec.TerminationMessagePolicy),
			AnnotationGrace:           strconv.FormatInt(int64(lifecycle.GracePeriod(pod)/time.Second), 10),
		},
	}
	c.Labels[agent.LabelContainerName] = spec.Name
	if action.Delay >= 0 {
		c.Annotations[AnnotationDelay] = action.Delay.String()
	}
	if spec.Lifecycle != nil && spec.Lifecycle.StopSignal != nil {
		c.StopSignal = signalToCRI(*spec.Lifecycle.StopSignal)
	}
	return c, b.addTerminationFile(pod, spec, action.Attempt, c)
}

func expandEach(texts []string, lookup func(string) (string, bool)) []string {
	var out []string
	for _, s := range texts {
		out = append(out, expandVariables(s, lookup))
	}
	return out
}

// containerMounts returns the container's volume mounts, and a mount of /etc/hosts unless the
// container mounts its own there.
func (b *Builder) containerMounts(ctx context.Context, pod *v1.Pod, spec *v1.Container, volumes map[string]agent.Mount,
	lookup func(string) (string, bool)) ([]*cri.Mount, error) {
	var out []*cri.Mount
	hosts := false
	for i, vm := range spec.VolumeMounts {
		v, ok := volumes[vm.Name]
		if !ok {
			return nil, fmt.Errorf("cannot find volume %q to mount into container %q", vm.Name, spec.Name)
		}
		if v.Block {
			return nil, fmt.Errorf(
				"volume %q of container %q is a block device: use volumeDevices instead of volumeMounts",
				vm.Name, spec.Name)
		}
		sub := vm.SubPath
		if vm.SubPathExpr != "" {
			sub = expandVariables(vm.SubPathExpr, lookup)
			if strings.Contains(sub, "$(") {
				return nil, fmt.Errorf("volumeMount %q of container %q: subPathExpr %q refers to an unknown variable",
					vm.Name, spec.Name, vm.SubPathExpr)
			}
		}
		src := v.HostPath
		if sub != "" {
			var err error
			if src, err = b.cfg.SubPaths.Bind(ctx, b.subPathTarget(pod, spec.Name, i), v.HostPath, sub); err != nil {
				return nil, fmt.Errorf("failed to prepare subPath for volumeMount %q of container %q: %w", vm.Name,
					spec.Name, err)
			}
		}
		target := vm.MountPath
		if !path.IsAbs(target) {
			target = path.Join("/", target)
		}
		hosts = hosts || path.Clean(target) == "/etc/hosts"
		m := &cri.Mount{ContainerPath: target, HostPath: src, Readonly: vm.ReadOnly || v.ReadOnly}
		if vm.RecursiveReadOnly != nil && *vm.RecursiveReadOnly != v1.RecursiveReadOnlyDisabled {
			m.RecursiveReadOnly = m.Readonly
		}
		if vm.MountPropagation != nil {
			switch *vm.MountPropagation {
			case v1.MountPropagationHostToContainer:
				m.Propagation = cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
			case v1.MountPropagationBidirectional:
				m.Propagation = cri.MountPropagation_PROPAGATION_BIDIRECTIONAL
			}
		}
		out = append(out, m)
	}
	if !hosts {
		file, err := b.WriteHostsFile(pod)
		if err != nil {
			return nil, err
		}
		ro := spec.SecurityContext != nil && spec.SecurityContext.ReadOnlyRootFilesystem != nil &&
			*spec.SecurityContext.ReadOnlyRootFilesystem
		out = append(out, &cri.Mount{ContainerPath: "/etc/hosts", HostPath: file, Readonly: ro})
	}
	return out, nil
}

// maxPodTerminals is the maximum number of pseudoterminals of a pod, divided among its containers.
// Each container may open at least minContainerTerminals.
const (
	maxPodTerminals       = 256
	minContainerTerminals = 16
)

// terminalLimit returns how many pseudoterminals each container of a pod may have open, so that one
// pod cannot use all pseudoterminals of the machine.
func terminalLimit(pod *v1.Pod) int {
	count := len(pod.Spec.InitContainers) + len(pod.Spec.Containers) + len(pod.Spec.EphemeralContainers)
	return max(minContainerTerminals, maxPodTerminals/max(1, count))
}
