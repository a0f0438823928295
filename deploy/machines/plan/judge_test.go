package plan

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/deploy/machines"
)

func (w *world) seen() map[string]Observation {
	all := map[string]Observation{}
	for name, f := range w.facts {
		all[name] = Observation{Facts: f}
	}
	return all
}

// judgeCases are the cases of TestJudge.
var judgeCases = []struct {
	name    string
	damage  func(*world, *machines.Facts) // of w1, or cp2 where on says so
	on      string
	grave   bool
	finding string // what is said, and the remedy
}{
	{"no root", func(_ *world, f *machines.Facts) {
		f.Root = false
	}, "w1", true, "root does not become root there -> name root in ssh.user"},
	{"no systemd", func(_ *world, f *machines.Facts) { f.Systemd = false }, "w1", true, "is not run by systemd"},
	{"another processor", func(_ *world, f *machines.Facts) {
		f.Arch = "riscv64"
	}, "w1", true, `is "riscv64", and the release has no file for that: there are amd64, arm64`},
	{"an escape", func(_ *world, f *machines.Facts) { f.Arch = "\x1b[2J" }, "w1", true, `is "?[2J"`},
	{"an old kernel", func(_ *world, f *machines.Facts) {
		f.Kernel = "4.19.0-26-amd64"
	}, "w1", true, `has Linux "4.19.0-26-amd64", and 5.6 is needed -> install a newer`},
	{"an older kernel", func(_ *world, f *machines.Facts) {
		f.Kernel = "5.10.0"
	}, "w1", false, "before 5.14 some things are missing"},
	{"cgroup v1", func(_ *world, f *machines.Facts) {
		f.Cgroup = nil
	}, "w1", true, "has no cgroup v2 at /sys/fs/cgroup -> boot it with"},
	{"no memory controller", func(_ *world, f *machines.Facts) {
		f.Cgroup = []string{"cpu", "pids"}
	}, "w1", true, "has cgroup v2 without memory"},
	{"no nft", func(_ *world, f *machines.Facts) {
		f.Programs["nft"] = false
	}, "w1", true, "has no nft -> install the package that has it, such as nftables"},
	{"no overlay", func(_ *world, f *machines.Facts) {
		f.Modules["overlay"] = false
	}, "w1", true, "its kernel has no overlay"},
	{"another address", func(_ *world, f *machines.Facts) {
		f.Addresses = []string{"10.0.2.15"}
	}, "w1", true, "does not have the address 192.0.2.51 of the file: it has 10.0.2.15"},
	{"no room", func(_ *world, f *machines.Facts) {
		f.FreeBytes = 200 << 20
	}, "w1", true, "has room for 200 MiB at /var/lib/keelson, and 1.0 GiB is needed"},
	{"little room", func(_ *world, f *machines.Facts) {
		f.FreeBytes = 3 << 30
	}, "w1", false, "has room for 3.0 GiB"},
	{"no memory", func(_ *world, f *machines.Facts) {
		f.Memory = 256 << 20
	}, "cp2", true, "has 256 MiB of memory, and a replica needs 400 MiB"},
	{"little memory", func(_ *world, f *machines.Facts) {
		f.Memory = 700 << 20
	}, "cp2", false, "has 700 MiB of memory"},
	{"a slow disk", func(_ *world, f *machines.Facts) {
		f.SyncLatency = 120 * time.Millisecond
	}, "cp2", false, "takes 120ms for a synchronous write"},
	{"a port", func(_ *world, f *machines.Facts) {
		f.Ports[10250] = true
	}, "w1", true, "port 10250, which keelson-agent needs, is taken -> 'ss -ltnp sport = :10250' there says by " +
		"whom; agent.kubelet-port"},
	{"a replica's port", func(_ *world, f *machines.Facts) {
		f.Ports[6445] = true
	}, "cp2", true, "port 6445, which keelson-controlplane needs, is taken"},
	{"a clock", func(_ *world, f *machines.Facts) {
		f.Skew = -10 * time.Second
	}, "w1", false, "its clock is 10s from the median of the machines -> have it follow a time server"},
	{"a wrong clock", func(_ *world, f *machines.Facts) {
		f.Skew = time.Hour
	}, "w1", true, "its clock is 1h0m0s from the median of the machines: it would treat"},
	{"a copy", func(_ *world, f *machines.Facts) { f.MachineID = "cp1" }, "w1", false, "has the machine ID of cp1"},
	{"a replica of another name", func(_ *world, f *machines.Facts) {
		f.ReplicaWhole, f.ClusterName, f.ClusterID = true, "test", "x"
	}, "cp2", true, `is a replica of the cluster "test", and the file's is "prod"`},
	{"a replica of another cluster", func(w *world, f *machines.Facts) {
		first := w.facts["cp1"]
		first.ReplicaWhole, first.ClusterName, first.ClusterID = true, "prod", "one"
		w.facts["cp1"] = first
		f.ReplicaWhole, f.ClusterName, f.ClusterID = true, "prod", "another"
	}, "cp2", true, "is a replica of another cluster than cp1 -> '/usr/lib/keelson/uninstall.sh'"},
	{"a node without a cluster", func(_ *world, f *machines.Facts) {
		f.Node, f.NodeCA = true, aCA
	}, "w1", true, "is a node of a cluster, of which no machine of the file has a replica"},
	{"a node of another cluster", func(w *world, f *machines.Facts) {
		first := w.facts["cp1"]
		first.ReplicaWhole, first.ClusterName, first.ClusterID, first.ReplicaCA = true, "prod", "one", aCA
		w.facts["cp1"] = first
		f.Node, f.NodeCA = true, strings.ReplaceAll(aCA, "prod", "other")
	}, "w1", true, "is a node of another cluster than cp1"},
	{"a name that is taken", func(w *world, _ *machines.Facts) {
		w.state = State{Known: true, Nodes: map[string]Node{"w1": {Ready: true, Address: "192.0.2.99"}}}
	}, "w1", true, "the cluster has a node of this name that is ready, at 192.0.2.99"},
	{"a role that the file does not give", func(w *world, f *machines.Facts) {
		f.ReplicaWhole, f.ClusterName, f.ClusterID = true, "prod", "one"
	}, "w1", false, "is a replica, and the file gives it no role controlplane"},
}

// What is wrong with a machine is said with its name and what to do, and what keeps it from being of use is grave.
func TestJudge(t *testing.T) {
	for _, c := range judgeCases {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(aCluster(3, 1))
			f := w.facts[c.on]
			c.damage(w, &f)
			w.facts[c.on] = f
			found := Inspect(w.cluster, w.seen(), w.release, w.state)
			if len(found) != 1 {
				t.Fatalf("%d findings, want 1: %+v", len(found), found)
			}
			if said := found[0].What + " -> " + found[0].Remedy; found[0].Machine != c.on ||
				found[0].Blocking != c.grave || !strings.Contains(said, c.finding) || found[0].Remedy == "" {
				t.Errorf("%s (grave: %v): %s\nwant %s (grave: %v): %s", found[0].Machine, found[0].Blocking, said, c.on,
					c.grave, c.finding)
			}
		})
	}
}

func TestJudgeOfAll(t *testing.T) {
	w := newWorld(aCluster(3, 2))
	if found := Inspect(w.cluster, w.seen(), w.release, State{}); len(found) > 0 {
		t.Errorf("of machines that are as they should be: %+v", found)
	}
	for _, s := range w.plan() {
		w.do(t, s)
	}
	// What runs there itself has the ports.
	for _, f := range w.facts {
		for _, p := range []int{6443, 6444, 6445, 10250} {
			f.Ports[p] = true
		}
	}
	if found := Inspect(w.cluster, w.seen(), w.release, w.state); len(found) > 0 {
		t.Errorf("of a cluster that runs: %+v", found)
	}
	// A clock that is behind all others is not theirs to mend.
	for i, h := range w.cluster.Hosts {
		f := w.facts[h.Name]
		f.Skew = 20 * time.Minute // ours is behind
		if i == 3 {
			f.Skew = 0
		}
		w.facts[h.Name] = f
	}
	if found := Inspect(w.cluster, w.seen(), w.release, w.state); len(found) != 1 || found[0].Machine != "w1" {
		t.Errorf("of one clock of five: %+v", found)
	}
	two := newWorld(aCluster(2, 0))
	if found := Inspect(two.cluster, two.seen(), two.release, State{}); len(found) != 1 ||
		len(BlockingFindings(found)) > 0 ||
		!strings.Contains(found[0].What, "2 control planes outlive the loss of 0, as 1 would") {
		t.Errorf("of two replicas: %+v", found)
	}
	seen := two.seen()
	seen["cp1"] = Observation{Err: errors.New("reaching cp1: no route to host")}
	if found := BlockingFindings(Inspect(two.cluster, seen, two.release, State{})); len(found) != 1 ||
		found[0].Machine != "cp1" || found[0].What != "reaching cp1: no route to host" {
		t.Errorf("of one that was not reached: %+v", found)
	}
}

// What would cost the control plane its majority is refused; the order of a removal is that in which nothing is lost.
func TestRemove(t *testing.T) {
	member := func(ready ...string) map[string]Member {
		all := map[string]Member{}
		for i, r := range ready {
			all[fmt.Sprintf("cp%d", i+1)] = Member{Voter: r != "learner", Ready: r}
		}
		return all
	}
	installed := emptyFacts()
	installed.Sums["/usr/bin/keelson-agent"] = "x"
	others := emptyFacts()
	others.Sums["/opt/cni/bin/bridge"] = "x"
	for _, c := range []struct {
		name    string
		state   State
		facts   machines.Facts
		machine string
		lost    bool
		want    string
	}{
		{"a worker", State{Known: true, Members: member("yes"), Nodes: map[string]Node{"w1": {Ready: true}}}, installed,
			"w1", false, "drain uninstall forget"},
		{"what was cut off before the Node went, on a machine with CNI plugins of others",
			State{Known: true, Members: member("yes"), Nodes: map[string]Node{"w1": {Ready: true}}}, others, "w1",
			false, "drain forget"},
		{"a machine with CNI plugins of others", State{Known: true, Members: member("yes")}, others, "w1", false, ""},
		{"a worker that is not ready", State{Known: true, Members: member("yes"), Nodes: map[string]Node{"w1": {}}},
			installed, "w1", false, "cordon uninstall forget"},
		{"a worker that is lost", State{Known: true, Members: member("yes"), Nodes: map[string]Node{"w1": {}}},
			machines.Facts{}, "w1", true, "forget"},
		{"what was cut off after the Node went", State{Known: true, Members: member("yes")}, installed, "w1",
			false, "uninstall"},
		{"what is gone", State{Known: true, Members: member("yes")}, emptyFacts(), "w1", false, ""},
		{"a replica", State{Known: true, Members: member("yes", "yes", "yes")}, installed, "cp1", false,
			"leave uninstall"},
		{"a replica that is a node too", State{Known: true, Members: member("yes", "yes", "yes"),
			Nodes: map[string]Node{"cp1": {Ready: true}}}, installed, "cp1", false, "drain leave uninstall forget"},
		{"one of two", State{Known: true, Members: member("yes", "yes")}, installed, "cp2", false, "leave uninstall"},
		{"the dead one of three", State{Known: true, Members: member("no answer", "yes", "yes")}, installed, "cp1",
			true, "leave"},
		{"a live one beside a dead one", State{Known: true, Members: member("no answer", "yes", "yes")},
			installed, "cp2", false,
			"without cp2 there are 2 replicas, of which 1 are ready: nothing could be written any more"},
		{"a learner counts for nothing", State{Known: true, Members: member("yes", "learner")}, installed, "cp1", false,
			"cp1 is the last replica"},
		{"the last one", State{Known: true, Members: member("yes")}, installed, "cp1", false,
			"cp1 is the last replica: with it the cluster goes"},
		{"a cluster that says nothing", State{}, installed, "w1", false, "the cluster does not answer"},
	} {
		steps, err := Remove(aCluster(3, 1), c.machine, c.facts, c.state, c.lost)
		var deeds []string
		for _, s := range steps {
			deeds = append(deeds, string(s.Do))
		}
		is := strings.Join(deeds, " ")
		if err != nil {
			is = err.Error()
		}
		if is != c.want && (err == nil || !strings.Contains(is, c.want)) {
			t.Errorf("%s: %q, want %q", c.name, is, c.want)
		}
	}
}

// The settings of daemons are those of the file, and nothing else.
func TestSettings(t *testing.T) {
	c, err := machines.Parse([]byte(`apiVersion: keelson.dev/v1
kind: Machines
controlplane: {store-quota: 4Gi}
agent: {max-pods: 60, registry-mirror: ["docker.io=m.example.com"]}
hosts:
- {name: cp1, address: "2001:db8::1", roles: [controlplane, worker], labels: {a: b, c: ""}, taints: ["t=1:NoSchedule"]}
`), "/", "/root")
	if err != nil {
		t.Fatal(err)
	}
	want := heading + "name: \"cp1\"\nadvertise-address: \"2001:db8::1\"\nstore-quota: \"4Gi\"\n"
	if is := ReplicaSettings(c.Hosts[0]); is != want {
		t.Errorf("is\n%s\nwant\n%s", is, want)
	}
	want = heading + "server: [\"[2001:db8::1]:6444\"]\ntoken-file: /var/lib/keelson/join-token\nnode-name: " +
		"\"cp1\"\nnode-ip: [\"2001:db8::1\"]\nnode-labels: [\"a=b\", \"c=\"]\n" +
		"taints: [\"t=1:NoSchedule\"]\ncgroup-root: /keelson.slice/pods\nmax-pods: 60\nregistry-mirror: " +
		"[\"docker.io=m.example.com\"]\n"
	if is := AgentSettings(c, c.Hosts[0]); is != want {
		t.Errorf("is\n%s\nwant\n%s", is, want)
	}
}

// A node whose cluster's CA was exchanged is of its cluster as before: its agent writes a line above the authorities that it believes.
func TestNodesShareAuthorities(t *testing.T) {
	one, other := aCA, strings.ReplaceAll(aCA, "prod", "other")
	for _, c := range []struct {
		node, replica string
		want          bool
	}{
		{one, one, true}, {"believed since 1795678860131 ms\n" + one, one, true},
		{"believed since 1 ms\n" + other + one, one, true},
		{"believed since 1 ms\n" + other, one, false}, {"believed since 1 ms\n", one, false}, {"", one, false},
	} {
		if got := shareCertificate(c.node, c.replica); got != c.want {
			t.Errorf("%q and %q: %v", c.node, c.replica, got)
		}
	}
}
