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

// baseChain is a base chain of the table, which the kernel calls at a netfilter hook. If its hook
// or priority changes in a release, its name must change too.
type baseChain struct {
	name       string
	hook       knftables.BaseChainHook
	priority   string
	directions []direction // directions that are evaluated, in this order
}

// baseChains are the base chains of the table. At the hook forward, one chain evaluates both
// directions. After a pod's egress rules have allowed a packet, evaluation returns to the base
// chain and continues with the destination pod's ingress rules. Traffic from pods to the node is
// evaluated at the hook input. Traffic from the node to its own pods is not evaluated. IPVS
// intercepts Service traffic before the chain at input, changes its destination and sends it
// through the hook output. It is evaluated there unless its source is an address of the node.
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
		tx.Add(&knftables.Chain{Name: c.name, Type: knftables.PtrTo(knftables.FilterType),
			Hook:     knftables.PtrTo(c.hook),
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
		rules = append(rules, from+"saddr fe80::/10 "+neighborDiscoveryMatch+"accept", from+"saddr fe80::/10 drop",
			from+"daddr fe80::/10 drop")
	case knftables.InputHook:
		rules = append(rules, from+"saddr fe80::/10 "+neighborDiscoveryMatch+"accept", from+"saddr fe80::/10 drop",
			from+"daddr fe80::/10 "+neighborDiscoveryMatch+"accept",
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

// addRebuild adds to the transaction the operations that replace the contents of the table with
// wanted. The transaction is atomic. current lists the names of the table's current objects by
// kind. bridge is the interface to which pods are attached.
func addRebuild(tx *knftables.Transaction, current map[string][]string, wanted ruleset, bridge string) {
	// Flush requires that the table exists; adding an existing table has no effect.
	tx.Add(&knftables.Table{Comment: knftables.PtrTo("Keelson NetworkPolicies")})
	for _, m := range current["map"] {
		tx.Flush(&knftables.Map{Name: m})
	}
	for _, c := range current["chain"] {
		tx.Flush(&knftables.Chain{Name: c})
	}
	for _, s := range current["set"] {
		tx.Flush(&knftables.Set{Name: s})
	}
	addBase(tx, bridge)
	addChanges(tx, ruleset{}, wanted)
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
	for name := range wanted.chains {
		kept[name] = true
	}
	for _, c := range current["chain"] {
		if !kept[c] {
			tx.Delete(&knftables.Chain{Name: c})
		}
	}
	for _, m := range current["map"] {
		if !kept[m] {
			tx.Delete(&knftables.Map{Name: m})
		}
	}
	for _, s := range current["set"] {
		if !kept[s] && wanted.sets[s] == nil {
			tx.Delete(&knftables.Set{Name: s})
		}
	}
}

// addChanges adds to the transaction the operations that change the kernel's rules from the ruleset
// current to the ruleset wanted.
func addChanges(tx *knftables.Transaction, current, wanted ruleset) {
	// New sets and chains come first, because rules and maps refer to them. Unused ones are deleted
	// last.
	for _, name := range slices.Sorted(maps.Keys(wanted.sets)) {
		changeSet(tx, name, current.sets[name], wanted.sets[name])
	}
	var rewritten []string
	for _, name := range slices.Sorted(maps.Keys(wanted.chains)) {
		old, ok := current.chains[name]
		if ok && slices.Equal(old, wanted.chains[name]) {
			continue
		}
		rewritten = append(rewritten, name)
		tx.Add(&knftables.Chain{Name: name})
		tx.Flush(&knftables.Chain{Name: name})
	}
	for _, name := range rewritten {
		for _, line := range wanted.chains[name] {
			tx.Add(&knftables.Rule{Chain: name, Rule: line})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(wanted.selves)) {
		changeElements(tx, name, current.selves[name], wanted.selves[name])
	}
	for _, name := range slices.Sorted(maps.Keys(wanted.owners)) {
		changeOwners(tx, name, current.owners[name], wanted.owners[name])
	}
	for _, name := range slices.Sorted(maps.Keys(wanted.maps)) {
		changeMap(tx, name, current.maps[name], wanted.maps[name])
	}
	var gone []string
	for name := range current.chains {
		if _, ok := wanted.chains[name]; !ok {
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
	for _, name := range slices.Sorted(maps.Keys(current.sets)) {
		if wanted.sets[name] == nil {
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

// missingElements returns the elements of wanted that are not in present, sorted.
func missingElements(wanted, present map[string]bool) (out []string) {
	for e := range wanted {
		if !present[e] {
			out = append(out, e)
		}
	}
	slices.Sort(out)
	return out
}

// changeOwners updates the elements of the named set of drop counters. If an address moves to
// another pod, its element is recreated, so that the counter starts at 0. oldOwners and newOwners
// map addresses to pod UIDs.
func changeOwners(tx *knftables.Transaction, name string, oldOwners, newOwners map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(oldOwners)) {
		if now, ok := newOwners[key]; !ok || now != oldOwners[key] {
			tx.Delete(&knftables.Element{Set: name, Key: []string{key}})
		}
	}
	for _, key := range slices.Sorted(maps.Keys(newOwners)) {
		if was, ok := oldOwners[key]; !ok || was != newOwners[key] {
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
