package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"os/exec"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// iptables is the Writer of mode iptables, which writes rules with iptables-restore. All rules are
// in chains named KEELSON-*, to which the built-in chains jump.
type iptables struct{ tables []*iptFamily }

// iptFamily holds the iptables rules of one address family.
type iptFamily struct {
	family
	base       Base
	built      bool
	hairpin    map[netip.Addr]int
	services   map[string]map[string]*servicemodel.Port // Service → Port ID → Port
	ruleCounts map[string]int                           // chain → expected number of rules
	// chain → its rules as Intact read them last; no entry if they were written since
	shownRules map[string]string
	run        func(ctx context.Context, input string, program string, args ...string) (string, error)
}

func newIPTables() *iptables {
	return &iptables{tables: []*iptFamily{{family: ipv4, run: runProgram}, {family: ipv6, run: runProgram}}}
}

// maxOutput limits the output of a program, in bytes.
const maxOutput = 64 << 20

// runProgram runs a program with the given standard input and returns its output. It stops the
// program after writeLimit.
func runProgram(ctx context.Context, input, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, writeLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdin = strings.NewReader(input)
	var out limitedBuffer
	var problem limitedBuffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	if err := cmd.Run(); err != nil {
		said := strings.TrimSpace(problem.String())
		return "", fmt.Errorf("%s %s: %w: %.500s", program, strings.Join(args, " "), err, said)
	}
	if out.Len() >= maxOutput {
		return "", fmt.Errorf("%s printed more than %d bytes", program, maxOutput)
	}
	return out.String(), nil
}

// limitedBuffer is a buffer that discards everything beyond maxOutput bytes.
type limitedBuffer struct{ bytes.Buffer }

func (l *limitedBuffer) Write(p []byte) (int, error) {
	if room := maxOutput - l.Len(); room > 0 {
		l.Buffer.Write(p[:min(len(p), room)])
	}
	return len(p), nil
}

// programName returns the name of an iptables program for the address family.
func (f family) programName(suffix string) string {
	if f.v6 {
		return "ip6tables" + suffix
	}
	return "iptables" + suffix
}

// Check returns an error with a remedy if this machine lacks the iptables programs or kernel
// support. It implements Writer.
func (w *iptables) Check(context.Context) error {
	for _, p := range []string{"iptables", "iptables-save", "iptables-restore"} {
		if _, err := exec.LookPath(p); err != nil {
			return fmt.Errorf("--proxy-mode=iptables needs %s: install the package iptables, or choose "+
				"another --proxy-mode", p)
		}
	}
	return nil
}

// iptTables are the tables of iptables that contain Keelson's rules, in the order in which they are
// written.
var iptTables = []string{"mangle", "nat", "filter"}

// Sync replaces all of Keelson's iptables rules with the rules for base and ports. It implements
// Writer.
func (w *iptables) Sync(ctx context.Context, base Base, ports iter.Seq[*servicemodel.Port]) error {
	for _, t := range w.tables {
		needed := t.isNeeded(base)
		for range t.familyPorts(ports) {
			needed = true
			break
		}
		if !needed {
			t.base = base
			if err := t.cleanFamily(ctx); err != nil {
				return err
			}
			continue
		}
		if err := t.syncFamily(ctx, base, t.familyPorts(ports)); err != nil {
			return err
		}
	}
	return nil
}

func (t *iptFamily) syncFamily(ctx context.Context, base Base, ports iter.Seq[*servicemodel.Port]) error {
	t.built, t.base = false, base
	t.hairpin, t.ruleCounts, t.shownRules = map[netip.Addr]int{}, map[string]int{}, map[string]string{}
	t.services = map[string]map[string]*servicemodel.Port{}
	all := t.iptSkeleton(base)
	for p := range ports {
		t.addPort(all, p)
	}
	for service := range t.services {
		t.addService(all, service)
	}
	for ip := range t.hairpin {
		all.addRule("nat", chainPostrouting, t.hairpinRule(ip))
	}
	there, err := t.readRules(ctx)
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, table := range iptTables {
		all.writeTable(&b, table, there)
	}
	if _, err := t.run(ctx, b.String(), t.programName("-restore"), "--noflush", "-w", "5"); err != nil {
		return fmt.Errorf("writing Service rules: %w", err)
	}
	for name, rules := range all.byTableAndChain() {
		t.ruleCounts[name] = len(rules)
	}
	t.built = true
	return nil
}

// addPort records a Port and its local hairpin pods, which may reach themselves through the Port.
// It adds the rules of the Port to rules.
func (t *iptFamily) addPort(rules iptRules, p *servicemodel.Port) {
	for _, ip := range t.addPortRules(rules, p) {
		t.hairpin[ip]++
	}
	service := p.ServiceName()
	if t.services[service] == nil {
		t.services[service] = map[string]*servicemodel.Port{}
	}
	t.services[service][p.ID] = p
}

// removePort removes the records of a Port and of its hairpin pods. It adds the rules of the Port
// to old, the set of rules that the caller deletes or replaces in the kernel.
func (t *iptFamily) removePort(old iptRules, p *servicemodel.Port) {
	for _, ip := range t.addPortRules(old, p) {
		if t.hairpin[ip]--; t.hairpin[ip] == 0 {
			delete(t.hairpin, ip)
		}
	}
	service := p.ServiceName()
	if delete(t.services[service], p.ID); len(t.services[service]) == 0 {
		delete(t.services, service)
	}
}

// addService adds to rules the rules that all Ports of a Service share.
func (t *iptFamily) addService(rules iptRules, service string) {
	addServiceRules(rules, service, slices.Collect(maps.Values(t.services[service])))
}

// readRules reads from the kernel the rules of Keelson's chains, and the jumps to them from
// built-in chains. Keys of the result have the form "TABLE CHAIN".
func (t *iptFamily) readRules(ctx context.Context) (map[string][]string, error) {
	out := map[string][]string{}
	for _, table := range iptTables {
		text, err := t.run(ctx, "", t.programName("-save"), "-t", table)
		if err != nil {
			return nil, fmt.Errorf("reading the Service rules: %w", err)
		}
		for line := range strings.SplitSeq(text, "\n") {
			f := strings.Fields(line)
			switch {
			case len(f) > 1 && strings.HasPrefix(f[0], ":"+chainPrefix):
				if key := table + " " + f[0][1:]; out[key] == nil {
					out[key] = []string{}
				}
			case len(f) > 1 && f[0] == "-A" && strings.HasPrefix(f[1], chainPrefix):
				key := table + " " + f[1]
				out[key] = append(out[key], line)
			case len(f) > 1 && f[0] == "-A" && strings.Contains(line, "-j "+chainPrefix):
				key := table + " " + f[1]
				out[key] = append(out[key], line)
			}
		}
	}
	return out, nil
}

// Apply changes the iptables rules of the changed Ports, in one call of iptables-restore per
// address family. It implements Writer.
func (w *iptables) Apply(ctx context.Context, changes []servicemodel.Change) error {
	for _, t := range w.tables {
		mine := t.familyChanges(changes)
		if len(mine) == 0 {
			continue
		}
		if !t.built {
			if err := t.syncFamily(ctx, t.base, addedPorts(mine)); err != nil {
				return err
			}
			continue
		}
		text := t.changeInput(mine)
		if text == "" {
			continue
		}
		if _, err := t.run(ctx, text, t.programName("-restore"), "--noflush", "-w", "5"); err != nil {
			t.built = false
			return fmt.Errorf("writing Service rules: %w", err)
		}
	}
	return nil
}

// changeInput returns the input for iptables-restore that applies the changes of Ports. It also
// updates the records of Ports and hairpin pods.
func (t *iptFamily) changeInput(changes []servicemodel.Change) string {
	before := maps.Clone(t.hairpin)
	old, now := iptRules{}, iptRules{}
	services := map[string]bool{}
	for _, c := range changes {
		for _, p := range []*servicemodel.Port{c.Old, c.New} {
			if p != nil {
				services[p.ServiceName()] = true
			}
		}
	}
	for service := range services {
		t.addService(old, service)
	}
	for _, c := range changes {
		if c.Old != nil {
			t.removePort(old, c.Old)
		}
		if c.New != nil {
			t.addPort(now, c.New)
		}
	}
	for service := range services {
		t.addService(now, service)
	}
	for _, ip := range slices.SortedFunc(maps.Keys(before), netip.Addr.Compare) {
		if t.hairpin[ip] == 0 {
			old.addRule("nat", chainPostrouting, t.hairpinRule(ip))
		}
	}
	for _, ip := range slices.SortedFunc(maps.Keys(t.hairpin), netip.Addr.Compare) {
		if before[ip] == 0 {
			now.addRule("nat", chainPostrouting, t.hairpinRule(ip))
		}
	}
	var b strings.Builder
	for _, table := range iptTables {
		t.changeTable(&b, table, old, now)
	}
	return b.String()
}

// changeTable writes to b the input for iptables-restore that replaces the rules old of a table
// with the rules wanted. In chains that several Ports share, it adds and deletes single rules. The
// chains of a single Port are replaced as a whole.
func (t *iptFamily) changeTable(b *strings.Builder, table string, old, wanted iptRules) {
	var heads, drops, adds, gone []string
	setOf := func(rules []string) map[string]bool {
		out := make(map[string]bool, len(rules))
		for _, r := range rules {
			out[r] = true
		}
		return out
	}
	for _, name := range slices.Sorted(maps.Keys(wanted[table])) {
		rules := wanted[table][name]
		if isSharedChain(name) {
			had := setOf(old[table][name])
			for _, r := range rules {
				if !had[r] {
					adds = append(adds, "-A "+name+" "+r)
					t.ruleCounts[table+" "+name]++
					delete(t.shownRules, table+" "+name)
				}
			}
			continue
		}
		if was, ok := old[table][name]; ok && slices.Equal(was, rules) {
			continue
		}
		heads = append(heads, ":"+name+" - [0:0]")
		for _, r := range rules {
			adds = append(adds, "-A "+name+" "+r)
		}
		t.ruleCounts[table+" "+name] = len(rules)
		delete(t.shownRules, table+" "+name)
	}
	for _, name := range slices.Sorted(maps.Keys(old[table])) {
		if isSharedChain(name) {
			stays := setOf(wanted[table][name])
			for _, r := range old[table][name] {
				if !stays[r] {
					drops = append(drops, "-D "+name+" "+r)
					t.ruleCounts[table+" "+name]--
					delete(t.shownRules, table+" "+name)
				}
			}
		} else if _, ok := wanted[table][name]; !ok {
			heads = append(heads, ":"+name+" - [0:0]")
			gone = append(gone, "-X "+name)
			delete(t.ruleCounts, table+" "+name)
			delete(t.shownRules, table+" "+name)
		}
	}
	if len(heads)+len(drops)+len(adds) == 0 {
		return
	}
	b.WriteString("*" + table + "\n")
	for _, lines := range [][]string{heads, drops, adds, gone} {
		for _, l := range lines {
			b.WriteString(l + "\n")
		}
	}
	b.WriteString("COMMIT\n")
}

// Intact reports whether the kernel still has the rules that were written. It compares the number
// of rules in each chain. If a chain was not written since the previous call, its rules must also
// equal those that the previous call read. The written text itself cannot be compared, because
// iptables-save prints rules differently. Intact implements Writer.
func (w *iptables) Intact(ctx context.Context) (bool, error) {
	for _, t := range w.tables {
		if !t.built {
			continue
		}
		there, err := t.readRules(ctx)
		if err != nil {
			return false, err
		}
		for name, n := range t.ruleCounts {
			rules, ok := there[name]
			text := strings.Join(rules, "\n")
			if was, looked := t.shownRules[name]; !ok || len(rules) != n || looked && was != text {
				return false, nil
			}
			t.shownRules[name] = text
		}
		for _, j := range t.kernelJumps() {
			if !slices.ContainsFunc(there[j.table+" "+j.from], func(r string) bool {
				return strings.HasSuffix(r, "-j "+j.to)
			}) {
				return false, nil
			}
		}
	}
	return true, nil
}

// Clean removes all of Keelson's iptables rules and chains. It implements Writer.
func (w *iptables) Clean(ctx context.Context) error {
	var errs []error
	for _, t := range w.tables {
		errs = append(errs, t.cleanFamily(ctx))
	}
	return errors.Join(errs...)
}

func (t *iptFamily) cleanFamily(ctx context.Context) error {
	t.built = false
	if _, err := exec.LookPath(t.programName("-save")); err != nil {
		return nil //nolint:nilerr // without the program there are no such rules
	}
	there, err := t.readRules(ctx)
	if err != nil {
		if t.v6 || errors.Is(err, unix.ENOENT) {
			return nil // a kernel without IPv6 has no rules
		}
		return err
	}
	var b strings.Builder
	for _, table := range iptTables {
		var heads, drops, gone []string
		for _, key := range slices.Sorted(maps.Keys(there)) {
			in, name, _ := strings.Cut(key, " ")
			if in != table {
				continue
			}
			if strings.HasPrefix(name, chainPrefix) {
				heads, gone = append(heads, ":"+name+" - [0:0]"), append(gone, "-X "+name)
				continue
			}
			for _, r := range there[key] {
				drops = append(drops, "-D"+strings.TrimPrefix(r, "-A"))
			}
		}
		if len(heads)+len(drops) == 0 {
			continue
		}
		b.WriteString("*" + table + "\n" + strings.Join(slices.Concat(heads, drops, gone), "\n") + "\nCOMMIT\n")
	}
	if b.Len() == 0 {
		return nil
	}
	_, err = t.run(ctx, b.String(), t.programName("-restore"), "--noflush", "-w", "5")
	return err
}
