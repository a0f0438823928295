// Package admission checks again on the node whether a pod may run there: resources, taints, host
// ports, sysctls, supported fields and the Pod Security level. It also decides about resizes. All
// decisions are pure.
package admission

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
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/internal/saturate"
)

// safeSysctls are the sysctls that Kubernetes documents as safe: they are namespaced and do not
// affect other pods.
var safeSysctls = []string{"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies",
	"net.ipv4.ping_group_range", "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ip_local_reserved_ports",
	"net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
	"net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"}

// CheckNode checks on the node whether the pod may run there beside others, the pods that already
// use the node's resources. The pod may have been bound without a scheduler, or two schedulers may
// have raced. It returns nil for an admitted pod, and otherwise a Stop that fails the pod
// permanently. Pure.
func CheckNode(pod *v1.Pod, others []*v1.Pod, node *v1.Node) *lifecycle.Stop {
	refuse := func(reason, format string, args ...any) *lifecycle.Stop {
		return NewRejection(pod, reason, format, args...)
	}
	if pressed := pressureConditions(pod, node); len(pressed) > 0 {
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
		return markStored(refuse("NodeAffinity",
			"Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"))
	}
	for i := range node.Spec.Taints {
		t := &node.Spec.Taints[i]
		if t.Effect == v1.TaintEffectNoExecute &&
			!corev1.TolerationsTolerateTaint(logr.Discard(), pod.Spec.Tolerations, t, false) {
			return markStored(refuse("TaintToleration",
				"Predicate TaintToleration failed: node(s) had untolerated taint(s)"))
		}
	}
	if clash := findHostPortConflict(pod, others); clash != "" {
		return refuse("NodePorts",
			"Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports")
	}
	return checkResources(pod, others, node, refuse)
}

// pressureConditions returns the node conditions for which the pod must be rejected: memory or disk
// pressure. Under memory pressure alone, a pod is admitted if it requests resources (it is not
// BestEffort) or tolerates the memory-pressure taint. Critical pods are never rejected. Pods that
// were admitted before a reboot are not rejected either: eviction stops such pods one at a time.
func pressureConditions(pod *v1.Pod, node *v1.Node) (pressed []v1.NodeConditionType) {
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
		if lifecycle.QOS(pod) != v1.PodQOSBestEffort ||
			corev1.TolerationsTolerateTaint(logr.Discard(), pod.Spec.Tolerations, t, false) {
			return nil
		}
	}
	return pressed
}

func markStored(stop *lifecycle.Stop) *lifecycle.Stop {
	stop.StoredNode = true
	return stop
}

func checkResources(pod *v1.Pod, others []*v1.Pod, node *v1.Node,
	refuse func(string, string, ...any) *lifecycle.Stop) *lifecycle.Stop {
	alloc := node.Status.Allocatable
	if n, ok := alloc[v1.ResourcePods]; ok && int64(len(others))+1 > saturate.Value(&n) {
		return refuse("OutOfpods", "Node didn't have enough resource: pods, requested: 1, used: %d, capacity: %d",
			len(others), saturate.Value(&n))
	}
	used := sumRequests(others)
	requests := resource.PodRequests(pod, resource.PodResourcesOptions{})
	var names []string
	for name := range requests {
		// Skip an extended resource that the node does not have: a scheduler extender manages it.
		if _, known := alloc[name]; known || !IsExtendedResource(string(name)) {
			names = append(names, string(name))
		}
	}
	slices.Sort(names)
	for _, n := range names {
		name := v1.ResourceName(n)
		if message := shortageMessage(name, requests, used, alloc); message != "" {
			r := refuse("OutOf"+n, "%s", message)
			r.StoredNode = IsExtendedResource(n)
			return r
		}
	}
	return nil
}

// IsExtendedResource reports whether a resource is an extended resource: its name has a domain
// other than kubernetes.io.
func IsExtendedResource(name string) bool {
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
			if lifecycle.IsInitContainer(pod, list[i].Name) && !lifecycle.IsSidecar(pod, &list[i]) {
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

func findHostPortConflict(pod *v1.Pod, others []*v1.Pod) string {
	ports := hostPorts(pod)
	if len(ports) == 0 {
		return ""
	}
	for _, o := range others {
		for _, t := range hostPorts(o) {
			for _, m := range ports {
				if m.port == t.port && m.proto == t.proto && (m.ip == t.ip || m.ip == "0.0.0.0" || t.ip == "0.0.0.0") {
					return fmt.Sprintf("%s:%d/%s", m.ip, m.port, m.proto)
				}
			}
		}
	}
	return ""
}

// CheckResize decides whether the node can grant the resources in a pod's spec now. granted is the
// same pod with its current grant. others are the other pods that use the node's resources, with
// their current grants. The reason is "" if the node can grant them, and otherwise Infeasible or
// Deferred. A resource that does not grow is always granted. Pure.
func CheckResize(pod, granted *v1.Pod, others []*v1.Pod, node *v1.Node) (reason, message string) {
	requests, before := resource.PodRequests(pod, resource.PodResourcesOptions{}),
		resource.PodRequests(granted, resource.PodResourcesOptions{})
	used, free := sumRequests(others), node.Status.Allocatable
	var grown []v1.ResourceName
	// Memory first, in the order of Kubernetes' messages.
	for _, name := range []v1.ResourceName{v1.ResourceMemory, v1.ResourceCPU} {
		if q := requests[name]; q.Cmp(before[name]) > 0 {
			grown = append(grown, name)
		}
	}
	for _, name := range grown {
		if q := requests[name]; q.Cmp(free[name]) > 0 {
			return v1.PodReasonInfeasible, fmt.Sprintf(
				"Node didn't have enough capacity: %s, requested: %d, capacity: %d",
				name, messageAmount(requests, name), messageAmount(free, name))
		}
	}
	for _, name := range grown {
		if message := shortageMessage(name, requests, used, free); message != "" {
			return v1.PodReasonDeferred, message
		}
	}
	return "", ""
}

// sumRequests returns the sum of the pods' requests. For a pod that is being resized it counts the
// larger of the grant and of the current resources of the pod and its containers.
func sumRequests(pods []*v1.Pod) v1.ResourceList {
	used := v1.ResourceList{}
	for _, p := range pods {
		options := resource.PodResourcesOptions{UseStatusResources: true,
			InPlacePodLevelResourcesVerticalScalingEnabled: true}
		for name, q := range resource.PodRequests(p, options) {
			sum := used[name]
			sum.Add(q)
			used[name] = sum
		}
	}
	return used
}

// shortageMessage returns a message if a node cannot provide the requested amount of a resource in
// addition to the used amount. It returns "" if the node's capacity is sufficient.
func shortageMessage(name v1.ResourceName, requested, used, capacity v1.ResourceList) string {
	q, sum := requested[name], used[name].DeepCopy()
	if sum.Add(q); q.IsZero() || sum.Cmp(capacity[name]) <= 0 {
		return ""
	}
	return fmt.Sprintf("Node didn't have enough resource: %s, requested: %d, used: %d, capacity: %d",
		name, messageAmount(requested, name), messageAmount(used, name), messageAmount(capacity, name))
}

// messageAmount returns the amount of a resource as messages show it: CPU in millicores, other
// resources in whole units.
func messageAmount(resources v1.ResourceList, name v1.ResourceName) int64 {
	q := resources[name]
	if name == v1.ResourceCPU {
		return saturate.MilliValue(&q)
	}
	return saturate.Value(&q)
}
