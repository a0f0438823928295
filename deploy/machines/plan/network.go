package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// Defaults of the agent (agent/network, agent/dns), and the fixed port of VXLAN.
const (
	vxlanPort, wireguardPort, dnsPort = 4789, 51871, 53
	// firstEphemeralPort is the first port that Linux assigns dynamically. Such a port may be free
	// again at once.
	firstEphemeralPort = 32768
)

// otherModules is the remedy for a missing kernel module.
const otherModules = "install the kernel's other modules, such as linux-modules-extra"

// checkNetwork checks the requirements of the pod network and of the Service rules.
func (j *inspector) checkNetwork(h machines.Host, f machines.Facts) {
	switch agentSetting(h, "proxy-mode") {
	case "iptables":
		for _, p := range []string{"iptables", "iptables-save", "iptables-restore"} {
			if !f.Programs[p] {
				j.addError(h.Name, "has no "+p, "install the package that has it, such as iptables, or take another agent.proxy-mode")
				break
			}
		}
	case "ipvs":
		const instead = ", or take another agent.proxy-mode"
		j.checkKernelParts(h, f, instead, "ip_vs_rr", "dummy")
		switch has, known := f.Modules["ip_vs"]; {
		case f.IPVS:
		case known && !has:
			j.checkKernelParts(h, f, instead, "ip_vs")
		default: // the kernel loads the others on demand
			j.addError(h.Name, "has not loaded ip_vs, which agent.proxy-mode ipvs needs",
				"'modprobe ip_vs' there, and a line for it in /etc/modules-load.d/ipvs.conf for the next boot"+instead)
		}
	}
	if agentSetting(h, "dns-local-address") != "none" && !f.Active[machines.Worker.UnitName()] {
		for _, at := range f.UDP {
			if at.Port() == dnsPort && at.Addr().IsUnspecified() {
				j.addWarning(h.Name, "UDP port 53 of all addresses is taken: the agent's DNS for pods may not get it at addresses of its own",
					"'ss -lunp sport = :53' there says by whom: have it listen at the addresses that it means, as bind-interfaces does of dnsmasq")
				break
			}
		}
	}
	j.checkTunnel(h, f)
}

// otherNetwork reports whether a network product attaches the pods of a machine. If any machine has
// its configuration, all will have it.
func (j *inspector) otherNetwork(h machines.Host) bool {
	_, elsewhere := h.Agent["cni-conf-dir"]
	return elsewhere || slices.ContainsFunc(slices.Collect(maps.Values(j.facts)), func(f machines.Facts) bool { return f.OtherNetwork })
}

// checkTunnel checks the requirements of the tunnel to other nodes' pods. There is no tunnel if
// another product attaches pods, but agents need WireGuard nevertheless.
func (j *inspector) checkTunnel(h machines.Host, f machines.Facts) {
	other := j.otherNetwork(h)
	switch mode := agentSetting(h, "pod-network"); mode {
	case "wireguard":
		j.checkKernelParts(h, f, ", or take another agent.pod-network", "wireguard")
		if port := portOf(h.Agent["wireguard-port"], wireguardPort); port != 0 && !other {
			j.checkUDPPort(h, f, port, "end that, or give all nodes another agent.wireguard-port")
		}
	case "", "auto", "vxlan":
		far := j.firstTunnelPeer(h, f, mode)
		if far == "" || other {
			return
		}
		j.checkKernelParts(h, f, " (pods of "+far+" are reached by VXLAN), or have agent.pod-network: routes where another network product attaches pods", "vxlan")
		j.checkUDPPort(h, f, vxlanPort, "end that: pods of "+far+" are reached by VXLAN")
	}
}

// checkKernelParts checks kernel modules. If their state is unknown, a machine with a running agent
// gets no warning, because its Node reports what is missing.
func (j *inspector) checkKernelParts(h machines.Host, f machines.Facts, more string, names ...string) {
	for _, m := range names {
		switch has, known := f.Modules[m]; {
		case known && !has:
			j.addError(h.Name, "its kernel has no "+m, otherModules+more)
		case !known && !f.Active[machines.Worker.UnitName()]:
			j.addWarning(h.Name, "does not tell whether its kernel has "+m+", which is needed", "see whether 'modprobe "+m+"' works there; else "+otherModules+more)
		}
	}
}

// checkUDPPort checks a UDP port that the kernel needs at all addresses of the machine.
func (j *inspector) checkUDPPort(h machines.Host, f machines.Facts, port int, remedy string) {
	own, err := netip.ParseAddr(h.Address)
	if err != nil || f.Active[machines.Worker.UnitName()] {
		return
	}
	found, sure := false, false
	for _, at := range f.UDP {
		if int(at.Port()) != port {
			continue
		}
		// A socket for all IPv6 addresses may include IPv4; this is not visible.
		same := at.Addr().Is4() == own.Is4()
		found = found || same || at.Addr() == netip.IPv6Unspecified()
		sure = sure || same && port < firstEphemeralPort
	}
	if !found {
		return
	}
	what := fmt.Sprintf("UDP port %d, which the tunnel to other nodes needs, is taken", port)
	remedy = fmt.Sprintf("'ss -lunp sport = :%d' there says by whom: %s", port, remedy)
	if sure {
		j.addError(h.Name, what, remedy)
	} else {
		j.addWarning(h.Name, what+", or was for a moment", remedy)
	}
}

// firstTunnelPeer returns a node with pods that this node reaches by VXLAN, or "". Like the agent
// (agent/network), it reaches a node without a tunnel if both have an address on the same link.
func (j *inspector) firstTunnelPeer(h machines.Host, f machines.Facts, mode string) string {
	own, err := netip.ParseAddr(h.Address)
	if err != nil {
		return ""
	}
	link := ""
	for _, n := range f.Networks {
		if n.Prefix.Addr() == own {
			link = n.Link
		}
	}
	if link == "" && mode != "vxlan" {
		return ""
	}
	for _, o := range j.otherNodes(h.Name) {
		near := func(n machines.Network) bool {
			return n.Link == link && !n.Prefix.IsSingleIP() && n.Prefix.Contains(o.addr)
		}
		if mode == "vxlan" || o.ours && j.addressFamilies() > 1 || !slices.ContainsFunc(f.Networks, near) {
			return o.name
		}
	}
	return ""
}

// peerNode is another node that this machine's pods communicate with.
type peerNode struct {
	name string
	addr netip.Addr
	ours bool // it is in the file
}

// otherNodes returns the nodes of the file and of the cluster with known addresses, except one.
func (j *inspector) otherNodes(but string) (out []peerNode) {
	add := func(name, address string, ours bool) {
		if a, err := netip.ParseAddr(address); err == nil && name != but {
			out = append(out, peerNode{name, a, ours})
		}
	}
	for _, h := range j.c.HostsWithRole(machines.Worker) {
		add(h.Name, h.Address, true)
	}
	for _, name := range slices.Sorted(maps.Keys(j.state.Nodes)) {
		if _, err := j.c.Host(name); err != nil {
			add(name, j.state.Nodes[name].Address, false)
		}
	}
	return out
}

// addressFamilies returns the number of address families of the file's cluster. With two, one of
// them has no routes on a link, because nodes of the file have one address each.
func (j *inspector) addressFamilies() int {
	for _, f := range j.c.Init {
		if ranges, ok := strings.CutPrefix(f, "--cluster-cidr="); ok {
			return 1 + strings.Count(ranges, ",")
		}
	}
	return 1
}

// agentSetting returns a setting of the agent that is a single text, or "".
func agentSetting(h machines.Host, key string) string {
	v := h.Agent[key]
	if len(v.Text) == 0 {
		return ""
	}
	return strings.Trim(v.Text[0], `"`)
}
