package pod

import (
	"fmt"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"
	corev1 "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/saturate"
)

// safeSysctls are the sysctls that Kubernetes documents as safe: they are namespaced and do not
// affect other pods.
var safeSysctls = []string{"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
	"net.ipv4.ip_unprivileged_port_start", "net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout",
	"net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"}

// Admit checks again on the node whether the pod fits. The pod may have been bound without a
// scheduler, or two schedulers may have raced. It returns nil for an admitted pod. A Stop fails the
// pod permanently. Pure.
func Admit(pod *v1.Pod, others []*v1.Pod, node *v1.Node) *Stop {
	refuse := func(reason, format string, args ...any) *Stop {
		return refusal(pod, reason, format, args...)
	}
	if pressed := pressure(pod, node); len(pressed) > 0 {
		return refuse("Evicted", "The node had condition: %v. ", pressed)
	}
	if sc := pod.Spec.SecurityContext; sc != nil {
		for _, s := range sc.Sysctls {
			if !slices.Contains(safeSysctls, s.Name) {
				return refuse("SysctlForbidden", "forbidden sysctl: %q not allowlisted", s.Name)
			}
			// A pod in the host's namespace must not set the host's sysctls.
			if pod.Spec.HostNetwork && strings.HasPrefix(s.Name, "net.") {
				return refuse("SysctlForbidden", "forbidden sysctl: %q not allowed with host net enabled", s.Name)
			}
			if pod.Spec.HostIPC && strings.HasPrefix(s.Name, "kernel.shm") {
				return refuse("SysctlForbidden", "forbidden sysctl: %q not allowed with host ipc enabled", s.Name)
			}
		}
	}
	if ok, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node); err != nil || !ok {
		return stored(refuse("NodeAffinity", "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"))
	}
	for i := range node.Spec.Taints {
		t := &node.Spec.Taints[i]
		if t.Effect == v1.TaintEffectNoExecute && !corev1.TolerationsTolerateTaint(logr.Discard(), pod.Spec.Tolerations, t, false) {
			return stored(refuse("TaintToleration", "Predicate TaintToleration failed: node(s) had untolerated taint(s)"))
		}
	}
	if clash := hostPortClash(pod, others); clash != "" {
		return refuse("NodePorts", "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports")
	}
	return outOf(pod, others, node, refuse)
}

// pressure returns the node conditions for which the pod must be rejected. Under memory pressure
// alone, a pod is admitted if it requests resources (it is not BestEffort) or tolerates the
// memory-pressure taint. Critical pods are never rejected, nor are pods that were admitted before a
// reboot: eviction handles those one at a time.
func pressure(pod *v1.Pod, node *v1.Node) (pressed []v1.NodeConditionType) {
	if agent.IsCritical(pod) || pod.Status.StartTime != nil {
		return nil
	}
	for _, c := range node.Status.Conditions {
		if c.Status == v1.ConditionTrue && (c.Type == v1.NodeMemoryPressure || c.Type == v1.NodeDiskPressure) {
			pressed = append(pressed, c.Type)
		}
	}
	if slices.Equal(pressed, []v1.NodeConditionType{v1.NodeMemoryPressure}) {
		t := &v1.Taint{Key: v1.TaintNodeMemoryPressure, Effect: v1.TaintEffectNoSchedule}
		if QOS(pod) != v1.PodQOSBestEffort || corev1.TolerationsTolerateTaint(logr.Discard(), pod.Spec.Tolerations, t, false) {
			return nil
		}
	}
	return pressed
}

func stored(s *Stop) *Stop {
	s.Stored = true
	return s
}

func outOf(pod *v1.Pod, others []*v1.Pod, node *v1.Node, refuse func(string, string, ...any) *Stop) *Stop {
	alloc := node.Status.Allocatable
	if n, ok := alloc[v1.ResourcePods]; ok && int64(len(others))+1 > saturate.Value(&n) {
		return refuse("OutOfpods", "Node didn't have enough resource: pods, requested: 1, used: %d, capacity: %d", len(others), saturate.Value(&n))
	}
	used := requestsOf(others)
	want := resource.PodRequests(pod, resource.PodResourcesOptions{})
	var names []string
	for name := range want {
		// Skip an extended resource that the node does not have: a scheduler extender manages it.
		if _, known := alloc[name]; known || !extended(string(name)) {
			names = append(names, string(name))
		}
	}
	slices.Sort(names)
	for _, n := range names {
		name := v1.ResourceName(n)
		if message := lacking(name, want, used, alloc); message != "" {
			r := refuse("OutOf"+n, "%s", message)
			r.Stored = extended(n)
			return r
		}
	}
	return nil
}

// extended reports whether name is an extended resource, outside the kubernetes.io domain.
func extended(name string) bool {
	return strings.Contains(name, "/") && !strings.Contains(name, "kubernetes.io/")
}

type hostPort struct {
	ip    string
	port  int32
	proto v1.Protocol
}

func hostPorts(pod *v1.Pod) []hostPort {
	var out []hostPort
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if isInit(pod, list[i].Name) && !sidecar(pod, &list[i]) {
				continue
			}
			for _, p := range list[i].Ports {
				port := p.HostPort
				if pod.Spec.HostNetwork && port == 0 {
					port = p.ContainerPort
				}
				if port == 0 {
					continue
				}
				h := hostPort{p.HostIP, port, p.Protocol}
				if h.ip == "" {
					h.ip = "0.0.0.0"
				}
				if h.proto == "" {
					h.proto = v1.ProtocolTCP
				}
				out = append(out, h)
			}
		}
	}
	return out
}

func hostPortClash(pod *v1.Pod, others []*v1.Pod) string {
	mine := hostPorts(pod)
	if len(mine) == 0 {
		return ""
	}
	for _, o := range others {
		for _, t := range hostPorts(o) {
			for _, m := range mine {
				if m.port == t.port && m.proto == t.proto && (m.ip == t.ip || m.ip == "0.0.0.0" || t.ip == "0.0.0.0") {
					return fmt.Sprintf("%s:%d/%s", m.ip, m.port, m.proto)
				}
			}
		}
	}
	return ""
}
