package network

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"sigs.k8s.io/knftables"
)

// SenderTable is the name of the nftables table, in the bridge family, that checks the source
// addresses of pods.
const SenderTable = "keelson-senders"

// senderPriority is the priority of the base chain of SenderTable. It precedes br_netfilter
// (priority
// 0), so the chain runs before frames are passed to the IP rules.
const senderPriority = "-310"

// podPort is a pod's port on Keelson's bridge: the host's end of the pod's veth pair. It includes
// the addresses from which the pod may send.
type podPort struct {
	Name      string // name of the interface
	MAC       string // MAC address of the pod's end
	Addresses []netip.Addr
	// Exempt pods may send from any address, and the bridge learns MAC addresses from their ports.
	Exempt bool
}

// linkLocal returns the IPv6 link-local address that the kernel derives from the MAC address in
// text (RFC 4291, appendix A). It returns false if text is not a MAC address.
func linkLocal(text string) (netip.Addr, bool) {
	mac, err := net.ParseMAC(text)
	if err != nil || len(mac) != 6 {
		return netip.Addr{}, false
	}
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]}),
		true
}

// Names of the sets of the table SenderTable. An element of setPorts is the name of a bridge port.
// An element of another set is the name of a port and an address from which the port's pod may
// send.
const (
	setPorts      = "ports"
	setMACs       = "macs"
	setAddresses4 = "addresses-4"
	setAddresses6 = "addresses-6"
	setTargets    = "targets" // the addresses of addresses-6, as integers
)

var senderSets = []knftables.Set{
	{Name: setPorts, Type: "ifname"},
	{Name: setMACs, Type: "ifname . ether_addr"},
	{Name: setAddresses4, Type: "ifname . ipv4_addr"},
	{Name: setAddresses6, Type: "ifname . ipv6_addr"},
	// nft 1.0.6 has no keyword for the target address of neighbor discovery.
	{Name: setTargets, TypeOf: "iifname . @th,64,128"},
}

// Names of the counters of the table SenderTable, one per reason for dropping a frame.
const (
	dropsMAC     = "other-mac"
	dropsAddress = "other-address"
	dropsARP     = "other-arp-sender"
	dropsND      = "other-nd-target"
	dropsRouter  = "router-messages"
	dropsType    = "other-ethertype"
)

var senderCounters = []string{dropsMAC, dropsAddress, dropsARP, dropsND, dropsRouter, dropsType}

// senderChain is a chain of the table SenderTable with its rules.
type senderChain struct {
	name  string
	base  bool // a base chain, which the kernel calls for each frame that enters a bridge
	rules []string
}

func dropAs(counter string) string { return "counter name " + counter + " drop" }

// senderChains are the chains of the table SenderTable. Each chain precedes the rules that refer to
// it. Only the three EtherTypes that the rules inspect are accepted. Otherwise a VLAN tag with ID 0
// could hide a packet from the rules.
var senderChains = []senderChain{
	{name: "from-arp", rules: []string{
		"arp htype 1 arp ptype ip arp hlen 6 arp plen 4 iifname . arp saddr ether @" + setMACs +
			" iifname . arp saddr ip @" +
			setAddresses4 + " accept",
		"arp htype 1 arp ptype ip arp hlen 6 arp plen 4 iifname . arp saddr ether @" + setMACs +
			" arp operation request arp saddr ip 0.0.0.0 accept",
		dropAs(dropsARP),
	}},
	{name: "from-4", rules: []string{
		"iifname . ip saddr @" + setAddresses4 + " accept",
		dropAs(dropsAddress),
	}},
	{name: "from-6", rules: []string{
		"icmpv6 type { nd-router-advert, nd-redirect } " + dropAs(dropsRouter),
		"icmpv6 type nd-neighbor-advert iifname . @th,64,128 != @" + setTargets + " " + dropAs(dropsND),
		"iifname . ip6 saddr @" + setAddresses6 + " accept",
		"ip6 saddr :: icmpv6 type nd-neighbor-solicit iifname . @th,64,128 @" + setTargets + " accept",
		"ip6 saddr :: icmpv6 type { nd-router-solicit, mld-listener-report, mld2-listener-report } accept",
		dropAs(dropsAddress),
	}},
	{name: "from-pod", rules: []string{
		"iifname . ether saddr != @" + setMACs + " " + dropAs(dropsMAC),
		"ether type ip goto from-4",
		"ether type ip6 goto from-6",
		"ether type arp goto from-arp",
		dropAs(dropsType),
	}},
	{name: "received", base: true, rules: []string{"iifname @" + setPorts + " goto from-pod"}},
}

// senderElements returns the elements of each set of SenderTable for the ports. The parts of an
// element are joined by " . ".
func senderElements(ports map[string]podPort) map[string]map[string]bool {
	out := map[string]map[string]bool{}
	for _, s := range senderSets {
		out[s.Name] = map[string]bool{}
	}
	for _, p := range ports {
		if p.Exempt {
			continue
		}
		out[setPorts][p.Name] = true
		out[setMACs][p.Name+" . "+p.MAC] = true
		addresses := p.Addresses
		if own, ok := linkLocal(p.MAC); ok {
			addresses = append(slices.Clone(addresses), own)
		}
		for _, a := range addresses {
			if a.Is4() {
				out[setAddresses4][p.Name+" . "+a.String()] = true
				continue
			}
			out[setAddresses6][p.Name+" . "+a.String()] = true
			out[setTargets][fmt.Sprintf("%s . 0x%x", p.Name, a.AsSlice())] = true
		}
	}
	return out
}

// buildSenders adds to the transaction the operations that replace the whole table SenderTable with
// the table for the ports. The transaction is atomic: no frame passes unchecked.
func buildSenders(tx *knftables.Transaction, ports map[string]podPort) {
	table := &knftables.Table{Comment: knftables.PtrTo("Keelson: addresses under which pods send")}
	tx.Add(table) // Delete requires that the table exists
	tx.Delete(&knftables.Table{})
	tx.Add(table)
	for _, s := range senderSets {
		tx.Add(&s)
	}
	for _, name := range senderCounters {
		tx.Add(&knftables.Counter{Name: name})
	}
	changeSenders(tx, nil, senderElements(ports))
	for _, c := range senderChains {
		chain := &knftables.Chain{Name: c.name}
		if c.base {
			chain.Type, chain.Hook = knftables.PtrTo(knftables.FilterType), knftables.PtrTo(knftables.PreroutingHook)
			chain.Priority = knftables.PtrTo(knftables.BaseChainPriority(senderPriority))
		}
		tx.Add(chain)
		for _, r := range c.rules {
			tx.Add(&knftables.Rule{Chain: c.name, Rule: r})
		}
	}
}

// changeSenders adds to the transaction the operations that change the set elements from current to
// wanted. The kernel checks a port as soon as its name is in setPorts. The same transaction
// therefore also adds the port's addresses.
func changeSenders(tx *knftables.Transaction, current, wanted map[string]map[string]bool) {
	for _, s := range senderSets {
		for _, e := range slices.Sorted(maps.Keys(current[s.Name])) {
			if !wanted[s.Name][e] {
				tx.Delete(senderElement(s.Name, e))
			}
		}
		for _, e := range slices.Sorted(maps.Keys(wanted[s.Name])) {
			if !current[s.Name][e] {
				tx.Add(senderElement(s.Name, e))
			}
		}
	}
}

func senderElement(set, element string) *knftables.Element {
	return &knftables.Element{Set: set, Key: strings.Split(element, " . ")}
}
