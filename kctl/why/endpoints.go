package why

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/controlplane/api"
)

// isReady reports whether endpoint e is ready to receive traffic. An endpoint without the condition
// Ready counts as ready.
func isReady(e *discoveryv1.Endpoint) bool { return e.Conditions.Ready == nil || *e.Conditions.Ready }

// slicesOf returns the number of EndpointSlices of Service s, all their endpoints, and the
// endpoints that are ready.
func (w trafficExplainer) slicesOf(s *corev1.Service) (sliceCount int, all, ready []*discoveryv1.Endpoint) {
	for i := range w.world.Route.Slices {
		l := &w.world.Route.Slices[i]
		if l.Namespace != s.Namespace || l.Labels[discoveryv1.LabelServiceName] != s.Name {
			continue
		}
		sliceCount++
		for j := range l.Endpoints {
			e := &l.Endpoints[j]
			all = append(all, e)
			if isReady(e) {
				ready = append(ready, e)
			}
		}
	}
	return sliceCount, all, ready
}

// explainNoEndpoints returns a Finding if the EndpointSlices of Service s contain no ready
// endpoint. It returns nil if there is a ready endpoint, or if EndpointSlices could not be read.
func (w trafficExplainer) explainNoEndpoints(s *corev1.Service) []Finding {
	if !w.world.hasList(Slices) {
		return nil
	}
	n, all, ready := w.slicesOf(s)
	if len(ready) > 0 {
		return nil
	}
	f := Finding{Object: objectName("service", s), What: "has no ready endpoint", Since: timeOrNil(s.CreationTimestamp),
		Mend: []string{kctlCommand(s, "get endpointslices -l %s=%s", discoveryv1.LabelServiceName, s.Name)}}
	switch {
	case n == 0 && len(s.Spec.Selector) == 0:
		f.Because = "it has no selector, and nobody has made an EndpointSlice for it"
	case n == 0:
		f.Because = "it has no EndpointSlice yet"
	case len(all) == 0:
		f.Because = fmt.Sprintf("its %s no endpoints", countHave(n, "EndpointSlice"))
	default:
		f.Because = fmt.Sprintf("none of the %s in its %s is ready", countNoun(len(all), "endpoint"),
			countNoun(n, "EndpointSlice"))
	}
	return []Finding{f}
}

func countHave(n int, thing string) string {
	if n == 1 {
		return thing + " has"
	}
	return countNoun(n, thing) + " have"
}

// explainNearEndpoints returns a Finding for ready nodes that Service s does not serve from a near
// endpoint. With internalTrafficPolicy Local, these are the nodes without a ready endpoint. With
// topology hints, these are the nodes for which no endpoint is hinted. It returns nil if there are
// no such nodes.
func (w trafficExplainer) explainNearEndpoints(s *corev1.Service) []Finding {
	if !w.world.hasList(Slices) || !w.world.hasList(Nodes) {
		return nil
	}
	_, _, ready := w.slicesOf(s)
	if len(ready) == 0 {
		return nil
	}
	if p := s.Spec.InternalTrafficPolicy; p != nil && *p == corev1.ServiceInternalTrafficPolicyLocal {
		bare := w.nodesWithout(func(n *corev1.Node) bool {
			return slices.ContainsFunc(ready, func(e *discoveryv1.Endpoint) bool {
				return e.NodeName != nil && *e.NodeName == n.Name
			})
		})
		if len(bare) == 0 {
			return nil
		}
		return []Finding{{Object: objectName("service", s),
			What: fmt.Sprintf("is not served on %s", countNoun(len(bare), "node")),
			Because: "internalTrafficPolicy Local keeps traffic on the node that it comes from, and " +
				"there is no ready " +
				"endpoint on: " + strings.Join(boundList(bare), ", "),
			Mend: []string{kctlCommand(s, `patch service %s -p '{"spec":{"internalTrafficPolicy":"Cluster"}}'`,
				s.Name)}}}
	}
	zoned := !slices.ContainsFunc(ready, func(e *discoveryv1.Endpoint) bool {
		return e.Hints == nil ||
			len(e.Hints.ForZones) == 0
	})
	if !zoned {
		return nil
	}
	bare := w.nodesWithout(func(n *corev1.Node) bool {
		zone := n.Labels[corev1.LabelTopologyZone]
		return slices.ContainsFunc(ready, func(e *discoveryv1.Endpoint) bool {
			return slices.ContainsFunc(e.Hints.ForZones, func(z discoveryv1.ForZone) bool { return z.Name == zone }) ||
				slices.ContainsFunc(e.Hints.ForNodes, func(f discoveryv1.ForNode) bool { return f.Name == n.Name })
		})
	})
	if len(bare) == 0 {
		return nil
	}
	return []Finding{{Object: objectName("service", s),
		What: fmt.Sprintf("keeps no traffic near on %s", countNoun(len(bare), "node")),
		Because: "no endpoint is hinted for the zone of: " + strings.Join(boundList(bare), ", ") +
			"; traffic from there goes to all endpoints",
		Mend: []string{"kctl get nodes -L " + corev1.LabelTopologyZone}}}
}

// nodesWithout returns the names of the ready nodes for which served returns false. The zone of a
// node is added to its name.
func (w trafficExplainer) nodesWithout(served func(n *corev1.Node) bool) []string {
	var out []string
	for i := range w.world.Nodes {
		n := &w.world.Nodes[i]
		if !api.IsNodeReady(n) || served(n) {
			continue
		}
		text := n.Name
		if zone := n.Labels[corev1.LabelTopologyZone]; zone != "" {
			text += " (zone " + zone + ")"
		}
		out = append(out, text)
	}
	return out
}

// explainEndpointSlice returns a Finding for an EndpointSlice that is being deleted, has no Service
// label, belongs to a missing Service, or has no ready endpoint. It returns nil otherwise.
func (w trafficExplainer) explainEndpointSlice(l *discoveryv1.EndpointSlice) []Finding {
	if f := explainDeletion(l, "endpointslice"); f != nil {
		return []Finding{*f}
	}
	service := l.Labels[discoveryv1.LabelServiceName]
	if service == "" {
		return []Finding{{Object: objectName("endpointslice", l), What: "belongs to no Service",
			Since:   timeOrNil(l.CreationTimestamp),
			Because: "it has no label " + discoveryv1.LabelServiceName,
			Mend: []string{kctlCommand(l, "label endpointslice %s %s=SERVICE", l.Name,
				discoveryv1.LabelServiceName)}}}
	}
	if w.world.hasList(Services) && !slices.ContainsFunc(w.world.Route.Services, func(s corev1.Service) bool {
		return s.Name == service && s.Namespace == l.Namespace
	}) {
		return []Finding{{Object: objectName("endpointslice", l), What: "belongs to a Service that is not there",
			Since:   timeOrNil(l.CreationTimestamp),
			Because: fmt.Sprintf("the namespace has no Service %s", shellWord(service)),
			Mend:    []string{kctlCommand(l, "get services"), kctlCommand(l, "delete endpointslice %s", l.Name)}}}
	}
	if slices.ContainsFunc(l.Endpoints, func(e discoveryv1.Endpoint) bool { return isReady(&e) }) {
		return nil
	}
	f := Finding{Object: objectName("endpointslice", l), What: "has no ready endpoint",
		Since:   timeOrNil(l.CreationTimestamp),
		Because: "it has no endpoints", Mend: []string{kctlCommand(l, "why service/%s", service)}}
	if len(l.Endpoints) > 0 {
		f.Because = fmt.Sprintf("none of its %s is ready", countNoun(len(l.Endpoints), "endpoint"))
	}
	for i := range l.Endpoints {
		e := &l.Endpoints[i]
		text := strings.Join(boundList(slices.Clone(e.Addresses)), ", ")
		if e.TargetRef != nil {
			text = strings.ToLower(e.TargetRef.Kind) + " " + e.TargetRef.Name + ", " + text
		}
		switch {
		case e.Conditions.Terminating != nil && *e.Conditions.Terminating:
			text += ": is going"
		default:
			text += ": is not ready"
		}
		f.Details = append(f.Details, text)
	}
	f.Details = boundList(f.Details)
	return []Finding{f}
}
