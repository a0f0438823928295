package nettrace

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// defaultNdots is the default of the resolver option ndots in pods. A name with at least that many
// dots is tried as it is before the search domains are appended.
const defaultNdots = 5

// unresolvable lists the reserved top-level domains that never resolve (RFC 6761).
var unresolvable = []string{"invalid", "test", "example"}

// resolveTarget adds the step for the DNS lookup of the target's host from the pod. It returns the
// Service to which the target's host resolves. If the host names a pod, as in
// HOST.SERVICE.NAMESPACE, host is the hostname of that pod; otherwise it is empty. ok is false if
// the host does not resolve to a Service, or if the pod cannot use the cluster's DNS.
func (x *tracer) resolveTarget() (svc *corev1.Service, host string, ok bool) {
	name := strings.ToLower(strings.TrimSuffix(x.target.Host, "."))
	policy := x.Pod.Spec.DNSPolicy
	if policy == "" {
		policy = corev1.DNSClusterFirst
	}
	if policy == corev1.DNSDefault || policy == corev1.DNSNone ||
		policy == corev1.DNSClusterFirst && x.Pod.Spec.HostNetwork {
		return nil, "", x.addOtherResolverStep(policy)
	}
	if !x.canQueryDNS() {
		return nil, "", false
	}
	var tried []string
	for _, full := range x.candidateNames(name) {
		service, namespace, before, within := x.splitServiceName(full)
		if !within {
			continue
		}
		tried = append(tried, full)
		for i := range x.Services {
			s := &x.Services[i]
			if s.Namespace == namespace && s.Name == service {
				x.addStep(Step{Name: "name", Says: fmt.Sprintf("%s is %s: service %s/%s", x.target.Host, full,
					namespace, service)})
				return s, before, true
			}
		}
	}
	if top := name[strings.LastIndexByte(name, '.')+1:]; slices.Contains(unresolvable, top) {
		x.addStep(Step{Name: "name", Stops: true,
			Says: fmt.Sprintf("%s does not resolve: no DNS server has names below .%s (RFC 6761)", x.target.Host, top),
			Mend: []string{"# correct the name"}})
		return nil, "", false
	}
	if len(tried) == 0 || x.isForeignName(name) {
		if r := x.Reach; r != nil && r.Unresolved != "" {
			x.addStep(Step{Name: "name", Stops: true,
				Says: fmt.Sprintf("%s does not resolve on node %s: %s", x.target.Host,
					x.Pod.Spec.NodeName, r.Unresolved),
				Mend: []string{"# correct the name, or the DNS servers of node " + x.Pod.Spec.NodeName}})
			return nil, "", false
		} else if r != nil && r.NoRoute != "" {
			x.addStep(x.noRouteStep(x.target.Host + " (" + strings.Join(r.Addresses, ", ") + ")"))
			return nil, "", false
		}
		x.addStep(Step{Name: "name",
			Says: fmt.Sprintf("%s is no name of the cluster: the node's DNS forwards it, and the connection leaves "+
				"the cluster", x.target.Host)})
		return nil, "", false
	}
	x.addStep(x.noSuchServiceStep(tried))
	return nil, "", false
}

// isForeignName reports whether a name that resolves to no Service belongs outside the cluster.
// Names without a dot, in the cluster's domain, or ending in .svc belong to the cluster. So does
// SERVICE.NAMESPACE if the namespace exists.
func (x *tracer) isForeignName(name string) bool {
	dots := strings.Count(name, ".")
	switch {
	case dots == 0, strings.HasSuffix(name, "."+x.Domain), strings.HasSuffix(name, ".svc"):
		return false
	case dots > 1:
		return true
	}
	_, namespace, _ := strings.Cut(name, ".")
	return !slices.ContainsFunc(x.Namespaces, func(ns corev1.Namespace) bool { return ns.Name == namespace })
}

// addOtherResolverStep adds the failed step for a pod that does not use the cluster's DNS because
// of its DNS policy. It always returns false.
func (x *tracer) addOtherResolverStep(policy corev1.DNSPolicy) bool {
	why, mend := "its dnsPolicy is "+string(policy), string(corev1.DNSClusterFirst)
	if policy == corev1.DNSClusterFirst {
		why, mend = "it is in its node's network with dnsPolicy ClusterFirst, which means Default there",
			string(corev1.DNSClusterFirstWithHostNet)
	}
	asked := "the node's own servers"
	if c := x.Pod.Spec.DNSConfig; policy == corev1.DNSNone && c != nil {
		asked = strings.Join(c.Nameservers, ", ")
	}
	return x.addStep(Step{Name: "name", Stops: true,
		Says: fmt.Sprintf("the pod does not ask the cluster for names: %s; it asks %s", why, asked),
		Mend: []string{"# set spec.dnsPolicy of the pod's template to " + mend}})
}

// canQueryDNS reports whether NetworkPolicies allow the pod to send queries to the cluster's DNS.
// If they do not, it adds a failed step and returns false.
func (x *tracer) canQueryDNS() bool {
	dns := endpoint{namespace: dnsNamespace, labels: map[string]string{"k8s-app": "kube-dns"}, port: 53,
		proto: corev1.ProtocolUDP}
	v := x.evaluatePolicies(x.Pod, egress, dns)
	if v.allowed {
		return true
	}
	return x.addStep(Step{Name: "name", Stops: true,
		Says: fmt.Sprintf("the pod may not ask for names: by %s it may send to those alone who are named there, "+
			"and the cluster's DNS is not", v.policyNames()),
		Details: []string{"a rule of egress to namespace kube-system, pods k8s-app=kube-dns, ports 53/UDP and " +
			"53/TCP, allows it"},
		Mend: []string{allowCommand(x.Pod, egress, dns, v)}})
}

// dnsNamespace is the namespace to which the cluster's DNS belongs in the evaluation of
// NetworkPolicies. A policy allows DNS queries if its selectors match a pod in this namespace with
// the label k8s-app=kube-dns. No such pod has to exist, because every node serves DNS itself.
const dnsNamespace = "kube-system"

// candidateNames returns the fully qualified names that the pod's resolver tries for a name, in
// order. They follow from the search domains and ndots of the pod. A target host with a trailing
// dot yields only the name itself.
func (x *tracer) candidateNames(name string) []string {
	search := []string{x.Pod.Namespace + ".svc." + x.Domain, "svc." + x.Domain, x.Domain}
	dots := defaultNdots
	if c := x.Pod.Spec.DNSConfig; c != nil {
		search = append(search, c.Searches...)
		for _, o := range c.Options {
			if o.Name == "ndots" && o.Value != nil {
				_, _ = fmt.Sscanf(*o.Value, "%d", &dots)
			}
		}
	}
	var out []string
	for _, s := range search {
		out = append(out, name+"."+s)
	}
	switch {
	case strings.HasSuffix(x.target.Host, "."):
		return []string{name}
	case strings.Count(name, ".") >= dots:
		return append([]string{name}, out...)
	}
	return append(out, name)
}

// splitServiceName splits a DNS name of the form [HOST.]SERVICE.NAMESPACE.svc.DOMAIN, where DOMAIN
// is the cluster's domain. It also accepts an SRV name,
// _PORT._PROTOCOL.SERVICE.NAMESPACE.svc.DOMAIN. ok is false for any other form.
func (x *tracer) splitServiceName(full string) (service, namespace, host string, ok bool) {
	rest, ok := strings.CutSuffix(full, ".svc."+x.Domain)
	parts := strings.Split(rest, ".")
	switch {
	case !ok:
		return "", "", "", false
	case len(parts) == 2:
		return parts[0], parts[1], "", true
	case len(parts) == 3:
		return parts[1], parts[2], parts[0], true
	case len(parts) == 4 && strings.HasPrefix(parts[0], "_") && strings.HasPrefix(parts[1], "_"):
		return parts[2], parts[3], "", true
	}
	return "", "", "", false
}

// noSuchServiceStep returns the failed step for a target host that resolves to no Service. tried
// are the DNS names that were looked up. The step lists other namespaces that have a Service of the
// same name.
func (x *tracer) noSuchServiceStep(tried []string) Step {
	s := Step{Name: "name", Stops: true, Says: fmt.Sprintf("%s is nobody's name: NXDOMAIN", x.target.Host)}
	for _, full := range tried {
		s.Details = append(s.Details, "asked for "+full)
	}
	if len(x.Unread) > 0 && slices.Contains(x.Unread, Services) {
		s.Stops, s.Says = true, "services may not be read, so that it is not known what "+x.target.Host+" means"
		return s
	}
	bare, _, _ := strings.Cut(x.target.Host, ".")
	for _, svc := range x.Services {
		if svc.Name == bare {
			s.Details = append(s.Details, fmt.Sprintf("there is a service of that name in namespace %s", svc.Namespace))
			s.Mend = append(s.Mend, fmt.Sprintf("# ask for %s.%s", svc.Name, svc.Namespace))
		}
	}
	if len(s.Mend) == 0 {
		s.Mend = []string{fmt.Sprintf("kctl -n %s get services", x.Pod.Namespace)}
	}
	return s
}
