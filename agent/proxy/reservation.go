package proxy

import (
	"net"
	"net/netip"
	"time"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// disconnectedAfter is the time without a session to the control plane after which the node removes
// the Service rules at addresses of replicas. Such rules could prevent the node from reaching the
// replicas.
const disconnectedAfter = time.Minute

// replicaAddresses returns the known addresses and ports on which replicas of the control plane
// listen, or nil if ControlPlane is nil.
func (p *Proxy) replicaAddresses() []netip.AddrPort {
	if p.ControlPlane == nil {
		return nil
	}
	return p.ControlPlane.ReplicaAddresses()
}

// computeReserved returns the addresses and ports at which this node currently must not let any
// Service capture traffic. It uses objects, this machine's addresses, and the known addresses of
// control-plane replicas.
func (p *Proxy) computeReserved(objects agent.Objects) *servicemodel.Reserved {
	x := servicemodel.ReservedInputs{Cluster: objects.Cluster(), Peers: objects.Peers(), Listens: p.ListenPorts,
		Own: machineAddresses(), Whole: p.Mode == ModeIPVS}
	x.Node, _ = objects.Node()
	x.Replicas = p.replicaAddresses()
	if p.ControlPlane != nil {
		x.Detached = p.ControlPlane.Disconnected() >= disconnectedAfter
	}
	return x.ComputeReserved()
}

// machineAddresses returns the addresses of this machine's network interfaces, for ReservedInputs.
// It omits loopback and link-local addresses, and the interface ipvsLink, which holds addresses of
// Services. It returns nil if the interfaces cannot be listed. In that case, only the addresses in
// the Node object are reserved.
func machineAddresses() []netip.Addr {
	links, err := net.Interfaces()
	if err != nil {
		return nil
	}
	var out []netip.Addr
	for _, l := range links {
		if l.Name == ipvsLink {
			continue
		}
		addrs, err := l.Addrs()
		if err != nil {
			continue // the interface was removed with its pod
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && !p.Addr().IsLoopback() &&
				!p.Addr().IsLinkLocalUnicast() {
				out = append(out, p.Addr().Unmap())
			}
		}
	}
	return out
}
