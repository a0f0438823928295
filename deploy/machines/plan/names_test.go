package plan

import (
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

// A machine that is part of the cluster under another name than the file's is not taken for one that the group has taken out, and nothing
// of it is taken away by the file's name: it lives.
func TestMachineHasAnotherName(t *testing.T) {
	rename := func(w *world, from, to string) {
		for i := range w.cluster.Hosts {
			if h := &w.cluster.Hosts[i]; h.Name == from {
				h.Name = to
			}
		}
		w.facts[to] = w.facts[from]
		delete(w.facts, from)
	}
	change := func(w *world, name string, how func(*machines.Facts)) {
		f := w.facts[name]
		how(&f)
		w.facts[name] = f
	}
	by := func(f *machines.Facts) { f.ControlPlane, f.Hostname = "advertise-address: 192.0.2.99\n", "cp2" }
	for _, c := range []struct {
		name    string
		damage  func(*world)
		machine string
		finding string // of the machine; "" = none
		remove  string // why it is not taken out; "" = it is
	}{
		{"a replica that was renamed in the file", func(w *world) { rename(w, "cp2", "db2") }, "db2",
			"ERROR db2: is the replica cp2 of the group, and not db2 -> name it cp2 in the file; 'kctl " +
				"cluster remove cp2' then takes it out, and 'up' takes it in by another name",
			"db2 is the replica cp2 of the cluster: name it cp2 in the file, and remove that"},
		{"a replica whose name is its hostname, at an address that the group does not know", func(w *world) {
			rename(w, "cp2", "db2")
			change(w, "db2", by)
			w.state.Members["cp2"] = Member{Address: "192.0.2.99", Voter: true, Ready: "yes"}
		}, "db2", "ERROR db2: is the replica cp2 of the group, and not db2", "db2 is the replica cp2 of the cluster"},
		{"a standby", func(w *world) {
			rename(w, "cp4", "sb")
		}, "sb", "ERROR sb: is the replica cp4 of the group, and not sb", "sb is the replica cp4 of the cluster"},
		{"two names that were exchanged", func(w *world) {
			rename(w, "cp2", "x")
			rename(w, "cp3", "cp2")
			rename(w, "x", "cp3")
		}, "cp2",
			"ERROR cp2: is the replica cp3 of the group, and not cp2", "cp2 is the replica cp3 of the cluster"},
		{"a cluster that says nothing", func(w *world) { rename(w, "cp2", "db2"); w.state = State{} }, "db2",
			"ERROR db2: is the replica cp2 of the group, and not db2 -> name it cp2 in the file; or, if that is not " +
				"its name, have name in /etc/keelson/controlplane.yaml there say db2", "the cluster does not answer"},
		{"a node that was renamed in the file", func(w *world) { rename(w, "w1", "web1") }, "web1",
			"ERROR web1: is the node w1 of the cluster, and not web1 -> name it w1 in the file; 'kctl cluster remove " +
				"w1' then takes it out", "web1 is the node w1 of the cluster: name it w1 in the file, and remove that"},
		{"a node of which the settings were written already", func(w *world) {
			rename(w, "w1", "web1")
			change(w, "web1", func(f *machines.Facts) { f.Agent, f.NodeName = "node-name: web1\n", "w1" })
			w.state.Nodes["w1"] = Node{Address: "192.0.2.98"}
		}, "web1", "ERROR web1: is the node w1 of the cluster, and not web1", "web1 is the node w1 of the cluster"},
		{"settings by hand of a replica that the group knows", func(w *world) {
			change(w, "cp2", func(f *machines.Facts) { f.ControlPlane = "name: x\n" })
		}, "cp2", "", ""},
		{"settings by hand of a node that the cluster knows", func(w *world) {
			change(w, "w1", func(f *machines.Facts) {
				f.Agent = "node-name: x\n"
			})
		}, "w1", "", ""},
		{"one that was taken out", func(w *world) { delete(w.state.Members, "cp2") }, "cp2",
			"ERROR cp2: its replica was removed from the raft cluster, and cannot rejoin with its data", ""},
		{"a machine in the place of a dead one, which is not taken in yet", func(w *world) {
			rename(w, "cp2", "cp9")
			change(w, "cp9", func(f *machines.Facts) { f.Joining, f.ControlPlane = true, "name: cp9\n" })
		}, "cp9", "", ""},
		{"a machine without anything in the place of a dead one", func(w *world) {
			rename(w, "cp2", "cp9")
			w.facts["cp9"] = emptyFacts()
		}, "cp9", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := settled(t)
			c.damage(w)
			var said []string
			for _, f := range Inspect(w.cluster, w.seen(), w.release, w.state) {
				word := "warning"
				if f.Blocking {
					word = "ERROR"
				}
				if f.Machine == c.machine {
					said = append(said, word+" "+f.Machine+": "+f.What+" -> "+f.Remedy)
				}
			}
			if got := strings.Join(said, "\n"); (got == "") != (c.finding == "") ||
				!strings.HasPrefix(got, c.finding) || len(said) > 1 {
				t.Errorf("it finds\n%s\nwant\n%s", got, c.finding)
			}
			steps, err := Remove(w.cluster, c.machine, w.facts[c.machine], w.state, false)
			if (err == nil) != (c.remove == "") || err != nil && !strings.HasPrefix(err.Error(), c.remove) {
				t.Errorf("it is removed by %+v, %v; want %q", steps, err, c.remove)
			}
		})
	}
}

// One that is gone for good is not asked: then the addresses alone tell of whom the file speaks.
func TestLostMachineHasAnotherName(t *testing.T) {
	w := settled(t)
	for _, c := range []struct{ was, name, want string }{
		{"cp2", "db2", "db2 is no part of the cluster, and at its address is the replica cp2: name it cp2 in the " +
			"file, and remove that"},
		{"w1", "web1", "web1 is no part of the cluster, and at its address is the node w1: name it w1 in the file, " +
			"and remove that"},
	} {
		for i := range w.cluster.Hosts {
			if h := &w.cluster.Hosts[i]; h.Name == c.was {
				h.Name = c.name
			}
		}
		if steps, err := Remove(w.cluster, c.name, machines.Facts{}, w.state, true); err == nil ||
			err.Error() != c.want {
			t.Errorf("%s is removed by %+v, %v; want %s", c.name, steps, err, c.want)
		}
	}
	if steps, err := Remove(w.cluster, "cp3", machines.Facts{}, w.state, true); err != nil || len(steps) != 1 ||
		steps[0].Do != Leave {
		t.Errorf("cp3 is removed by %+v, %v", steps, err)
	}
}
