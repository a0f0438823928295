package proxy

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/knftables"
)

// Table is the name of our nftables table; nothing else on the node is touched.
const Table = "keelson"

// markMasquerade is the packet mark of traffic whose source becomes the node's:
// replies must come back through the node that changed the destination.
const markMasquerade = "0x4000"

const (
	mapServices     = "services"
	mapNodePorts    = "nodeports"
	mapRefused      = "refused"
	mapRefusedPorts = "refused-nodeports"
	setHairpin      = "hairpin"
	chainRefuse     = "refuse"
	chainDispatch   = "dispatch"
)

// chainSpec is one chain of ours: its rules in order, and the sets it remembers clients in.
type chainSpec struct {
	rules    []string
	affinity []affinitySet
}

type affinitySet struct {
	name    string
	seconds int32
}

// ruleset is a model rendered: what the kernel should hold beyond the base chains.
type ruleset struct {
	chains    map[string]chainSpec
	services  map[string]string // "ip . proto . port" → verdict
	nodePorts map[string]string // "proto . port" → verdict
	hairpin   map[string]bool   // pod addresses that may reach themselves through a Service

	// Addresses and node ports without a backend, in the same form.
	refused, refusedPorts map[string]string
}

// render turns the model into chains and map elements. Pure.
func render(m Model) ruleset {
	r := ruleset{chains: map[string]chainSpec{}, services: map[string]string{}, nodePorts: map[string]string{},
		hairpin: map[string]bool{},
		refused: map[string]string{}, refusedPorts: map[string]string{}}
	ids := slices.Sorted(maps.Keys(m))
	for _, id := range ids {
		p := m[id]
		if len(p.Cluster) > 0 {
			r.balance("svc-"+id, p, p.Cluster)
		}
		r.dispatch(p.Internal, p.Cluster, "svc-"+id, "goto "+chainRefuse)
	}
	// Anybody may write any address as an external one. What the cluster gave to a Service stays that Service's.
	for _, id := range ids {
		p := m[id]
		if len(p.External) > 0 {
			if len(p.Outside) > 0 {
				r.external("ext-"+id, p)
			}
			without := "goto " + chainRefuse
			if p.KeepSource && len(p.Serving) > 0 {
				without = "drop" // other nodes have backends: as documented, this one keeps silent
			}
			r.dispatch(p.External, p.Outside, "ext-"+id, without)
		}
		for _, b := range p.Cluster {
			if b.Local {
				r.hairpin[b.IP.String()] = true
			}
		}
	}
	return r
}

// dispatch sends what is for the frontends to a chain, or says what becomes of it without a backend. A frontend that
// is there already stays as it is.
func (r *ruleset) dispatch(fronts []Frontend, to []Backend, chain, without string) {
	addresses, ports, verdict := r.services, r.nodePorts, "goto "+chain
	if len(to) == 0 {
		addresses, ports, verdict = r.refused, r.refusedPorts, without
	}
	for _, f := range fronts {
		key, into, all := serviceKey(f), addresses, []map[string]string{r.services, r.refused}
		if !f.IP.IsValid() {
			key, into, all = f.Proto+" . "+fmt.Sprint(f.Port), ports, []map[string]string{r.nodePorts, r.refusedPorts}
		}
		taken := slices.ContainsFunc(all, func(m map[string]string) bool { return m[key] != "" })
		if !taken {
			into[key] = verdict
		}
	}
}

func serviceKey(f Frontend) string { return fmt.Sprintf("%s . %s . %d", f.IP, f.Proto, f.Port) }

// balance writes the chain that chooses one of the backends, of which there is at least one.
func (r *ruleset) balance(chain string, p Port, to []Backend) {
	if p.Affinity > 0 {
		r.sticky(chain, p, to)
	} else {
		r.chains[chain] = chainSpec{rules: []string{fmt.Sprintf("meta l4proto %s dnat ip to %s", p.Proto, choose(to))}}
	}
}

func choose(to []Backend) string {
	if len(to) == 1 {
		return fmt.Sprintf("%s:%d", to[0].IP, to[0].Port)
	}
	parts := make([]string, len(to))
	for i, b := range to {
		parts[i] = fmt.Sprintf("%d : %s . %d", i, b.IP, b.Port)
	}
	return fmt.Sprintf("numgen random mod %d map { %s }", len(to), strings.Join(parts, ", "))
}

// sticky gives every backend a chain and a set of the clients that belong to it.
func (r *ruleset) sticky(chain string, p Port, to []Backend) {
	var front chainSpec
	pick := make([]string, len(to))
	for i, b := range to {
		own := fmt.Sprintf("ep-%s-%s-%d", chain, strings.ReplaceAll(b.IP.String(), ".", "-"), b.Port)
		r.chains[own] = chainSpec{
			rules: []string{
				fmt.Sprintf("update @%s { ip saddr }", own),
				fmt.Sprintf("meta l4proto %s dnat to %s:%d", p.Proto, b.IP, b.Port),
			},
			affinity: []affinitySet{{own, p.Affinity}},
		}
		front.rules = append(front.rules, fmt.Sprintf("ip saddr @%s goto %s", own, own))
		pick[i] = fmt.Sprintf("%d : goto %s", i, own)
	}
	front.rules = append(front.rules, fmt.Sprintf("numgen random mod %d vmap { %s }", len(to), strings.Join(pick, " , ")))
	r.chains[chain] = front
}

func (r *ruleset) external(chain string, p Port) {
	if p.KeepSource {
		r.balance(chain, p, p.Outside)
		return
	}
	to := "svc-" + p.ID
	// Cluster traffic policy may leave out backends that external traffic may use.
	if !slices.Equal(p.Cluster, p.Outside) {
		to = "out-" + p.ID
		r.balance(to, p, p.Outside)
	}
	r.chains[chain] = chainSpec{rules: []string{"meta mark set meta mark or " + markMasquerade, "goto " + to}}
}

// base adds the table from nothing: in one transaction, so that no packet sees half of it.
func base(tx *knftables.Transaction, serviceCIDR, clusterCIDR netip.Prefix) {
	tx.Add(&knftables.Table{})
	tx.Delete(&knftables.Table{})
	tx.Add(&knftables.Table{Comment: knftables.PtrTo("Keelson Service rules")})
	tx.Add(&knftables.Map{Name: mapServices, Type: "ipv4_addr . inet_proto . inet_service : verdict"})
	tx.Add(&knftables.Map{Name: mapNodePorts, Type: "inet_proto . inet_service : verdict"})
	tx.Add(&knftables.Set{Name: setHairpin, Type: "ipv4_addr . ipv4_addr"})
	tx.Add(&knftables.Chain{Name: chainDispatch})
	tx.Add(&knftables.Rule{Chain: chainDispatch, Rule: "ip daddr . meta l4proto . th dport vmap @" + mapServices})
	tx.Add(&knftables.Rule{Chain: chainDispatch, Rule: "fib daddr type local ip daddr != 127.0.0.0/8 meta l4proto . th dport vmap @" + mapNodePorts})
	for _, hook := range []knftables.BaseChainHook{knftables.PreroutingHook, knftables.OutputHook} {
		name := "nat-" + string(hook)
		tx.Add(&knftables.Chain{Name: name, Type: knftables.PtrTo(knftables.NATType), Hook: knftables.PtrTo(hook), Priority: knftables.PtrTo(knftables.DNATPriority)})
		tx.Add(&knftables.Rule{Chain: name, Rule: "jump " + chainDispatch})
	}
	tx.Add(&knftables.Chain{Name: "nat-postrouting", Type: knftables.PtrTo(knftables.NATType), Hook: knftables.PtrTo(knftables.PostroutingHook), Priority: knftables.PtrTo(knftables.SNATPriority)})
	tx.Add(&knftables.Rule{Chain: "nat-postrouting", Rule: fmt.Sprintf("meta mark and %s != 0 meta mark set meta mark xor %s masquerade", markMasquerade, markMasquerade)})
	tx.Add(&knftables.Rule{Chain: "nat-postrouting", Rule: "ct status dnat ip saddr . ip daddr @" + setHairpin + " masquerade"})
	if clusterCIDR.IsValid() {
		// Beyond the cluster nobody knows the way to a pod: such traffic takes the node's address.
		tx.Add(&knftables.Rule{Chain: "nat-postrouting", Rule: fmt.Sprintf("ip saddr %s ip daddr != %s masquerade", clusterCIDR, clusterCIDR)})
	}
	refusals(tx, serviceCIDR)
}

// refusals answer what has no backend at once, before it is routed or delivered: addresses of whatever kind and node
// ports by what the model says of them, and an address of the Services' range that no rule changed.
func refusals(tx *knftables.Transaction, serviceCIDR netip.Prefix) {
	tx.Add(&knftables.Map{Name: mapRefused, Type: "ipv4_addr . inet_proto . inet_service : verdict"})
	tx.Add(&knftables.Map{Name: mapRefusedPorts, Type: "inet_proto . inet_service : verdict"})
	tx.Add(&knftables.Chain{Name: chainRefuse})
	// the kernel limits the rate of ICMP
	tx.Add(&knftables.Rule{Chain: chainRefuse, Rule: "meta l4proto tcp reject with tcp reset"})
	tx.Add(&knftables.Rule{Chain: chainRefuse, Rule: "reject"})
	for _, hook := range []knftables.BaseChainHook{knftables.InputHook, knftables.ForwardHook, knftables.OutputHook} {
		name := "refuse-" + string(hook)
		tx.Add(&knftables.Chain{Name: name, Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(hook), Priority: knftables.PtrTo(knftables.FilterPriority)})
		tx.Add(&knftables.Rule{Chain: name, Rule: "ct state new ip daddr . meta l4proto . th dport vmap @" + mapRefused})
		if hook == knftables.InputHook {
			tx.Add(&knftables.Rule{Chain: name, Rule: "ct state new fib daddr type local ip daddr != 127.0.0.0/8 meta l4proto . th dport vmap @" + mapRefusedPorts})
		} else if serviceCIDR.IsValid() {
			tx.Add(&knftables.Rule{Chain: name, Rule: fmt.Sprintf("ip daddr %s goto %s", serviceCIDR, chainRefuse)})
		}
	}
}

// change adds to tx what turns the kernel from one ruleset into another.
func change(tx *knftables.Transaction, from, to ruleset) {
	// New chains first, so that rules and maps may refer to them; the old go last.
	for _, name := range slices.Sorted(maps.Keys(to.chains)) {
		c := to.chains[name]
		if old, ok := from.chains[name]; ok && slices.Equal(old.rules, c.rules) && slices.Equal(old.affinity, c.affinity) {
			continue
		}
		for _, a := range c.affinity {
			tx.Add(&knftables.Set{Name: a.name, Type: "ipv4_addr", Flags: []knftables.SetFlag{knftables.DynamicFlag, knftables.TimeoutFlag},
				Timeout: knftables.PtrTo(time.Duration(a.seconds) * time.Second), Size: knftables.PtrTo(uint64(65535))})
		}
		tx.Add(&knftables.Chain{Name: name})
		tx.Flush(&knftables.Chain{Name: name})
	}
	for _, name := range slices.Sorted(maps.Keys(to.chains)) {
		c := to.chains[name]
		if old, ok := from.chains[name]; ok && slices.Equal(old.rules, c.rules) && slices.Equal(old.affinity, c.affinity) {
			continue
		}
		for _, rule := range c.rules {
			tx.Add(&knftables.Rule{Chain: name, Rule: rule})
		}
	}
	changeMap(tx, mapServices, from.services, to.services)
	changeMap(tx, mapNodePorts, from.nodePorts, to.nodePorts)
	changeMap(tx, mapRefused, from.refused, to.refused)
	changeMap(tx, mapRefusedPorts, from.refusedPorts, to.refusedPorts)
	for _, ip := range slices.Sorted(maps.Keys(from.hairpin)) {
		if !to.hairpin[ip] {
			tx.Delete(&knftables.Element{Set: setHairpin, Key: []string{ip, ip}})
		}
	}
	for _, ip := range slices.Sorted(maps.Keys(to.hairpin)) {
		if !from.hairpin[ip] {
			tx.Add(&knftables.Element{Set: setHairpin, Key: []string{ip, ip}})
		}
	}
	removeChains(tx, from, to)
}

func removeChains(tx *knftables.Transaction, from, to ruleset) {
	var gone []string
	for name := range from.chains {
		if _, ok := to.chains[name]; !ok {
			gone = append(gone, name)
		}
	}
	// "svc-" and "ext-" chains refer to "ep-" and each other: empty all, then delete all.
	slices.SortFunc(gone, func(a, b string) int { return cmp.Compare(b, a) })
	for _, name := range gone {
		tx.Flush(&knftables.Chain{Name: name})
	}
	for _, name := range gone {
		tx.Delete(&knftables.Chain{Name: name})
		for _, a := range from.chains[name].affinity {
			tx.Delete(&knftables.Set{Name: a.name})
		}
	}
}

func changeMap(tx *knftables.Transaction, name string, from, to map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(from)) {
		if to[key] != from[key] {
			tx.Delete(&knftables.Element{Map: name, Key: strings.Split(key, " . ")})
		}
	}
	for _, key := range slices.Sorted(maps.Keys(to)) {
		if from[key] != to[key] {
			tx.Add(&knftables.Element{Map: name, Key: strings.Split(key, " . "), Value: []string{to[key]}})
		}
	}
}
