package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// What the agent has unless its settings say otherwise (agent/network, agent/dns), and for which port VXLAN is not asked.
const (
	vxlanPort, wireguardPort, dnsPort = 4789, 51871, 53
	// handedOut is the first port that Linux gives to who asks for any: such a one may be free again at once.
	handedOut = 32768
)

// otherModules is what helps where a kernel lacks a part of itself.
const otherModules = "install the kernel's other modules, such as linux-modules-extra"

// network judges what the pod network and the rules of Services need that the file asks for.
func (j *judge) network(h machines.Host, f machines.Facts) {
	switch setting(h, "proxy-mode") {
	case "iptables":
		for _, p := range []string{"iptables", "iptables-save", "iptables-restore"} {
			if !f.Programs[p] {
				j.grave(h.Name, "has no "+p, "install the package that has it, such as iptables, or take another agent.proxy-mode")
				break
			}
		}
	case "ipvs":
		const instead = ", or take another agent.proxy-mode"
		j.parts(h, f, instead, "ip_vs_rr", "dummy")
		switch has, known := f.Modules["ip_vs"]; {
		case f.IPVS:
		case known && !has:
			j.parts(h, f, instead, "ip_vs")
		default: // the kernel loads the others when they are asked for
			j.grave(h.Name, "has not loaded ip_vs, which agent.proxy-mode ipvs needs",
				"'modprobe ip_vs' there, and a line for it in /etc/modules-load.d/ipvs.conf for the next boot"+instead)
		}
	}
	if setting(h, "dns-local-address") != "none" && !f.Active[machines.Worker.Unit()] {
		for _, at := range f.UDP {
			if at.Port() == dnsPort && at.Addr().IsUnspecified() {
				j.light(h.Name, "UDP port 53 of all addresses is taken: the agent's DNS for pods may not get it at addresses of its own",
					"'ss -lunp sport = :53' there says by whom: have it listen at the addresses that it means, as bind-interfaces does of dnsmasq")
				break
			}
		}
	}
	j.tunnel(h, f)
}

// otherNetwork says whether another product attaches a machine's pods: one that has its configuration on any machine will have it on all.
func (j *judge) otherNetwork(h machines.Host) bool {
	_, elsewhere := h.Agent["cni-conf-dir"]
	return elsewhere || slices.ContainsFunc(slices.Collect(maps.Values(j.facts)), func(f machines.Facts) bool { return f.OtherNetwork })
}

// tunnel judges what leads to other nodes' pods. Keelson makes no tunnel where another product attaches them; WireGuard is needed by its
// agents even so.
func (j *judge) tunnel(h machines.Host, f machines.Facts) {
	other := j.otherNetwork(h)
	switch mode := setting(h, "pod-network"); mode {
	case "wireguard":
		j.parts(h, f, ", or take another agent.pod-network", "wireguard")
		if port := portOf(h.Agent["wireguard-port"], wireguardPort); port != 0 && !other {
			j.taken(h, f, port, "end that, or give all nodes another agent.wireguard-port")
		}
	case "", "auto", "vxlan":
		far := j.tunneled(h, f, mode)
		if far == "" || other {
			return
		}
		j.parts(h, f, " (pods of "+far+" are reached by VXLAN), or have agent.pod-network: routes where another network product attaches pods", "vxlan")
		j.taken(h, f, vxlanPort, "end that: pods of "+far+" are reached by VXLAN")
	}
}

// parts judges parts of the kernel. Where it cannot be told, nothing is said of a machine whose agent runs: its Node says what it cannot do.
func (j *judge) parts(h machines.Host, f machines.Facts, more string, names ...string) {
	for _, m := range names {
		switch has, known := f.Modules[m]; {
		case known && !has:
			j.grave(h.Name, "its kernel has no "+m, otherModules+more)
		case !known && !f.Active[machines.Worker.Unit()]:
			j.light(h.Name, "does not tell whether its kernel has "+m+", which is needed", "see whether 'modprobe "+m+"' works there; else "+otherModules+more)
		}
	}
}

// taken judges a UDP port that the kernel is to have at all addresses of the machine.
func (j *judge) taken(h machines.Host, f machines.Facts, port int, remedy string) {
	own, err := netip.ParseAddr(h.Address)
	if err != nil || f.Active[machines.Worker.Unit()] {
		return
	}
	found, sure := false, false
	for _, at := range f.UDP {
		if int(at.Port()) != port {
			continue
		}
		// A socket of all addresses of IPv6 may be of IPv4's as well: it does not say so.
		same := at.Addr().Is4() == own.Is4()
		found = found || same || at.Addr() == netip.IPv6Unspecified()
		sure = sure || same && port < handedOut
	}
	if !found {
		return
	}
	what := fmt.Sprintf("UDP port %d, which the tunnel to other nodes needs, is taken", port)
	remedy = fmt.Sprintf("'ss -lunp sport = :%d' there says by whom: %s", port, remedy)
	if sure {
		j.grave(h.Name, what, remedy)
	} else {
		j.light(h.Name, what+", or was for a moment", remedy)
	}
}

// tunneled is a node whose pods this one reaches by VXLAN; "" = none that is known. As the agent does (agent/network), it takes for
// near who has an address on the link that has its own.
func (j *judge) tunneled(h machines.Host, f machines.Facts, mode string) string {
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
	for _, o := range j.nodes(h.Name) {
		near := func(n machines.Network) bool {
			return n.Link == link && !n.Prefix.IsSingleIP() && n.Prefix.Contains(o.addr)
		}
		if mode == "vxlan" || o.ours && j.families() > 1 || !slices.ContainsFunc(f.Networks, near) {
			return o.name
		}
	}
	return ""
}

// node is another one that this machine's pods speak to.
type node struct {
	name string
	addr netip.Addr
	ours bool // it is in the file
}

// nodes are those of the file and of the cluster but for one, as far as their addresses are known.
func (j *judge) nodes(but string) (out []node) {
	add := func(name, address string, ours bool) {
		if a, err := netip.ParseAddr(address); err == nil && name != but {
			out = append(out, node{name, a, ours})
		}
	}
	for _, h := range j.c.With(machines.Worker) {
		add(h.Name, h.Address, true)
	}
	for _, name := range slices.Sorted(maps.Keys(j.state.Nodes)) {
		if _, err := j.c.Host(name); err != nil {
			add(name, j.state.Nodes[name].Address, false)
		}
	}
	return out
}

// families is how many the file makes the cluster with. Of two, one has no route on a link: nodes of the file have one address each.
func (j *judge) families() int {
	for _, f := range j.c.Init {
		if ranges, ok := strings.CutPrefix(f, "--cluster-cidr="); ok {
			return 1 + strings.Count(ranges, ",")
		}
	}
	return 1
}

// setting is one of the agent's that is a single text.
func setting(h machines.Host, key string) string {
	v := h.Agent[key]
	if len(v.Text) == 0 {
		return ""
	}
	return strings.Trim(v.Text[0], `"`)
}
