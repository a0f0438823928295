package plan

import (
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// fleetPort is where replicas listen for agents and for replicas that join.
const fleetPort = "6444"

const heading = "# Of the cluster file: 'kctl cluster up' writes what it says, and overwrites what is changed here.\n"

// ReplicaSettings is the file of settings of a replica.
func ReplicaSettings(h machines.Host) string {
	return heading +
		"name: " + strconv.Quote(h.Name) + "\n" +
		"advertise-address: " + strconv.Quote(h.Address) + "\n" +
		settings(h.ControlPlane)
}

// AgentSettings is the file of settings of an agent. Labels and taints are in it so that a node has them from its first moment.
func AgentSettings(c machines.Cluster, h machines.Host) string {
	var b strings.Builder
	b.WriteString(heading)
	b.WriteString("server: " + list(servers(c)) + "\n")
	b.WriteString("token-file: /var/lib/keelson/join-token\n")
	b.WriteString("node-name: " + strconv.Quote(h.Name) + "\n")
	b.WriteString("node-ip: " + list([]string{h.Address}) + "\n")
	if len(h.Labels) > 0 {
		var all []string
		for _, k := range slices.Sorted(maps.Keys(h.Labels)) {
			all = append(all, k+"="+h.Labels[k])
		}
		b.WriteString("node-labels: " + list(all) + "\n")
	}
	if len(h.Taints) > 0 {
		b.WriteString("taints: " + list(h.Taints) + "\n")
	}
	b.WriteString("cgroup-root: /keelson.slice/pods\n") // the slice of the agent's unit
	b.WriteString(settings(h.Agent))
	return b.String()
}

// servers are where agents and further replicas find the control plane.
func servers(c machines.Cluster) []string {
	var out []string
	for _, h := range c.Replicas() {
		out = append(out, net.JoinHostPort(h.Address, fleetPort))
	}
	return out
}

func list(all []string) string {
	quoted := make([]string, len(all))
	for i, s := range all {
		quoted[i] = strconv.Quote(s)
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

func settings(s machines.Settings) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(s)) {
		v := strings.Join(s[k].Text, ", ")
		if s[k].List {
			v = "[" + v + "]"
		}
		b.WriteString(k + ": " + v + "\n")
	}
	return b.String()
}

// lineDiff are the lines that only one has, but for remarks.
func lineDiff(is, want string) (out []string) {
	a, b := lines(is), lines(want)
	for _, l := range a {
		if !slices.Contains(b, l) {
			out = append(out, "- "+l)
		}
	}
	for _, l := range b {
		if !slices.Contains(a, l) {
			out = append(out, "+ "+l)
		}
	}
	if len(out) == 0 {
		return []string{"(remarks, or the order of lines)"}
	}
	return out
}

// lines are those that say something. What a machine says may be anything: a line is shown up to a bound, and only what prints.
func lines(text string) (out []string) {
	for l := range strings.SplitSeq(text, "\n") {
		if l = strings.TrimSpace(l); l == "" || l[0] == '#' {
			continue
		}
		l = strings.ToValidUTF8(l[:min(len(l), 160)], "?")
		out = append(out, strings.Map(func(r rune) rune {
			if strconv.IsPrint(r) {
				return r
			}
			return '?'
		}, l))
		if len(out) == 200 {
			break
		}
	}
	return out
}
