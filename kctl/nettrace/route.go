package nettrace

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

// traceToBackends adds the last two steps of a trace. The first contains the IP routes from the
// pod's node to each of the backends. The second contains the decisions of the NetworkPolicies,
// only for backends with a route.
func (x *tracer) traceToBackends(backends []backend) {
	route, reached := x.routeSteps(backends)
	if !x.addStep(route) {
		return
	}
	x.addStep(x.policyStep(reached))
}

// routeSteps returns the step with the IP route from the pod's node to each of the backends, and
// the backends that have a route. The step fails if no backend has a route.
func (x *tracer) routeSteps(backends []backend) (s Step, reached []backend) {
	s = Step{Name: "route"}
	if slices.Contains(x.Unread, Nodes) {
		s.Says = "nodes may not be read, so that it is not known whether the way is there"
		return s, backends
	}
	if n := x.nodeNamed(x.Pod.Spec.NodeName); n != nil && !api.IsNodeReady(n) {
		s.Details = append(s.Details,
			fmt.Sprintf("node %s of this pod is not Ready: its rules may be those of some time ago", n.Name))
	}
	told := map[string]bool{}
	for _, b := range backends {
		says, ok := x.routeText(b)
		if ok {
			reached = append(reached, b)
		}
		if !told[says] && len(told) < maxListed {
			told[says] = true
			s.Details = append(s.Details, says)
		}
	}
	switch {
	case len(reached) == len(backends) && len(s.Details) == 1:
		s.Says, s.Details = s.Details[0], nil
	case len(reached) == len(backends):
		s.Says = "there is a way to each"
	case len(reached) > 0:
		s.Partly, s.Says = true,
			fmt.Sprintf("%d of %d are reached: connections to the others hang until they are taken out",
				len(reached), len(backends))
	default:
		s.Stops, s.Says = true, "there is no way"
		for _, b := range backends[:1] {
			if n := x.nodeOf(b); n != "" {
				s.Mend = []string{"kctl why node/" + n}
			}
		}
	}
	return s, reached
}

// routeText returns a text about the IP route from the pod's node to backend b. ok is false if the
// backend's node does not exist, is not Ready, or has no address of the backend's IP family.
func (x *tracer) routeText(b backend) (says string, ok bool) {
	name := x.nodeOf(b)
	if name == "" {
		for _, n := range x.Nodes {
			for _, a := range n.Status.Addresses {
				if a.Address == b.ip.String() {
					return "node " + n.Name + " itself", true
				}
			}
		}
		return fmt.Sprintf("%s is outside of the cluster: by the node's own routes", b.ip), true
	}
	if name == x.Pod.Spec.NodeName {
		return "on the same node " + name, true
	}
	n := x.nodeNamed(name)
	switch {
	case n == nil:
		return fmt.Sprintf("node %s is gone", name), false
	case !api.IsNodeReady(n):
		return fmt.Sprintf("node %s is not Ready: nothing arrives there", name), false
	}
	via := ""
	for _, a := range n.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); a.Type == corev1.NodeInternalIP && err == nil &&
			ip.Is4() == b.ip.Is4() {
			via = a.Address
			break
		}
	}
	if via == "" {
		return fmt.Sprintf("node %s has no internal address of the family of %s", name, b.ip), false
	}
	if b.pod != nil && b.pod.Spec.HostNetwork {
		return fmt.Sprintf("node %s itself, %s", name, via), true
	}
	cidrs := podRanges(n)
	for _, c := range cidrs {
		if p, err := netip.ParsePrefix(c); err == nil && p.Contains(b.ip) {
			return fmt.Sprintf("pods %s are behind node %s, %s", c, name, via), true
		}
	}
	return fmt.Sprintf("%s is not among the pods of node %s (%v): the node's own network product leads there, if one "+
		"does", b.ip, name, cidrs), true
}

func (x *tracer) nodeNamed(name string) *corev1.Node {
	for i := range x.Nodes {
		if x.Nodes[i].Name == name {
			return &x.Nodes[i]
		}
	}
	return nil
}
