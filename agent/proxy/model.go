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

// Compute derives the model. Pure: same input, same output.
func Compute(services []*v1.Service, slicesOf []*discoveryv1.EndpointSlice, node string) Model {
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
			port := servicePort(svc, p, byService[svc.Namespace+"/"+svc.Name], node)
			m[port.ID] = port
		}
	}
	return m
}

func servicePort(svc *v1.Service, p v1.ServicePort, parts []*discoveryv1.EndpointSlice, node string) Port {
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
	all, serving := backends(p.Name, parts, node)
	out.Serving = serving
	out.Cluster, out.Outside = all, all
	if t := svc.Spec.InternalTrafficPolicy; t != nil && *t == v1.ServiceInternalTrafficPolicyLocal {
		out.Cluster = localOnly(all)
	}
	if svc.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
		out.Outside, out.KeepSource = localOnly(all), true
	}
	return out
}

// backends are the endpoints that take traffic: the ready ones; where there is
// none, those that terminate but still serve. serving are both.
func backends(portName string, parts []*discoveryv1.EndpointSlice, node string) (routed, serving []Backend) {
	var ready, ending []Backend
	for _, s := range parts {
		var port int32
		for _, p := range s.Ports {
			if p.Port != nil && (p.Name == nil && portName == "" || p.Name != nil && *p.Name == portName) {
				port = *p.Port
			}
		}
		if port == 0 {
			continue
		}
		for _, e := range s.Endpoints {
			for _, a := range e.Addresses {
				ip, err := netip.ParseAddr(a)
				if err != nil {
					continue
				}
				b := Backend{ip, port, e.NodeName != nil && *e.NodeName == node}
				switch c := e.Conditions; {
				case c.Ready == nil || *c.Ready:
					ready = append(ready, b)
				case c.Serving != nil && *c.Serving && c.Terminating != nil && *c.Terminating:
					ending = append(ending, b)
				}
			}
		}
	}
	serving = distinct(slices.Concat(ready, ending))
	if len(ready) == 0 {
		return serving, serving
	}
	return distinct(ready), serving
}

func distinct(b []Backend) []Backend {
	slices.SortFunc(b, func(a, b Backend) int { return cmp.Or(a.IP.Compare(b.IP), cmp.Compare(a.Port, b.Port)) })
	return slices.CompactFunc(b, func(a, b Backend) bool { return a.IP == b.IP && a.Port == b.Port })
}

func localOnly(all []Backend) []Backend {
	var out []Backend
	for _, b := range all {
		if b.Local {
			out = append(out, b)
		}
	}
	return out
}
