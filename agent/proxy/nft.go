package proxy

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// nft is the Writer of mode nftables. It writes one table per address family. Each change is one
// transaction.
type nft struct {
	tableDialect
	tables []*nftTable
	open   func(knftables.Family) (knftables.Interface, error)
	// reads the kernel's rules; nil: not supported, so rules are not compared
	read func(f family, table, chain string) (map[string]shownChain, error)
}

// tableDialect determines the contents of an nftTable: either all rules of Services (mode
// nftables), or only the rules that mode ipvs requires.
type tableDialect struct {
	table    string
	skeleton func(family, Base) *tableSkeleton
	render   func(family, *servicemodel.Port) portRules
}

// nftTable is one nftables table and its state in the kernel.
type nftTable struct {
	family
	tableDialect
	nft   knftables.Interface
	base  Base
	built bool
	want  tableState
	shown shownRules
}

func newNFT() *nft {
	return newNFTDialect(tableDialect{table: Table, skeleton: family.fullSkeleton, render: family.renderPort})
}

func newNFTDialect(d tableDialect) *nft {
	n := &nft{tableDialect: d, read: kernelRules,
		tables: []*nftTable{{family: ipv4, tableDialect: d}, {family: ipv6, tableDialect: d}}}
	n.open = func(f knftables.Family) (knftables.Interface, error) { return knftables.New(f, d.table) }
	return n
}

// openTable opens the connection to nftables for the table, if it is not open.
func (t *nftTable) openTable(n *nft) error {
	if t.nft != nil {
		return nil
	}
	var err error
	name := knftables.IPv4Family
	if t.v6 {
		name = knftables.IPv6Family
	}
	t.shown.read = n.read
	t.nft, err = n.open(name)
	return err
}

// Check returns an error with a remedy if this machine does not support nftables. It implements
// Writer.
func (n *nft) Check(context.Context) error {
	if err := n.tables[0].openTable(n); err != nil {
		return fmt.Errorf("Service rules need nftables: %w: install nft and a kernel with nf_tables, or choose "+
			"another --proxy-mode", err)
	}
	return nil
}

// Sync replaces the contents of Keelson's nftables tables with the rules for base and ports. It
// implements Writer.
func (n *nft) Sync(ctx context.Context, base Base, ports iter.Seq[*servicemodel.Port]) error {
	if err := n.Check(ctx); err != nil {
		return err
	}
	for _, t := range n.tables {
		needed := t.isNeeded(base)
		for range t.familyPorts(ports) {
			needed = true
			break
		}
		if !needed {
			if err := n.deleteTable(ctx, t); err != nil {
				return err
			}
			t.base = base
			continue
		}
		if err := n.syncTable(ctx, t, base, t.familyPorts(ports)); err != nil {
			return err
		}
	}
	return nil
}

// syncTable replaces the contents of one table in one transaction. It keeps the sets that store
// client affinity.
func (n *nft) syncTable(ctx context.Context, t *nftTable, base Base, ports iter.Seq[*servicemodel.Port]) error {
	if err := t.openTable(n); err != nil {
		return err
	}
	frame := t.skeleton(t.family, base)
	there, err := t.listContents(ctx)
	if err != nil {
		return err
	}
	fine := true
	if t.shown.read != nil && len(there.chains) > 0 {
		if fine, err = isTableActive(t.family, t.table); err != nil {
			return fmt.Errorf("reading the Service rules: %w", err)
		}
	}
	t.built, t.base = false, base
	t.want = newTableState()
	t.shown.intactGeneration, t.shown.chains = 0, map[string]shownChain{}
	for _, r := range frame.rules {
		t.want.rules[r.Chain]++
	}
	tx := t.nft.NewTransaction()
	if !there.chains[frame.markerChain()] || !fine {
		there = tableContents{}
		tx.Add(&knftables.Table{})
		tx.Delete(&knftables.Table{})
	}
	frame.writeSkeleton(tx, there)
	wanted := tableContents{chains: map[string]bool{frame.markerChain(): true}, sets: map[string]bool{}}
	for _, c := range frame.chains {
		wanted.chains[c.Name] = true
	}
	t.addPorts(tx, ports, there, wanted)
	there.deleteUnwanted(tx, wanted)
	if err := t.runTransaction(ctx, tx); err != nil {
		return err
	}
	t.built = true
	return t.shown.recordChains(t.family, t.table)
}

// tableContents lists the names of a table's chains, and of its sets that store client affinity.
type tableContents struct{ chains, sets map[string]bool }

// listContents reads from the kernel which chains and affinity sets the table has. The result is
// empty if the table does not exist.
func (t *nftTable) listContents(ctx context.Context) (tableContents, error) {
	out := tableContents{chains: map[string]bool{}, sets: map[string]bool{}}
	all, err := t.nft.ListAll(ctx)
	if knftables.IsNotFound(err) {
		return out, nil
	}
	if err != nil {
		return out, fmt.Errorf("reading the Service rules: %w", err)
	}
	for _, c := range all["chain"] {
		out.chains[c] = true
	}
	for _, s := range all["set"] {
		if strings.HasPrefix(s, "ep-") {
			out.sets[s] = true
		}
	}
	return out, nil
}

// writeSkeleton adds to the transaction the table, maps, sets, base chains and rules of the
// skeleton. current lists the chains that the kernel's table has. If it is not empty, writeSkeleton
// also flushes these chains, and all maps and sets except the connection counters.
func (s *tableSkeleton) writeSkeleton(tx *knftables.Transaction, current tableContents) {
	old := len(current.chains) > 0
	if !old {
		tx.Add(&knftables.Table{Comment: knftables.PtrTo("Keelson Service rules")})
	}
	for _, m := range s.maps {
		tx.Add(m)
		if old {
			tx.Flush(&knftables.Map{Name: m.Name})
		}
	}
	for _, set := range s.sets {
		tx.Add(set)
		if old && set.Name != setConnections && set.Name != setUnserved {
			tx.Flush(&knftables.Set{Name: set.Name})
		}
	}
	for _, c := range s.chains {
		tx.Add(c)
	}
	tx.Add(&knftables.Chain{Name: s.markerChain()})
	for _, name := range slices.Sorted(maps.Keys(current.chains)) {
		tx.Flush(&knftables.Chain{Name: name})
	}
	for _, r := range s.rules {
		tx.Add(r)
	}
}

// deleteUnwanted adds to the transaction the deletion of the chains and sets in c that are not in
// wanted. The caller must ensure that no remaining rule refers to them.
func (c tableContents) deleteUnwanted(tx *knftables.Transaction, wanted tableContents) {
	for _, name := range slices.Sorted(maps.Keys(c.chains)) {
		if !wanted.chains[name] {
			tx.Delete(&knftables.Chain{Name: name})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.sets)) {
		if !wanted.sets[name] {
			tx.Delete(&knftables.Set{Name: name})
		}
	}
}

// addPorts adds to the transaction the elements and chains of all Ports. current lists the chains
// and sets of the kernel's table. The names of the written chains and sets are added to wanted.
func (t *nftTable) addPorts(
	tx *knftables.Transaction, ports iter.Seq[*servicemodel.Port], current, wanted tableContents,
) {
	var order []*servicemodel.Port
	for p := range ports {
		order = append(order, p)
	}
	slices.SortFunc(order, func(a, b *servicemodel.Port) int { return strings.Compare(a.ID, b.ID) })
	for _, p := range order {
		of := t.render(t.family, p)
		for _, c := range of.own {
			wanted.chains[c.name] = true
			t.want.rules[c.name] = len(c.rules)
			if c.affinity > 0 {
				wanted.sets[c.name] = true
				if current.sets[c.name] && current.chains[c.name] {
					continue // keep the clients that it stores
				}
				tx.Add(t.clientSet(c))
			}
		}
		t.want.countUses(of, 1)
		t.addChains(tx, of, func(nftChain) bool { return true })
		for _, m := range slices.Sorted(maps.Keys(of.elements)) {
			t.want.elements[m] = t.want.elements[m].addElements(of.elements[m], 1)
			for _, e := range of.elements[m] {
				tx.Add(e.toMapElement(m))
			}
		}
	}
	for _, ip := range slices.SortedFunc(maps.Keys(t.want.hairpinUses), netip.Addr.Compare) {
		tx.Add(hairpinElement(ip))
	}
	for name := range t.want.sharedUses {
		wanted.chains[name] = true
	}
}

// addChains adds to the transaction those shared chains of p that no other Port uses yet, and p's
// own chains for which changed returns true.
func (t *nftTable) addChains(tx *knftables.Transaction, p portRules, changed func(nftChain) bool) {
	var rules []*knftables.Rule
	write := func(c nftChain) {
		tx.Add(&knftables.Chain{Name: c.name})
		for _, r := range c.rules {
			rules = append(rules, &knftables.Rule{Chain: c.name, Rule: r})
		}
	}
	for _, c := range p.shared {
		if t.want.sharedUses[c.name] == 1 {
			write(c)
		}
	}
	for _, c := range p.own {
		if changed(c) {
			write(c)
		}
	}
	for _, r := range rules { // after all chains, because rules refer to chains
		tx.Add(r)
	}
}

func distinctAddrs(all []netip.Addr) []netip.Addr {
	out := slices.Clone(all)
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

func hairpinElement(ip netip.Addr) *knftables.Element {
	return &knftables.Element{Set: setHairpin, Key: []string{ip.String(), ip.String()}}
}

// toMapElement converts the element for a transaction. m is the name of the nftables map.
func (e mapElement) toMapElement(m string) *knftables.Element {
	// Key and Value are single strings rather than parts, because a transaction may contain
	// hundreds of thousands of elements.
	out := &knftables.Element{Map: m, Key: []string{e.key}, Value: []string{e.value}}
	if e.comment != "" {
		out.Comment = &e.comment
	}
	return out
}

// Apply writes the rules of the changed Ports, in one transaction per address family. It implements
// Writer.
func (n *nft) Apply(ctx context.Context, changes []servicemodel.Change) error {
	for _, t := range n.tables {
		mine := t.familyChanges(changes)
		if len(mine) == 0 {
			continue
		}
		if !t.built { // first Ports of this family
			if err := n.syncTable(ctx, t, t.base, addedPorts(mine)); err != nil {
				return err
			}
			continue
		}
		tx := t.nft.NewTransaction()
		t.shown.written = nil
		t.addChanges(tx, mine)
		if tx.NumOperations() == 0 {
			continue
		}
		err := t.runTransaction(ctx, tx)
		if err == nil && len(t.shown.written) > 0 {
			err = t.shown.recordChains(t.family, t.table, t.shown.written...)
		}
		if err != nil {
			t.built = false
			return err
		}
	}
	return nil
}

// addChanges adds to the transaction the operations for the changes, and updates the recorded state
// of the table. All deletions of elements precede the additions, because an element may move from
// one Port to another.
func (t *nftTable) addChanges(tx *knftables.Transaction, changes []servicemodel.Change) {
	type place struct{ m, key string }
	gone, come := map[place]mapElement{}, map[place]mapElement{}
	oldChains, newChains := map[string]nftChain{}, map[string]nftChain{}
	shared, hairpin := maps.Clone(t.want.sharedUses), maps.Clone(t.want.hairpinUses)
	var pieces []portRules
	gather := func(p *servicemodel.Port, into map[place]mapElement, chains map[string]nftChain, by int) {
		if p == nil {
			return
		}
		of := t.render(t.family, p)
		for m, list := range of.elements {
			t.want.elements[m] = t.want.elements[m].addElements(list, by)
			for _, e := range list {
				into[place{m, e.key}] = e
			}
		}
		for _, c := range of.own {
			chains[c.name] = c
		}
		t.want.countUses(of, by)
		if by > 0 {
			pieces = append(pieces, of)
		}
	}
	for _, c := range changes {
		gather(c.New, come, newChains, 1)
	}
	for _, c := range changes {
		gather(c.Old, gone, oldChains, -1)
	}
	for name := range oldChains {
		delete(t.want.rules, name)
	}
	for name, c := range newChains {
		t.want.rules[name] = len(c.rules)
	}
	differs := func(c nftChain) bool {
		old, ok := oldChains[c.name]
		return !ok || !slices.Equal(old.rules, c.rules)
	}
	t.replaceChains(tx, pieces, shared, oldChains, differs)
	order := func(a, b place) int { return strings.Compare(a.m+" "+a.key, b.m+" "+b.key) }
	for _, at := range slices.SortedFunc(maps.Keys(gone), order) {
		if e, ok := come[at]; !ok || e != gone[at] {
			tx.Delete(gone[at].toMapElement(at.m))
		}
	}
	for _, at := range slices.SortedFunc(maps.Keys(come), order) {
		if e, ok := gone[at]; !ok || e != come[at] {
			tx.Add(come[at].toMapElement(at.m))
		}
	}
	t.updateHairpins(tx, hairpin)
	var dead []nftChain
	for name := range shared {
		if t.want.sharedUses[name] == 0 {
			dead = append(dead, nftChain{name: name})
		}
	}
	for name, c := range oldChains {
		if _, ok := newChains[name]; !ok {
			dead = append(dead, c)
		}
	}
	deleteChains(tx, dead)
	for _, c := range dead {
		delete(t.shown.chains, c.name)
	}
	for _, c := range t.shown.written {
		delete(t.shown.chains, c)
	}
}

// replaceChains adds chains of renderedPorts to the transaction: shared chains that no Port used
// before, and own chains for which differs returns true. oldUses is the previous number of users of
// each shared chain. oldChains contains the previous own chains.
func (t *nftTable) replaceChains(
	tx *knftables.Transaction, renderedPorts []portRules, oldUses map[string]int, oldChains map[string]nftChain,
	differs func(nftChain) bool,
) {
	var rules []*knftables.Rule
	made := map[string]bool{}
	for _, p := range renderedPorts {
		for _, c := range p.shared {
			if oldUses[c.name] == 0 && !made[c.name] {
				made[c.name] = true
				t.shown.written = append(t.shown.written, c.name)
				tx.Add(&knftables.Chain{Name: c.name})
				for _, r := range c.rules {
					rules = append(rules, &knftables.Rule{Chain: c.name, Rule: r})
				}
			}
		}
		for _, c := range p.own {
			if !differs(c) {
				continue
			}
			if _, ok := oldChains[c.name]; c.affinity > 0 && !ok {
				tx.Add(t.clientSet(c))
			}
			t.shown.written = append(t.shown.written, c.name)
			tx.Add(&knftables.Chain{Name: c.name})
			tx.Flush(&knftables.Chain{Name: c.name})
			for _, r := range c.rules {
				rules = append(rules, &knftables.Rule{Chain: c.name, Rule: r})
			}
		}
	}
	for _, r := range rules {
		tx.Add(r)
	}
}

func (t *nftTable) updateHairpins(tx *knftables.Transaction, before map[netip.Addr]int) {
	for _, ip := range slices.SortedFunc(maps.Keys(before), netip.Addr.Compare) {
		if t.want.hairpinUses[ip] == 0 {
			tx.Delete(hairpinElement(ip))
		}
	}
	for _, ip := range slices.SortedFunc(maps.Keys(t.want.hairpinUses), netip.Addr.Compare) {
		if before[ip] == 0 {
			tx.Add(hairpinElement(ip))
		}
	}
}

// deleteChains adds to the transaction the deletion of chains and of their affinity sets. It
// flushes all of the chains first, because they may refer to each other.
func deleteChains(tx *knftables.Transaction, chains []nftChain) {
	slices.SortFunc(chains, func(a, b nftChain) int { return strings.Compare(b.name, a.name) })
	for _, c := range chains {
		tx.Flush(&knftables.Chain{Name: c.name})
	}
	for _, c := range chains {
		tx.Delete(&knftables.Chain{Name: c.name})
	}
	for _, c := range chains {
		if c.affinity > 0 {
			tx.Delete(&knftables.Set{Name: c.name})
		}
	}
}

func (t *nftTable) runTransaction(ctx context.Context, tx *knftables.Transaction) error {
	ctx, cancel := context.WithTimeout(ctx, writeLimit)
	defer cancel()
	if err := t.nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("nft transaction of %d steps: %w", tx.NumOperations(), err)
	}
	return nil
}

// deleteTable deletes an nftables table. It succeeds if the table does not exist.
func (n *nft) deleteTable(ctx context.Context, t *nftTable) error {
	if err := t.openTable(n); err != nil {
		if t.v6 { // a kernel without IPv6 has no such table
			return nil
		}
		return err
	}
	t.built = false
	there, err := t.listContents(ctx)
	if err != nil || len(there.chains) == 0 {
		return err
	}
	tx := t.nft.NewTransaction()
	tx.Delete(&knftables.Table{})
	return t.runTransaction(ctx, tx)
}

// Clean deletes Keelson's nftables tables of this mode. It implements Writer.
func (n *nft) Clean(ctx context.Context) error {
	var errs []error
	for _, t := range n.tables {
		errs = append(errs, n.deleteTable(ctx, t))
	}
	return errors.Join(errs...)
}
