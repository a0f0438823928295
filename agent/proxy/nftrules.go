package proxy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// Table is the name of Keelson's nftables tables, one per address family. The agent changes no
// other table.
const Table = "keelson"

// markMasquerade is the packet mark that requests masquerading: the node's address replaces the
// source address. The replies then return through this node, which has changed the destination and
// must reverse the change.
const markMasquerade = "0x4000"

// The maps and sets. The maps of node ports have the prefix nodePortPrefix, and no address in their
// keys.
//
//	services ─▶ goto pick-N ─▶ endpoints (destination address and a random number below N → backend)
//	         ─▶ goto outside-N: the same, with the node's address as source
//	         ─▶ goto short ─▶ inside: from pods and the node itself, to any node; local: from others, to this node
//
// A Service thus consists of a few elements and has no rules of its own, unless it has session
// affinity.
const (
	mapServices       = "services"
	mapInside         = "inside"
	mapLocal          = "local"
	mapEndpoints      = "endpoints-" // followed by the protocol
	mapLocalEndpoints = "local-endpoints-"
	mapRefused        = "refused"
	mapFirewall       = "firewall"
	setHairpin        = "hairpin"
	setConnections    = "connections"
	setUnserved       = "unserved" // counts packets that found no backend; setConnections counts those that found one
	chainRefuse       = "refuse"
	chainUnserved     = "no-backend"
	chainSilent       = "silent"
	chainDispatch     = "dispatch"
	chainShort        = "short"
	nodePortPrefix    = "nodeport-"
	markStatement     = "meta mark set meta mark or " + markMasquerade
)

// countedFor is the time after which the connection counter of a frontend expires if no connection
// uses it. The counters of deleted Services expire in the same way.
const countedFor = 24 * time.Hour

// mapElement is an element of an nftables map, or of a set if value is empty.
type mapElement struct{ key, value, comment string }

// nftChain is an nftables chain with its rules. It belongs to one Port (own) or to all Ports that
// use it (shared).
type nftChain struct {
	name     string
	rules    []string
	affinity int32 // seconds; if not 0, a set with the chain's name stores the clients
}

// portRules contains the nftables map elements and chains of one Port.
type portRules struct {
	elements map[string][]mapElement // elements of each map, by the map's name
	own      []nftChain
	shared   []nftChain
	hairpin  []netip.Addr // pods that may reach themselves through the Service
}

func (f family) elementKey(at servicemodel.Frontend) string {
	if at.IsNodePort() {
		return at.Proto + " . " + strconv.Itoa(int(at.Port))
	}
	return at.IP.String() + " . " + at.Proto + " . " + strconv.Itoa(int(at.Port))
}

// mapName returns the name of the nftables map with the element of a frontend. It is baseName, with
// the prefix nodePortPrefix for a node port.
func mapName(baseName string, at servicemodel.Frontend) string {
	if at.IsNodePort() {
		return nodePortPrefix + baseName
	}
	return baseName
}

// renderPort returns the nftables map elements and chains of a Port in mode nftables. It is pure.
func (f family) renderPort(p *servicemodel.Port) portRules {
	out := portRules{elements: map[string][]mapElement{}}
	add := func(m string, at servicemodel.Frontend, value string) {
		m = mapName(m, at)
		out.elements[m] = append(out.elements[m], mapElement{f.elementKey(at), value, sanitizeComment(p.Name)})
	}
	chains := map[string]bool{}
	for _, at := range p.Internal {
		if to := f.addBalancing(&out, p, at, internalPrefix, p.Backends.Cluster, mapEndpoints, chains); to != "" {
			add(mapServices, at, "goto "+to)
		} else {
			add(mapRefused, at, noBackendVerdict(p.StayInside, p))
		}
	}
	for _, at := range p.External {
		to := f.addBalancing(&out, p, at, "out-", p.Backends.Outside, mapEndpoints, chains)
		if to == "" {
			add(mapRefused, at, noBackendVerdict(p.KeepSource, p))
			continue
		}
		if !p.KeepSource {
			add(mapServices, at, "goto "+f.addMasqueradeChain(&out, to, chains))
			continue
		}
		add(mapServices, at, "goto "+mapName(chainShort, at))
		add(mapInside, at, "goto "+to)
		if here := f.addBalancing(&out, p, at, "loc-", p.Backends.Here, mapLocalEndpoints, chains); here != "" {
			add(mapLocal, at, "goto "+here)
		} else {
			// other nodes have backends: Kubernetes specifies that this node drops the packets
			add(mapRefused, at, "goto "+chainSilent)
		}
	}
	out.addGuard(p, add)
	out.hairpin = p.LocalAddresses()
	return out
}

// noBackendVerdict returns the nftables verdict for traffic to a Port without a backend. mustStay
// means that the traffic must stay on this node. Such traffic is dropped if other nodes could serve
// it, as Kubernetes specifies. All other traffic is rejected.
func noBackendVerdict(mustStay bool, p *servicemodel.Port) string {
	if mustStay && len(p.Backends.Serving) > 0 {
		return "goto " + chainSilent
	}
	return "goto " + chainUnserved
}

// addBalancing adds to out the map elements and chains that select one of the backends for traffic
// to a frontend of the Port p. It returns the name of the first chain, or "" if there are no
// backends. chainNames is the set of chain names that out already contains.
func (f family) addBalancing(
	out *portRules, p *servicemodel.Port, frontend servicemodel.Frontend, prefix string,
	backends []servicemodel.Backend,
	endpointsMap string, chainNames map[string]bool,
) string {
	if len(backends) == 0 {
		return ""
	}
	if p.Affinity > 0 {
		return f.addAffinityChains(out, p, prefix, backends, chainNames)
	}
	if prefix != internalPrefix && p.Wide {
		return f.addChoiceChain(out, p, prefix, backends, chainNames)
	}
	m, key := mapName(endpointsMap+frontend.Proto, frontend), strconv.Itoa(int(frontend.Port))
	if !frontend.IsNodePort() {
		key = frontend.IP.String() + " . " + key
	}
	for i, b := range backends {
		out.elements[m] = append(out.elements[m], mapElement{key: key + " . " + strconv.Itoa(i),
			value: b.IP.String() + " . " + strconv.Itoa(int(b.Port))})
	}
	c := f.pickChain(m, frontend, len(backends))
	if !chainNames[c.name] {
		chainNames[c.name] = true
		out.shared = append(out.shared, c)
	}
	return c.name
}

// internalPrefix is the prefix of the names of a Port's own chains for traffic to the cluster IP.
const internalPrefix = "svc-"

// addChoiceChain adds to out the chain that selects one of the backends at random, for all external
// frontends of a Port. It returns the chain's name.
func (f family) addChoiceChain(
	out *portRules, p *servicemodel.Port, prefix string, backends []servicemodel.Backend, chainNames map[string]bool,
) string {
	name := prefix + p.ID
	if chainNames[name] {
		return name
	}
	chainNames[name] = true
	choice := make([]string, len(backends))
	for i, b := range backends {
		choice[i] = fmt.Sprintf("%d : %s . %d", i, b.IP, b.Port)
	}
	out.own = append(out.own, nftChain{name: name, rules: []string{f.countRule(setConnections),
		fmt.Sprintf("meta l4proto %s dnat %s to numgen random mod %d map { %s }", p.Proto, f.ip, len(backends),
			strings.Join(choice, " , "))}})
	return name
}

// choiceKey returns the first part of the keys of endpoint maps, as an nftables expression: the
// destination address, unless it is a node port, and the destination port.
func (f family) choiceKey(nodePort bool, proto string) string {
	if nodePort {
		return proto + " dport"
	}
	return f.ip + " daddr . " + proto + " dport"
}

// pickChain returns the chain that selects one of n backends at random from the map endpointsMap.
// All frontends with n backends share this chain.
func (f family) pickChain(endpointsMap string, at servicemodel.Frontend, n int) nftChain {
	return nftChain{name: "pick-" + strings.Replace(endpointsMap, mapEndpoints, "", 1) + "-" + strconv.Itoa(n),
		rules: []string{
			f.countRule(setConnections),
			fmt.Sprintf("meta l4proto %s dnat %s to %s . numgen random mod %d map @%s", at.Proto, f.ip,
				f.choiceKey(at.IsNodePort(), at.Proto), n, endpointsMap),
		}}
}

func (f family) countRule(set string) string {
	return fmt.Sprintf("update @%s { %s daddr . meta l4proto . th dport counter }", set, f.ip)
}

// addMasqueradeChain adds to out a chain that marks packets for masquerading and then goes to the
// chain target. It returns the new chain's name.
func (f family) addMasqueradeChain(out *portRules, target string, chainNames map[string]bool) string {
	c := nftChain{name: "masked-" + target, rules: []string{markStatement, "goto " + target}}
	if !chainNames[c.name] {
		chainNames[c.name] = true
		if strings.HasPrefix(target, "pick-") {
			out.shared = append(out.shared, c)
		} else {
			out.own = append(out.own, c)
		}
	}
	return c.name
}

// addAffinityChains adds to out the chains for session affinity: a chain that selects the backend,
// and a chain and a set of clients for every backend. It returns the name of the selecting chain.
func (f family) addAffinityChains(
	out *portRules, p *servicemodel.Port, prefix string, backends []servicemodel.Backend, chainNames map[string]bool,
) string {
	front := nftChain{name: prefix + p.ID, rules: []string{f.countRule(setConnections)}}
	if chainNames[front.name] {
		return front.name
	}
	chainNames[front.name] = true
	choice := make([]string, len(backends))
	for i, b := range backends {
		// the name contains the timeout, because a set's timeout cannot be changed
		own := "ep-" + p.ID + "-" + servicemodel.ShortHash(fmt.Sprint(b.AddrPort(), p.Affinity))
		if !chainNames[own] {
			chainNames[own] = true
			out.own = append(out.own, nftChain{name: own, affinity: p.Affinity, rules: []string{
				fmt.Sprintf("update @%s { %s saddr }", own, f.ip),
				fmt.Sprintf("meta l4proto %s dnat to %s", p.Proto, b.AddrPort()),
			}})
		}
		front.rules = append(front.rules, fmt.Sprintf("%s saddr @%s goto %s", f.ip, own, own))
		choice[i] = fmt.Sprintf("%d : goto %s", i, own)
	}
	front.rules = append(front.rules, fmt.Sprintf("numgen random mod %d vmap { %s }", len(backends),
		strings.Join(choice, " , ")))
	out.own = append(out.own, front)
	return front.name
}

// addGuard adds to out the chain that drops packets from clients outside the Service's
// loadBalancerSourceRanges, and the map elements that lead to it. add adds an element to a map.
func (out *portRules) addGuard(p *servicemodel.Port, add func(m string, at servicemodel.Frontend, value string)) {
	if len(p.Guarded) == 0 {
		return
	}
	guard := nftChain{name: "fw-" + p.Sources.ID, rules: []string{p.Sources.DropRule}}
	out.shared = append(out.shared, guard)
	for _, at := range p.Guarded {
		add(mapFirewall, at, "goto "+guard.name)
	}
}

func joinPrefixes(all []netip.Prefix) string {
	out := make([]string, len(all))
	for i, p := range all {
		out[i] = p.String()
	}
	return strings.Join(out, ", ")
}

// tableSkeleton is an nftables table without any Services: maps, sets, and base chains with their
// rules in order.
type tableSkeleton struct {
	maps   []*knftables.Map
	sets   []*knftables.Set
	chains []*knftables.Chain
	rules  []*knftables.Rule
}

// markerChain returns the name of an empty chain. The name contains a hash of the skeleton. If the
// kernel's table has this chain, it was written for the same skeleton.
func (s *tableSkeleton) markerChain() string {
	sum := sha256.New()
	for _, m := range s.maps {
		fmt.Fprintln(sum, m.Name, m.Type, m.TypeOf)
	}
	for _, set := range s.sets {
		fmt.Fprintln(sum, set.Name, set.Type, set.Flags, set.Timeout != nil)
	}
	for _, r := range s.rules {
		fmt.Fprintln(sum, r.Chain, r.Rule)
	}
	return "version-" + hex.EncodeToString(sum.Sum(nil)[:6])
}

func (s *tableSkeleton) addHookChain(
	name string, kind knftables.BaseChainType, hook knftables.BaseChainHook, priority knftables.BaseChainPriority,
) {
	s.chains = append(s.chains, &knftables.Chain{Name: name, Type: knftables.PtrTo(kind), Hook: knftables.PtrTo(hook),
		Priority: knftables.PtrTo(priority)})
}

func (s *tableSkeleton) addChain(name string) {
	s.chains = append(s.chains, &knftables.Chain{Name: name})
}

func (s *tableSkeleton) addRule(chain, format string, args ...any) {
	s.rules = append(s.rules, &knftables.Rule{Chain: chain, Rule: fmt.Sprintf(format, args...)})
}

// addBypass adds to a chain of the output hook the rule that exempts the agent's own connections to
// replicas. For other hooks it does nothing.
func (s *tableSkeleton) addBypass(chain string, hook knftables.BaseChainHook) {
	if hook == knftables.OutputHook {
		s.addRule(chain, "meta mark and %#x != 0 return", agent.ReplicaMark)
	}
}

// fullSkeleton returns the nftables table of mode nftables without any Services. It is pure.
func (f family) fullSkeleton(b Base) *tableSkeleton {
	s := &tableSkeleton{}
	address := f.ip + " daddr . meta l4proto . th dport"
	for _, kind := range []struct{ prefix, of string }{{"", f.addr + " . inet_proto . inet_service"},
		{nodePortPrefix, "inet_proto . inet_service"}} {
		for _, m := range []string{mapServices, mapInside, mapLocal, mapRefused, mapFirewall} {
			s.maps = append(s.maps, &knftables.Map{Name: kind.prefix + m, Type: kind.of + " : verdict"})
		}
		// One map per protocol: nft 1.0.6 rejects "th dport" in such a map as a contradiction to
		// the protocol of a rule that is added later.
		for _, proto := range []string{"tcp", "udp", "sctp"} {
			for _, m := range []string{mapEndpoints, mapLocalEndpoints} {
				s.maps = append(s.maps, &knftables.Map{Name: kind.prefix + m + proto,
					TypeOf: fmt.Sprintf("%s . numgen random mod 2 : %s daddr . %s dport",
						f.choiceKey(kind.prefix != "", proto), f.ip, proto)})
			}
		}
	}
	s.sets = append(s.sets, &knftables.Set{Name: setHairpin, Type: f.addr + " . " + f.addr})
	for _, name := range []string{setConnections, setUnserved} {
		s.sets = append(s.sets, &knftables.Set{Name: name, Type: f.addr + " . inet_proto . inet_service",
			Flags:   []knftables.SetFlag{knftables.DynamicFlag, knftables.TimeoutFlag},
			Timeout: knftables.PtrTo(countedFor),
			Size:    knftables.PtrTo(uint64(65535))})
	}
	at := fmt.Sprintf("fib daddr type local %s daddr != %s", f.ip, f.loopback)
	if chosen := f.familyPrefixes(b.NodePorts); len(chosen) > 0 {
		at += fmt.Sprintf(" %s daddr { %s }", f.ip, joinPrefixes(chosen))
	} else if len(b.NodePorts) > 0 {
		at = "" // no address of this family
	}
	s.addChain(chainRefuse)
	s.addChain(chainUnserved)
	s.addChain(chainSilent)
	s.addChain(chainDispatch)
	s.addRule(chainDispatch, "%s vmap @%s", address, mapServices)
	if at != "" {
		s.addRule(chainDispatch, "%s meta l4proto . th dport vmap @%s", at, nodePortPrefix+mapServices)
	}
	s.addShortcutChains(f, "", address, f.familyPrefixes(b.PodCIDRs))
	s.addShortcutChains(f, nodePortPrefix, "meta l4proto . th dport", f.familyPrefixes(b.PodCIDRs))
	for _, hook := range []knftables.BaseChainHook{knftables.PreroutingHook, knftables.OutputHook} {
		s.addHookChain("guard-"+string(hook), knftables.FilterType, hook, knftables.DNATPriority+"-10")
		s.addBypass("guard-"+string(hook), hook)
		s.addRule("guard-"+string(hook), "ct state new %s vmap @%s", address, mapFirewall)
		s.addHookChain("nat-"+string(hook), knftables.NATType, hook, knftables.DNATPriority)
		s.addBypass("nat-"+string(hook), hook)
		s.addRule("nat-"+string(hook), "jump %s", chainDispatch)
	}
	s.addMasqueradeRules(f, f.familyPrefixes(b.PodCIDRs))
	s.addRefusalRules(f, address, at, f.familyPrefixes(b.ServiceCIDRs))
	return s
}

// addShortcutChains adds the chains for external traffic to Services with externalTrafficPolicy
// Local. Packets from other hosts go only to endpoints on this node. Packets from pods and from the
// node itself may go to any endpoint, as with the cluster IP. prefix is nodePortPrefix or "".
func (s *tableSkeleton) addShortcutChains(f family, prefix, key string, pods []netip.Prefix) {
	name := prefix + chainShort
	s.addChain(name)
	if len(pods) > 0 {
		s.addRule(name, "%s saddr { %s } %s vmap @%s", f.ip, joinPrefixes(pods), key, prefix+mapInside)
	}
	s.addRule(name, "fib saddr type local %s %s vmap @%s", markStatement, key, prefix+mapInside)
	s.addRule(name, "%s vmap @%s", key, prefix+mapLocal)
}

func (s *tableSkeleton) addMasqueradeRules(f family, pods []netip.Prefix) {
	const name = "nat-postrouting"
	s.addHookChain(name, knftables.NATType, knftables.PostroutingHook, knftables.SNATPriority)
	s.addRule(name, "meta mark and %s != 0 meta mark set meta mark xor %s masquerade", markMasquerade, markMasquerade)
	s.addRule(name, "ct status dnat %s saddr . %s daddr @%s masquerade", f.ip, f.ip, setHairpin)
	for _, p := range pods {
		// Hosts outside the cluster have no route to pods: such traffic takes the node's address.
		s.addRule(name, "%s saddr %s %s daddr != { %s } masquerade", f.ip, p, f.ip, joinPrefixes(pods))
	}
}

// addRefusalRules adds the chains and rules that reject or drop traffic without a backend, before
// it is routed or delivered. The rules look up frontends in the maps named by mapRefused. address
// is the key expression for frontends with an address. nodePort is the match expression for packets
// to node ports; if it is empty, node ports get no rule. Traffic to an address in the prefixes
// services is also rejected if the address belongs to no Service. Local addresses in these prefixes
// are exempt, because the agent serves DNS at one of them.
func (s *tableSkeleton) addRefusalRules(f family, address, nodePort string, services []netip.Prefix) {
	// the kernel limits the rate of ICMP errors
	s.addRule(chainRefuse, "meta l4proto tcp reject with tcp reset")
	s.addRule(chainRefuse, "reject")
	s.addRule(chainUnserved, "%s", f.countRule(setUnserved))
	s.addRule(chainUnserved, "goto %s", chainRefuse)
	s.addRule(chainSilent, "%s", f.countRule(setUnserved))
	s.addRule(chainSilent, "drop")
	for _, hook := range []knftables.BaseChainHook{knftables.InputHook, knftables.ForwardHook, knftables.OutputHook} {
		name := "refuse-" + string(hook)
		s.addHookChain(name, knftables.FilterType, hook, knftables.FilterPriority)
		s.addBypass(name, hook)
		s.addRule(name, "ct state new %s vmap @%s", address, mapRefused)
		if hook == knftables.InputHook && nodePort != "" {
			s.addRule(name, "ct state new %s meta l4proto . th dport vmap @%s", nodePort, nodePortPrefix+mapRefused)
		}
		if hook != knftables.InputHook && len(services) > 0 {
			s.addRule(name, "%s daddr { %s } fib daddr type != local goto %s", f.ip,
				joinPrefixes(services), chainRefuse)
		}
	}
}

// clientSet returns the nftables set that stores the clients with affinity to the backend of the
// chain c.
func (f family) clientSet(c nftChain) *knftables.Set {
	return &knftables.Set{Name: c.name, Type: f.addr,
		Flags:   []knftables.SetFlag{knftables.DynamicFlag, knftables.TimeoutFlag},
		Timeout: knftables.PtrTo(time.Duration(c.affinity) * time.Second), Size: knftables.PtrTo(uint64(65535))}
}
