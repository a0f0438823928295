package plan

import (
	"net/netip"
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

// networkCase is a cluster of two workers, something that is not as it should be of the first, and what is found.
type networkCase struct {
	name   string
	agent  string // settings of all workers, KEY=VALUE
	w2     string // its address; "" = on the link of w1
	damage func(*machines.Facts)
	want   string // "" = nothing is found; E or W, and what is said with its remedy
}

func judgeNetworkLacks(names ...string) func(*machines.Facts) {
	return func(f *machines.Facts) {
		for _, m := range names {
			f.Modules[m] = false
		}
	}
}

func judgeNetworkUnknown(names ...string) func(*machines.Facts) {
	return func(f *machines.Facts) {
		for _, m := range names {
			delete(f.Modules, m)
		}
	}
}

func judgeNetworkUdp(at string) func(*machines.Facts) {
	return func(f *machines.Facts) { f.UDP = append(f.UDP, netip.MustParseAddrPort(at)) }
}

func judgeNetworkAll(how ...func(*machines.Facts)) func(*machines.Facts) {
	return func(f *machines.Facts) {
		for _, change := range how {
			change(f)
		}
	}
}

func judgeNetworkNet(link, prefix string) func(*machines.Facts) {
	return func(f *machines.Facts) {
		f.Networks = append(f.Networks, machines.Network{Link: link, Prefix: netip.MustParsePrefix(prefix)})
	}
}

func judgeNetworkRunning(f *machines.Facts) { f.Active["keelson-agent"] = true }

func judgeNetworkOther(f *machines.Facts) { f.OtherNetwork = true }

var judgeNetworkFar = "198.51.100.7"

// judgeNetworkCases are the cases of TestJudgeNetwork.
var judgeNetworkCases = []networkCase{
	{"one link needs no tunnel", "", "", judgeNetworkLacks("vxlan", "wireguard", "ip_vs", "dummy"), ""},
	{"two links need one", "", judgeNetworkFar, judgeNetworkLacks("vxlan"),
		"E its kernel has no vxlan -> install the kernel's other modules, such as " +
			"linux-modules-extra (pods of w2 are reached by VXLAN), or have agent.pod-network: routes"},
	{"two links by name", "pod-network=\"auto\"", judgeNetworkFar, judgeNetworkLacks("vxlan"),
		"E its kernel has no vxlan"},
	{"routes alone", "pod-network=routes", judgeNetworkFar,
		judgeNetworkAll(judgeNetworkLacks("vxlan"), judgeNetworkUdp("0.0.0.0:4789")), ""},
	{"the tunnel to all", "pod-network=vxlan", "", judgeNetworkLacks("vxlan"), "E its kernel has no vxlan"},
	{"a second link of which the node's address is not", "", judgeNetworkFar,
		judgeNetworkAll(judgeNetworkLacks("vxlan"), judgeNetworkNet("eth1", "198.51.100.1/24")),
		"E its kernel has no vxlan"},
	{"a second network of its link", "", judgeNetworkFar,
		judgeNetworkAll(judgeNetworkLacks("vxlan"), judgeNetworkNet("eth0", "198.51.100.1/24")), ""},
	{"an address on no link", "", "", judgeNetworkAll(judgeNetworkLacks("vxlan"), func(f *machines.Facts) {
		f.Networks[1].Prefix = netip.MustParsePrefix("192.0.2.51/32")
	}), "E its kernel has no vxlan"},
	{"links that are not known", "", judgeNetworkFar,
		judgeNetworkAll(judgeNetworkLacks("vxlan"), func(f *machines.Facts) { f.Networks = nil }), ""},
	{"a kernel that does not tell", "", judgeNetworkFar, judgeNetworkUnknown("vxlan"),
		"W does not tell whether its kernel has vxlan, which is needed -> see whether 'modprobe " +
			"vxlan' works there"},
	{"a kernel that does not tell what all need", "", "", judgeNetworkUnknown("nf_tables"),
		"W does not tell whether its kernel has nf_tables"},
	{"a kernel that does not tell, of a node that runs", "", judgeNetworkFar,
		judgeNetworkAll(judgeNetworkUnknown("vxlan", "overlay", "nf_tables"), judgeNetworkRunning), ""},
	{"a network of others", "", judgeNetworkFar,
		judgeNetworkAll(judgeNetworkLacks("vxlan"), judgeNetworkUdp("0.0.0.0:4789"), judgeNetworkOther), ""},
	{"configurations elsewhere", "cni-conf-dir=/opt/net", judgeNetworkFar, judgeNetworkLacks("vxlan"), ""},
	{"the tunnel's port", "", judgeNetworkFar, judgeNetworkUdp("0.0.0.0:4789"),
		"E UDP port 4789, which the tunnel to other nodes needs, is taken -> 'ss -lunp sport = :4789' " +
			"there says by whom"},
	{"the tunnel's port at one address", "", judgeNetworkFar, judgeNetworkUdp("127.0.0.1:4789"), "E UDP port 4789"},
	{"the tunnel's port, perhaps", "", judgeNetworkFar, judgeNetworkUdp("[::]:4789"), "W UDP port 4789"},
	{"the tunnel's port in the other family", "", judgeNetworkFar, judgeNetworkUdp("[2001:db8::1]:4789"), ""},
	{"the tunnel's port without a tunnel", "", "", judgeNetworkUdp("0.0.0.0:4789"), ""},
	{"the tunnel's port where the agent runs", "", judgeNetworkFar,
		judgeNetworkAll(judgeNetworkUdp("0.0.0.0:4789"), judgeNetworkRunning), ""},
	{"no wireguard", "pod-network=wireguard", "", judgeNetworkLacks("wireguard", "vxlan"),
		"E its kernel has no wireguard"},
	{"no wireguard beside a network of others", "pod-network=wireguard", "",
		judgeNetworkAll(judgeNetworkLacks("wireguard"), judgeNetworkOther),
		"E its kernel has no wireguard"},
	{"wireguard's port", "pod-network=wireguard", "", judgeNetworkUdp("0.0.0.0:51871"),
		"W UDP port 51871, which the tunnel to other nodes needs, is taken, or was for a moment -> 'ss -lunp " +
			"sport = :51871' there says by whom: end that, or give all nodes another agent.wireguard-port"},
	{"wireguard's port of the file", "pod-network=wireguard wireguard-port=5555", "",
		judgeNetworkAll(judgeNetworkUdp("0.0.0.0:51871"), judgeNetworkUdp("0.0.0.0:5555")), "E UDP port 5555"},
	{"no iptables", "proxy-mode=iptables", "", func(f *machines.Facts) {
		f.Programs["iptables-save"] = false
	}, "E has no iptables-save -> install the package that has it, such as iptables"},
	{"no iptables, which nobody needs", "", "", func(f *machines.Facts) { f.Programs["iptables"] = false }, ""},
	{"IPVS", "proxy-mode=ipvs", "", func(f *machines.Facts) { f.IPVS = true }, ""},
	{"IPVS that does not tell what it is", "proxy-mode=ipvs", "",
		judgeNetworkAll(judgeNetworkUnknown("ip_vs"), func(f *machines.Facts) {
			f.IPVS = true
		}), ""},
	{"no IPVS", "proxy-mode=ipvs", "", judgeNetworkLacks("ip_vs"),
		"E its kernel has no ip_vs -> install the kernel's other modules, such as linux-modules-extra, or take " +
			"another agent.proxy-mode"},
	{"IPVS without the way of choosing", "proxy-mode=ipvs", "",
		judgeNetworkAll(judgeNetworkLacks("ip_vs_rr"), func(f *machines.Facts) {
			f.IPVS = true
		}), "E its kernel has no ip_vs_rr"},
	{"IPVS without dummy", "proxy-mode=ipvs", "", judgeNetworkAll(judgeNetworkLacks("dummy"), func(f *machines.Facts) {
		f.IPVS = true
	}), "E its kernel has no dummy"},
	{"IPVS that is not loaded", "proxy-mode=ipvs", "", func(*machines.Facts) {},
		"E has not loaded ip_vs, which agent.proxy-mode ipvs needs -> 'modprobe ip_vs' there"},
	{"a DNS server at all addresses", "", "", judgeNetworkUdp("0.0.0.0:53"),
		"W UDP port 53 of all addresses is taken: the agent's DNS for pods may not get it at " +
			"addresses of its own -> 'ss -lunp sport = :53' there says by whom"},
	{"DNS servers at theirs", "", "", judgeNetworkAll(judgeNetworkUdp("127.0.0.53:53"),
		judgeNetworkUdp("192.0.2.51:53"), judgeNetworkUdp("[::1]:53")), ""},
	{"a DNS server beside an agent without", "dns-local-address=none", "", judgeNetworkUdp("[::]:53"), ""},
	{"a DNS server beside an agent that runs", "", "",
		judgeNetworkAll(judgeNetworkUdp("0.0.0.0:53"), judgeNetworkRunning), ""},
}

// What the pod network and the rules of Services need follows from the file and from who is on whose link. What cannot be told refuses
// nobody, and of a machine whose agent has its ports and parts of the kernel nothing is said.
func TestJudgeNetwork(t *testing.T) {
	for _, c := range judgeNetworkCases {
		t.Run(c.name, c.judged)
	}
}

func (c networkCase) judged(t *testing.T) {
	cluster := aCluster(1, 2)
	for i := range cluster.Hosts {
		h := &cluster.Hosts[i]
		if h.Name == "w2" && c.w2 != "" {
			h.Address = c.w2
		}
		if h.Agent = (machines.Settings{}); h.HasRole(machines.Worker) {
			for _, s := range strings.Fields(c.agent) {
				k, v, _ := strings.Cut(s, "=")
				h.Agent[k] = machines.Value{Text: []string{v}}
			}
		}
	}
	w := newWorld(cluster)
	f, second := w.facts["w1"], w.facts["w2"]
	c.damage(&f)
	second.IPVS = true
	w.facts["w1"], w.facts["w2"] = f, second
	found := Inspect(w.cluster, w.seen(), w.release, w.state)
	if c.want == "" {
		if len(found) > 0 {
			t.Errorf("found %+v, want nothing", found)
		}
		return
	}
	if len(found) != 1 {
		t.Fatalf("%d findings, want 1: %+v", len(found), found)
	}
	said := map[bool]string{true: "E ", false: "W "}[found[0].Blocking] + found[0].What + " -> " + found[0].Remedy
	if found[0].Machine != "w1" || !strings.HasPrefix(said, c.want) {
		t.Errorf("%s: %s\nwant w1: %s", found[0].Machine, said, c.want)
	}
}

// Nodes of the cluster count that are not in the file, and of two families one goes by the tunnel whoever is on the link.
func TestJudgeWhoIsFar(t *testing.T) {
	for _, c := range []struct {
		name  string
		state State
		init  string
		want  bool
	}{
		{"alone", State{}, "10.1.0.0/16", false},
		{"a node of the link", State{Known: true, Nodes: map[string]Node{"hand": {Address: "192.0.2.200"}}},
			"10.1.0.0/16,fd00:1::/48", false},
		{"a node of another link", State{Known: true, Nodes: map[string]Node{"hand": {Address: "203.0.113.1"}}},
			"10.1.0.0/16", true},
		{"a node that says no address", State{Known: true, Nodes: map[string]Node{"hand": {}}}, "10.1.0.0/16", false},
	} {
		cluster := aCluster(1, 1)
		cluster.Init = []string{"--cluster-cidr=" + c.init}
		w := newWorld(cluster)
		w.facts["w1"].Modules["vxlan"] = false
		if found := Inspect(w.cluster, w.seen(), w.release, c.state); (len(found) > 0) != c.want {
			t.Errorf("%s: found %+v, want any: %v", c.name, found, c.want)
		}
	}
	cluster := aCluster(1, 2)
	cluster.Init = []string{"--cluster-cidr=10.1.0.0/16,fd00:1::/48"}
	w := newWorld(cluster)
	w.facts["w1"].Modules["vxlan"] = false
	if found := Inspect(w.cluster, w.seen(), w.release, State{}); len(found) != 1 || found[0].Machine != "w1" ||
		!strings.Contains(found[0].Remedy, "pods of w2 are reached by VXLAN") {
		t.Errorf("of two families on one link: found %+v", found)
	}
}
