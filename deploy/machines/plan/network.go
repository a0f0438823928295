package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// vxlanPort is the fixed UDP port of the VXLAN tunnel. wireguardPort and dnsPort are defaults of
// the agent (agent/network, agent/dns).
const (
	vxlanPort, wireguardPort, dnsPort = 4789, 51871, 53
	// firstEphemeralPort is the first port that Linux assigns dynamically to sockets. From there
	// on, a port that is in use may be free a moment later.
	firstEphemeralPort = 32768
)

// otherModules is the remedy for a kernel module that is not installed.
const otherModules = "install the kernel's other modules, such as linux-modules-extra"

// checkNetwork adds findings if the machine h lacks kernel modules, programs, or free ports that
// its proxy mode, its DNS, and its pod network need.
func (j *inspector) checkNetwork(h machines.Host, f machines.Facts) {
	switch agentSetting(h, "proxy-mode") {
	case "iptables":
		for _, p := range []string{"iptables", "iptables-save", "iptables-restore"} {
			if !f.Programs[p] {
				j.addError(h.Name, "has no "+p, "install the package that has it, such as iptables, or take another "+
					"agent.proxy-mode")
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
		default: // the kernel loads the other modules on demand
			j.addError(h.Name, "has not loaded ip_vs, which agent.proxy-mode ipvs needs",
				"'modprobe ip_vs' there, and a line for it in /etc/modules-load.d/ipvs.conf for the next boot"+instead)
		}
	}
	if agentSetting(h, "dns-local-address") != "none" && !f.Active[machines.Worker.UnitName()] {
		for _, at := range f.UDP {
			if at.Port() == dnsPort && at.Addr().IsUnspecified() {
				j.addWarning(h.Name, "UDP port 53 of all addresses is taken: the agent's DNS for pods may not get it "+
					"at addresses of its own",
					"'ss -lunp sport = :53' there says by whom: have it listen at the addresses that it means, as "+
						"bind-interfaces does of dnsmasq")
				break
			}
		}
	}
	j.checkTunnel(h, f)
}

// otherNetwork reports whether another CNI product than Keelson attaches the pods of the machine h
// to the network. If any machine has the configuration of such a product, all machines are assumed
// to use it.
func (j *inspector) otherNetwork(h machines.Host) bool {
	_, elsewhere := h.Agent["cni-conf-dir"]
	return elsewhere || slices.ContainsFunc(slices.Collect(maps.Values(j.facts)), func(f machines.Facts) bool {
		return f.OtherNetwork
	})
}

// checkTunnel adds findings if the machine h lacks the requirements of the tunnel to pods of other
// nodes. If another CNI product attaches the pods, there is no tunnel, and only WireGuard is
// checked: the agent needs its kernel module nevertheless.
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
		j.checkKernelParts(h, f, " (pods of "+far+
			" are reached by VXLAN), or have agent.pod-network: routes where another network product attaches pods",
			"vxlan")
		j.checkUDPPort(h, f, vxlanPort, "end that: pods of "+far+" are reached by VXLAN")
	}
}

// checkKernelParts adds an error for each named kernel module that the machine h lacks. hint is
// appended to the remedy. If it is unknown whether a module is available, it adds a warning
// instead. A machine with a running agent gets no such warning, because its Node reports missing
// modules.
func (j *inspector) checkKernelParts(h machines.Host, f machines.Facts, hint string, names ...string) {
	for _, m := range names {
		switch has, known := f.Modules[m]; {
		case known && !has:
			j.addError(h.Name, "its kernel has no "+m, otherModules+hint)
		case !known && !f.Active[machines.Worker.UnitName()]:
			j.addWarning(h.Name, "does not tell whether its kernel has "+m+", which is needed",
				"see whether 'modprobe "+m+"' works there; else "+otherModules+hint)
		}
	}
}

// checkUDPPort adds a finding if another program uses the UDP port at the address of the machine h.
// The finding is an error only if the conflict is certain. It is a warning for an ephemeral port,
// and for a socket that listens at all IPv6 addresses. A machine with a running agent is not
// checked.
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
		// A socket for all IPv6 addresses may also receive IPv4; /proc does not show this.
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

// firstTunnelPeer returns the name of the first node in otherNodes to which pod traffic of the
// machine h needs a VXLAN tunnel. It returns "" if no tunnel is needed. In mode vxlan, traffic to
// every node needs a tunnel. In mode auto, a node needs no tunnel if its address is in a network of
// the interface that has the address of h. Package agent/network uses the same rule.
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

// peerNode is another node that the pods of a machine must reach.
type peerNode struct {
	name string
	addr netip.Addr
	ours bool // the node is in the cluster file
}

// otherNodes returns the nodes of the cluster file, and then the nodes that are in the cluster but
// not in the cluster file. It omits nodes without a valid address, and the node with the name
// excluded.
func (j *inspector) otherNodes(excluded string) (out []peerNode) {
	add := func(name, address string, ours bool) {
		if a, err := netip.ParseAddr(address); err == nil && name != excluded {
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

// addressFamilies returns the number of IP address families of the pods, according to the init flag
// cluster-cidr. With two, pods of one family are always reached by a tunnel, because each node of
// the cluster file has only one address.
func (j *inspector) addressFamilies() int {
	for _, f := range j.c.Init {
		if ranges, ok := strings.CutPrefix(f, "--cluster-cidr="); ok {
			return 1 + strings.Count(ranges, ",")
		}
	}
	return 1
}

// agentSetting returns the first value, without quotes, of a setting of the agent on the host h. It
// returns "" if the setting is missing.
func agentSetting(h machines.Host, key string) string {
	v := h.Agent[key]
	if len(v.Text) == 0 {
		return ""
	}
	return strings.Trim(v.Text[0], `"`)
}
