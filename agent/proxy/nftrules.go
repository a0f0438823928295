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
)

// Table is the name of Keelson's nftables tables, one per address family. The agent changes no
// other table.
const Table = "keelson"

// markMasquerade is the packet mark for masquerading: the node's address replaces the source
// address. Replies must return through the node that changed the destination.
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
// uses it. Counters of deleted Services expire likewise.
const countedFor = 24 * time.Hour

// mapElement is an element of an nftables map, or of a set if value is empty.
type mapElement struct{ key, value, comment string }

// nftChain is an nftables chain with its rules. It belongs to one Port, or several Ports share it.
type nftChain struct {
	name     string
	rules    []string
	affinity int32 // seconds; if not 0, a set with the chain's name stores the clients
}

// sameChain reports whether two shared chains are equal, by their names, which are hashes of their
// rules. Either may be nil.
func (c *nftChain) sameChain(d *nftChain) bool {
	return c == d || c != nil && d != nil && c.name == d.name
}

// portRules contains the nftables map elements and chains of one Port.
type portRules struct {
	elements map[string][]mapElement // by map
	own      []nftChain
	shared   []nftChain
	hairpin  []netip.Addr // pods that may reach themselves through the Service
}

func (f family) elementKey(at Frontend) string {
	if at.IsNodePort() {
		return at.Proto + " . " + strconv.Itoa(int(at.Port))
	}
	return at.IP.String() + " . " + at.Proto + " . " + strconv.Itoa(int(at.Port))
}

// mapName returns the full name of the map name for a frontend: node ports have maps of their own,
// with the prefix nodePortPrefix.
func mapName(name string, at Frontend) string {
	if at.IsNodePort() {
		return nodePortPrefix + name
	}
	return name
}

// renderPort returns the nftables map elements and chains of a Port in mode nftables. It is pure.
func (f family) renderPort(p *Port) portRules {
	out := portRules{elements: map[string][]mapElement{}}
	add := func(m string, at Frontend, value string) {
		m = mapName(m, at)
		out.elements[m] = append(out.elements[m], mapElement{f.elementKey(at), value, sanitizeComment(p.Name)})
	}
	chains := map[string]bool{}
	for _, at := range p.Internal {
		if to := f.addBalancing(&out, p, at, internalPrefix, p.Cluster, mapEndpoints, chains); to != "" {
			add(mapServices, at, "goto "+to)
		} else {
			add(mapRefused, at, noBackendVerdict(p.StayInside, p))
		}
	}
	for _, at := range p.External {
		to := f.addBalancing(&out, p, at, "out-", p.Outside, mapEndpoints, chains)
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
		if here := f.addBalancing(&out, p, at, "loc-", p.Here, mapLocalEndpoints, chains); here != "" {
			add(mapLocal, at, "goto "+here)
		} else {
			add(mapRefused, at, "goto "+chainSilent) // other nodes have backends: Kubernetes specifies that this node drops the packets
		}
	}
	out.addGuard(p, add)
	out.hairpin = p.localAddresses()
	return out
}

// noBackendVerdict returns the nftables verdict for traffic to a Port without a backend. With
// stays, the traffic must stay on this node. It is then dropped if other nodes could serve it, as
// Kubernetes specifies. All other traffic is rejected.
func noBackendVerdict(stays bool, p *Port) string {
	if stays && len(p.Serving) > 0 {
		return "goto " + chainSilent
	}
	return "goto " + chainUnserved
}

// addBalancing adds the rules that select a backend for traffic to a frontend of p. It returns the
// name of the chain that selects, or "" if there are no backends. made contains the names of the
// chains that out already has.
func (f family) addBalancing(out *portRules, p *Port, at Frontend, prefix string, to []Backend, endpoints string, made map[string]bool) string {
	if len(to) == 0 {
		return ""
	}
	if p.Affinity > 0 {
		return f.addAffinityChains(out, p, prefix, to, made)
	}
	if prefix != internalPrefix && p.Wide {
		return f.addChoiceChain(out, p, prefix, to, made)
	}
	m, key := mapName(endpoints+at.Proto, at), strconv.Itoa(int(at.Port))
	if !at.IsNodePort() {
		key = at.IP.String() + " . " + key
	}
	for i, b := range to {
		out.elements[m] = append(out.elements[m], mapElement{key: key + " . " + strconv.Itoa(i),
			value: b.IP.String() + " . " + strconv.Itoa(int(b.Port))})
	}
	c := f.pickChain(m, at, len(to))
	if !made[c.name] {
		made[c.name] = true
		out.shared = append(out.shared, c)
	}
	return c.name
}

// internalPrefix is the first part of the names of a Port's chains for traffic to the cluster IP.
const internalPrefix = "svc-"

// Limits up to which the nftables maps contain all endpoints of each external frontend. Beyond
// these limits, each port of a Service has one chain with its endpoints. The kernel then stores the
// sum of frontends and endpoints, not their product.
const (
	maxMappedFrontends = 8  // per port
	maxMappedPairs     = 64 // per Service
)

// addChoiceChain adds to out the chain that selects one of the endpoints to for all external
// frontends of a Port. It returns the chain's name.
func (f family) addChoiceChain(out *portRules, p *Port, prefix string, to []Backend, made map[string]bool) string {
	name := prefix + p.ID
	if made[name] {
		return name
	}
	made[name] = true
	choice := make([]string, len(to))
	for i, b := range to {
		choice[i] = fmt.Sprintf("%d : %s . %d", i, b.IP, b.Port)
	}
	out.own = append(out.own, nftChain{name: name, rules: []string{f.countRule(setConnections),
		fmt.Sprintf("meta l4proto %s dnat %s to numgen random mod %d map { %s }", p.Proto, f.ip, len(to), strings.Join(choice, " , "))}})
	return name
}

// choiceKey returns the nftables expression for the packet fields by which a backend is selected in
// a map.
func (f family) choiceKey(nodePort bool, proto string) string {
	if nodePort {
		return proto + " dport"
	}
	return f.ip + " daddr . " + proto + " dport"
}

// pickChain returns the chain that selects one of n backends in the map endpoints. All frontends
// with n backends share it.
func (f family) pickChain(endpoints string, at Frontend, n int) nftChain {
	return nftChain{name: "pick-" + strings.Replace(endpoints, mapEndpoints, "", 1) + "-" + strconv.Itoa(n), rules: []string{
		f.countRule(setConnections),
		fmt.Sprintf("meta l4proto %s dnat %s to %s . numgen random mod %d map @%s", at.Proto, f.ip, f.choiceKey(at.IsNodePort(), at.Proto), n, endpoints),
	}}
}

func (f family) countRule(set string) string {
	return fmt.Sprintf("update @%s { %s daddr . meta l4proto . th dport counter }", set, f.ip)
}

// addMasqueradeChain adds a chain that marks packets for masquerading and then goes to another
// chain. It returns the new chain's name.
func (f family) addMasqueradeChain(out *portRules, to string, made map[string]bool) string {
	c := nftChain{name: "masked-" + to, rules: []string{markStatement, "goto " + to}}
	if !made[c.name] {
		made[c.name] = true
		if strings.HasPrefix(to, "pick-") {
			out.shared = append(out.shared, c)
		} else {
			out.own = append(out.own, c)
		}
	}
	return c.name
}

// addAffinityChains adds to out a chain and a set of clients for every backend, for session
// affinity. It returns the name of the chain that selects the backend.
func (f family) addAffinityChains(out *portRules, p *Port, prefix string, to []Backend, made map[string]bool) string {
	front := nftChain{name: prefix + p.ID, rules: []string{f.countRule(setConnections)}}
	if made[front.name] {
		return front.name
	}
	made[front.name] = true
	choice := make([]string, len(to))
	for i, b := range to {
		own := "ep-" + p.ID + "-" + shortHash(fmt.Sprint(b.addrPort(), p.Affinity)) // the name contains the timeout, because a set's timeout cannot be changed
		if !made[own] {
			made[own] = true
			out.own = append(out.own, nftChain{name: own, affinity: p.Affinity, rules: []string{
				fmt.Sprintf("update @%s { %s saddr }", own, f.ip),
				fmt.Sprintf("meta l4proto %s dnat to %s", p.Proto, b.addrPort()),
			}})
		}
		front.rules = append(front.rules, fmt.Sprintf("%s saddr @%s goto %s", f.ip, own, own))
		choice[i] = fmt.Sprintf("%d : goto %s", i, own)
	}
	front.rules = append(front.rules, fmt.Sprintf("numgen random mod %d vmap { %s }", len(to), strings.Join(choice, " , ")))
	out.own = append(out.own, front)
	return front.name
}

// addGuard adds to out the rules that drop packets of clients outside the Service's
// loadBalancerSourceRanges. add adds an element to a map.
func (out *portRules) addGuard(p *Port, add func(m string, at Frontend, value string)) {
	if len(p.Guarded) == 0 {
		return
	}
	out.shared = append(out.shared, *p.guard)
	for _, at := range p.Guarded {
		add(mapFirewall, at, "goto "+p.guard.name)
	}
}

// guardChain returns the chain that drops packets of clients outside ranges. Ports with the same
// ranges share the chain, because its name is a hash of the ranges.
func (f family) guardChain(ranges []netip.Prefix) *nftChain {
	rule := "drop"
	if len(ranges) > 0 {
		rule = fmt.Sprintf("%s saddr != { %s } drop", f.ip, joinPrefixes(ranges))
	}
	return &nftChain{name: "fw-" + shortHash(rule), rules: []string{rule}}
}

func joinPrefixes(all []netip.Prefix) string {
	out := make([]string, len(all))
	for i, p := range all {
		out[i] = p.String()
	}
	return strings.Join(out, ", ")
}

// shortHashDigits is the number of digits that shortHash returns.
const shortHashDigits = 12

// shortHash returns a short hexadecimal hash of s.
func shortHash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:shortHashDigits/2])
}

// tableSkeleton is an nftables table as it is without any Service: maps, sets, and base chains with
// their rules in order.
type tableSkeleton struct {
	maps   []*knftables.Map
	sets   []*knftables.Set
	chains []*knftables.Chain
	rules  []*knftables.Rule
}

// markerChain returns the name of an empty chain that identifies the skeleton. It shows whether the
// kernel's table was written for the same skeleton.
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

func (s *tableSkeleton) addHookChain(name string, kind knftables.BaseChainType, hook knftables.BaseChainHook, priority knftables.BaseChainPriority) {
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

// fullSkeleton returns the table of mode nftables as it is without any Service. It is pure.
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
					TypeOf: fmt.Sprintf("%s . numgen random mod 2 : %s daddr . %s dport", f.choiceKey(kind.prefix != "", proto), f.ip, proto)})
			}
		}
	}
	s.sets = append(s.sets, &knftables.Set{Name: setHairpin, Type: f.addr + " . " + f.addr})
	for _, name := range []string{setConnections, setUnserved} {
		s.sets = append(s.sets, &knftables.Set{Name: name, Type: f.addr + " . inet_proto . inet_service",
			Flags: []knftables.SetFlag{knftables.DynamicFlag, knftables.TimeoutFlag}, Timeout: knftables.PtrTo(countedFor),
			Size: knftables.PtrTo(uint64(65535))})
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
// Local. Other hosts reach only endpoints on this node. Pods and the node itself may use any
// endpoint, as with the cluster IP.
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
// it is routed or delivered. They apply to the frontends in the maps "refused". They also reject
// traffic to addresses in the ranges services that no Service has. Local addresses are exempt,
// because the agent serves DNS at one of them.
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
			s.addRule(name, "%s daddr { %s } fib daddr type != local goto %s", f.ip, joinPrefixes(services), chainRefuse)
		}
	}
}

// clientSet returns the nftables set that stores which clients have affinity to the backend of
// chain c.
func (f family) clientSet(c nftChain) *knftables.Set {
	return &knftables.Set{Name: c.name, Type: f.addr, Flags: []knftables.SetFlag{knftables.DynamicFlag, knftables.TimeoutFlag},
		Timeout: knftables.PtrTo(time.Duration(c.affinity) * time.Second), Size: knftables.PtrTo(uint64(65535))}
}
