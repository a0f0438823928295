package plan

import (
	"fmt"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// replicaPorts are the TCP ports of a replica: for the Kubernetes API, for agents and joining
// replicas, and for the raft messages of other replicas.
var replicaPorts = []int{6443, 6444, 6445}

const kubeletPort = 10250

// checkFirewalls adds a warning for each firewall of the machine h that may block traffic of other
// machines or pods. Daemons become healthy even if their traffic is blocked, and the rules of the
// firewall are not inspected. It adds nothing for a machine that already has its roles, because
// blocked traffic would be visible there.
func (j *inspector) checkFirewalls(h machines.Host, f machines.Facts) {
	if !lacksRole(h, f) {
		return
	}
	node := h.HasRole(machines.Worker) && !j.otherNetwork(h)
	for _, one := range f.Firewalls {
		switch one {
		case "firewalld":
			j.addWarning(h.Name, "runs firewalld: what it does not know of pods and of other machines it refuses",
				"let it: "+j.firewalldCommands(h, node))
		case "ufw":
			j.addWarning(h.Name, "has ufw in force: what it does not know of pods and of other machines it refuses",
				"let it: "+ufwCommands(h, node))
		case "forward":
			if node {
				j.addWarning(h.Name, "has rules by which only what they name is forwarded, as Docker makes them: pods "+
					"may reach nobody but each other",
					"iptables -I FORWARD -i keelson0 -j ACCEPT && iptables -I FORWARD -o keelson0 -j ACCEPT, at each "+
						"boot, and with ip6tables for pods of IPv6")
			}
		}
	}
}

// firewalldCommands returns the shell commands that make firewalld accept traffic to the machine h.
// If node is true, the commands also make it accept the traffic of pods.
func (j *inspector) firewalldCommands(h machines.Host, node bool) string {
	const change = "firewall-cmd --permanent"
	var do []string
	if node {
		// firewalld selects the zone of a packet by its source: for local pods by their interface,
		// for pods of other nodes by their address.
		for _, link := range podLinks(h) {
			do = append(do, change+" --zone=trusted --add-interface="+link)
		}
		all, _ := j.clusterRanges()
		for _, r := range all {
			if r.purpose == pods {
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

// ufwCommands returns the shell commands that make ufw accept traffic to the machine h. If node is
// true, the commands also make it accept the traffic of pods.
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

// podLinks returns the network interfaces on which packets of pods arrive at the machine h. These
// are the bridge of its own pods, and the tunnel device if its pod network uses a tunnel.
func podLinks(h machines.Host) []string {
	switch agentSetting(h, "pod-network") {
	case "routes":
		return []string{"keelson0"}
	case "wireguard":
		return []string{"keelson0", "keelson-wg"}
	}
	return []string{"keelson0", "keelson-vx"}
}

// listenPorts returns the ports of the machine h that other machines connect to, as PORT/tcp or
// PORT/udp.
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
