package pod

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Annotations on containers and sandboxes. They hold the values that a worker needs after a restart
// of the agent.
const (
	annHash         = "keelson.dev/container-hash"
	annDelay        = "keelson.dev/restart-delay"
	annRestartCount = "io.kubernetes.container.restartCount"
	annTermPath     = "io.kubernetes.container.terminationMessagePath"
	annTermPolicy   = "io.kubernetes.container.terminationMessagePolicy"
	annTermFile     = "keelson.dev/termination-file" // path on the host
	annGrace        = "io.kubernetes.pod.terminationGracePeriod"
)

// logDirectory returns a pod's log directory, in the layout that log collectors expect:
// NAMESPACE_NAME_UID.
func logDirectory(root string, pod *v1.Pod) string {
	return filepath.Join(root, pod.Namespace+"_"+pod.Name+"_"+string(pod.UID))
}

// nameByLogs fills in the namespace and the name of pods of which only the UID is known. It reads
// them from the names of the log directories. A log directory of an unknown UID stays: it may
// belong to a kubelet on this machine.
func nameByLogs(root string, pods map[types.UID]*v1.Pod) error {
	entries, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		parts := strings.Split(e.Name(), "_") // none of the three parts can contain an underscore
		if !e.IsDir() || len(parts) != 3 || parts[0] == "" || parts[1] == "" {
			continue
		}
		if p := pods[types.UID(parts[2])]; p != nil && p.Name == "" {
			p.Namespace, p.Name = parts[0], parts[1]
		}
	}
	return nil
}

// logPath returns the path of a container's log relative to the pod's log directory.
func logPath(name string, attempt uint32) string {
	return filepath.Join(name, strconv.FormatUint(uint64(attempt), 10)+".log")
}

func podLabels(pod *v1.Pod) map[string]string {
	l := maps.Clone(pod.Labels)
	if l == nil {
		l = map[string]string{}
	}
	l[agent.LabelPodName], l[agent.LabelPodNamespace], l[agent.LabelPodUID] = pod.Name, pod.Namespace, string(pod.UID)
	return l
}

// sandboxConfig returns the CRI configuration of the pod's sandbox.
func (w *worker) sandboxConfig(pod *v1.Pod, attempt uint32) (*cri.PodSandboxConfig, error) {
	host, err := hostname(pod, w.cfg.Objects.Cluster().Domain)
	if err != nil {
		return nil, err
	}
	dns, err := w.dns(pod)
	if err != nil {
		return nil, err
	}
	ann := maps.Clone(pod.Annotations)
	if ann == nil {
		ann = map[string]string{}
	}
	ann[annGrace] = strconv.FormatInt(int64(grace(pod)/time.Second), 10)
	c := &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: pod.Name, Namespace: pod.Namespace, Uid: string(pod.UID), Attempt: attempt},
		Hostname:     host,
		LogDirectory: logDirectory(w.cfg.Paths.Logs, pod),
		DnsConfig:    dns,
		Labels:       podLabels(pod),
		Annotations:  ann,
		Linux: &cri.LinuxPodSandboxConfig{CgroupParent: cgroupParent(w.cfg.CgroupRoot, pod),
			Resources: w.podLimits(pod), SecurityContext: w.sandboxSecurity(pod)},
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

func (w *worker) sandboxSecurity(pod *v1.Pod) *cri.LinuxSandboxSecurityContext {
	p := pod.Spec.SecurityContext
	if p == nil {
		p = &v1.PodSecurityContext{}
	}
	out := &cri.LinuxSandboxSecurityContext{NamespaceOptions: namespaces(pod), SupplementalGroups: supplemental(p),
		RunAsUser: firstInt(p.RunAsUser, nil), RunAsGroup: firstInt(p.RunAsGroup, nil), Seccomp: seccomp(p.SeccompProfile, nil, false, w.cfg.SeccompDefault)}
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if sc := list[i].SecurityContext; sc != nil && sc.Privileged != nil && *sc.Privileged {
				out.Privileged = true
			}
		}
	}
	return out
}

func portMappings(pod *v1.Pod) []*cri.PortMapping {
	var out []*cri.PortMapping
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if isInit(pod, list[i].Name) && !sidecar(pod, &list[i]) {
				continue
			}
			for _, p := range list[i].Ports {
				if p.HostPort != 0 {
					out = append(out, &cri.PortMapping{Protocol: protocol(p.Protocol), ContainerPort: p.ContainerPort, HostPort: p.HostPort, HostIp: p.HostIP})
				}
			}
		}
	}
	return out
}

func protocol(p v1.Protocol) cri.Protocol {
	switch p {
	case v1.ProtocolUDP:
		return cri.Protocol_UDP
	case v1.ProtocolSCTP:
		return cri.Protocol_SCTP
	default:
		return cri.Protocol_TCP
	}
}

// containerConfig returns the CRI configuration of one instance of a container. An error becomes
// the message of CreateContainerConfigError.
func (w *worker) containerConfig(ctx context.Context, pod *v1.Pod, spec *v1.Container, a Action, image agent.ImageConfig, ref string, mounts map[string]agent.Mount) (*cri.ContainerConfig, error) {
	if err := verifyNonRoot(pod, spec, image.User); err != nil {
		return nil, err
	}
	envs, err := environ{objects: w.cfg.Objects, pod: pod, allocatable: w.cfg.allocatable()}.build(spec)
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
	m, err := w.mounts(ctx, pod, spec, mounts, lookup)
	if err != nil {
		return nil, err
	}
	devices, err := blockDevices(spec, mounts)
	if err != nil {
		return nil, err
	}
	c := &cri.ContainerConfig{
		Metadata:   &cri.ContainerMetadata{Name: spec.Name, Attempt: a.Attempt},
		Image:      &cri.ImageSpec{Image: ref, UserSpecifiedImage: spec.Image},
		Command:    expandAll(spec.Command, lookup),
		Args:       expandAll(spec.Args, lookup),
		WorkingDir: spec.WorkingDir,
		Envs:       envs,
		Mounts:     m,
		Devices:    devices,
		Labels:     podLabels(pod),
		LogPath:    logPath(spec.Name, a.Attempt),
		Stdin:      spec.Stdin, StdinOnce: spec.StdinOnce, Tty: spec.TTY,
		Linux: &cri.LinuxContainerConfig{
			Resources:       w.containerLimits(pod, spec),
			SecurityContext: withVolumeGroups(securityContext(pod, spec, w.cfg.SeccompDefault), mounts),
		},
		Annotations: map[string]string{
			annHash:                   specHash(spec),
			annRestartCount:           strconv.FormatUint(uint64(a.Attempt), 10),
			agent.AnnotationTerminals: strconv.Itoa(terminals(pod)),
			annTermPath:               spec.TerminationMessagePath,
			annTermPolicy:             string(spec.TerminationMessagePolicy),
			annGrace:                  strconv.FormatInt(int64(grace(pod)/time.Second), 10),
		},
	}
	c.Labels[agent.LabelContainerName] = spec.Name
	if a.Delay >= 0 {
		c.Annotations[annDelay] = a.Delay.String()
	}
	if spec.Lifecycle != nil && spec.Lifecycle.StopSignal != nil {
		if n, ok := cri.Signal_value["SIGNAL_"+string(*spec.Lifecycle.StopSignal)]; ok {
			c.StopSignal = cri.Signal(n)
		}
	}
	return c, w.terminationFile(pod, spec, a.Attempt, c)
}

func expandAll(in []string, lookup func(string) (string, bool)) []string {
	var out []string
	for _, s := range in {
		out = append(out, expand(s, lookup))
	}
	return out
}

// mounts returns the container's volume mounts, and a mount of /etc/hosts unless the container
// mounts its own there.
func (w *worker) mounts(ctx context.Context, pod *v1.Pod, spec *v1.Container, volumes map[string]agent.Mount, lookup func(string) (string, bool)) ([]*cri.Mount, error) {
	var out []*cri.Mount
	hosts := false
	for i, vm := range spec.VolumeMounts {
		v, ok := volumes[vm.Name]
		if !ok {
			return nil, fmt.Errorf("cannot find volume %q to mount into container %q", vm.Name, spec.Name)
		}
		if v.Block {
			return nil, fmt.Errorf("volume %q of container %q is a block device: name it in volumeDevices", vm.Name, spec.Name)
		}
		sub := vm.SubPath
		if vm.SubPathExpr != "" {
			sub = expand(vm.SubPathExpr, lookup)
			if strings.Contains(sub, "$(") {
				return nil, fmt.Errorf("volumeMount %q of container %q: subPathExpr %q names an unknown variable", vm.Name, spec.Name, vm.SubPathExpr)
			}
		}
		src := v.HostPath
		if sub != "" {
			var err error
			if src, err = w.cfg.SubPaths.Bind(ctx, w.subPathTarget(pod, spec.Name, i), v.HostPath, sub); err != nil {
				return nil, fmt.Errorf("failed to prepare subPath for volumeMount %q of container %q: %w", vm.Name, spec.Name, err)
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
		file, err := w.hostsFile(pod)
		if err != nil {
			return nil, err
		}
		ro := spec.SecurityContext != nil && spec.SecurityContext.ReadOnlyRootFilesystem != nil && *spec.SecurityContext.ReadOnlyRootFilesystem
		out = append(out, &cri.Mount{ContainerPath: "/etc/hosts", HostPath: file, Readonly: ro})
	}
	return out, nil
}

// podTerminals is the number of pseudoterminals of a pod. leastTerminals is the minimum for each of
// its containers.
const (
	podTerminals   = 256
	leastTerminals = 16
)

// terminals returns how many pseudoterminals each container of a pod may have open, so that one pod
// cannot use all pseudoterminals of the machine.
func terminals(pod *v1.Pod) int {
	count := len(pod.Spec.InitContainers) + len(pod.Spec.Containers) + len(pod.Spec.EphemeralContainers)
	return max(leastTerminals, podTerminals/max(1, count))
}
