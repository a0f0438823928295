package plan

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// Recorded is the annotation of a Node that says which labels and taints it has from a cluster file: what goes from the file goes
// from the Node, and what others gave it stays.
const Recorded = "keelson.dev/cluster-file"

// record is what the annotation says, as JSON; unknown fields are ignored.
type record struct {
	Labels []string `json:"labels,omitempty"` // keys
	Taints []string `json:"taints,omitempty"` // KEY:EFFECT
}

// Marks are changes of a Node. Record is written after all of them; "-" has it removed.
type Marks struct {
	Label   []string // KEY=VALUE
	Unlabel []string // KEY
	Taint   []string // KEY[=VALUE]:EFFECT
	Untaint []string // KEY:EFFECT
	Record  string
}

func (m Marks) any() bool {
	return len(m.Label)+len(m.Unlabel)+len(m.Taint)+len(m.Untaint) > 0 || m.Record != ""
}

func (m Marks) lines() (out []string) {
	for _, of := range []struct {
		what string
		all  []string
	}{{"label ", m.Label}, {"no label ", m.Unlabel}, {"taint ", m.Taint}, {"no taint ", m.Untaint}} {
		for _, one := range of.all {
			out = append(out, of.what+one)
		}
	}
	if len(out) == 0 {
		out = []string{"notes which labels and taints come from the file"}
	}
	return out
}

// NodeMarks says how a Node that exists has to change.
func NodeMarks(h machines.Host, n Node) Marks { return marks(h, n, true) }

// marks says how a Node has to change. One that does not exist yet gets labels and taints as it is made, from its agent's settings.
func marks(h machines.Host, n Node, exists bool) (m Marks) {
	var before record
	_ = json.Unmarshal([]byte(n.Record), &before) // what somebody has broken says nothing of what came from the file
	if !exists {
		n = Node{Labels: h.Labels, Taints: h.Taints}
	}
	now := record{Labels: slices.Sorted(maps.Keys(h.Labels))}
	for _, k := range now.Labels {
		if v, ok := n.Labels[k]; !ok || v != h.Labels[k] {
			m.Label = append(m.Label, k+"="+h.Labels[k])
		}
	}
	for _, k := range before.Labels {
		if _, has := n.Labels[k]; has && !slices.Contains(now.Labels, k) {
			m.Unlabel = append(m.Unlabel, k)
		}
	}
	has := map[string]string{}
	for _, t := range n.Taints {
		has[taintName(t)] = t
	}
	for _, t := range h.Taints {
		name := taintName(t)
		now.Taints = append(now.Taints, name)
		if is, ok := has[name]; !ok || taintValue(is) != taintValue(t) {
			m.Taint = append(m.Taint, t)
		}
	}
	slices.Sort(now.Taints)
	for _, name := range before.Taints {
		if _, ok := has[name]; ok && !slices.Contains(now.Taints, name) {
			m.Untaint = append(m.Untaint, name)
		}
	}
	m.Record = recordChange(n.Record, now)
	return m
}

// recordChange is what to write; "" where it stands there already, or there is nothing to be noted.
func recordChange(is string, now record) string {
	if len(now.Labels)+len(now.Taints) == 0 {
		if is != "" {
			return "-"
		}
		return ""
	}
	raw, err := json.Marshal(now)
	if err != nil || string(raw) == is {
		return "" // lists of texts always marshal
	}
	return string(raw)
}

// taintName is what tells a taint from others: KEY:EFFECT.
func taintName(t string) string {
	rest, effect, _ := strings.Cut(t, ":")
	k, _, _ := strings.Cut(rest, "=")
	return k + ":" + effect
}

func taintValue(t string) string {
	rest, _, _ := strings.Cut(t, ":")
	_, v, _ := strings.Cut(rest, "=")
	return v
}
