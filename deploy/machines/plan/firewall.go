package plan

import (
	"fmt"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// replicaPorts are the ports of a replica: for the API, for agents, and for other replicas.
var replicaPorts = []int{6443, 6444, 6445}

const kubeletPort = 10250

// checkFirewalls warns of firewalls that may block machines and pods although all daemons are
// healthy; only the rules would show it. Machines that already have their roles are not warned
// about, because a problem would be visible there.
func (j *inspector) checkFirewalls(h machines.Host, f machines.Facts) {
	if !lacksRole(h, f) {
		return
	}
	node := h.HasRole(machines.Worker) && !j.otherNetwork(h)
	for _, one := range f.Firewalls {
		switch one {
		case "firewalld":
			j.addWarning(h.Name, "runs firewalld: what it does not know of pods and of other machines it refuses", "let it: "+j.firewalldCommands(h, node))
		case "ufw":
			j.addWarning(h.Name, "has ufw in force: what it does not know of pods and of other machines it refuses", "let it: "+ufwCommands(h, node))
		case "forward":
			if node {
				j.addWarning(h.Name, "has rules by which only what they name is forwarded, as Docker makes them: pods may reach nobody but each other",
					"iptables -I FORWARD -i keelson0 -j ACCEPT && iptables -I FORWARD -o keelson0 -j ACCEPT, at each boot, and with ip6tables for pods of IPv6")
			}
		}
	}
}

// firewalldCommands returns the commands that make firewalld accept the traffic of a machine.
func (j *inspector) firewalldCommands(h machines.Host, node bool) string {
	const change = "firewall-cmd --permanent"
	var do []string
	if node {
		// A packet belongs to the zone of its source: for local pods by their link, for other pods
		// by their address.
		for _, link := range podLinks(h) {
			do = append(do, change+" --zone=trusted --add-interface="+link)
		}
		all, _ := j.clusterRanges()
		for _, r := range all {
			if r.of == pods {
				do = append(do, change+" --zone=trusted --add-source="+r.String())
			}
		}
	}
	open := change
	for _, port := range listenPorts(h) {
		open += " --add-port=" + port
	}
	return strings.Join(append(do, open, "firewall-cmd --reload"), " && ")
}

// ufwCommands returns the commands that make ufw accept the traffic of a machine.
func ufwCommands(h machines.Host, node bool) string {
	var do []string
	if node {
		for _, link := range podLinks(h) {
			do = append(do, "ufw allow in on "+link)
		}
		do = append(do, "ufw route allow in on keelson0", "ufw route allow out on keelson0")
	}
	for _, port := range listenPorts(h) {
		do = append(do, "ufw allow "+port)
	}
	return strings.Join(do, " && ")
}

// podLinks returns the links by which traffic of pods arrives: their bridge and the tunnel.
func podLinks(h machines.Host) []string {
	switch agentSetting(h, "pod-network") {
	case "routes":
		return []string{"keelson0"}
	case "wireguard":
		return []string{"keelson0", "keelson-wg"}
	}
	return []string{"keelson0", "keelson-vx"}
}

// listenPorts returns the ports that other machines connect to, in the form of firewall commands.
func listenPorts(h machines.Host) (out []string) {
	if h.HasReplica() {
		for _, port := range replicaPorts {
			out = append(out, fmt.Sprintf("%d/tcp", port))
		}
	}
	if !h.HasRole(machines.Worker) {
		return out
	}
	if port := portOf(h.Agent["kubelet-port"], kubeletPort); port != 0 {
		out = append(out, fmt.Sprintf("%d/tcp", port))
	}
	switch agentSetting(h, "pod-network") {
	case "routes":
	case "wireguard":
		out = append(out, fmt.Sprintf("%d/udp", portOf(h.Agent["wireguard-port"], wireguardPort)))
	default:
		out = append(out, fmt.Sprintf("%d/udp", vxlanPort))
	}
	return out
}
