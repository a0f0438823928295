package policy

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// tableContents is the parsed output of nft for Keelson's nftables table.
type tableContents struct {
	rules map[string]int // chain → number of rules
	// chain → hash of its rules' expressions and handles; the kernel never reuses a handle
	code     map[string]string
	elements map[string]map[string]bool // elements of each set; elements of maps have the form "key : target"
	cost     time.Duration              // CPU time for reading the table
}

// listTable reads the contents of Keelson's nftables table with nft.
func listTable(ctx context.Context) (tableContents, error) {
	runtime.LockOSThread() // ClockGettime returns the CPU time of the current thread
	defer runtime.UnlockOSThread()
	var complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, "nft", "-j", "list", "table", "inet", Table)
	cmd.Stderr = &complaint
	raw, err := cmd.Output()
	cost := time.Duration(0)
	if p := cmd.ProcessState; p != nil {
		cost = p.UserTime() + p.SystemTime()
	}
	if err != nil {
		return tableContents{cost: cost}, fmt.Errorf("listing table %s: %w: %s", Table, err,
			bytes.TrimSpace(complaint.Bytes()))
	}
	began := threadCPUTime()
	out, err := parseTable(raw)
	out.cost = cost + threadCPUTime() - began
	return out, err
}

// threadCPUTime returns the CPU time of the current thread.
func threadCPUTime() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

type listing struct {
	Nftables []struct {
		Chain *struct {
			Name, Hook string
		}
		Rule *struct {
			Chain  string
			Handle int64
			Expr   json.RawMessage
		}
		Set *listedSet
		Map *listedSet
	}
}

type listedSet struct {
	Name string
	Elem []json.RawMessage
}

// parseTable parses nft's JSON output for a table.
func parseTable(raw []byte) (tableContents, error) {
	out := tableContents{rules: map[string]int{}, code: map[string]string{}, elements: map[string]map[string]bool{}}
	var l listing
	if err := json.Unmarshal(raw, &l); err != nil {
		return out, fmt.Errorf("parsing the output of nft: %w", err)
	}
	for _, o := range l.Nftables {
		switch {
		case o.Chain != nil:
			name := o.Chain.Name
			if o.Chain.Hook != "" {
				name += " " + o.Chain.Hook
			}
			if _, ok := out.rules[name]; !ok {
				out.rules[name] = 0
			}
		case o.Rule != nil:
			out.rules[o.Rule.Chain]++
			out.code[o.Rule.Chain] = hashID(out.code[o.Rule.Chain], fmt.Sprint(o.Rule.Handle), string(o.Rule.Expr))
		case o.Set != nil:
			out.elements[o.Set.Name] = map[string]bool{}
			for _, e := range o.Set.Elem {
				out.elements[o.Set.Name][elementKey(e)] = true
			}
		case o.Map != nil:
			out.elements[o.Map.Name] = map[string]bool{}
			for _, e := range o.Map.Elem {
				out.elements[o.Map.Name][mapElement(e)] = true
			}
		}
	}
	for _, c := range baseChains { // rules name only their chain, not its hook
		if n, ok := out.rules[c.name]; ok {
			delete(out.rules, c.name)
			out.rules[c.name+" "+string(c.hook)] += n
		}
	}
	return out, nil
}

// elementKey returns the key of a set or map element in the syntax of a ruleset.
func elementKey(raw json.RawMessage) string {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text
	}
	var o struct {
		Concat []json.RawMessage
		Elem   *struct{ Val json.RawMessage }
		Range  []string
		Prefix *struct {
			Addr string
			Len  int
		}
	}
	if json.Unmarshal(raw, &o) == nil {
		switch {
		case o.Elem != nil:
			return elementKey(o.Elem.Val)
		case len(o.Range) == 2:
			return o.Range[0] + "-" + o.Range[1]
		case o.Prefix != nil:
			if s, err := parseRange(fmt.Sprintf("%s/%d", o.Prefix.Addr, o.Prefix.Len)); err == nil {
				return s.String()
			}
		case len(o.Concat) > 0:
			var parts []string
			for _, c := range o.Concat {
				parts = append(parts, elementKey(c))
			}
			return strings.Join(parts, " . ")
		}
	}
	return string(raw)
}

// mapElement returns an element of a verdict map in the form "key : goto chain" or "key : jump
// chain".
func mapElement(raw json.RawMessage) string {
	var kv []json.RawMessage
	if json.Unmarshal(raw, &kv) != nil || len(kv) != 2 {
		return string(raw)
	}
	var verdict struct{ Goto, Jump *struct{ Target string } }
	switch err := json.Unmarshal(kv[1], &verdict); {
	case err == nil && verdict.Goto != nil:
		return elementKey(kv[0]) + " : goto " + verdict.Goto.Target
	case err == nil && verdict.Jump != nil:
		return elementKey(kv[0]) + " : jump " + verdict.Jump.Target
	}
	return string(raw)
}

// findReplacedChain returns an error that names a chain of the table that another program has
// rewritten, or nil. previousHashes maps the chains to the hashes of their rules at the last check.
func (t tableContents) findReplacedChain(previousHashes map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(previousHashes)) {
		if now, ok := t.code[name]; ok && now != previousHashes[name] {
			return fmt.Errorf("the rules of chain %s differ from those that were written", name)
		}
	}
	return nil
}

// findDifference returns an error that describes the first difference between the table in the
// kernel and the ruleset want, or nil if they are equal.
func (t tableContents) findDifference(want ruleset) error {
	rules := map[string]int{}
	for _, c := range baseChains {
		rules[c.name+" "+string(c.hook)] = len(baseRules(c, bridge))
	}
	for name, lines := range want.chains {
		rules[name] = len(lines)
	}
	for _, name := range slices.Sorted(maps.Keys(rules)) {
		if n, ok := t.rules[name]; !ok || n != rules[name] {
			return fmt.Errorf("chain %s has %d rules, and %d were written", name, n, rules[name])
		}
	}
	elements := map[string]map[string]bool{}
	for name, m := range want.maps {
		elements[name] = map[string]bool{}
		for key, verdict := range m {
			elements[name][key+" : "+verdict] = true
		}
	}
	maps.Copy(elements, want.selves)
	for name, s := range want.sets {
		elements[name] = s.elements
	}
	for name, owners := range want.owners {
		elements[name] = map[string]bool{}
		for address := range owners {
			elements[name][address] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(elements)) {
		if !maps.Equal(t.elements[name], elements[name]) {
			return fmt.Errorf("the elements of %s differ from those that were written", name)
		}
	}
	return nil
}
