package plan

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// RecordAnnotation is the annotation of a Node that lists which labels and taints of the Node come
// from the cluster file. A listed label or taint is removed from the Node when it is removed from
// the cluster file. Labels and taints that are not listed are never changed.
const RecordAnnotation = "keelson.dev/cluster-file"

// marksRecord is the JSON value of RecordAnnotation. Unknown fields are ignored.
type marksRecord struct {
	Labels []string `json:"labels,omitempty"` // keys of labels
	Taints []string `json:"taints,omitempty"` // KEY:EFFECT
}

// Marks are the changes to a Node after which it has the labels and taints that the cluster file
// gives it. Record is the new value of RecordAnnotation, to be written after the other changes. It
// is "-" if RecordAnnotation must be removed, and "" if it does not change.
type Marks struct {
	Label   []string // labels to set: KEY=VALUE
	Unlabel []string // labels to remove: KEY
	Taint   []string // taints to set: KEY[=VALUE]:EFFECT
	Untaint []string // taints to remove: KEY:EFFECT
	Record  string
}

func (m Marks) hasChanges() bool {
	return len(m.Label)+len(m.Unlabel)+len(m.Taint)+len(m.Untaint) > 0 || m.Record != ""
}

func (m Marks) describe() (out []string) {
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

// NodeMarks returns the changes that give the existing Node n the labels and taints of the host h
// in the cluster file.
func NodeMarks(h machines.Host, n Node) Marks { return computeMarks(h, n, true) }

// computeMarks returns the changes that give the Node n the labels and taints of the host h, and
// the value of RecordAnnotation that lists them. If exists is false, there is no Node yet, and the
// only change is RecordAnnotation. The agent then creates the Node with the labels and taints in
// its settings.
func computeMarks(h machines.Host, n Node, exists bool) (m Marks) {
	var before marksRecord
	_ = json.Unmarshal([]byte(n.Record), &before) // a damaged RecordAnnotation counts as empty
	if !exists {
		n = Node{Labels: h.Labels, Taints: h.Taints}
	}
	now := marksRecord{Labels: slices.Sorted(maps.Keys(h.Labels))}
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
		has[taintKeyEffect(t)] = t
	}
	for _, t := range h.Taints {
		name := taintKeyEffect(t)
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

// recordChange returns the value to which RecordAnnotation must be set so that it lists the wanted
// labels and taints. current is the current value of RecordAnnotation. It returns "" if current is
// already right, and "-" if RecordAnnotation must be removed.
func recordChange(current string, wanted marksRecord) string {
	if len(wanted.Labels)+len(wanted.Taints) == 0 {
		if current != "" {
			return "-"
		}
		return ""
	}
	raw, err := json.Marshal(wanted)
	if err != nil || string(raw) == current {
		return "" // a list of strings can always be marshaled
	}
	return string(raw)
}

// taintKeyEffect returns the part KEY:EFFECT of a taint KEY[=VALUE]:EFFECT. A Node has at most one
// taint with the same key and effect.
func taintKeyEffect(t string) string {
	rest, effect, _ := strings.Cut(t, ":")
	k, _, _ := strings.Cut(rest, "=")
	return k + ":" + effect
}

func taintValue(t string) string {
	rest, _, _ := strings.Cut(t, ":")
	_, v, _ := strings.Cut(rest, "=")
	return v
}
