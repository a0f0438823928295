package why

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/balancer"
)

// explainService returns the Findings about a Service. It reports a deletion, a missing external
// address, and a selector that matches no pods or no Ready pods. It also reports missing ready
// endpoints, nodes that its traffic policy excludes, and undeclared target ports. It returns nil if
// there is no such problem.
func (w trafficExplainer) explainService(s *corev1.Service) []Finding {
	if f := explainDeletion(s, "service"); f != nil {
		return []Finding{*f}
	}
	var out []Finding
	if f := explainLoadBalancer(s); f != nil {
		out = append(out, *f)
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return out // a Service of type ExternalName has no endpoints
	}
	if len(s.Spec.Selector) == 0 || !w.world.hasList(Pods) {
		// without a selector, the pods of the Service are not known
		return append(append(out, w.explainNoEndpoints(s)...), w.explainNearEndpoints(s)...)
	}
	var selected, ready []*corev1.Pod
	selector := labels.SelectorFromSet(s.Spec.Selector)
	for i := range w.world.Pods {
		p := &w.world.Pods[i]
		if p.Namespace != s.Namespace || api.IsPodTerminal(p) ||
			!selector.Matches(labels.Set(p.Labels)) {
			continue
		}
		selected = append(selected, p)
		if api.IsPodReady(p) && p.DeletionTimestamp == nil {
			ready = append(ready, p)
		}
	}
	if len(selected) == 0 {
		return append(out, w.explainEmptySelector(s))
	}
	if len(ready) == 0 && !s.Spec.PublishNotReadyAddresses {
		out = append(out, Finding{Object: objectName("service", s), What: "has no pod that is Ready",
			Because: fmt.Sprintf("%s selects %s, and none is Ready", selector, countNoun(len(selected), "pod"))})
		var below []corev1.Pod
		for _, p := range selected {
			below = append(below, *p)
		}
		return append(out, w.world.workloads().explainUnhealthyPods(below, &out[len(out)-1])...)
	}
	out = append(append(out, w.explainNoEndpoints(s)...), w.explainNearEndpoints(s)...)
	return append(out, explainUnknownPorts(s, selected)...)
}

// explainLoadBalancer returns a Finding for a Service of type LoadBalancer with a missing external
// address or an address outside the configured pools. It also returns a Finding if no node
// announces the addresses. It returns nil for a Service without these problems, and for other
// types.
func explainLoadBalancer(s *corev1.Service) *Finding {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	f := &Finding{Object: objectName("service", s), What: "has no address from outside",
		Since: timeOrNil(s.CreationTimestamp)}
	pools := fmt.Sprintf("kctl -n %s edit configmap %s", balancer.Namespace, balancer.ConfigMap)
	nodePort := kctlCommand(s, `patch service %s -p '{"spec":{"type":"NodePort"}}'   # is reached at the nodes' `+
		`addresses`, s.Name)
	c := meta.FindStatusCondition(s.Status.Conditions, balancer.Condition)
	switch {
	case c != nil && c.Status != metav1.ConditionTrue:
		if len(s.Status.LoadBalancer.Ingress) > 0 {
			f.What = "has not all addresses from outside that it asks for"
		}
		f.Since, f.Because, f.Mend = timeOrNil(c.LastTransitionTime), c.Message, []string{pools, nodePort}
	case c != nil && c.Reason == balancer.ReasonOutside:
		f.What, f.Because, f.Mend = "has an address of no pool", c.Message, []string{pools}
	case len(s.Status.LoadBalancer.Ingress) == 0 && !balancer.IsManaged(s):
		f.Because = fmt.Sprintf("its loadBalancerClass is %s, whose controller has given it none",
			*s.Spec.LoadBalancerClass)
		f.Mend = []string{"kctl get pods -A   # does that controller run?", nodePort}
	case len(s.Status.LoadBalancer.Ingress) == 0:
		f.Because = fmt.Sprintf("there is no pool of addresses for load balancers (ConfigMap %s/%s), and no other "+
			"controller has given it one", balancer.Namespace, balancer.ConfigMap)
		f.Mend = []string{fmt.Sprintf("kctl -n %s create configmap %s --from-literal=first='addresses: [...]'",
			balancer.Namespace, balancer.ConfigMap), nodePort}
	case c != nil && s.Annotations[balancer.AnnouncedBy] == "":
		f.What, f.Because = "is answered for by no node",
			"no node that is Ready, heard of and not cordoned answers for addresses"
		if s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
			f.Because += ", or none of them has a ready endpoint, which externalTrafficPolicy Local demands"
		}
		f.Mend = []string{"kctl get nodes", kctlCommand(s, "describe service %s", s.Name)}
	default:
		return nil
	}
	return f
}

// explainEmptySelector returns the Finding for a Service with a selector that matches no pods. It
// compares the selector with the labels of the pods in the namespace, and suggests similar labels.
func (w trafficExplainer) explainEmptySelector(s *corev1.Service) Finding {
	f := Finding{Object: objectName("service", s), What: "selects no pod", Since: timeOrNil(s.CreationTimestamp),
		Mend: []string{kctlCommand(s, "get pods --show-labels")}}
	var parts []string
	for k, v := range s.Spec.Selector {
		parts = append(parts, k+"="+v)
	}
	slices.Sort(parts)
	f.Because = strings.Join(parts, ",") + " selects 0 pods"
	have := map[string]int{}
	total := 0
	for _, p := range w.world.Pods {
		if p.Namespace != s.Namespace {
			continue
		}
		total++
		for k, v := range p.Labels {
			have[k+"="+v]++
		}
	}
	if total == 0 {
		f.Because += ": the namespace has no pods"
		return f
	}
	var words []string
	for l := range have {
		words = append(words, l)
	}
	patch := make([]string, 0, len(parts))
	for _, part := range parts {
		if have[part] > 0 {
			continue
		}
		near := nearestWord(part, words)
		if near == "" {
			f.Details = append(f.Details, fmt.Sprintf("no pod of the namespace has %s", part))
			continue
		}
		f.Details = append(f.Details, fmt.Sprintf("%s selects 0 pods; %s selects %s", part, near,
			countNoun(have[near], "pod")))
		key, value, _ := strings.Cut(near, "=")
		if wrong, _, _ := strings.Cut(part, "="); wrong != key {
			patch = append(patch, fmt.Sprintf("%q:null", wrong))
		}
		patch = append(patch, fmt.Sprintf("%q:%q", key, value))
	}
	if len(f.Details) == 0 {
		f.Details = []string{"each of these labels is on a pod, and no pod has all of them"}
	}
	if len(parts) == 1 {
		f.Because, f.Details = f.Details[0], nil
	}
	f.Details = boundList(f.Details)
	if len(patch) > 0 {
		f.Mend = append(f.Mend, kctlCommand(s, `patch service %s --type=merge -p '{"spec":{"selector":{%s}}}'`, s.Name,
			strings.Join(patch, ",")))
	}
	return f
}

// explainUnknownPorts returns a Finding for each target port of Service s that no container of pods
// declares. A named port must be declared. A numeric port is reported only if the containers
// declare other ports.
func explainUnknownPorts(s *corev1.Service, pods []*corev1.Pod) []Finding {
	var out []Finding
	for _, port := range s.Spec.Ports {
		found := false
		var declared []string
		for _, p := range pods {
			for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
				for _, has := range c.Ports {
					text := fmt.Sprint(has.ContainerPort)
					if has.Name != "" {
						text = has.Name + " (" + text + ")"
					}
					if !slices.Contains(declared, text) {
						declared = append(declared, text)
					}
					found = found || port.TargetPort.Type == intstr.String && has.Name == port.TargetPort.StrVal ||
						port.TargetPort.Type == intstr.Int && has.ContainerPort == targetPort(port)
				}
			}
		}
		if found || port.TargetPort.Type == intstr.Int && len(declared) == 0 {
			continue
		}
		f := Finding{Object: objectName("service", s),
			What:    fmt.Sprintf("sends port %d to %s, which no container has", port.Port, targetText(port)),
			Because: "the containers of its pods declare: " + strings.Join(boundList(declared), ", "),
			Mend:    []string{kctlCommand(s, "edit service %s   # targetPort", s.Name)}}
		if len(declared) == 0 {
			f.Because = "the containers of its pods declare no ports, and a name is looked up there"
		} else if port.TargetPort.Type == intstr.Int {
			f.What = fmt.Sprintf("sends port %d to %s, which no container declares", port.Port, targetText(port))
			f.Because += "; one may listen there all the same"
		}
		out = append(out, f)
	}
	return out
}

func targetPort(p corev1.ServicePort) int32 {
	if p.TargetPort.IntVal == 0 {
		return p.Port
	}
	return p.TargetPort.IntVal
}

func targetText(p corev1.ServicePort) string {
	if p.TargetPort.Type == intstr.String {
		return "port " + p.TargetPort.StrVal
	}
	return fmt.Sprintf("port %d", targetPort(p))
}
