package policy

import (
	"maps"
	"slices"
	"strings"

	"sigs.k8s.io/knftables"
)

// Table is the name of Keelson's nftables table for policies, in the inet family. The Enforcer
// changes no other table.
const Table = "keelson-policy"

// baseChain is a base chain of the table: a chain that the kernel calls at a netfilter hook. A
// change of its hook or priority requires a new name.
type baseChain struct {
	name       string
	hook       knftables.BaseChainHook
	priority   string
	directions []direction // directions that are evaluated, in this order
}

// baseChains are the base chains of the table. At forward, one chain evaluates both directions.
// After a pod's egress rules have allowed a packet, evaluation returns to the base chain and
// continues with the destination pod's ingress rules. Traffic from pods to the node is evaluated at
// input. Traffic from the node to its own pods is not evaluated. IPVS intercepts Service traffic
// before the chain at input, changes its destination and sends it through output. It is evaluated
// there unless its source is an address of the node.
var baseChains = []baseChain{
	{"forward", knftables.ForwardHook, "filter", []direction{directions[1], directions[0]}},
	{"local", knftables.InputHook, "filter + 120", []direction{directions[1]}},
	{"sent", knftables.OutputHook, "filter", []direction{directions[1], directions[0]}},
}

// addBase adds to the transaction the table, maps, sets and base chains that are missing. It also
// rewrites the rules of the base chains. bridge is the interface to which pods are attached.
func addBase(tx *knftables.Transaction, bridge string) {
	tx.Add(&knftables.Table{Comment: knftables.PtrTo("Keelson NetworkPolicies")})
	for _, f := range families {
		addr := setContent{six: f.six}.nftType()
		tx.Add(&knftables.Set{Name: selfSet(f), Type: addr + " . " + addr})
		for _, d := range directions {
			tx.Add(&knftables.Map{Name: verdictMap(d, f), Type: addr + " : verdict"})
			tx.Add(&knftables.Set{Name: droppedSet(d, f), Type: addr + " ; counter"}) // each element has a counter
		}
	}
	for _, c := range baseChains {
		tx.Add(&knftables.Chain{Name: c.name, Type: knftables.PtrTo(knftables.FilterType), Hook: knftables.PtrTo(c.hook),
			Priority: knftables.PtrTo(knftables.BaseChainPriority(c.priority))})
		tx.Flush(&knftables.Chain{Name: c.name})
		for _, line := range baseRules(c, bridge) {
			tx.Add(&knftables.Rule{Chain: c.name, Rule: line})
		}
	}
}

func baseRules(c baseChain, bridge string) []string {
	rules := []string{"ct state established,related accept"}
	// Pods have link-local IPv6 addresses even in an IPv4 cluster, and no policy can name them.
	// Neighbor discovery requires these addresses. All other packets of pods to or from them are
	// dropped.
	from := `iifname "` + bridge + `" ip6 `
	switch c.hook {
	case knftables.ForwardHook:
		rules = append(rules, from+"saddr fe80::/10 "+neighborDiscoveryMatch+"accept", from+"saddr fe80::/10 drop", from+"daddr fe80::/10 drop")
	case knftables.InputHook:
		rules = append(rules, from+"saddr fe80::/10 "+neighborDiscoveryMatch+"accept", from+"saddr fe80::/10 drop", from+"daddr fe80::/10 "+neighborDiscoveryMatch+"accept",
			from+"daddr fe80::/10 drop")
	}
	if c.hook == knftables.OutputHook {
		rules = append(rules, "fib saddr type local accept")
	}
	for _, d := range c.directions {
		for _, f := range families {
			rules = append(rules, f.ip+" "+d.own+" vmap @"+verdictMap(d, f))
		}
	}
	return rules
}

// addRebuild adds to the transaction all operations that replace the contents of the table by the
// ruleset to. The transaction is atomic. have lists the names of the table's current objects by
// kind. bridge is the interface to which pods are attached.
func addRebuild(tx *knftables.Transaction, have map[string][]string, to ruleset, bridge string) {
	// Flush requires that the table exists; adding an existing table has no effect.
	tx.Add(&knftables.Table{Comment: knftables.PtrTo("Keelson NetworkPolicies")})
	for _, m := range have["map"] {
		tx.Flush(&knftables.Map{Name: m})
	}
	for _, c := range have["chain"] {
		tx.Flush(&knftables.Chain{Name: c})
	}
	for _, s := range have["set"] {
		tx.Flush(&knftables.Set{Name: s})
	}
	addBase(tx, bridge)
	addChanges(tx, ruleset{}, to)
	kept := map[string]bool{}
	for _, c := range baseChains {
		kept[c.name] = true
	}
	for _, f := range families {
		kept[selfSet(f)] = true
		for _, d := range directions {
			kept[verdictMap(d, f)], kept[droppedSet(d, f)] = true, true
		}
	}
	for name := range to.chains {
		kept[name] = true
	}
	for _, c := range have["chain"] {
		if !kept[c] {
			tx.Delete(&knftables.Chain{Name: c})
		}
	}
	for _, m := range have["map"] {
		if !kept[m] {
			tx.Delete(&knftables.Map{Name: m})
		}
	}
	for _, s := range have["set"] {
		if !kept[s] && to.sets[s] == nil {
			tx.Delete(&knftables.Set{Name: s})
		}
	}
}

// addChanges adds to the transaction the operations that change the kernel's rules from one ruleset
// to another.
func addChanges(tx *knftables.Transaction, from, to ruleset) {
	// New sets and chains come first, because rules and maps refer to them. Unused ones are deleted
	// last.
	for _, name := range slices.Sorted(maps.Keys(to.sets)) {
		changeSet(tx, name, from.sets[name], to.sets[name])
	}
	var rewritten []string
	for _, name := range slices.Sorted(maps.Keys(to.chains)) {
		old, ok := from.chains[name]
		if ok && slices.Equal(old, to.chains[name]) {
			continue
		}
		rewritten = append(rewritten, name)
		tx.Add(&knftables.Chain{Name: name})
		tx.Flush(&knftables.Chain{Name: name})
	}
	for _, name := range rewritten {
		for _, line := range to.chains[name] {
			tx.Add(&knftables.Rule{Chain: name, Rule: line})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(to.selves)) {
		changeElements(tx, name, from.selves[name], to.selves[name])
	}
	for _, name := range slices.Sorted(maps.Keys(to.owners)) {
		changeOwners(tx, name, from.owners[name], to.owners[name])
	}
	for _, name := range slices.Sorted(maps.Keys(to.maps)) {
		changeMap(tx, name, from.maps[name], to.maps[name])
	}
	var gone []string
	for name := range from.chains {
		if _, ok := to.chains[name]; !ok {
			gone = append(gone, name)
		}
	}
	slices.Sort(gone)
	for _, name := range gone { // chains may refer to each other: flush all of them before deleting
		tx.Flush(&knftables.Chain{Name: name})
	}
	for _, name := range gone {
		tx.Delete(&knftables.Chain{Name: name})
	}
	for _, name := range slices.Sorted(maps.Keys(from.sets)) {
		if to.sets[name] == nil {
			tx.Delete(&knftables.Set{Name: name})
		}
	}
}

func changeSet(tx *knftables.Transaction, name string, from, to *filledSet) {
	if from == to {
		return
	}
	var old map[string]bool
	if from == nil {
		s := &knftables.Set{Name: name, Type: to.nftType()}
		if len(to.spans) > 0 {
			s.Flags = []knftables.SetFlag{knftables.IntervalFlag}
		}
		tx.Add(s)
	} else {
		old = from.elements
	}
	changeElements(tx, name, old, to.elements)
}

func changeElements(tx *knftables.Transaction, name string, from, to map[string]bool) {
	for _, e := range missingElements(from, to) {
		tx.Delete(&knftables.Element{Set: name, Key: strings.Split(e, " . ")})
	}
	for _, e := range missingElements(to, from) {
		tx.Add(&knftables.Element{Set: name, Key: strings.Split(e, " . ")})
	}
}

// missingElements returns the elements of the first set that the second set lacks, sorted.
func missingElements(of, in map[string]bool) (out []string) {
	for e := range of {
		if !in[e] {
			out = append(out, e)
		}
	}
	slices.Sort(out)
	return out
}

// changeOwners recreates an address in the set name of drop counters when the address moves to
// another pod, so that its counter starts at 0. from and to map addresses to pod UIDs.
func changeOwners(tx *knftables.Transaction, name string, from, to map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(from)) {
		if now, ok := to[key]; !ok || now != from[key] {
			tx.Delete(&knftables.Element{Set: name, Key: []string{key}})
		}
	}
	for _, key := range slices.Sorted(maps.Keys(to)) {
		if was, ok := from[key]; !ok || was != to[key] {
			tx.Add(&knftables.Element{Set: name, Key: []string{key}})
		}
	}
}

func changeMap(tx *knftables.Transaction, name string, from, to map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(from)) {
		if to[key] != from[key] {
			tx.Delete(&knftables.Element{Map: name, Key: []string{key}, Value: []string{from[key]}})
		}
	}
	for _, key := range slices.Sorted(maps.Keys(to)) {
		if from[key] != to[key] {
			tx.Add(&knftables.Element{Map: name, Key: []string{key}, Value: []string{to[key]}})
		}
	}
}
