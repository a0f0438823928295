package plan

import (
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// fleetPort is the TCP port of a replica to which agents and joining replicas connect.
const fleetPort = "6444"

const heading = "# Of the cluster file: 'kctl cluster up' writes what it says, and overwrites what is changed here.\n"

// ReplicaSettings returns the content of the settings file of the replica on the host h.
func ReplicaSettings(h machines.Host) string {
	return heading +
		"name: " + strconv.Quote(h.Name) + "\n" +
		"advertise-address: " + strconv.Quote(h.Address) + "\n" +
		yamlSettings(h.ControlPlane)
}

// AgentSettings returns the content of the settings file of the agent on the host h. It includes
// labels and taints, so that the Node has them from its creation.
func AgentSettings(c machines.Cluster, h machines.Host) string {
	var b strings.Builder
	b.WriteString(heading)
	b.WriteString("server: " + yamlList(gatewayAddresses(c)) + "\n")
	b.WriteString("token-file: /var/lib/keelson/join-token\n")
	b.WriteString("node-name: " + strconv.Quote(h.Name) + "\n")
	b.WriteString("node-ip: " + yamlList([]string{h.Address}) + "\n")
	if len(h.Labels) > 0 {
		var all []string
		for _, k := range slices.Sorted(maps.Keys(h.Labels)) {
			all = append(all, k+"="+h.Labels[k])
		}
		b.WriteString("node-labels: " + yamlList(all) + "\n")
	}
	if len(h.Taints) > 0 {
		b.WriteString("taints: " + yamlList(h.Taints) + "\n")
	}
	b.WriteString("cgroup-root: /keelson.slice/pods\n") // the slice in the agent's systemd unit
	b.WriteString(yamlSettings(h.Agent))
	return b.String()
}

// gatewayAddresses returns the addresses, as HOST:PORT, at which agents and joining replicas
// connect to the replicas.
func gatewayAddresses(c machines.Cluster) []string {
	var out []string
	for _, h := range c.ReplicaHosts() {
		out = append(out, net.JoinHostPort(h.Address, fleetPort))
	}
	return out
}

func yamlList(all []string) string {
	quoted := make([]string, len(all))
	for i, s := range all {
		quoted[i] = strconv.Quote(s)
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

func yamlSettings(s machines.Settings) string {
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

// lineDiff returns the lines by which two settings files differ. A line that is only in current is
// returned as "- LINE", and a line that is only in wanted as "+ LINE". Comments are ignored. If no
// line differs, it returns one text that states this.
func lineDiff(current, wanted string) (out []string) {
	a, b := settingLines(current), settingLines(wanted)
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

// settingLines returns the lines of a settings file that are neither empty nor comments. The text
// comes from a machine and may contain anything. Therefore it returns at most 200 lines of 160
// bytes, with '?' for characters that cannot be printed.
func settingLines(text string) (out []string) {
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
