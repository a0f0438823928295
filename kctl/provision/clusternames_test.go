package provision

import (
	"maps"
	"strings"
	"testing"
)

// Machines that were renamed in the file are not wiped, changed or taken out by the name that is not theirs; by their own they are.
func TestClusterMachinesRenamed(t *testing.T) {
	s := newSite(t)
	hosts := []string{"cp1 192.0.2.11 controlplane", "cp2 192.0.2.12 controlplane", "cp3 192.0.2.13 controlplane",
		"w1 192.0.2.21 worker"}
	s.write("", hosts...)
	if said, err := s.kctl("up"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	before := s.cluster()
	s.all["db2"], s.all["web1"] = s.all["cp2"], s.all["w1"]
	s.write("", hosts[0], "db2 192.0.2.12 controlplane", hosts[2], "web1 192.0.2.21 worker")
	trees := map[string]map[string]string{"cp2": s.all["cp2"].tree(t), "w1": s.all["w1"].tree(t)}
	for _, c := range []struct{ verb, name, said, err string }{
		{"up", "", "ERROR    db2: is the replica cp2 of the group, and not db2", "nothing was changed"},
		{"up", "", "ERROR    web1: is the node w1 of the cluster, and not web1", "nothing was changed"},
		{"remove", "db2", "", "nothing was changed: db2 is the replica cp2 of the cluster: name it cp2 in the file"},
		{"remove", "web1", "", "nothing was changed: web1 is the node w1 of the cluster: name it w1 in the file"},
	} {
		said, err := s.kctl(c.verb, strings.Fields(c.name)...)
		if err == nil || !strings.Contains(said, c.said) || !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s %s: %v\n%s\nwant %s, %s", c.verb, c.name, err, said, c.said, c.err)
		}
	}
	after := s.cluster()
	for name, was := range trees {
		if !maps.Equal(was, s.all[name].tree(t)) {
			t.Errorf("%s has changed", name)
		}
	}
	if !maps.Equal(after.Members, before.Members) || len(after.Nodes) != 1 || !maps.Equal(after.Starts, before.Starts) {
		t.Errorf("the cluster is %+v, and was %+v", after, before)
	}
	s.write("", hosts...)
	for _, name := range []string{"cp2", "w1"} {
		if said, err := s.kctl("remove", name); err != nil {
			t.Errorf("%s: %v\n%s", name, err, said)
		}
	}
	if is := s.cluster(); is.Members["cp2"] != "" || len(is.Members) != 2 || len(is.Nodes) != 0 {
		t.Errorf("the cluster is %+v", is)
	}
}
