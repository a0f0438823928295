package plan

import (
	"fmt"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// replicaPorts are those at which replicas listen: the API, for agents, for each other.
var replicaPorts = []int{6443, 6444, 6445}

const kubeletPort = 10250

// firewalls warns of what may keep machines and pods from each other although all daemons are well: whether it does, only its rules
// say. Of machines that are what they are to be, nothing is said: there it shows.
func (j *judge) firewalls(h machines.Host, f machines.Facts) {
	if !lacks(h, f) {
		return
	}
	node := h.Is(machines.Worker) && !j.otherNetwork(h)
	for _, one := range f.Firewalls {
		switch one {
		case "firewalld":
			j.light(h.Name, "runs firewalld: what it does not know of pods and of other machines it refuses", "let it: "+j.firewalld(h, node))
		case "ufw":
			j.light(h.Name, "has ufw in force: what it does not know of pods and of other machines it refuses", "let it: "+ufw(h, node))
		case "forward":
			if node {
				j.light(h.Name, "has rules by which only what they name is forwarded, as Docker makes them: pods may reach nobody but each other",
					"iptables -I FORWARD -i keelson0 -j ACCEPT && iptables -I FORWARD -o keelson0 -j ACCEPT, at each boot, and with ip6tables for pods of IPv6")
			}
		}
	}
}

// firewalld is what has firewalld let through what a machine needs.
func (j *judge) firewalld(h machines.Host, node bool) string {
	const change = "firewall-cmd --permanent"
	var do []string
	if node {
		// A packet is of the zone of whom it comes from: of pods here by their link, of others' by their address.
		for _, link := range links(h) {
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
	for _, port := range ports(h) {
		open += " --add-port=" + port
	}
	return strings.Join(append(do, open, "firewall-cmd --reload"), " && ")
}

// ufw is the same of ufw.
func ufw(h machines.Host, node bool) string {
	var do []string
	if node {
		for _, link := range links(h) {
			do = append(do, "ufw allow in on "+link)
		}
		do = append(do, "ufw route allow in on keelson0", "ufw route allow out on keelson0")
	}
	for _, port := range ports(h) {
		do = append(do, "ufw allow "+port)
	}
	return strings.Join(do, " && ")
}

// links are those by which pods come: their bridge, and the tunnel.
func links(h machines.Host) []string {
	switch setting(h, "pod-network") {
	case "routes":
		return []string{"keelson0"}
	case "wireguard":
		return []string{"keelson0", "keelson-wg"}
	}
	return []string{"keelson0", "keelson-vx"}
}

// ports are those at which a machine listens to others, as firewalls have them.
func ports(h machines.Host) (out []string) {
	if h.Replica() {
		for _, port := range replicaPorts {
			out = append(out, fmt.Sprintf("%d/tcp", port))
		}
	}
	if !h.Is(machines.Worker) {
		return out
	}
	if port := portOf(h.Agent["kubelet-port"], kubeletPort); port != 0 {
		out = append(out, fmt.Sprintf("%d/tcp", port))
	}
	switch setting(h, "pod-network") {
	case "routes":
	case "wireguard":
		out = append(out, fmt.Sprintf("%d/udp", portOf(h.Agent["wireguard-port"], wireguardPort)))
	default:
		out = append(out, fmt.Sprintf("%d/udp", vxlanPort))
	}
	return out
}
