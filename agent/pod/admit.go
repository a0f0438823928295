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

// safeSysctls are namespaced and harmless to other pods, as documented.
var safeSysctls = []string{"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
	"net.ipv4.ip_unprivileged_port_start", "net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout",
	"net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"}

// Admit checks on the node what the scheduler promised: the pod may have been bound by
// hand, or two schedulers may have raced. nil admits; otherwise the pod fails for good. Pure.
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
			// The node's own is not the pod's to set.
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

// pressure are the conditions of the node for which it does not take the pod. Short of memory it takes those that requested
// some, and those that tolerate the taint; short of disk none but those without which it may not work. What it had taken
// before a reboot it does not refuse: that goes one by one, if it has to.
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
		// An extended resource that the node has never heard of is managed elsewhere: by a scheduler's extender.
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

// extended says whether a resource is of somebody else's making than Kubernetes'.
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
