package provision

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// promote has a standby take the vote of a replica that is dead, as the leader does it.
func (s *site) promote(dead, by string) {
	s.t.Helper()
	var c map[string]any
	raw, err := os.ReadFile(s.shared)
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	delete(c["Members"].(map[string]any), dead)
	delete(c["Waiting"].(map[string]any), by)
	c["Changed"] = []any{map[string]any{"dead": dead, "standby": by}}
	if c["Leader"] == dead {
		c["Leader"] = by
	}
	if raw, err = json.Marshal(c); err != nil {
		s.t.Fatal(err)
	}
	put(s.t, s.shared, string(raw), 0o600)
	if err := os.Remove(filepath.Join(s.all[by].root, "var/lib/keelson/controlplane/standby.json")); err != nil {
		s.t.Fatal(err)
	}
}

// A standby joins, gets the vote of a replica that dies, and keeps it; the dead one, back, is refused and then joins as a standby;
// an upgrade goes to who has no vote first; standbys leave. What a person reads. F53
func TestClusterWithStandbys(t *testing.T) {
	s := newSite(t)
	script := written{site: s}
	say, do := script.say, script.do
	hosts := []string{"cp1 192.0.2.11 controlplane", "cp2 192.0.2.12 controlplane", "cp3 192.0.2.13 controlplane",
		"w1 192.0.2.21 worker"}
	nothing := func() {
		t.Helper()
		before := map[string]map[string]string{}
		for name, m := range s.all {
			before[name] = m.tree(t)
		}
		if said := do("up"); !strings.Contains(said, "nothing to do") {
			t.Errorf("there was to do:\n%s", said)
		}
		for name, m := range s.all {
			if !maps.Equal(before[name], m.tree(t)) {
				t.Errorf("%s has changed", name)
			}
		}
	}
	say("what no file may say")
	s.write("", "cp1 192.0.2.11 standby", "w1 192.0.2.21 worker")
	do("up")
	s.write("", hosts...)
	if _, err := s.kctl("up"); err != nil {
		t.Fatal(err)
	}
	say("the file of a cluster of three has a standby now, which is taken in: no other machine is changed")
	hosts = slices.Insert(hosts, 3, "cp4 192.0.2.14 standby")
	s.write("", hosts...)
	do("add")
	if is := s.cluster(); !is.Waiting["cp4"] || len(is.Members) != 4 {
		t.Errorf("the cluster is %+v", is)
	}
	say("the others are told")
	do("up", "--dry-run")
	do("up")
	nothing()
	say("never is allowed, and said")
	s.write("controlplane: {replace-dead-after: 0}\n", hosts...)
	do("up", "--dry-run")
	s.write("", hosts...)
	say("cp1, which leads, dies, and cp4 gets its vote; cp1 is back with what it had")
	s.promote("cp1", "cp4")
	do("up")
	do("add", "cp1")
	do("upgrade", "--to", s.release)
	do("remove", "cp1")
	if m := s.cluster(); m.Waiting["cp4"] || m.Members["cp4"] == "" {
		t.Errorf("the cluster is %+v", m)
	}
	do("add", "--dry-run")
	do("up")
	nothing()
	if is := s.cluster(); !maps.Equal(is.Waiting, map[string]bool{"cp1": true}) || len(is.Members) != 4 {
		t.Errorf("the cluster is %+v", is)
	}
	say("another release: who has no vote comes first")
	s.pack("v2")
	begun := len(s.cluster().Done)
	if _, err := s.kctl("upgrade", "--to", s.release); err != nil {
		t.Fatal(err)
	}
	want := []string{"restart cp1 keelson-controlplane", "restart cp2 keelson-controlplane",
		"restart cp3 keelson-controlplane", "lead cp2",
		"restart cp4 keelson-controlplane", "restart w1 keelson-agent"}
	if is := s.cluster(); !slices.Equal(is.Done[begun:], want) {
		t.Errorf("it went\n%s", strings.Join(is.Done[begun:], "\n"))
	}
	say("the file says what is so")
	s.write("", "cp1 192.0.2.11 standby", hosts[1], hosts[2], "cp4 192.0.2.14 controlplane", hosts[4])
	nothing()
	say("a standby leaves, and all the rest")
	do("remove", "cp1")
	say("a standby that has a vote is asked, too")
	s.write("", hosts[0], hosts[3], hosts[4])
	do("remove", "cp1")
	s.write("", hosts...)
	do("reset", "prod")
	say("a cluster with a standby from the beginning, which the file names first")
	s.write("", hosts[3], hosts[0], hosts[4])
	do("up")
	if is := s.cluster(); !maps.Equal(is.Waiting, map[string]bool{"cp4": true}) || len(is.Members) != 2 {
		t.Errorf("the cluster is %+v", is)
	}
	nothing()
	script.is("testdata/standbys.txt")
}
