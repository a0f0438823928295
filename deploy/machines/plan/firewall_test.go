package plan

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

// Firewall rules that may block DNS or pod traffic are reported before a machine joins, with the
// commands that correct them. They do not block the plan.
func TestJudgeFirewalls(t *testing.T) {
	for _, c := range []struct {
		on, settings, firewalls string
		joined                  bool
		want                    string // what is said, and the remedy, a line each
	}{
		{on: "w1"},
		{on: "w1", firewalls: "firewalld",
			want: "runs firewalld: what it does not know of pods and of other machines " +
				"it refuses -> let it: " +
				"firewall-cmd --permanent --zone=trusted --add-interface=keelson0 && firewall-cmd --permanent " +
				"--zone=trusted --add-interface=keelson-vx && " +
				"firewall-cmd --permanent --zone=trusted --add-source=10.1.0.0/16 && firewall-cmd --permanent " +
				"--add-port=10250/tcp --add-port=4789/udp && firewall-cmd --reload"},
		{on: "w1", settings: "pod-network=wireguard wireguard-port=5555 kubelet-port=0", firewalls: "ufw",
			want: "has ufw in force: what it does not know of pods and of other machines it refuses -> let it: " +
				"ufw allow in on keelson0 && ufw allow in on keelson-wg && ufw route allow in on " +
				"keelson0 && ufw route allow out on keelson0 && ufw allow 5555/udp"},
		{on: "w1", settings: "pod-network=routes", firewalls: "forward",
			want: "has rules by which only what they name is forwarded, as Docker makes them: pods may reach nobody " +
				"but each other -> iptables -I FORWARD -i keelson0 -j ACCEPT && iptables -I FORWARD -o keelson0 -j " +
				"ACCEPT, at each boot, and with ip6tables for pods of IPv6"},
		{on: "cp2", firewalls: "firewalld forward",
			want: "runs firewalld: what it does not know of pods and of other machines it refuses -> let it: " +
				"firewall-cmd --permanent --add-port=6443/tcp --add-port=6444/tcp --add-port=6445/tcp && " +
				"firewall-cmd --reload"},
		{on: "w1", settings: "cni-conf-dir=/opt/net", firewalls: "ufw forward",
			want: "has ufw in force: what it does not know of pods and of other machines it refuses -> let it: " +
				"ufw allow 10250/tcp && ufw allow 4789/udp"},
		{on: "w1", firewalls: "firewalld forward", joined: true},
	} {
		w := newWorld(aCluster(3, 1))
		for i := range w.cluster.Hosts {
			if h := &w.cluster.Hosts[i]; h.Name == "w1" {
				h.Agent = machines.Settings{}
				for _, s := range strings.Fields(c.settings) {
					k, v, _ := strings.Cut(s, "=")
					h.Agent[k] = machines.Value{Text: []string{v}}
				}
			}
		}
		f := w.facts[c.on]
		f.Modules["wireguard"] = true
		f.Firewalls = strings.Fields(c.firewalls)
		w.facts[c.on] = f
		if c.joined {
			for _, s := range w.plan() {
				w.do(t, s)
			}
		}
		var all []string
		for _, one := range Inspect(w.cluster, w.seen(), w.release, w.state) {
			if all = append(all, one.What+" -> "+one.Remedy); one.Machine != c.on || one.Blocking {
				t.Errorf("%+v", one)
			}
		}
		if said := strings.Join(all, "\n"); said != c.want {
			t.Errorf("%s with %q and %q: said\n%s\nwant\n%s", c.on, c.settings, c.firewalls, said, c.want)
		}
	}
}

// healthzPort is the port at which load balancers in front of nodes ask; like node ports, it is open only where somebody
// uses it.
const healthzPort = 10256

// The ports that are judged are those that daemons have, and docs/reference/ports.md lists all of them.
func TestPortsOfTheCode(t *testing.T) {
	text := func(path string) string {
		t.Helper()
		raw, err := os.ReadFile("../../../" + path)
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	for path, want := range map[string]string{
		"controlplane/datadir/cluster.go": fmt.Sprintf("{&c.APIPort, %d}, {&c.FleetPort, %d}, {&c.PeerPort, %d}",
			replicaPorts[0], replicaPorts[1], replicaPorts[2]),
		"agent/node/config.go":      fmt.Sprintf("c.Listen.KubeletPort = %d\n", kubeletPort),
		"agent/node/proxyhealth.go": fmt.Sprintf("proxyHealthzPort = %d\n", healthzPort),
		"agent/network/plan.go":     fmt.Sprintf("tunnelPort = %d ", vxlanPort),
		"agent/network/encrypt.go":  fmt.Sprintf("DefaultWireGuardPort = %d\n", wireguardPort),
	} {
		if !strings.Contains(text(path), want) {
			t.Errorf("%s does not say %q", path, want)
		}
	}
	_, table, _ := strings.Cut(text("docs/reference/ports.md"), "\n## Ports\n")
	table, _, _ = strings.Cut(table, "\n## ")
	var told []string
	for line := range strings.Lines(table) {
		if cell := strings.Split(line, " | "); strings.HasPrefix(line, "| ") && strings.Contains(cell[0], "/") {
			told = append(told, strings.TrimPrefix(cell[0], "| "))
		}
	}
	both := machines.Host{Roles: []machines.Role{machines.ControlPlane, machines.Worker}}
	want := append(listenPorts(both), fmt.Sprintf("%d/udp", wireguardPort), fmt.Sprintf("%d/tcp", healthzPort),
		"30000-32767/tcp, /udp")
	if !slices.Equal(told, want) {
		t.Errorf("docs/reference/ports.md lists %q, want %q", told, want)
	}
}
