package servicemodel

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// defaultAffinity is the duration of session affinity in seconds, for a Service that specifies
// none.
const defaultAffinity = 10800

// computePorts returns the Ports of a Service: one for each of its ports in each address family in
// which it has a cluster IP. parts are its EndpointSlices.
func computePorts(
	svc *v1.Service, parts map[string]*discoveryv1.EndpointSlice, at Location, reserved *Reserved,
) []*Port {
	if svc.Spec.Type == v1.ServiceTypeExternalName {
		return nil
	}
	var out []*Port
	for _, ip := range clusterIPs(svc) {
		common := findExternalAddresses(svc, ip.Is6())
		for _, p := range svc.Spec.Ports {
			if !isValidPort(p) {
				continue // an invalid Service must not break the rules of all Services
			}
			out = append(out, servicePort(svc, p, ip, common, parts, at, reserved))
		}
	}
	return out
}

// isValidPort reports whether rules can be written for a Service port. The API server has already
// validated the port; this is a second check.
func isValidPort(p v1.ServicePort) bool {
	switch p.Protocol {
	case "", v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP:
		return p.Port > 0 && p.Port <= 65535 && p.NodePort >= 0 && p.NodePort <= 65535
	}
	return false
}

// clusterIPs returns the cluster IPs of a Service, at most one per family. A headless Service has
// none.
func clusterIPs(svc *v1.Service) []netip.Addr {
	given := svc.Spec.ClusterIPs
	if len(given) == 0 {
		given = []string{svc.Spec.ClusterIP}
	}
	var out []netip.Addr
	for _, s := range given {
		ip, err := netip.ParseAddr(s)
		if err == nil && ip.Zone() == "" && !ip.Is4In6() && !slices.ContainsFunc(out, func(o netip.Addr) bool {
			return o.Is4() == ip.Is4()
		}) {
			out = append(out, ip)
		}
	}
	return out
}

func servicePort(svc *v1.Service, p v1.ServicePort, ip netip.Addr, common externalAddresses,
	parts map[string]*discoveryv1.EndpointSlice, at Location,
	reserved *Reserved) *Port {
	proto := strings.ToLower(string(cmp.Or(p.Protocol, v1.ProtocolTCP)))
	out := &Port{Name: svc.Namespace + "/" + svc.Name + ":" + cmp.Or(p.Name, fmt.Sprint(p.Port)),
		Proto: proto, V6: ip.Is6()}
	unique := out.Name + proto
	if out.V6 {
		unique += "6"
	}
	out.ID = ShortHash(unique)
	out.Internal = []Frontend{{ip, proto, p.Port}}
	out.addExternalFrontends(p, common, reserved)
	if svc.Spec.SessionAffinity == v1.ServiceAffinityClientIP {
		out.Affinity = defaultAffinity
		if c := svc.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			out.Affinity = min(max(*c.ClientIP.TimeoutSeconds, 1), 86400)
		}
	}
	out.assignBackends(svc, findCandidates(p.Name, parts, out.V6, at))
	return out
}

// maxAddresses returns the maximum number of external addresses that are served per port of a
// Service.
func maxAddresses(svc *v1.Service) int { return max(maxServicePairs/max(len(svc.Spec.Ports), 1), 1) }

// Limits up to which the nftables maps contain all endpoints of each external frontend. Beyond
// these limits, each port of a Service has one chain with its endpoints. The kernel then stores the
// sum of frontends and endpoints, not their product.
const (
	MaxMappedFrontends = 8  // per port
	maxMappedPairs     = 64 // per Service
)

// externalAddresses are the external addresses of a Service in one address family, which all its
// ports share.
type externalAddresses struct {
	addresses  []netip.Addr        // external IPs and load balancer addresses, without duplicates
	balanced   map[netip.Addr]bool // load balancer addresses
	maxPerPort int                 // maximum number of addresses per port
	wide       bool                // Wide of the Service's Ports
	sources    *SourceRanges       // clients that may use load balancer addresses; nil = all
}

// findExternalAddresses returns the external addresses of a Service in one address family, and the
// clients that may use them.
func findExternalAddresses(svc *v1.Service, v6 bool) externalAddresses {
	out := externalAddresses{balanced: map[netip.Addr]bool{}, maxPerPort: maxAddresses(svc)}
	has := map[netip.Addr]bool{}
	add := func(s string) (netip.Addr, bool) {
		ip, err := netip.ParseAddr(s)
		if err != nil || ip.Is6() != v6 || ip.Is4In6() || ip.Zone() != "" ||
			ip.IsUnspecified() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast() {
			return ip, false
		}
		if !has[ip] {
			has[ip] = true
			out.addresses = append(out.addresses, ip)
		}
		return ip, true
	}
	for _, a := range svc.Spec.ExternalIPs {
		add(a)
	}
	if svc.Spec.Type == v1.ServiceTypeLoadBalancer {
		out.sources = newSourceRanges(sourcePrefixes(svc, v6), v6)
	}
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if in.IPMode != nil && *in.IPMode == v1.LoadBalancerIPModeProxy {
			continue // the load balancer must receive this traffic itself
		}
		if ip, ok := add(in.IP); ok {
			out.balanced[ip] = true
		}
	}
	out.wide = len(out.addresses) >= MaxMappedFrontends || len(out.addresses)*len(svc.Spec.Ports) > maxMappedPairs
	return out
}

// addExternalFrontends adds to the Port its frontends for external traffic: node port, external IPs
// and load balancer addresses. It omits reserved frontends.
func (p *Port) addExternalFrontends(port v1.ServicePort, all externalAddresses, reserved *Reserved) {
	p.Sources, p.Wide = all.sources, all.wide
	for _, ip := range all.addresses {
		if len(p.External) >= all.maxPerPort {
			break
		}
		f := Frontend{ip, p.Proto, port.Port}
		if !reserved.AllowsFrontend(f) {
			continue
		}
		p.External = append(p.External, f)
		if all.sources != nil && all.balanced[ip] {
			p.Guarded = append(p.Guarded, f)
		}
	}
	if port.NodePort != 0 {
		nodePortIP := netip.IPv4Unspecified()
		if p.V6 {
			nodePortIP = netip.IPv6Unspecified()
		}
		if f := (Frontend{nodePortIP, p.Proto, port.NodePort}); reserved.AllowsFrontend(f) {
			p.External = append(p.External, f)
		}
	}
}

// assignBackends sets the backends of the Port for internal and external traffic, and the fields
// that depend on the Service's traffic policies. found contains the usable endpoints. Equal lists
// share their memory.
func (p *Port) assignBackends(svc *v1.Service, found candidates) {
	shared := func(a, b []Backend) []Backend {
		if slices.Equal(a, b) {
			return a
		}
		return b
	}
	p.Backends.Outside = found.clusterBackends()
	p.Backends.Cluster = p.Backends.Outside
	p.Backends.Serving = shared(p.Backends.Outside, found.servingBackends())
	if t := svc.Spec.InternalTrafficPolicy; t != nil && *t == v1.ServiceInternalTrafficPolicyLocal {
		p.StayInside, p.Backends.Cluster = true, shared(p.Backends.Outside, found.localBackends())
	}
	if svc.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
		p.KeepSource, p.Backends.Here = true, shared(p.Backends.Outside, found.localBackends())
	}
}
