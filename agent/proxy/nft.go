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
)

// nft writes nftables rules: one table per address family. Each change is one transaction.
type nft struct {
	dialect
	tables []*nftTable
	open   func(knftables.Family) (knftables.Interface, error)
	read   func(f family, table, chain string) (map[string]shown, error) // reads the kernel's rules; nil: not supported, rules are not compared
}

// dialect determines the contents of a table: all rules of Services, or only those that mode ipvs
// requires.
type dialect struct {
	table string
	frame func(family, Base) *skeleton
	piece func(family, *Port) piece
}

// nftTable is one table and its state in the kernel.
type nftTable struct {
	family
	dialect
	nft      knftables.Interface
	read     func(f family, table, chain string) (map[string]shown, error)
	base     Base
	built    bool
	shared   map[string]int     // chain → number of Ports that use it
	hairpin  map[netip.Addr]int // pod → number of Ports through which it may reach itself
	elements map[string]digest  // map → digest of the elements that it should contain
	rules    map[string]int     // chain → number of rules that it should contain
	proven   map[string]shown   // chain → what the kernel returned for it after it was written, if it could be read
	fresh    []string           // chains that the current transaction writes
	checked  uint32             // ruleset generation at which this table was last found intact
}

func newNFT() *nft {
	return speaking(dialect{table: Table, frame: family.skeletonOf, piece: family.render})
}

func speaking(d dialect) *nft {
	n := &nft{dialect: d, read: kernelRules, tables: []*nftTable{{family: ipv4, dialect: d}, {family: ipv6, dialect: d}}}
	n.open = func(f knftables.Family) (knftables.Interface, error) { return knftables.New(f, d.table) }
	return n
}

// handle opens the connection to nftables for the table.
func (t *nftTable) handle(n *nft) error {
	if t.nft != nil {
		return nil
	}
	var err error
	name := knftables.IPv4Family
	if t.v6 {
		name = knftables.IPv6Family
	}
	t.read = n.read
	t.nft, err = n.open(name)
	return err
}

// Check implements Writer.
func (n *nft) Check(context.Context) error {
	if err := n.tables[0].handle(n); err != nil {
		return fmt.Errorf("Service rules need nftables: %w: install nft and a kernel with nf_tables, or choose another --proxy-mode", err)
	}
	return nil
}

// Sync implements Writer.
func (n *nft) Sync(ctx context.Context, base Base, ports iter.Seq[*Port]) error {
	if err := n.Check(ctx); err != nil {
		return err
	}
	for _, t := range n.tables {
		needed := t.wanted(base)
		for range t.ports(ports) {
			needed = true
			break
		}
		if !needed {
			if err := n.drop(ctx, t); err != nil {
				return err
			}
			t.base = base
			continue
		}
		if err := n.sync(ctx, t, base, t.ports(ports)); err != nil {
			return err
		}
	}
	return nil
}

// sync replaces the contents of a table in one transaction. It keeps the sets that store client
// affinity.
func (n *nft) sync(ctx context.Context, t *nftTable, base Base, ports iter.Seq[*Port]) error {
	if err := t.handle(n); err != nil {
		return err
	}
	frame := t.frame(t.family, base)
	there, err := t.look(ctx)
	if err != nil {
		return err
	}
	fine := true
	if t.read != nil && len(there.chains) > 0 {
		if fine, err = sound(t.family, t.table); err != nil {
			return fmt.Errorf("reading the Service rules: %w", err)
		}
	}
	t.built, t.base = false, base
	t.shared, t.hairpin, t.elements, t.rules = map[string]int{}, map[netip.Addr]int{}, map[string]digest{}, map[string]int{}
	t.checked, t.proven = 0, map[string]shown{}
	for _, r := range frame.rules {
		t.rules[r.Chain]++
	}
	tx := t.nft.NewTransaction()
	if !there.chains[frame.marker()] || !fine {
		there = contents{}
		tx.Add(&knftables.Table{})
		tx.Delete(&knftables.Table{})
	}
	frame.begin(tx, there)
	wanted := contents{chains: map[string]bool{frame.marker(): true}, sets: map[string]bool{}}
	for _, c := range frame.chains {
		wanted.chains[c.Name] = true
	}
	t.fill(tx, ports, there, wanted)
	there.prune(tx, wanted)
	if err := t.run(ctx, tx); err != nil {
		return err
	}
	t.built = true
	return t.learn()
}

// contents lists the chains of a table and the sets that store client affinity.
type contents struct{ chains, sets map[string]bool }

// look reads the contents of the table. It returns empty contents if the table does not exist.
func (t *nftTable) look(ctx context.Context) (contents, error) {
	out := contents{chains: map[string]bool{}, sets: map[string]bool{}}
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

// begin writes the skeleton and flushes its current contents.
func (s *skeleton) begin(tx *knftables.Transaction, there contents) {
	old := len(there.chains) > 0
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
	tx.Add(&knftables.Chain{Name: s.marker()})
	for _, name := range slices.Sorted(maps.Keys(there.chains)) {
		tx.Flush(&knftables.Chain{Name: name})
	}
	for _, r := range s.rules {
		tx.Add(r)
	}
}

// prune deletes the chains and sets that are not in wanted. No other rule may refer to them.
func (c contents) prune(tx *knftables.Transaction, wanted contents) {
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

// fill writes all Ports.
func (t *nftTable) fill(tx *knftables.Transaction, ports iter.Seq[*Port], there, wanted contents) {
	var order []*Port
	for p := range ports {
		order = append(order, p)
	}
	slices.SortFunc(order, func(a, b *Port) int { return strings.Compare(a.ID, b.ID) })
	for _, p := range order {
		of := t.piece(t.family, p)
		for _, c := range of.own {
			wanted.chains[c.name] = true
			t.rules[c.name] = len(c.rules)
			if c.affinity > 0 {
				wanted.sets[c.name] = true
				if there.sets[c.name] && there.chains[c.name] {
					continue // keep the clients that it stores
				}
				tx.Add(t.clients(c))
			}
		}
		t.count(of, 1)
		t.ensure(tx, of, func(chain) bool { return true })
		for _, m := range slices.Sorted(maps.Keys(of.elements)) {
			t.elements[m] = t.elements[m].with(of.elements[m], 1)
			for _, e := range of.elements[m] {
				tx.Add(e.of(m))
			}
		}
	}
	for _, ip := range slices.SortedFunc(maps.Keys(t.hairpin), netip.Addr.Compare) {
		tx.Add(hairpinOf(ip))
	}
	for name := range t.shared {
		wanted.chains[name] = true
	}
}

// ensure adds the shared chains of p that are used for the first time, and its own chains for which
// changed returns true.
func (t *nftTable) ensure(tx *knftables.Transaction, p piece, changed func(chain) bool) {
	var rules []*knftables.Rule
	write := func(c chain) {
		tx.Add(&knftables.Chain{Name: c.name})
		for _, r := range c.rules {
			rules = append(rules, &knftables.Rule{Chain: c.name, Rule: r})
		}
	}
	for _, c := range p.shared {
		if t.shared[c.name] == 1 {
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

// count adds by to the number of users of each shared chain and hairpin address.
func (t *nftTable) count(p piece, by int) {
	for _, c := range p.shared {
		t.rules[c.name] = len(c.rules)
		if t.shared[c.name] += by; t.shared[c.name] == 0 {
			delete(t.shared, c.name)
			delete(t.rules, c.name)
		}
	}
	for _, ip := range distinctAddrs(p.hairpin) {
		if t.hairpin[ip] += by; t.hairpin[ip] == 0 {
			delete(t.hairpin, ip)
		}
	}
}

func distinctAddrs(all []netip.Addr) []netip.Addr {
	out := slices.Clone(all)
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

func hairpinOf(ip netip.Addr) *knftables.Element {
	return &knftables.Element{Set: setHairpin, Key: []string{ip.String(), ip.String()}}
}

// of returns the element for the named map.
func (e element) of(m string) *knftables.Element {
	// Key and Value are single strings rather than parts, because a transaction may contain
	// hundreds of thousands of elements.
	out := &knftables.Element{Map: m, Key: []string{e.key}, Value: []string{e.value}}
	if e.comment != "" {
		out.Comment = &e.comment
	}
	return out
}

// Apply implements Writer.
func (n *nft) Apply(ctx context.Context, changes []Change) error {
	for _, t := range n.tables {
		mine := t.changes(changes)
		if len(mine) == 0 {
			continue
		}
		if !t.built { // first Ports of this family
			if err := n.sync(ctx, t, t.base, added(mine)); err != nil {
				return err
			}
			continue
		}
		tx := t.nft.NewTransaction()
		t.fresh = nil
		t.change(tx, mine)
		if tx.NumOperations() == 0 {
			continue
		}
		err := t.run(ctx, tx)
		if err == nil && len(t.fresh) > 0 {
			err = t.learn(t.fresh...)
		}
		if err != nil {
			t.built = false
			return err
		}
	}
	return nil
}

// change adds the operations for the changes. An element may move from one Port to another, so all
// deletions precede the additions.
func (t *nftTable) change(tx *knftables.Transaction, changes []Change) {
	type place struct{ m, key string }
	gone, come := map[place]element{}, map[place]element{}
	oldChains, newChains := map[string]chain{}, map[string]chain{}
	shared, hairpin := maps.Clone(t.shared), maps.Clone(t.hairpin)
	var pieces []piece
	gather := func(p *Port, into map[place]element, chains map[string]chain, by int) {
		if p == nil {
			return
		}
		of := t.piece(t.family, p)
		for m, list := range of.elements {
			t.elements[m] = t.elements[m].with(list, by)
			for _, e := range list {
				into[place{m, e.key}] = e
			}
		}
		for _, c := range of.own {
			chains[c.name] = c
		}
		t.count(of, by)
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
		delete(t.rules, name)
	}
	for name, c := range newChains {
		t.rules[name] = len(c.rules)
	}
	differs := func(c chain) bool {
		old, ok := oldChains[c.name]
		return !ok || !slices.Equal(old.rules, c.rules)
	}
	t.rechain(tx, pieces, shared, oldChains, differs)
	order := func(a, b place) int { return strings.Compare(a.m+" "+a.key, b.m+" "+b.key) }
	for _, at := range slices.SortedFunc(maps.Keys(gone), order) {
		if e, ok := come[at]; !ok || e != gone[at] {
			tx.Delete(gone[at].of(at.m))
		}
	}
	for _, at := range slices.SortedFunc(maps.Keys(come), order) {
		if e, ok := gone[at]; !ok || e != come[at] {
			tx.Add(come[at].of(at.m))
		}
	}
	t.rehair(tx, hairpin)
	var dead []chain
	for name := range shared {
		if t.shared[name] == 0 {
			dead = append(dead, chain{name: name})
		}
	}
	for name, c := range oldChains {
		if _, ok := newChains[name]; !ok {
			dead = append(dead, c)
		}
	}
	remove(tx, dead)
	for _, c := range dead {
		delete(t.proven, c.name)
	}
	for _, c := range t.fresh {
		delete(t.proven, c)
	}
}

// rechain writes the chains that are new or have changed.
func (t *nftTable) rechain(tx *knftables.Transaction, pieces []piece, before map[string]int, old map[string]chain, differs func(chain) bool) {
	var rules []*knftables.Rule
	made := map[string]bool{}
	for _, p := range pieces {
		for _, c := range p.shared {
			if before[c.name] == 0 && !made[c.name] {
				made[c.name] = true
				t.fresh = append(t.fresh, c.name)
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
			if _, ok := old[c.name]; c.affinity > 0 && !ok {
				tx.Add(t.clients(c))
			}
			t.fresh = append(t.fresh, c.name)
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

func (t *nftTable) rehair(tx *knftables.Transaction, before map[netip.Addr]int) {
	for _, ip := range slices.SortedFunc(maps.Keys(before), netip.Addr.Compare) {
		if t.hairpin[ip] == 0 {
			tx.Delete(hairpinOf(ip))
		}
	}
	for _, ip := range slices.SortedFunc(maps.Keys(t.hairpin), netip.Addr.Compare) {
		if before[ip] == 0 {
			tx.Add(hairpinOf(ip))
		}
	}
}

// remove deletes chains that may refer to each other.
func remove(tx *knftables.Transaction, dead []chain) {
	slices.SortFunc(dead, func(a, b chain) int { return strings.Compare(b.name, a.name) })
	for _, c := range dead {
		tx.Flush(&knftables.Chain{Name: c.name})
	}
	for _, c := range dead {
		tx.Delete(&knftables.Chain{Name: c.name})
	}
	for _, c := range dead {
		if c.affinity > 0 {
			tx.Delete(&knftables.Set{Name: c.name})
		}
	}
}

func (t *nftTable) run(ctx context.Context, tx *knftables.Transaction) error {
	ctx, cancel := context.WithTimeout(ctx, writeLimit)
	defer cancel()
	if err := t.nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("nft transaction of %d steps: %w", tx.NumOperations(), err)
	}
	return nil
}

// drop deletes a table.
func (n *nft) drop(ctx context.Context, t *nftTable) error {
	if err := t.handle(n); err != nil {
		if t.v6 { // a kernel without IPv6 has no such table
			return nil
		}
		return err
	}
	t.built = false
	there, err := t.look(ctx)
	if err != nil || len(there.chains) == 0 {
		return err
	}
	tx := t.nft.NewTransaction()
	tx.Delete(&knftables.Table{})
	return t.run(ctx, tx)
}

// Clean implements Writer.
func (n *nft) Clean(ctx context.Context) error {
	var errs []error
	for _, t := range n.tables {
		errs = append(errs, n.drop(ctx, t))
	}
	return errors.Join(errs...)
}
