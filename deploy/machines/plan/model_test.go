package plan

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

// world is a model of machines and their cluster; steps change it like the real ones.
type world struct {
	cluster machines.Cluster
	facts   map[string]machines.Facts
	state   State
	release Release
}

func emptyFacts() machines.Facts {
	f := machines.Facts{Arch: "amd64", Kernel: "6.1.0-18-amd64", Root: true, Systemd: true,
		Cgroup: []string{"cpu", "memory", "pids"}, Memory: 2 << 30, FreeBytes: 20 << 30,
		Programs: map[string]bool{}, Modules: map[string]bool{}, Ports: map[int]bool{}, Sums: map[string]string{},
		Active: map[string]bool{}, Enabled: map[string]bool{}, Stale: map[string]bool{}}
	for _, p := range []string{"tar", "gzip", "sha256sum", "nft", "ip", "iptables", "iptables-save",
		"iptables-restore"} {
		f.Programs[p] = true
	}
	for _, m := range []string{"overlay", "nf_tables", "nf_conntrack", "br_netfilter", "vxlan", "wireguard", "ip_vs",
		"ip_vs_rr", "dummy"} {
		f.Modules[m] = true
	}
	return f
}

func aRelease(version string) Release {
	r := Release{Version: version, Archives: map[string]Archive{}}
	for _, arch := range []string{"amd64", "arm64"} {
		top := "keelson-" + version + "-linux-" + arch
		r.Archives[arch] = Archive{
			Tarball: File{Name: top + ".tar.gz", Sum: "tarball of " + version + arch, Size: 64 << 20},
			Images:  &File{Name: top + "-images.tar", Sum: "images of " + version + arch, Size: 20 << 20},
			Sums: map[string]string{"/usr/bin/kctl": version + "kctl", "/usr/bin/keelson-agent": version + "agent",
				"/usr/lib/keelson/uninstall.sh": "one for all"},
			ImageSums: map[string]string{"/var/lib/keelson/images.d/entry.tar": version + "entry"},
		}
	}
	return r
}

// aCluster returns control planes, one of which is also a worker, and workers.
func aCluster(replicas, workers int) machines.Cluster {
	c := machines.Cluster{Name: "prod", Init: []string{"--cluster-cidr=10.1.0.0/16"}}
	for i := range replicas {
		h := machines.Host{Name: fmt.Sprintf("cp%d", i+1), Address: fmt.Sprintf("192.0.2.%d", 11+i),
			Roles: []machines.Role{machines.ControlPlane}, SSH: machines.SSH{User: "root"}}
		c.Hosts = append(c.Hosts, h)
	}
	for i := range workers {
		c.Hosts = append(c.Hosts, machines.Host{Name: fmt.Sprintf("w%d", i+1), Address: fmt.Sprintf("192.0.2.%d", 51+i),
			Roles: []machines.Role{machines.Worker}, SSH: machines.SSH{User: "root"}})
	}
	return c
}

// withStandbys adds standbys.
func withStandbys(c machines.Cluster, standbys int) machines.Cluster {
	for i := range standbys {
		h := machines.Host{Name: fmt.Sprintf("sb%d", i+1), Address: fmt.Sprintf("192.0.2.%d", 31+i),
			Roles: []machines.Role{machines.Standby}, SSH: machines.SSH{User: "root"}}
		c.Hosts = slices.Insert(c.Hosts, i, h)
	}
	return c
}

func newWorld(c machines.Cluster) *world {
	w := &world{cluster: c, facts: map[string]machines.Facts{}, release: aRelease("v1")}
	for _, h := range c.Hosts {
		f := emptyFacts()
		f.MachineID, f.Addresses = h.Name, []string{h.Address}
		f.Networks = []machines.Network{{Link: "lo", Prefix: netip.MustParsePrefix("127.0.0.1/8")},
			{Link: "eth0", Prefix: netip.MustParsePrefix(h.Address + "/24")}}
		w.facts[h.Name] = f
	}
	return w
}

func (w *world) plan() []Step { return SortSteps(NewPlan(w.cluster, w.facts, w.release, w.state)) }

// do applies the effect of a step.
func (w *world) do(t *testing.T, s Step) {
	f := w.facts[s.Machine]
	h, _ := w.cluster.Host(s.Machine)
	a := w.release.Archives[f.Arch]
	install := func(r machines.Role) {
		for _, file := range s.Files {
			if f.Sums[machines.Cache+"/"+file.Name] != file.Sum {
				t.Fatalf("%s: %s is needed and was not put there", s.Machine, file.Name)
			}
		}
		for _, u := range []string{"keelson-controlplane", "keelson-agent"} { // each new program concerns both
			f.Stale[u] = f.Active[u] && (f.Stale[u] || countDiffering(f.Sums, a.Sums) > 0)
		}
		maps.Copy(f.Sums, a.Sums)
		f.Version = "keelson-controlplane version " + w.release.Version
		f.Active[r.UnitName()], f.Enabled[r.UnitName()], f.Stale[r.UnitName()] = true, true, false
	}
	switch s.Do {
	case Upload:
		for _, file := range s.Files {
			f.Sums[machines.Cache+"/"+file.Name] = file.Sum
		}
	case ControlPlane:
		install(machines.ControlPlane)
		if s.Start == Init && w.state.Known {
			t.Fatalf("%s makes a cluster beside the one that there is", s.Machine)
		}
		if s.Start == Join && !w.state.Known {
			t.Fatalf("%s joins before there is a cluster", s.Machine)
		}
		f.ControlPlane, f.Replica, f.ReplicaWhole, f.ClusterID, f.ClusterName, f.ReplicaCA = s.Settings, true, true,
			"id", w.cluster.Name, aCA
		f.Admin = f.Admin || s.Admin || s.Start == Init
		w.state.Known = true
		if w.state.Members == nil {
			w.state.Members, w.state.Nodes = map[string]Member{}, map[string]Node{}
		}
		if s.Start != "" {
			if w.state.Members[s.Machine].Voter && s.Standby {
				t.Fatalf("%s has a vote, and would lose it", s.Machine)
			}
			f.WithoutVote = s.Standby
			w.state.Members[s.Machine] = Member{Address: h.Address, Voter: !s.Standby, Standby: s.Standby, Ready: "yes"}
		}
	case Agent:
		install(machines.Worker)
		maps.Copy(f.Sums, a.ImageSums)
		f.Agent = s.Settings
		if _, exists := w.state.Nodes[s.Machine]; s.Start == Join && exists && !s.Replace {
			t.Fatalf("%s: its token does not take over the Node", s.Machine)
		} else if !exists {
			w.state.Nodes[s.Machine] = Node{Ready: true, Address: h.Address, Labels: maps.Clone(h.Labels),
				Taints: slices.Clone(h.Taints)}
		}
		f.Node, f.NodeCA = true, aCA
	case Mark:
		n := w.state.Nodes[s.Machine]
		w.state.Nodes[s.Machine] = marked(n, NodeMarks(h, n))
	default:
		t.Fatalf("%s is no part of it", s.Do)
	}
	w.facts[s.Machine] = f
}

const aCA = "-----BEGIN CERTIFICATE-----\nprod\n-----END CERTIFICATE-----\n"

func marked(n Node, m Marks) Node {
	n.Labels = maps.Clone(n.Labels)
	if n.Labels == nil {
		n.Labels = map[string]string{}
	}
	for _, l := range m.Label {
		k, v, _ := strings.Cut(l, "=")
		n.Labels[k] = v
	}
	for _, k := range m.Unlabel {
		delete(n.Labels, k)
	}
	n.Taints = slices.DeleteFunc(slices.Clone(n.Taints), func(t string) bool {
		return slices.Contains(m.Untaint, taintKeyEffect(t)) || slices.ContainsFunc(m.Taint, func(new string) bool {
			return taintKeyEffect(new) == taintKeyEffect(t)
		})
	})
	n.Taints = append(n.Taints, m.Taint...)
	if m.Record != "" {
		n.Record = strings.TrimPrefix(m.Record, "-")
	}
	return n
}

// disturb changes something of the file, the machines, or the cluster, as users and faults do.
func (w *world) disturb(r *rand.Rand) string {
	i := r.IntN(len(w.cluster.Hosts))
	h := &w.cluster.Hosts[i]
	f := w.facts[h.Name]
	defer func() { w.facts[h.Name] = f }()
	unit := []string{"keelson-controlplane", "keelson-agent"}[r.IntN(2)]
	switch r.IntN(19) {
	case 16, 17:
		if dead, by := w.replace(r); dead != "" {
			f = w.facts[h.Name]
			return dead + ": dead, replaced by " + by + " and reinstalled"
		}
	case 18:
		if h.HasRole(machines.Standby) && w.state.Members[h.Name].Voter {
			if i := slices.IndexFunc(w.cluster.Hosts, func(o machines.Host) bool {
				return o.HasRole(machines.ControlPlane) && !w.state.Members[o.Name].Voter
			}); i >= 0 {
				other := &w.cluster.Hosts[i]
				h.Roles[slices.Index(h.Roles, machines.Standby)] = machines.ControlPlane
				other.Roles[slices.Index(other.Roles, machines.ControlPlane)] = machines.Standby
				return h.Name + ": a control plane in the file now, and " + other.Name + " a standby"
			}
		}
	case 0:
		w.release = aRelease(fmt.Sprintf("v%d", r.IntN(3)+1))
		return "another release"
	case 1:
		f.Agent = "max-pods: 3\n"
		return h.Name + ": settings by hand"
	case 2:
		delete(f.Active, unit)
		return h.Name + ": " + unit + " ended"
	case 3:
		delete(f.Enabled, unit)
		return h.Name + ": " + unit + " not at boot"
	case 4:
		f.Stale[unit] = f.Active[unit]
		return h.Name + ": " + unit + " as before"
	case 5:
		f.Sums["/usr/bin/kctl"] = "broken"
		return h.Name + ": a program is broken"
	case 6:
		clear(f.Sums)
		return h.Name + ": its programs are gone"
	case 7:
		if h.HasRole(machines.Worker) {
			h.Labels = map[string]string{fmt.Sprintf("l%d", r.IntN(3)): fmt.Sprint(r.IntN(2))}
			return h.Name + ": labels"
		}
	case 8:
		if h.HasRole(machines.Worker) {
			h.Taints = []string{fmt.Sprintf("t%d=%d:NoSchedule", r.IntN(3), r.IntN(2)), "x:NoExecute"}[:r.IntN(3)]
			return h.Name + ": taints"
		}
	case 9:
		if n, ok := w.state.Nodes[h.Name]; ok {
			n.Labels = map[string]string{"l0": "by hand", "other": "stays"}
			n.Taints = append(n.Taints, "node.kubernetes.io/unschedulable:NoSchedule")
			w.state.Nodes[h.Name] = n
			return h.Name + ": labels by hand"
		}
	case 10:
		h.Agent = machines.Settings{"max-pods": {Text: []string{fmt.Sprint(r.IntN(3))}}}
		return h.Name + ": settings of the file"
	case 11:
		f.Admin = f.Admin && len(w.state.Members) > 1 && !w.onlyAdmin(h.Name)
		return h.Name + ": the kubeconfig is gone"
	case 12:
		if !f.ReplicaWhole || len(w.state.Members) > 1 && !w.onlyAdmin(h.Name) {
			f = emptyFacts()
			f.Addresses = []string{h.Address}
			return h.Name + ": reinstalled"
		}
	case 13:
		if !h.HasRole(machines.Worker) {
			h.Roles = append(h.Roles, machines.Worker)
			return h.Name + ": a worker too"
		}
	case 15:
		for path := range f.Sums {
			if strings.HasPrefix(path, machines.Cache) {
				f.Sums[path] = "broken"
			}
		}
		f.Sums["/usr/bin/kctl"] = "broken"
		return h.Name + ": what was put there is broken"
	case 14:
		n := len(w.cluster.Hosts)
		role := []machines.Role{machines.ControlPlane, machines.Worker, machines.Standby}[r.IntN(3)]
		name := fmt.Sprintf("m%d", n)
		w.cluster.Hosts = append(w.cluster.Hosts,
			machines.Host{Name: name, Address: fmt.Sprintf("192.0.2.%d", 100+n), Roles: []machines.Role{role}})
		fresh := emptyFacts()
		fresh.Addresses = []string{fmt.Sprintf("192.0.2.%d", 100+n)}
		w.facts[name] = fresh
		return name + ": a new machine"
	}
	return "nothing"
}

// replace makes a standby the successor of a dead replica, like autopilot. The dead replica's
// machine is then empty.
func (w *world) replace(r *rand.Rand) (dead, by string) {
	var voters, waiting []string
	for _, name := range slices.Sorted(maps.Keys(w.state.Members)) {
		f := w.facts[name]
		switch m := w.state.Members[name]; {
		case m.Voter && !w.onlyAdmin(name):
			voters = append(voters, name)
		case m.Standby && f.ReplicaWhole:
			waiting = append(waiting, name)
		}
	}
	if len(voters) < 2 || len(waiting) == 0 {
		return "", ""
	}
	dead, by = voters[r.IntN(len(voters))], waiting[r.IntN(len(waiting))]
	w.promote(dead, by)
	h, _ := w.cluster.Host(dead)
	f := emptyFacts()
	f.Addresses = []string{h.Address}
	w.facts[dead] = f
	return dead, by
}

func (w *world) promote(dead, by string) {
	delete(w.state.Members, dead)
	m, f := w.state.Members[by], w.facts[by]
	m.Voter, m.Standby, f.WithoutVote = true, false, false
	w.state.Members[by], w.facts[by] = m, f
	if w.state.Replaced == nil {
		w.state.Replaced = map[string]string{}
	}
	w.state.Replaced[dead] = by
}

func (w *world) onlyAdmin(name string) bool {
	for other, f := range w.facts {
		if other != name && f.Admin {
			return false
		}
	}
	return true
}

// A plan that was carried out leaves nothing to do, and so does the next plan after an interruption
// at any step.
func TestSecondPlanIsEmpty(t *testing.T) {
	for seed := range uint64(1000) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := newWorld(withStandbys(aCluster(1+r.IntN(3), r.IntN(4)), r.IntN(3)))
		var story []string
		for round := range 4 {
			steps := w.plan()
			if round == 0 && len(steps) == 0 {
				t.Fatal("nothing is to be done on empty machines")
			}
			if cut := r.IntN(len(steps) + 1); r.IntN(2) == 0 {
				steps = steps[:cut]
				story = append(story, fmt.Sprintf("cut off after %d steps", cut))
			}
			for _, s := range steps {
				w.do(t, s)
			}
			for _, s := range w.plan() {
				w.do(t, s)
			}
			if left := w.plan(); len(left) > 0 {
				var out strings.Builder
				Show(&out, left)
				t.Fatalf("seed %d, after %q there is still to do\n%s", seed, story, out.String())
			}
			if is, want := w.voters(), len(w.cluster.HostsWithRole(machines.ControlPlane)); is != want {
				t.Fatalf("seed %d, after %q there are %d votes, want %d, as the file has control planes: %+v", seed,
					story, is, want, w.state.Members)
			}
			for _, h := range w.cluster.Hosts {
				if _, is := w.state.Members[h.Name]; is != h.HasReplica() {
					t.Fatalf("seed %d, after %q: %s is a member: %v", seed, story, h.Name, is)
				}
				for _, r := range h.Roles {
					f := w.facts[h.Name]
					if u := r.UnitName(); !f.Active[u] || !f.Enabled[u] || f.Stale[u] ||
						f.Sums["/usr/bin/kctl"] != w.release.Version+"kctl" {
						t.Fatalf("seed %d: nothing is to be done any more, and %s has %+v", seed, h.Name, f)
					}
				}
				if n := w.state.Nodes[h.Name]; h.HasRole(machines.Worker) {
					for k, v := range h.Labels {
						if n.Labels[k] != v {
							t.Fatalf("seed %d: node %s has the labels %v, want %v", seed, h.Name, n.Labels, h.Labels)
						}
					}
					for _, taint := range h.Taints {
						if !slices.Contains(n.Taints, taint) {
							t.Fatalf("seed %d: node %s has the taints %v, want %v", seed, h.Name, n.Taints, h.Taints)
						}
					}
				}
			}
			for range 1 + r.IntN(3) {
				story = append(story, w.disturb(r))
			}
		}
	}
}

func (w *world) voters() (n int) {
	for _, m := range w.state.Members {
		if m.Voter {
			n++
		}
	}
	return n
}

// What comes from the file goes with it, and what others gave a Node stays.
func TestMarks(t *testing.T) {
	h := machines.Host{Name: "w1", Roles: []machines.Role{machines.Worker},
		Labels: map[string]string{"a": "1", "b": "2"}, Taints: []string{"t=1:NoSchedule", "u:NoExecute"}}
	n := marked(Node{Labels: map[string]string{"other": "x", "a": "by hand"}, Taints: []string{"other:NoSchedule"}},
		NodeMarks(h, Node{Labels: map[string]string{"other": "x", "a": "by hand"}}))
	h.Labels, h.Taints = map[string]string{"b": "3"}, []string{"t=2:NoSchedule"}
	got := NodeMarks(h, n)
	want := Marks{Label: []string{"b=3"}, Unlabel: []string{"a"}, Taint: []string{"t=2:NoSchedule"},
		Untaint: []string{"u:NoExecute"}, Record: `{"labels":["b"],"taints":["t:NoSchedule"]}`}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("is\n%+v\nwant\n%+v", got, want)
	}
	h.Labels, h.Taints = nil, nil
	n = marked(n, got)
	n = marked(n, NodeMarks(h, n))
	if !maps.Equal(n.Labels, map[string]string{"other": "x"}) ||
		!slices.Equal(n.Taints, []string{"other:NoSchedule"}) || n.Record != "" {
		t.Errorf("of the file there stays %+v", n)
	}
	if m := NodeMarks(h, Node{Record: "{broken"}); m.Record != "-" || len(m.Unlabel) > 0 {
		t.Errorf("a broken record: %+v", m)
	}
}
