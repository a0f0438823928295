// Package proxy makes Services reachable on a worker: a pure model of what
// traffic goes where, computed from Services and EndpointSlices, and nftables
// rules that express it as maps, so that the cost of a packet does not grow with
// the number of Services.
package proxy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// Frontend is where clients knock.
type Frontend struct {
	IP    netip.Addr // invalid for a node port
	Proto string     // "tcp", "udp", "sctp"
	Port  int32
}

// Backend is one pod's port.
type Backend struct {
	IP    netip.Addr
	Port  int32
	Local bool // on this node
}

// Port is one port of one Service as this node serves it.
type Port struct {
	Name     string // "namespace/service:port", for comments
	ID       string // stable and short, names the chains
	Proto    string
	Internal []Frontend // cluster traffic
	External []Frontend // traffic from outside: node port, external and load balancer addresses
	// Cluster are the backends of internal traffic, Outside those of external traffic.
	Cluster []Backend
	Outside []Backend
	// Serving are all that may still answer what was sent to them, those that terminate too.
	Serving []Backend
	// KeepSource leaves the client's address on external traffic (externalTrafficPolicy Local).
	KeepSource bool
	Affinity   int32 // seconds for which a client stays with a backend; 0 = none
}

// Model is everything this node's rules say.
type Model map[string]Port // by ID

// Place is where a node stands: hints of endpoints name nodes and zones.
type Place struct{ Node, Zone string }

// Compute derives the model. Pure: same input, same output.
func Compute(services []*v1.Service, slicesOf []*discoveryv1.EndpointSlice, at Place) Model {
	byService := map[string][]*discoveryv1.EndpointSlice{}
	for _, s := range slicesOf {
		if s.AddressType == discoveryv1.AddressTypeIPv4 {
			key := s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName]
			byService[key] = append(byService[key], s)
		}
	}
	m := Model{}
	for _, svc := range services {
		if svc.Spec.Type == v1.ServiceTypeExternalName || svc.Spec.ClusterIP == v1.ClusterIPNone || svc.Spec.ClusterIP == "" {
			continue
		}
		for _, p := range svc.Spec.Ports {
			port := servicePort(svc, p, byService[svc.Namespace+"/"+svc.Name], at)
			m[port.ID] = port
		}
	}
	return m
}

func servicePort(svc *v1.Service, p v1.ServicePort, parts []*discoveryv1.EndpointSlice, at Place) Port {
	proto := strings.ToLower(string(cmp.Or(p.Protocol, v1.ProtocolTCP)))
	out := Port{Name: fmt.Sprintf("%s/%s:%s", svc.Namespace, svc.Name, cmp.Or(p.Name, fmt.Sprint(p.Port))), Proto: proto}
	sum := sha256.Sum256([]byte(out.Name + proto))
	out.ID = hex.EncodeToString(sum[:6])
	if ip, err := netip.ParseAddr(svc.Spec.ClusterIP); err == nil {
		out.Internal = append(out.Internal, Frontend{ip, proto, p.Port})
	}
	outside := slices.Clone(svc.Spec.ExternalIPs)
	for _, in := range svc.Status.LoadBalancer.Ingress {
		outside = append(outside, in.IP)
	}
	for _, a := range outside {
		if ip, err := netip.ParseAddr(a); err == nil && ip.Is4() {
			out.External = append(out.External, Frontend{ip, proto, p.Port})
		}
	}
	if p.NodePort != 0 {
		out.External = append(out.External, Frontend{Proto: proto, Port: p.NodePort})
	}
	if svc.Spec.SessionAffinity == v1.ServiceAffinityClientIP {
		out.Affinity = 10800
		if c := svc.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			out.Affinity = *c.ClientIP.TimeoutSeconds
		}
	}
	found := endpointsOf(p.Name, parts, at)
	out.Serving = found.serving()
	out.Cluster = found.cluster()
	out.Outside = out.Cluster
	if t := svc.Spec.InternalTrafficPolicy; t != nil && *t == v1.ServiceInternalTrafficPolicyLocal {
		out.Cluster = found.local()
	}
	if svc.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
		out.Outside, out.KeepSource = found.local(), true
	}
	return out
}
