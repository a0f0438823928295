// Package nettrace traces a connection from a pod through the cluster's network: DNS, Service,
// endpoints, routes, NetworkPolicies and ingress proxies. The result is a list of steps that ends
// at the step that fails. The package does no I/O: the caller reads the objects.
package nettrace

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"keelson.dev/keelson/controlplane/api/balancer"
)

// World contains the objects that the caller read for one trace. The content of a list is not known
// if Unread contains its name, because it could not be read.
type World struct {
	Domain string // DNS domain of the cluster
	Unread []string

	Pod        *corev1.Pod // the pod that opens the connection
	Nodes      []corev1.Node
	Namespaces []corev1.Namespace
	Services   []corev1.Service
	Slices     []discoveryv1.EndpointSlice // EndpointSlices of the Services to which the target may resolve
	Pods       []corev1.Pod                // pods of the endpoints, and the pod with the target's address
	Policies   []networkingv1.NetworkPolicy
	Ranges     []networkingv1.ServiceCIDR // IP ranges from which Services get their addresses

	// Reach reports whether the pod's node can reach a target outside the cluster. It is nil if the
	// node was not asked or did not respond.
	Reach *Reach

	Entrances *Entrances // nil if Ingress and Gateway API objects were not read
}

// Names of the lists in World. World.Unread contains the names of the lists that could not be read.
const (
	Nodes      = "nodes"
	Namespaces = "namespaces"
	Services   = "services"
	Slices     = "endpointslices"
	Pods       = "pods"
	Policies   = "networkpolicies"
	Ranges     = "servicecidrs"
)

// Reach reports whether a node can resolve a host and has a route to it. It is the response body of
// the node agent at /keelson/reach.
type Reach struct {
	Addresses  []string `json:"addresses"`
	Unresolved string   `json:"unresolved"`
	NoRoute    string   `json:"noRoute"`
}

// Step is one hop or check of a trace, such as the DNS lookup or the NetworkPolicies, with its
// result.
type Step struct {
	// Name is "pod", "name", "address", "rule", "endpoint", "route" or "policy". For a target
	// behind an Ingress or a Gateway, it is also "entrance", "listener", "match", "backend" or
	// "proxy".
	Name    string   `json:"name"`
	Says    string   `json:"says"`
	Stops   bool     `json:"stops,omitempty"`
	Partly  bool     `json:"partly,omitempty"` // the step fails for some of the endpoints only
	Details []string `json:"details,omitempty"`
	Mend    []string `json:"mend,omitempty"` // commands that repair the problem, in order
}

// Report contains the steps of a trace. If a step fails, it is the last step.
type Report struct {
	From   string   `json:"from"`
	To     string   `json:"to"`
	Steps  []Step   `json:"steps"`
	Stops  string   `json:"stops,omitempty"`  // name of the step that fails; empty if the connection is possible
	Partly bool     `json:"partly,omitempty"` // some connections succeed and some fail
	Unread []string `json:"unread,omitempty"`
}

// Target is the destination of the traced connection.
type Target struct {
	Host  string
	Port  int32           // 0 selects any port
	Proto corev1.Protocol // empty selects any protocol of the Service's port, and TCP elsewhere

	Scheme string // "http" or "https" if the target is a URL; otherwise empty
	Path   string // path and query if the target is a URL
}

// maxListed is the maximum number of endpoints or ingress proxies that a step or a report lists
// individually.
const maxListed = 10

// TargetForms describes, for help texts and errors, the forms that ParseTarget accepts.
const TargetForms = "SERVICE, SERVICE.NAMESPACE, svc/NAME, a host name or an ADDRESS, each with :PORT and /PROTOCOL " +
	"if need be, or a URL"

// ParseTarget parses HOST[:PORT][/PROTOCOL], or a URL http[s]://HOST[:PORT][/PATH]. HOST may also
// be svc/NAME or service/NAME. An IPv6 address with a port requires brackets. The error names the
// invalid part.
func ParseTarget(s string) (Target, error) {
	if strings.Contains(s, "://") {
		return parseURL(s)
	}
	t := Target{Host: s}
	rest, proto, has := strings.Cut(s, "/")
	if has && rest != "svc" && rest != "service" && rest != "services" {
		t.Proto = corev1.Protocol(strings.ToUpper(proto))
		if t.Proto != corev1.ProtocolTCP && t.Proto != corev1.ProtocolUDP && t.Proto != corev1.ProtocolSCTP {
			return t, fmt.Errorf("target %q: unknown protocol %q (tcp, udp, sctp): want %s", s, proto, TargetForms)
		}
		t.Host = rest
	} else if has {
		t.Host = proto
	}
	if _, err := netip.ParseAddr(t.Host); err == nil {
		return t, nil
	}
	if i := strings.LastIndexByte(t.Host, ':'); i >= 0 {
		var port uint16
		if _, err := fmt.Sscanf(t.Host[i+1:], "%d", &port); err != nil || port == 0 ||
			fmt.Sprint(port) != t.Host[i+1:] {
			return t, fmt.Errorf("target %q: invalid port %q: want a number from 1 to 65535", s, t.Host[i+1:])
		}
		t.Host, t.Port = strings.Trim(t.Host[:i], "[]"), int32(port)
	}
	if t.Host == "" {
		return t, fmt.Errorf("target %q has no host", s)
	}
	return t, nil
}

func parseURL(s string) (t Target, err error) {
	u, err := url.Parse(s)
	if err != nil {
		return t, fmt.Errorf("target %q is not a URL: %w", s, err)
	}
	t = Target{Scheme: strings.ToLower(u.Scheme), Host: u.Hostname(), Path: u.RequestURI(), Proto: corev1.ProtocolTCP}
	switch {
	case t.Scheme != "http" && t.Scheme != "https":
		return t, fmt.Errorf("target %q: unknown scheme %q: want http or https", s, u.Scheme)
	case t.Host == "":
		return t, fmt.Errorf("target %q has no host", s)
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[t.Scheme]
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return t, fmt.Errorf("target %q: invalid port %q: want a number from 1 to 65535", s, port)
	}
	t.Port = int32(n)
	return t, nil
}

// tracer holds the objects, the target and the report of one trace while it is built.
type tracer struct {
	*World
	target Target
	report Report
}

// proxyTracer traces connections that go through an ingress proxy: it finds the proxies and their
// rules.
type proxyTracer struct {
	trace *tracer
}

func (t *tracer) proxies() proxyTracer { return proxyTracer{t} }

// Trace traces a connection from w.Pod to t, and returns the steps up to the first step that fails.
func Trace(w *World, t Target) Report {
	x := &tracer{World: w, target: t}
	x.report = Report{From: x.sourceText(), To: t.String(), Steps: []Step{}, Unread: w.Unread}
	x.runTrace()
	return x.report
}

// String returns the target in a form that ParseTarget accepts.
func (t Target) String() string {
	s := t.Host
	if t.Scheme != "" {
		return t.Scheme + "://" + net.JoinHostPort(t.Host, fmt.Sprint(t.Port)) + t.Path
	}
	if t.Port != 0 {
		if strings.Contains(s, ":") {
			s = "[" + s + "]"
		}
		s = fmt.Sprintf("%s:%d", s, t.Port)
	}
	if t.Proto != "" {
		s += "/" + strings.ToLower(string(t.Proto))
	}
	return s
}

func (x *tracer) sourceText() string {
	s := "pod " + x.Pod.Namespace + "/" + x.Pod.Name
	switch {
	case x.Pod.Status.PodIP != "" && x.Pod.Spec.HostNetwork:
		s += fmt.Sprintf(" (in the network of node %s, %s)", x.Pod.Spec.NodeName, x.Pod.Status.PodIP)
	case x.Pod.Status.PodIP != "":
		s += fmt.Sprintf(" (%s on node %s)", x.Pod.Status.PodIP, x.Pod.Spec.NodeName)
	}
	return s
}

// addStep appends s to the report. It returns false if s is a failed step, which ends the trace,
// and true otherwise.
func (x *tracer) addStep(s Step) bool {
	x.report.Steps = append(x.report.Steps, s)
	x.report.Partly = x.report.Partly || s.Partly
	if s.Stops {
		x.report.Stops = s.Name
	}
	return !s.Stops
}

// runTrace runs the trace. Depending on the target's host, it continues at an IP address, at an
// ingress proxy or at a Service.
func (x *tracer) runTrace() {
	if x.Pod.Status.PodIP == "" {
		x.addStep(Step{Name: "pod", Stops: true, Says: "it has no address: it does not run",
			Mend: []string{fmt.Sprintf("kctl -n %s why pod/%s", x.Pod.Namespace, x.Pod.Name)}})
		return
	}
	if ip, err := netip.ParseAddr(x.target.Host); err == nil {
		x.traceToAddress(ip.Unmap())
		return
	}
	if all := x.proxies().listHostObjects(x.targetHost()); len(all) > 0 && len(TargetServices(x.World, x.target)) == 0 {
		x.proxies().traceFromHostObjects(all)
		return
	}
	if svc, host, ok := x.resolveTarget(); ok {
		x.traceToService(svc, host, "")
	}
}

// traceToAddress traces a connection to an IP address. The address may belong to a Service, a pod
// or a node, or be outside the cluster.
func (x *tracer) traceToAddress(ip netip.Addr) {
	for i := range x.Services {
		svc := &x.Services[i]
		if what := addressKind(svc, ip); what != "" {
			says := fmt.Sprintf("%s is %s of service %s/%s", ip, what, svc.Namespace, svc.Name)
			if node := svc.Annotations[balancer.AnnouncedBy]; node != "" && what == balancersAddress {
				says += fmt.Sprintf("; for clients outside node %s answers for it, and clients inside never "+
					"leave their own", node)
			}
			x.addStep(Step{Name: "address", Says: says})
			if d := x.proxies().entryPointWithAddress(); d != nil {
				x.proxies().traceThroughEntryPoint(hostObject{entry: d})
			} else {
				x.traceToService(svc, "", what)
			}
			return
		}
	}
	for i := range x.Pods {
		p := &x.Pods[i]
		if !p.Spec.HostNetwork && slices.Contains(podAddresses(p), ip.String()) {
			x.addStep(Step{Name: "address", Says: fmt.Sprintf("%s is pod %s/%s", ip, p.Namespace, p.Name)})
			x.traceToBackends([]backend{{ip: ip, port: x.target.Port, proto: x.targetProtocol(), pod: p}})
			return
		}
	}
	for _, n := range x.Nodes {
		for _, a := range n.Status.Addresses {
			if a.Address == ip.String() {
				x.addStep(Step{Name: "address", Says: fmt.Sprintf("%s is node %s", ip, n.Name)})
				x.traceToBackends([]backend{{ip: ip, port: x.target.Port, proto: x.targetProtocol()}})
				return
			}
		}
	}
	if stop := x.unknownAddressStep(ip); stop != nil {
		x.addStep(*stop)
		return
	}
	if r := x.Reach; r != nil && r.NoRoute != "" {
		x.addStep(x.noRouteStep(ip.String()))
		return
	}
	says := fmt.Sprintf("%s is no service, pod or node that is known", ip)
	if len(x.Unread) > 0 {
		says += " to whom may read as much as you"
	}
	x.addStep(Step{Name: "address", Says: says +
		": the connection leaves the cluster, with the node's address as its source"})
	x.traceToBackends([]backend{{ip: ip, port: x.target.Port, proto: x.targetProtocol()}})
}

func (x *tracer) targetProtocol() corev1.Protocol {
	if x.target.Proto == "" {
		return corev1.ProtocolTCP
	}
	return x.target.Proto
}

const balancersAddress = "the load balancer's address"

// addressKind returns the kind of ip, an address of svc, as a text such as "the cluster address".
// It returns "" if ip is not an address of svc.
func addressKind(svc *corev1.Service, ip netip.Addr) string {
	is := func(s string) bool {
		a, err := netip.ParseAddr(s)
		return err == nil && a.Unmap() == ip
	}
	for _, a := range append(slices.Clone(svc.Spec.ClusterIPs), svc.Spec.ClusterIP) {
		if is(a) {
			return "the cluster address"
		}
	}
	if slices.ContainsFunc(svc.Spec.ExternalIPs, is) {
		return "an external address"
	}
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if is(in.IP) {
			return balancersAddress
		}
	}
	return ""
}

func podAddresses(p *corev1.Pod) (out []string) {
	for _, ip := range p.Status.PodIPs {
		out = append(out, ip.IP)
	}
	if len(out) == 0 && p.Status.PodIP != "" {
		out = append(out, p.Status.PodIP)
	}
	return out
}

// TargetServices returns the Services to which the target's host or address may refer. The caller
// reads the EndpointSlices of these Services before it calls Trace.
func TargetServices(w *World, t Target) (out []corev1.Service) {
	x := &tracer{World: w, target: t}
	ip, err := netip.ParseAddr(t.Host)
	for _, svc := range w.Services {
		if err == nil {
			if addressKind(&svc, ip.Unmap()) != "" {
				out = append(out, svc)
			}
			continue
		}
		for _, full := range x.candidateNames(strings.ToLower(strings.TrimSuffix(t.Host, "."))) {
			if name, namespace, _, ok := x.splitServiceName(full); ok && name == svc.Name &&
				namespace == svc.Namespace {
				out = append(out, svc)
				break
			}
		}
	}
	return out
}
