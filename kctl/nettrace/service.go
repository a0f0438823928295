package nettrace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// backend is an address and a port to which the connection may be sent, such as an endpoint of a
// Service.
type backend struct {
	ip    netip.Addr
	port  int32
	proto corev1.Protocol
	node  string
	pod   *corev1.Pod // nil if no pod with that address was read
}

// traceToService traces a connection to a Service: its port, its endpoints, the routes and the
// NetworkPolicies. If host is not empty, only the endpoints with that hostname count. kind is the
// kind of address by which the Service was reached, such as a result of addressKind. It is empty if
// the Service was reached by its name.
func (x *tracer) traceToService(svc *corev1.Service, host, kind string) {
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		x.addStep(Step{Name: "address",
			Says: fmt.Sprintf("service %s/%s is another name for %s: the connection goes where that leads",
				svc.Namespace, svc.Name, svc.Spec.ExternalName)})
		return
	}
	headless := svc.Spec.ClusterIP == corev1.ClusterIPNone || svc.Spec.ClusterIP == ""
	if kind == "" {
		says := strings.Join(svc.Spec.ClusterIPs, ", ")
		if headless {
			says = "the addresses of its pods: the service is headless, no rule stands between"
		}
		x.addStep(Step{Name: "address", Says: says})
	}
	port, ok := x.findServicePort(svc, headless)
	if !ok {
		return
	}
	all, ready := x.serviceEndpoints(svc, port, host)
	if !x.addEndpointStep(svc, host, all, ready) {
		return
	}
	if local := svc.Spec.InternalTrafficPolicy; local != nil && *local == corev1.ServiceInternalTrafficPolicyLocal &&
		kind != "an external address" && !headless {
		ready = slices.DeleteFunc(ready, func(b backend) bool { return b.node != x.Pod.Spec.NodeName })
		if len(ready) == 0 {
			x.addStep(Step{Name: "endpoint", Stops: true,
				Says: fmt.Sprintf("internalTrafficPolicy is Local, and node %s has no endpoint that is ready",
					x.Pod.Spec.NodeName),
				Mend: []string{fmt.Sprintf(`kctl -n %s patch service %s -p `+
					`'{"spec":{"internalTrafficPolicy":"Cluster"}}'`, svc.Namespace, svc.Name)}})
			return
		}
	}
	x.traceToBackends(ready)
}

// findServicePort adds a step for the port of svc that matches the target's port and protocol, and
// returns the port and true. If no port matches and headless is true, it returns nil and true. If
// no port matches and headless is false, it adds a failed step and returns nil and false.
func (x *tracer) findServicePort(svc *corev1.Service, headless bool) (*corev1.ServicePort, bool) {
	var have []string
	for i := range svc.Spec.Ports {
		p := &svc.Spec.Ports[i]
		proto := p.Protocol
		if proto == "" {
			proto = corev1.ProtocolTCP
		}
		if (x.target.Port == 0 || p.Port == x.target.Port) && (x.target.Proto == "" || proto == x.target.Proto) {
			text := fmt.Sprintf("%d/%s leads to port %s of its pods", p.Port, proto, p.TargetPort.String())
			if p.TargetPort.String() == "0" || p.TargetPort.String() == "" {
				text = fmt.Sprintf("%d/%s leads to the same port of its pods", p.Port, proto)
			}
			if !headless {
				x.addStep(Step{Name: "rule", Says: text})
			}
			return p, true
		}
		have = append(have, fmt.Sprintf("%d/%s", p.Port, proto))
	}
	if headless { // a headless Service has no proxy, so the ports of the pods count
		return nil, true
	}
	return nil,
		x.addStep(Step{Name: "rule", Stops: true,
			Says: fmt.Sprintf("service %s/%s has no port %s: nobody answers there", svc.Namespace, svc.Name,
				x.wantedPortText()),
			Details: []string{"it has " + strings.Join(have, ", ")},
			Mend:    []string{fmt.Sprintf("kctl -n %s edit service/%s", svc.Namespace, svc.Name)}})
}

func (x *tracer) wantedPortText() string {
	s := ""
	if x.target.Port != 0 {
		s = fmt.Sprint(x.target.Port)
	}
	return s + "/" + string(x.targetProtocol())
}

// serviceEndpoints returns all endpoints of svc for a port, and the endpoints that receive traffic.
// The latter are the ready endpoints, or the serving terminating endpoints if no endpoint is ready.
// A nil port stands for the target's port. If host is not empty, only endpoints with that hostname
// are returned.
func (x *tracer) serviceEndpoints(svc *corev1.Service, port *corev1.ServicePort, host string) (all, ready []backend) {
	var last []backend // terminating endpoints that still serve; used if no endpoint is ready
	for i := range x.Slices {
		s := &x.Slices[i]
		if s.Namespace != svc.Namespace || s.Labels[discoveryv1.LabelServiceName] != svc.Name {
			continue
		}
		number, proto := x.target.Port, x.targetProtocol()
		if port != nil {
			p := portOf(s, port.Name)
			if p == nil || p.Port == nil {
				continue
			}
			number = *p.Port
			if p.Protocol != nil {
				proto = *p.Protocol
			}
		}
		for _, e := range s.Endpoints {
			if host != "" && (e.Hostname == nil || *e.Hostname != host) {
				continue
			}
			for _, b := range x.endpointBackends(e, s.Namespace, number, proto) {
				all = append(all, b)
				switch {
				case e.Conditions.Ready == nil || *e.Conditions.Ready:
					ready = append(ready, b)
				case e.Conditions.Serving != nil && *e.Conditions.Serving && e.Conditions.Terminating != nil &&
					*e.Conditions.Terminating:
					last = append(last, b)
				}
			}
		}
	}
	if len(ready) == 0 {
		ready = last
	}
	return all, ready
}

func portOf(s *discoveryv1.EndpointSlice, name string) *discoveryv1.EndpointPort {
	for i := range s.Ports {
		if n := s.Ports[i].Name; n == nil && name == "" || n != nil && *n == name {
			return &s.Ports[i]
		}
	}
	return nil
}

func (x *tracer) endpointBackends(e discoveryv1.Endpoint, namespace string, port int32, proto corev1.Protocol) (
	out []backend,
) {
	for _, a := range e.Addresses {
		ip, err := netip.ParseAddr(a)
		if err != nil {
			continue
		}
		b := backend{ip: ip, port: port, proto: proto}
		if e.NodeName != nil {
			b.node = *e.NodeName
		}
		for i := range x.Pods {
			if p := &x.Pods[i]; e.TargetRef != nil && e.TargetRef.Kind == "Pod" && p.Name == e.TargetRef.Name &&
				p.Namespace == namespace {
				b.pod = p
			}
		}
		out = append(out, b)
	}
	return out
}

// addEndpointStep adds the step that lists the endpoints of svc. all and ready are the results of
// serviceEndpoints for host. It returns false if the step fails, because no endpoint is ready or
// EndpointSlices could not be read, and true otherwise.
func (x *tracer) addEndpointStep(svc *corev1.Service, host string, all, ready []backend) bool {
	if slices.Contains(x.Unread, Slices) {
		return x.addStep(Step{Name: "endpoint", Stops: true,
			Says: "endpointslices may not be read, so that it is not known who answers"})
	}
	s := Step{Name: "endpoint"}
	for _, b := range ready[:min(len(ready), maxListed)] {
		s.Details = append(s.Details, x.backendText(b))
	}
	if more := len(ready) - maxListed; more > 0 {
		s.Details = append(s.Details, fmt.Sprintf("and %d more", more))
	}
	switch {
	case len(ready) > 0:
		s.Says = fmt.Sprintf("%d of %d ready", len(ready), len(all))
	case len(all) > 0:
		s.Stops, s.Says = true, fmt.Sprintf("none of %d is ready: a connection is refused", len(all))
	case host != "":
		s.Stops, s.Says = true, fmt.Sprintf("service %s/%s has no endpoint with hostname %s", svc.Namespace,
			svc.Name, host)
	default:
		s.Stops, s.Says = true, fmt.Sprintf("service %s/%s has none: a connection is refused", svc.Namespace, svc.Name)
	}
	if s.Stops {
		s.Mend = []string{fmt.Sprintf("kctl -n %s why service/%s", svc.Namespace, svc.Name)}
	}
	return x.addStep(s)
}

// backendText returns the text for a backend in a report: its address, pod and node.
func (x *tracer) backendText(b backend) string {
	s := b.ip.String()
	if b.port != 0 {
		s = netip.AddrPortFrom(b.ip, uint16(b.port)).String()
	}
	if b.pod != nil {
		s += fmt.Sprintf(" pod %s/%s", b.pod.Namespace, b.pod.Name)
	}
	if n := x.nodeOf(b); n != "" {
		s += " on node " + n
	}
	return s
}

func (x *tracer) nodeOf(b backend) string {
	if b.node == "" && b.pod != nil {
		return b.pod.Spec.NodeName
	}
	return b.node
}
